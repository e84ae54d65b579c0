"""Cores and drivers with one guard removed. Each must be caught: one that survives is a hole, or a guard too many."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import attrs

from swapkv.fsm.commands import Command
from swapkv.fsm.core import SwapCore
from swapkv.fsm.events import Event
from tests.prove import guards_of_data, guards_of_drivers, guards_of_moves, guards_of_spills, guards_of_turns
from tests.prove.catchers import catcher
from tests.prove.explore import explore
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
        guards_of_spills.SPILLS,
        guards_of_drivers.ORDER,
        guards_of_drivers.CALLS,
    )
    for canary in canaries
}

ENDLESS_S = 5


@attrs.frozen
class Flight:
    """What became of a canary. `error`: what was found, None if it survived."""

    canary: Canary
    error: BaseException | None
    seconds: float

    @property
    def words(self) -> str:
        """What was found, in one line."""
        error = self.error
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            return "survived"
        first = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {first}" if first else f"{type(error).__name__}"


def fly(canary: Canary) -> Flight:
    """Run what should catch the canary with its guard removed, until it does or has come to its end."""
    begin_s = time.perf_counter()
    with applied(canary.edits), _endless_is_caught():
        error = _catch(canary.catcher)
    return Flight(canary, error, time.perf_counter() - begin_s)


def _catch(name: str) -> BaseException | None:
    if name in WORLDS:
        found = explore(WORLDS[name]).found
        return None if found is None else found.error
    try:
        catcher(name)()
    except Exception as error:
        return error
    return None


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
