"""Round robin: everybody gets a slice of the device in turn."""

from collections import Counter
from collections.abc import Sequence
from enum import Enum

import attrs

from swapkv.errors import ProtocolError
from swapkv.schedulers.base import Phase, Plan, RequestView


class VictimOrder(Enum):
    """Who leaves first, of those whose slice is used up."""

    LONGEST_SLICE = "longest slice"
    SCORE = "score"
    """The best victim by `Pool.victims`."""


@attrs.frozen(kw_only=True)
class RoundRobin:
    """At most `slots` requests on the device; who waits longest comes next. Ties go to who is named first.

    While others wait, a request is preempted once it has run `quantum_tokens` since it came, and never before
    `min_run_tokens`, however short the quantum: what was restored has to be worth it. `concurrent_swaps`: how many
    exchanges of one request for another may be under way at a time; free slots are filled at once.
    Raises `ProtocolError` for values below 1.
    """

    slots: int
    quantum_tokens: int
    min_run_tokens: int = 1
    concurrent_swaps: int = 1
    victims: VictimOrder = VictimOrder.LONGEST_SLICE

    def __attrs_post_init__(self) -> None:
        for name in ("slots", "quantum_tokens", "min_run_tokens", "concurrent_swaps"):
            if getattr(self, name) < 1:
                raise ProtocolError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def wants_scores(self) -> bool:
        """See `Scheduler.wants_scores`."""
        return self.victims is VictimOrder.SCORE

    def plan(self, requests: Sequence[RequestView]) -> Plan:
        """See `Scheduler.plan`."""
        count = Counter(request.phase for request in requests)
        waiting = [r.name for r in sorted(requests, key=_waiting_since) if r.phase in (Phase.WAITING, Phase.OFF)]
        room = max(0, self.slots - count[Phase.RUNNING] - count[Phase.COMING])
        swaps = self.concurrent_swaps - max(count[Phase.COMING], count[Phase.LEAVING])
        leave = self._used_up(requests)[: max(0, min(swaps, len(waiting) - room))]
        return Plan(leave=tuple(leave), come=tuple(waiting[: room + len(leave)]))

    def _used_up(self, requests: Sequence[RequestView]) -> list[str]:
        """Those whose slice is used up, in the order in which they leave."""
        least = max(self.quantum_tokens, self.min_run_tokens)
        used_up = [r for r in requests if r.phase is Phase.RUNNING and r.slice_tokens >= least]
        order = _by_score if self.victims is VictimOrder.SCORE else _by_slice
        return [request.name for request in sorted(used_up, key=order)]


def _waiting_since(request: RequestView) -> int:
    return request.waiting_since_ns


def _by_score(request: RequestView) -> float:
    return -request.score


def _by_slice(request: RequestView) -> int:
    return -request.slice_tokens
