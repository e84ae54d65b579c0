"""A device for the core: three lanes that run when told to, and memory that holds stamps instead of numbers.

A copy reads its source when it *runs*, not when it is submitted, so a missing fence shows as a wrong stamp.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from swapkv.fsm.commands import ClonePages, Copy, RecordFence
from swapkv.fsm.core import SwapCore
from swapkv.fsm.ledger import PageState
from swapkv.ids import Fence, Lane

POISON = "poison"
Stamp = Any


@attrs.define(eq=False)
class Work:
    """Something in a lane. `run` does it and returns what to report, if anything; it waits for `after` and `gate`."""

    run: Callable[[], object | None]
    after: tuple[Fence, ...] = ()
    fence: Fence | None = None
    gate: Callable[[], bool] = lambda: True


class StampDevice:
    """Lanes, device pages and host slots of one core."""

    def __init__(self, core: SwapCore) -> None:
        self.core = core
        self.layout = core.layout
        self.lanes: dict[Lane, deque[Work]] = {lane: deque() for lane in Lane}
        self.reached: dict[Lane, int] = dict.fromkeys(Lane, 0)
        self.pages: dict[tuple[int, int], list[Stamp]] = {}
        self.host: dict[tuple[int, int, int], list[Stamp]] = {}

    def runnable(self) -> list[Lane]:
        """Lanes whose first work could run now."""
        return [lane for lane, queue in self.lanes.items() if queue and self._ready(queue[0])]

    def run(self, lane: Lane) -> object | None:
        """Run the first work of `lane`; the answer is to be reported to the core at some later time."""
        work = self.lanes[lane].popleft()
        answer = work.run()
        if work.fence is not None:
            assert work.fence.value > self.reached[lane]
            self.reached[lane] = work.fence.value
        return answer

    def page(self, page: int, layer: int) -> list[Stamp]:
        """The stamps of one device page in one layer."""
        return self.pages.setdefault((page, layer), [POISON] * self.layout.page_size)

    def slot(self, offset: int, layer: int, page: int) -> list[Stamp]:
        """The stamps of one page of one layer in a host slot."""
        return self.host.setdefault((offset, layer, page), [POISON] * self.layout.page_size)

    def submit_copy(self, copy: Copy, answer: Callable[[Copy], object], *, moves: bool) -> None:
        """Queue a copy; with `moves` false it fails without having moved anything."""

        def run() -> object:
            if moves:
                self._move(copy)
            return answer(copy)

        self.lanes[copy.lane].append(Work(run, copy.after, copy.fence))

    def submit_clone(self, clone: ClonePages, answer: Callable[[Fence], object]) -> None:
        def run() -> object:
            for layer in self.layout.groups[clone.group].layers:
                for source, target in zip(clone.source.tolist(), clone.target.tolist(), strict=True):
                    self.page(target, layer)[:] = self.page(source, layer)
            return answer(clone.fence)

        self.lanes[Lane.COMPUTE].append(Work(run, clone.after, clone.fence))

    def submit_record(self, record: RecordFence, answer: Callable[[Fence], object]) -> None:
        self.lanes[Lane.COMPUTE].append(Work(lambda: answer(record.fence), (), record.fence))

    def poison_what_is_free(self) -> None:
        """Nobody may read a free page or slot: make sure that it shows."""
        taken = self.core.host.taken()
        self.host = {place: stamps for place, stamps in self.host.items() if place[0] in taken}
        for page, layer in self.pages:
            if self.core.ledger.state_of(page) is PageState.FREE:
                self.pages[page, layer] = [POISON] * self.layout.page_size

    def _ready(self, work: Work) -> bool:
        return work.gate() and all(self.reached[fence.lane] >= fence.value for fence in work.after)

    def _move(self, copy: Copy) -> None:
        for item in copy.items:
            for layer in copy.layers:
                for at, page in enumerate(item.pages.tolist()):
                    device, host = self.page(page, layer), self.slot(item.host, layer, item.first + at)
                    if copy.lane is Lane.OUT:
                        host[:] = device
                    else:
                        device[:] = host
