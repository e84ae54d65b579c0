"""The anyio driver: events go into the core, its commands become work and news.

The data path in one breath: a call of `Pool` becomes an event, the core decides (`fsm/core`), its copies go to streams
(`executor`, `transfers`), reapers wait for them and report over the `bridge`, and the core decides again. Nothing is
decided here.
"""

import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

from swapkv.bridge import Alarm, LoopBridge, Reaper
from swapkv.closing import close_within
from swapkv.errors import IllegalTransition, PoolBroken, ProtocolError, SwapError
from swapkv.executor import Copier, Executor, Work
from swapkv.fsm import commands, events, queries
from swapkv.fsm.core import SwapCore
from swapkv.fsm.records import Chunk
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import Lane, LayerId, SeqId
from swapkv.observer import Observer
from swapkv.streams.base import Device, Event
from swapkv.waiters import Waiter, Waiters

Report: TypeAlias = Work | Waiter | events.Tick


class RestoreListener(Protocol):
    """A restore that somebody follows layer by layer."""

    def layer_ready(self, layer: LayerId) -> None:
        """`layer` has landed, and all before it."""

    def undone(self, error: BaseException) -> None:
        """Layers that have not landed will not."""


class Driver:
    """Runs one core on one device. Everything but the reapers' reports happens on the thread of the event loop."""

    def __init__(self, core: SwapCore, copier: Copier, device: Device, observer: Observer | None) -> None:
        self.core = core
        self.executor = Executor(copier, observer)
        self.waiters = Waiters()
        self.restores: dict[SeqId, RestoreListener] = {}
        self._device = device
        self._observer = observer
        if observer is not None:
            core.on_transition = self._on_transition
        self._bridge: LoopBridge[Report] = LoopBridge(self._receive)
        self._alarm = Alarm(f"swapkv-{device.name}-alarm", lambda: self._bridge.post(events.Tick()))
        self._reapers = {lane: Reaper(f"swapkv-{device.name}-reap-{lane.name.lower()}") for lane in Lane}
        self._touched: set[SeqId] = set()
        self._states: dict[SeqId, queries.SequenceState] = {}
        self._end: SwapError | None = None

    def require_open(self) -> None:
        """Raise `PoolClosed` or `PoolBroken` if the pool serves no more, `ProtocolError` on a foreign thread."""
        if self._end is not None:
            raise type(self._end)(str(self._end)) from self._end.__cause__
        if threading.get_ident() != self._bridge.thread:
            raise ProtocolError("a pool was called from another thread: call it on the one of its event loop")

    def tell(self, event: events.Event) -> list[commands.Command]:
        """Put one event to the core, carry out the answer and return it. Raises what the core refuses with."""
        self.require_open()
        return self._handle(event)

    async def reached(self, event: Event) -> None:
        """Wait until work that was launched on a compute stream is over, well or badly."""
        waiter = self.waiters.add("event", id(event))
        self._reapers[Lane.COMPUTE].watch(partial(self._reap, event, waiter))
        try:
            await waiter.wait()
        finally:
            self.waiters.drop(waiter)

    def stop(self, end: SwapError) -> None:
        """Serve no more: every call that waits, and every later one, raises `end`."""
        if self._end is None:
            self._end = end
            for restore in list(self.restores.values()):
                restore.undone(end)
            self.waiters.end_all(end)

    def shut_down(self, timeout_s: float) -> list[str]:
        """Stop the device and the threads, blocking. Returns the names of streams and threads that are stuck."""
        deadline_s = time.monotonic() + timeout_s
        try:
            stuck = close_within(self._device, timeout_s)
        finally:
            self._alarm.close()
            for reaper in self._reapers.values():
                reaper.stop()
        for lane, reaper in self._reapers.items():
            if not reaper.join(max(0.1, deadline_s - time.monotonic())):
                stuck.append(f"reaper of {lane.name}")
        return stuck

    def _receive(self, reports: list[Report]) -> None:
        """Reports have come from the reapers or the alarm."""
        for report in reports:
            if self._end is not None:
                return
            try:
                if isinstance(report, Waiter):
                    report.end(None)
                else:
                    self._handle(report.finish() if isinstance(report, Work) else report)
            except Exception as error:
                self._break(error)

    def _handle(self, event: events.Event) -> list[commands.Command]:
        now_ns = time.monotonic_ns()
        try:
            answer = self.core.handle(event, now_ns)
        except Exception as error:
            if isinstance(error, SwapError) and not isinstance(error, IllegalTransition):
                raise
            raise self._break(error) from error
        try:
            for command in answer:
                self._carry_out(command)
            if self._observer is not None:
                self._touched.update(_names(event))
                self._observe_states(now_ns)
        except Exception as error:
            raise self._break(error) from error
        return answer

    def _carry_out(self, command: commands.Command) -> None:
        """Do what the core has decided. What raises here leaves the core and the device apart for good."""
        work = self.executor.carry_out(command)
        if work is not None:
            self._reapers[work.lane].watch(partial(self._reap, work.event, work))
        elif type(command) in _NEWS:
            _NEWS[type(command)](self, command)

    def _break(self, error: BaseException) -> PoolBroken:
        """An invariant or the device failed for good."""
        broken = PoolBroken(f"the pool cannot go on ({type(error).__name__}: {error}): open a new one")
        broken.__cause__ = error
        self.stop(broken)
        return broken

    def _reap(self, event: Event, report: Report) -> None:
        """On a reaper's thread: wait for the end of some work, then have the loop look at it, however it ended."""
        with suppress(Exception):
            event.wait()
        self._bridge.post(report)

    def _granted(self, granted: commands.StepGranted) -> None:
        self.waiters.end("step", granted.step)

    def _refused(self, refused: commands.StepRefused) -> None:
        self.waiters.end("step", refused.step, error=refused.cause)

    def _parked(self, parked: commands.Parked) -> None:
        self._touch(parked.sequence)
        self.waiters.end("park", parked.sequence, parked.outcome)

    def _spilled(self, spilled: commands.Spilled) -> None:
        self._touch(spilled.sequence)
        self.waiters.end("park", spilled.sequence)

    def _park_undone(self, undone: commands.ParkUndone) -> None:
        self._touch(undone.sequence)
        self.waiters.end("park", undone.sequence, error=undone.cause or _cancelled("offload", undone.sequence))

    def _pages_ready(self, ready: commands.PagesReady) -> None:
        self.waiters.end("pages", ready.sequence)

    def _layer_ready(self, ready: commands.LayerReady) -> None:
        if ready.sequence in self.restores:
            self.restores[ready.sequence].layer_ready(ready.layer)

    def _restored(self, restored: commands.Restored) -> None:
        self._touch(restored.sequence)
        restore = self.restores.pop(restored.sequence, None)
        if restore is not None:
            restore.layer_ready(LayerId(self.core.layout.num_layers - 1))
        self.waiters.end("pages", restored.sequence)
        self.waiters.end("restore", restored.sequence)

    def _layers_lost(self, lost: commands.LayersLost) -> None:
        if lost.sequence in self.restores:
            self.restores[lost.sequence].undone(lost.cause or _cancelled("restore", lost.sequence))

    def _restore_undone(self, undone: commands.RestoreUndone) -> None:
        self._touch(undone.sequence)
        cause = undone.cause or _cancelled("restore", undone.sequence)
        self.restores.pop(undone.sequence, None)
        self.waiters.end("pages", undone.sequence, error=cause)
        self.waiters.end("restore", undone.sequence, error=cause)

    def _gone(self, gone: commands.Gone) -> None:
        self._touch(gone.sequence)
        self.waiters.end("gone", gone.sequence)

    def _wake(self, wake: commands.WakeAt) -> None:
        self._alarm.set(wake.at_ns)

    def _touch(self, name: SeqId) -> None:
        if self._observer is not None:
            self._touched.add(name)

    def _on_transition(self, chunk: Chunk, before: ChunkState, after: ChunkState, now_ns: int) -> None:
        assert self._observer is not None
        self._touched.update(chunk.refs)
        self._observer.on_transition(chunk.id, list(chunk.refs), before, after, now_ns)

    def _observe_states(self, now_ns: int) -> None:
        """Tell the observer which sequences are in another state than before."""
        assert self._observer is not None
        for name in sorted(self._touched):
            sequence = self.core.sequences.get(name)
            state = None if sequence is None else queries.state_of(sequence)
            if state is not self._states.get(name):
                self._observer.on_state(name, state, now_ns)
            if state is None:
                self._states.pop(name, None)
            else:
                self._states[name] = state
        self._touched.clear()


def _cancelled(what: str, sequence: SeqId) -> ProtocolError:
    return ProtocolError(f"the {what} of sequence {sequence!r} was cancelled")


def _names(event: events.Event) -> tuple[SeqId, ...]:
    """The sequences that an event names."""
    names = (getattr(event, "sequence", None), getattr(event, "child", None))
    return (*(name for name in names if name is not None), *getattr(event, "appends", ()))


_NEWS: dict[type, Any] = {
    commands.StepGranted: Driver._granted,
    commands.StepRefused: Driver._refused,
    commands.Parked: Driver._parked,
    commands.Spilled: Driver._spilled,
    commands.ParkUndone: Driver._park_undone,
    commands.PagesReady: Driver._pages_ready,
    commands.LayerReady: Driver._layer_ready,
    commands.Restored: Driver._restored,
    commands.LayersLost: Driver._layers_lost,
    commands.RestoreUndone: Driver._restore_undone,
    commands.Gone: Driver._gone,
    commands.WakeAt: Driver._wake,
}
