"""What a scheduler sees and says. It decides who runs; how they come and go is the runner's business."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import attrs


class Phase(Enum):
    """Where a request is, as a scheduler sees it."""

    WAITING = "waiting"
    """It has no KV on any tier: it begins, or begins again, with a prefill."""
    OFF = "off"
    """Its KV is off the device, complete."""
    COMING = "coming"
    RUNNING = "running"
    LEAVING = "leaving"
    DONE = "done"


@attrs.frozen(kw_only=True)
class RequestView:
    """One request. `slice_tokens`: tokens since it last came to the device. `waiting_since_ns`: 0 while it is there.

    `score`: how good a victim it is (the order of `Pool.victims`), higher is better.
    """

    name: str
    phase: Phase
    slice_tokens: int
    waiting_since_ns: int
    remaining_tokens: int
    score: float = float("-inf")


@attrs.frozen(kw_only=True)
class Plan:
    """Requests that leave the device, all of them running, and requests that come to it, all waiting or off, in order."""

    leave: tuple[str, ...] = ()
    come: tuple[str, ...] = ()


class Scheduler(Protocol):
    """Decides from views alone, so that the same decisions can be replayed."""

    @property
    def wants_scores(self) -> bool:
        """Whether `RequestView.score` is looked at; working it out costs time."""

    def plan(self, requests: Sequence[RequestView]) -> Plan:
        """What should change now. Called before every step, with all requests in the order in which they were given."""
