"""The ledger of device pages: who owns each, and which submitted work may still touch it.

Every page is exactly one of FREE, OWNED (by a chunk), FENCED (released, but submitted work may still touch it) or
QUARANTINED (a copy that hung may touch it for ever). Hazards are keyed by the physical page, reads and writes apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.fsm.fences import FenceClock
from swapkv.ids import ChunkId, Fence, GroupId, Lane, PhysicalPages


class PageState(IntEnum):
    """What the ledger says of a page."""

    FREE = 0
    OWNED = 1
    FENCED = 2
    QUARANTINED = 3


@attrs.define(eq=False)
class _Batch:
    """Pages without an owner that come free when the fences `until` have passed."""

    pages: PhysicalPages
    until: tuple[Fence, ...]


class PageLedger:
    """Pages of all layer groups; group `g` has the numbers `[base(g), base(g) + total(g))`."""

    def __init__(self, pages_per_group: Sequence[int], clock: FenceClock) -> None:
        self._clock = clock
        self._base = np.concatenate(([0], np.cumsum(pages_per_group))).astype(np.int64)
        total = int(self._base[-1])
        self._state = np.full(total, PageState.FREE, dtype=np.uint8)
        self._owner = np.full(total, -1, dtype=np.int64)
        self._last_read = np.zeros((len(Lane), total), dtype=np.int64)
        self._last_write = np.zeros((len(Lane), total), dtype=np.int64)
        self._free = [
            np.arange(b, b + n, dtype=np.int64)[::-1].copy() for b, n in zip(self._base, pages_per_group, strict=False)
        ]
        self._num_free = list(pages_per_group)
        self._fenced: list[list[_Batch]] = [[] for _ in pages_per_group]
        self._num_fenced = [0] * len(pages_per_group)
        self._quarantine: list[list[_Batch]] = [[] for _ in pages_per_group]
        self._num_quarantined = [0] * len(pages_per_group)
        self._stuck: list[Fence] = []

    def base(self, group: GroupId) -> int:
        """The first page number of `group`."""
        return int(self._base[group])

    def total(self, group: GroupId) -> int:
        return int(self._base[group + 1] - self._base[group])

    def free(self, group: GroupId) -> int:
        return self._num_free[group]

    def fenced(self, group: GroupId) -> int:
        return self._num_fenced[group]

    def quarantined(self, group: GroupId) -> int:
        return self._num_quarantined[group]

    def owned(self, group: GroupId) -> int:
        return self.total(group) - self.free(group) - self.fenced(group) - self.quarantined(group)

    def available(self, group: GroupId) -> int:
        """Pages that can be allocated now: the free ones, and the fenced ones, whose new owner waits for the fence."""
        return self._num_free[group] + self._num_fenced[group]

    def allocate(self, group: GroupId, owner: ChunkId, count: int) -> PhysicalPages:
        """Take `count` pages for `owner`, free ones first. The caller checks `available` before.

        Whoever writes to them first orders itself after `before_write`.
        """
        assert count <= self.available(group), (group, count)
        taken = self._take_free(group, min(count, self._num_free[group]))
        if len(taken) < count:
            taken = np.concatenate((taken, self._take_fenced(group, count - len(taken))))
        self._state[taken] = PageState.OWNED
        self._owner[taken] = owner
        return taken

    def release(self, group: GroupId, pages: PhysicalPages) -> None:
        """Give owned pages back: free at once, or fenced until what was submitted on them is over."""
        if not len(pages):
            return
        assert (self._state[pages] == PageState.OWNED).all(), "a page was released twice"
        self._owner[pages] = -1
        until = latest((*self._pending(self._last_write, pages), *self._pending(self._last_read, pages)))
        if any(self._behind_stuck(fence) for fence in until):
            self._put_quarantine(group, _Batch(pages.copy(), until))
        elif until:
            self._state[pages] = PageState.FENCED
            self._fenced[group].append(_Batch(pages.copy(), until))
            self._num_fenced[group] += len(pages)
        else:
            self._put_free(group, pages)

    def hand_over(self, pages: PhysicalPages, owner: ChunkId) -> None:
        """Owned pages go to another owner as they are."""
        assert (self._state[pages] == PageState.OWNED).all(), "a page without an owner was handed over"
        self._owner[pages] = owner

    def mark_stuck(self, fence: Fence) -> None:
        """The work of `fence` hangs: pages that wait for it, or for what its lane was given later, are quarantined.

        They come free if it ends after all.
        """
        self._stuck.append(fence)
        for index, batches in enumerate(self._fenced):
            stuck = [b for b in batches if any(self._behind_stuck(f) for f in b.until)]
            self._fenced[index] = [b for b in batches if b not in stuck]
            for batch in stuck:
                self._num_fenced[index] -= len(batch.pages)
                self._put_quarantine(GroupId(index), batch)

    def note_read(self, fence: Fence, pages: PhysicalPages) -> None:
        """Submitted work reads `pages` until `fence` passes."""
        self._last_read[fence.lane][pages] = fence.value

    def note_write(self, fence: Fence, pages: PhysicalPages) -> None:
        """Submitted work writes `pages` until `fence` passes."""
        self._last_write[fence.lane][pages] = fence.value

    def before_read(self, pages: PhysicalPages, lane: Lane) -> tuple[Fence, ...]:
        """What a reader of `pages` on `lane` waits for: the writers on other lanes that are not over."""
        return tuple(self._pending(self._last_write, pages, lane))

    def before_write(self, pages: PhysicalPages, lane: Lane) -> tuple[Fence, ...]:
        """What a writer of `pages` on `lane` waits for: the readers and writers on other lanes that are not over.

        Not for readers that hang: what they copy is used by nobody, and they may hang for ever.
        """
        readers = map(self._before_stuck, self._pending(self._last_read, pages, lane))
        return latest((*self._pending(self._last_write, pages, lane), *filter(None, readers)))

    def pass_fence(self) -> None:
        """A fence has passed: free the pages that nothing touches any more."""
        self._stuck = [fence for fence in self._stuck if not self._clock.passed(fence)]
        for batches, counts in ((self._fenced, self._num_fenced), (self._quarantine, self._num_quarantined)):
            for index, group_batches in enumerate(batches):
                over = [batch for batch in group_batches if self._over(batch)]
                if over:
                    batches[index] = [batch for batch in group_batches if batch not in over]
                for batch in over:
                    counts[index] -= len(batch.pages)
                    self._put_free(GroupId(index), batch.pages)

    def state_of(self, page: int) -> PageState:
        return PageState(int(self._state[page]))

    def owners(self) -> NDArray[np.int64]:
        """The owning chunk of every page, -1 for none. Shape `[total pages]`."""
        return self._owner.copy()

    def check(self) -> None:
        """Assert that every page is in exactly one place and that the counts agree with the states."""
        for group in range(len(self._num_free)):
            low, high = self._base[group], self._base[group + 1]
            states = np.bincount(self._state[low:high], minlength=len(PageState)).tolist()
            owned = self.owned(GroupId(group))
            counts = [self._num_free[group], owned, self._num_fenced[group], self._num_quarantined[group]]
            assert states == counts, f"group {group}: states {states}, counts {counts}"
            free = self._free[group][: self._num_free[group]]
            fenced = [page for batch in self._fenced[group] for page in batch.pages.tolist()]
            assert len(set(free.tolist())) == len(free), "a page is free twice"
            assert len(set(fenced)) == len(fenced) == self._num_fenced[group], "a page is fenced twice"
            assert (self._state[free] == PageState.FREE).all()
            assert (self._state[fenced] == PageState.FENCED).all()
            quarantined = [page for batch in self._quarantine[group] for page in batch.pages.tolist()]
            assert len(set(quarantined)) == len(quarantined) == self._num_quarantined[group]
        assert ((self._owner >= 0) == (self._state == PageState.OWNED)).all(), "an owner without an owned page"

    def _pending(
        self, table: NDArray[np.int64], pages: PhysicalPages, apart_from: Lane | None = None
    ) -> Iterator[Fence]:
        for lane in Lane:
            if lane is not apart_from and self._clock.open_fences(lane):
                fence = self._clock.pending(lane, table[lane][pages])
                if fence is not None:
                    yield fence

    def _over(self, batch: _Batch) -> bool:
        return all(self._clock.passed(fence) for fence in batch.until)

    def _behind_stuck(self, fence: Fence) -> bool:
        return any(stuck.lane is fence.lane and stuck.value <= fence.value for stuck in self._stuck)

    def _before_stuck(self, fence: Fence) -> Fence | None:
        """What of `fence` can be waited for: of a lane that hangs, all that it was given before that and is not over."""
        stuck = [other.value for other in self._stuck if other.lane is fence.lane]
        if stuck and min(stuck) <= fence.value:
            fence = Fence(fence.lane, min(stuck) - 1)
        return None if self._clock.passed(fence) else fence

    def _put_quarantine(self, group: GroupId, batch: _Batch) -> None:
        self._state[batch.pages] = PageState.QUARANTINED
        self._quarantine[group].append(batch)
        self._num_quarantined[group] += len(batch.pages)

    def _take_free(self, group: GroupId, count: int) -> PhysicalPages:
        end = self._num_free[group]
        self._num_free[group] = end - count
        return self._free[group][end - count : end][::-1].copy()

    def _take_fenced(self, group: GroupId, count: int) -> PhysicalPages:
        parts = []
        while count:
            batch = self._fenced[group][0]
            parts.append(batch.pages[:count])
            batch.pages = batch.pages[count:]
            if not len(batch.pages):
                self._fenced[group].pop(0)
            count -= len(parts[-1])
            self._num_fenced[group] -= len(parts[-1])
        return np.concatenate(parts)

    def _put_free(self, group: GroupId, pages: PhysicalPages) -> None:
        end = self._num_free[group]
        self._free[group][end : end + len(pages)] = pages
        self._num_free[group] = end + len(pages)
        self._state[pages] = PageState.FREE


def latest(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The last fence of each lane: a lane works in order."""
    last: dict[Lane, Fence] = {}
    for fence in fences:
        last[fence.lane] = max(fence, last.get(fence.lane, fence))
    return tuple(last.values())
