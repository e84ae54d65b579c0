"""Cores with one guard removed. Each must be caught: one that survives is a hole in the worlds, or a guard too many."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import attrs

from swapkv.fsm.commands import Command
from swapkv.fsm.core import SwapCore
from swapkv.fsm.events import Event
from tests.prove import guards_of_data, guards_of_moves, guards_of_turns
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
        guards_of_turns.BUDGETS,
        guards_of_turns.STEPS,
    )
    for canary in canaries
}

ENDLESS_S = 5


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
    handle = SwapCore.handle

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Violation("the core does not answer")

    def handle_in_time(core: SwapCore, event: Event, now_ns: int) -> list[Command]:
        signal.setitimer(signal.ITIMER_REAL, ENDLESS_S)
        try:
            return handle(core, event, now_ns)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, stop)
    SwapCore.handle = handle_in_time  # type: ignore[method-assign]
    try:
        yield
    finally:
        SwapCore.handle = handle  # type: ignore[method-assign]
        signal.signal(signal.SIGALRM, before)
