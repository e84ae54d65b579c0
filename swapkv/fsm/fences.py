"""Which device work is over: a timeline for each lane."""

import numpy as np
from numpy.typing import NDArray

from swapkv.ids import Fence, Lane


class FenceClock:
    """Issues fences and remembers which have passed.

    A lane works in order, but completions may be *reported* in any order (several ranks, several reapers). A fence
    counts as passed when it and every earlier one of its lane have been reported.
    """

    def __init__(self) -> None:
        self._issued = [0] * len(Lane)
        self._passed_up_to = [0] * len(Lane)
        self._reported_ahead: list[set[int]] = [set() for _ in Lane]

    def issue(self, lane: Lane) -> Fence:
        """The fence of work that is about to be submitted to `lane`."""
        self._issued[lane] += 1
        return Fence(lane, self._issued[lane])

    def complete(self, fence: Fence) -> bool:
        """The work of `fence` is over, well or badly: nothing of it touches memory any more. False: known already."""
        lane, value = fence
        assert 0 < value <= self._issued[lane], fence
        ahead = self._reported_ahead[lane]
        if value <= self._passed_up_to[lane] or value in ahead:
            return False
        ahead.add(value)
        while self._passed_up_to[lane] + 1 in ahead:
            self._passed_up_to[lane] += 1
            ahead.discard(self._passed_up_to[lane])
        return True

    def passed(self, fence: Fence) -> bool:
        """Whether the work of `fence`, and all that its lane was given before, is over."""
        return fence.value <= self._passed_up_to[fence.lane]

    def pending(self, lane: Lane, values: NDArray[np.int64]) -> Fence | None:
        """The last of the fences `values` of `lane` (0: none) if it has not passed."""
        last = int(values.max()) if len(values) else 0
        return Fence(lane, last) if last > self._passed_up_to[lane] else None

    def open_fences(self, lane: Lane) -> int:
        """How many issued fences of `lane` have not passed."""
        return self._issued[lane] - self._passed_up_to[lane]
