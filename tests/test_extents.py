"""The extent allocator against a naive map of the arena.

What it promises: extents never overlap, and `allocate` fails only when no run of untaken bytes is long enough.
"""

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swapkv.budget.extents import Extents
from swapkv.errors import ProtocolError

TOTAL = 40


class ExtentsAgainstMap(RuleBasedStateMachine):
    """`taken`: offset to size of every extent that is out."""

    @initialize()
    def begin(self) -> None:
        self.extents = Extents(TOTAL)
        self.taken: dict[int, int] = {}

    def longest_gap(self) -> int:
        edges = [(0, 0), *sorted(self.taken.items()), (TOTAL, 0)]
        return max(after - (before + size) for (before, size), (after, _) in pairwise(edges))

    @rule(size=st.sampled_from([1, 2, 3, 5, 8, 13]))
    def allocate(self, size: int) -> None:
        gap = self.longest_gap()
        offset = self.extents.allocate(size)
        assert (offset is not None) == (size <= gap), f"{size} bytes, the longest gap is {gap}"
        if offset is not None:
            assert offset not in self.taken
            self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.extents.free(offset)

    @rule(offset=st.integers(-1, TOTAL))
    def free_what_is_not_taken(self, offset: int) -> None:
        if offset not in self.taken:
            with pytest.raises(ProtocolError, match=f"offset {offset} is not taken"):
                self.extents.free(offset)

    @invariant()
    def extents_are_apart_and_counted(self) -> None:
        assert self.extents.taken() == self.taken
        assert self.extents.used == sum(self.taken.values())
        end = 0
        for offset, size in sorted(self.taken.items()):
            assert offset >= end, "two extents overlap"
            end = offset + size
        assert end <= TOTAL


ExtentsAgainstMap.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestExtentsAgainstMap = ExtentsAgainstMap.TestCase


def test_extent_of_a_size_that_was_freed_is_used_again_without_merging() -> None:
    extents = Extents(100)
    offsets = [extents.allocate(10) for _ in range(4)]
    assert offsets == [0, 10, 20, 30]
    extents.free(10)
    extents.free(20)
    assert extents.allocate(10) == 20
    assert extents.allocate(10) == 10


def test_neighbours_that_were_freed_merge_when_nothing_else_serves() -> None:
    extents = Extents(40)
    for _ in range(4):
        extents.allocate(10)
    extents.free(10)
    extents.free(30)
    assert extents.allocate(20) is None, "20 bytes are free, in two pieces"
    extents.free(20)
    assert extents.allocate(30) == 10
    assert extents.used == 40


def test_free_end_of_the_arena_merges_with_what_was_never_touched() -> None:
    extents = Extents(25)
    extents.allocate(10)
    extents.allocate(10)
    extents.free(10)
    assert extents.allocate(15) == 10


def test_smallest_range_that_is_large_enough_is_cut() -> None:
    extents = Extents(22)
    for size in (8, 1, 5, 1, 6, 1):
        extents.allocate(size)
    for offset in (0, 9, 15):
        extents.free(offset)
    assert extents.allocate(4) == 9
    assert extents.allocate(1) == 13, "what was left of the range"


def test_extents_of_nothing_hand_out_nothing() -> None:
    assert Extents(0).allocate(1) is None


def test_extent_without_bytes_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        Extents(10).allocate(0)
