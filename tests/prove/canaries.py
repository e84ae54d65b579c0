"""Cores with one guard removed. Each must be caught: one that survives is a hole in the worlds, or a guard too many."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import attrs

from tests.prove import guards_of_data, guards_of_moves
from tests.prove.explore import Outcome, explore
from tests.prove.mutation import Canary, applied
from tests.prove.violation import Violation
from tests.prove.worlds import WORLDS

CANARIES: dict[str, Canary] = {
    canary.name: canary
    for canaries in (
        guards_of_data.FENCES,
        guards_of_data.REFERENCES,
        guards_of_data.COPIES,
        guards_of_moves.RESTORES,
        guards_of_moves.HANGS,
        guards_of_moves.BUDGETS,
        guards_of_moves.STEPS,
    )
    for canary in canaries
}

ENDLESS_S = 300


def fly(canary: Canary, limit: int | None = None) -> Outcome:
    """Explore the canary's world with its guard removed, until it is caught or `limit` states have been met."""
    with applied(canary.edits), _endless_is_caught():
        return explore(WORLDS[canary.world], limit=limit)


def elsewhere(canary: Canary, world: str) -> Canary:
    """The same canary in another world."""
    return attrs.evolve(canary, world=world)


@contextmanager
def _endless_is_caught() -> Iterator[None]:
    """A core that never answers is a violation, too."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Violation("the core does not answer")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, ENDLESS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
