"""Round robin: everybody gets a slice of the device in turn."""

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
    """At most `slots` requests on the device; who waits longest comes next.

    A request may be preempted once it has run `quantum_tokens` since it came, and never before `min_run_tokens`: what
    was restored has to be worth it. `concurrent_swaps`: how many may be coming at a time.
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
        here = [r for r in requests if r.phase in (Phase.RUNNING, Phase.COMING)]
        waiting = sorted(
            (r for r in requests if r.phase in (Phase.WAITING, Phase.OFF)), key=lambda r: (r.waiting_since_ns, r.name)
        )
        room = max(0, self.slots - len(here))
        come, waiting = waiting[:room], waiting[room:]
        moving = sum(r.phase in (Phase.COMING, Phase.LEAVING) for r in requests)
        swaps = min(len(waiting), max(0, self.concurrent_swaps - moving))
        leave = self._used_up(here)[:swaps]
        come += waiting[: len(leave)]
        return Plan(leave=tuple(r.name for r in leave), come=tuple(r.name for r in come))

    def _used_up(self, here: Sequence[RequestView]) -> list[RequestView]:
        least = max(self.quantum_tokens, self.min_run_tokens)
        used_up = [r for r in here if r.phase is Phase.RUNNING and r.slice_tokens >= least]
        if self.victims is VictimOrder.SCORE:
            return sorted(used_up, key=lambda r: (-r.score, r.name))
        return sorted(used_up, key=lambda r: (-r.slice_tokens, r.name))
