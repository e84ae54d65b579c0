"""The driver that never waits: told events and polled, on any clock. `stepped` and `simulate` run on it."""

import time
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from swapkv.errors import IllegalTransition, PoolBroken, SwapError
from swapkv.executor import Clock, Copier, Executor, Work
from swapkv.fsm import commands, copies, events
from swapkv.fsm.core import SwapCore
from swapkv.ids import Lane
from swapkv.observer import Observer

News: TypeAlias = (
    commands.StepGranted
    | commands.StepRefused
    | commands.Parked
    | commands.Spilled
    | commands.ParkUndone
    | commands.PagesReady
    | commands.LayerReady
    | commands.Restored
    | commands.LayersLost
    | commands.RestoreUndone
    | commands.Gone
)
"""What a poll reports: see `swapkv.fsm.commands` for what each means."""


class StepDriver:
    """Runs one core. `clock`: nanoseconds; the same that the device's events follow."""

    def __init__(
        self, core: SwapCore, copier: Copier, observer: Observer | None = None, clock: Clock = time.monotonic_ns
    ) -> None:
        self.core = core
        self.clock = clock
        self.executor = Executor(copier, observer, clock)
        self._work: dict[Lane, deque[Work]] = {lane: deque() for lane in Lane}
        self._news: list[News] = []
        self._wake_ns: int | None = None
        self._end: SwapError | None = None

    def require_open(self) -> None:
        """Raise what ended the pool, if something has."""
        if self._end is not None:
            raise type(self._end)(str(self._end)) from self._end.__cause__

    def stop(self, end: SwapError) -> None:
        """Serve no more: every later call raises `end`."""
        self._end = end

    def tell(self, event: events.Event) -> list[commands.Command]:
        """Put one event to the core, carry out the answer and return it. Raises what the core refuses with."""
        self.require_open()
        return self._handle(event)

    def poll(self) -> list[News]:
        """Take in what the device has done, and return the news since the last call. Never blocks.

        Raises `PoolBroken` if the device or an invariant has failed for good.
        """
        self.require_open()
        try:
            for event in self._ended():
                self._handle(event)
        except PoolBroken:
            raise
        except Exception as error:
            raise self._break(error) from error
        if self._wake_ns is not None and self._wake_ns <= self.clock():
            self._wake_ns = None
            self._handle(events.Tick())
        news, self._news = self._news, []
        return news

    def idle(self) -> bool:
        """Whether nothing is under way: another `poll` would bring no news by itself."""
        return not any(self._work.values()) and copies.next_wake(self.core) is None

    def oldest(self) -> Work | None:
        """Work whose end may be waited for; None if there is none."""
        return next((queue[0] for queue in self._work.values() if queue), None)

    @property
    def wake_ns(self) -> int | None:
        """When a `poll` has something to do by time alone."""
        return self._wake_ns

    def _handle(self, event: events.Event) -> list[commands.Command]:
        try:
            answer = self.core.handle(event, self.clock())
        except Exception as error:
            if isinstance(error, SwapError) and not isinstance(error, IllegalTransition):
                raise
            raise self._break(error) from error
        try:
            for command in answer:
                self._carry_out(command)
        except Exception as error:
            raise self._break(error) from error
        return answer

    def _carry_out(self, command: commands.Command) -> None:
        """Do what the core has decided. What raises here leaves the core and the device apart for good."""
        work = self.executor.carry_out(command)
        if work is not None:
            self._work[work.lane].append(work)
        elif isinstance(command, commands.WakeAt):
            self._wake_ns = command.at_ns if self._wake_ns is None else min(self._wake_ns, command.at_ns)
        elif not isinstance(command, commands.Copy | commands.ClonePages | commands.RecordFence):
            self._news.append(command)

    def _ended(self) -> Iterator[events.Event]:
        """The ends of work that the device has done, lane by lane in order."""
        for queue in self._work.values():
            while queue and queue[0].event.query():
                yield queue.popleft().finish()

    def _break(self, error: BaseException) -> PoolBroken:
        broken = PoolBroken(f"the pool cannot go on ({type(error).__name__}: {error}): open a new one")
        broken.__cause__ = error
        self._end = broken
        return broken
