"""The slab's allocator against a naive map, from any state that a scan may find."""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swapkv.errors import ProtocolError
from swapkv.tiers.slab_extents import SlabExtents

BEGIN, END = 3, 43


class ExtentsAgainstMap(RuleBasedStateMachine):
    """`taken`: offset to size of every extent that is out."""

    @initialize(gaps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=4))
    def begin(self, gaps: list[tuple[int, int]]) -> None:
        self.taken: dict[int, int] = {}
        at = BEGIN
        for gap, size in gaps:
            self.taken[at + gap] = size
            at += gap + size
        self.extents = SlabExtents(BEGIN, END, self.taken.items())
        self.peak = self.extents.used_bytes

    def gaps(self) -> list[int]:
        edges = [(BEGIN, 0), *sorted(self.taken.items()), (END, 0)]
        return [gap for (before, size), (after, _) in pairwise(edges) if (gap := after - (before + size))]

    @rule(size=st.sampled_from([1, 2, 3, 5, 8, 13]))
    def allocate(self, size: int) -> None:
        longest = max(self.gaps(), default=0)
        offset = self.extents.allocate(size)
        assert (offset is not None) == (size <= longest), f"{size} bytes, the longest gap is {longest}"
        if offset is not None:
            self.taken[offset] = size
            self.peak = max(self.peak, sum(self.taken.values()))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.extents.free(offset)

    @rule(offset=st.integers(-1, END))
    def free_what_is_not_taken(self, offset: int) -> None:
        if offset not in self.taken:
            with pytest.raises(ProtocolError, match=f"offset {offset} is not taken"):
                self.extents.free(offset)

    @invariant()
    def extents_are_apart_counted_and_coalesced(self) -> None:
        end = BEGIN
        for offset, size in sorted(self.taken.items()):
            assert offset >= end, "two extents overlap"
            end = offset + size
        assert end <= END
        assert self.extents.used_bytes == sum(self.taken.values()) <= self.extents.total_bytes
        assert self.extents.peak_bytes == self.peak
        gaps = self.gaps()
        assert (self.extents.num_ranges, self.extents.largest_bytes) == (len(gaps), max(gaps, default=0))


ExtentsAgainstMap.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestExtentsAgainstMap = ExtentsAgainstMap.TestCase


@pytest.mark.parametrize("taken", [[(0, 2)], [(9, 2)], [(2, 3), (4, 1)], [(2, 0)]])
def test_extents_that_overlap_or_leave_the_slab_are_refused(taken: list[tuple[int, int]]) -> None:
    with pytest.raises(ProtocolError, match="overlaps another or leaves the slab"):
        SlabExtents(1, 10, taken)


def test_smallest_range_that_is_large_enough_is_cut() -> None:
    extents = SlabExtents(0, 20, [(8, 1), (12, 1)])
    assert extents.allocate(3) == 9
    assert extents.allocate(7) == 13
    assert extents.allocate(9) is None
