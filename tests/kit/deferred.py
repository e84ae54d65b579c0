"""A host device whose streams do nothing until they are told to, and reapers that report when they are told to.

Everything happens on the calling thread, in an order that the test chooses: streams, events and copies are the real
ones, only their threads are gone.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import ClassVar

from swapkv.basepool import BasePool
from swapkv.fsm.ledger import PageState
from swapkv.streams.base import Event
from swapkv.streams.host import HostDevice, HostStream, Operation, Work

POISON = 0xDB


class _Held:
    """The queue of a stream without a thread."""

    def __init__(self) -> None:
        self.operations: deque[Operation | None] = deque()

    def put(self, operation: Operation | None) -> None:
        self.operations.append(operation)

    def get(self) -> Operation | None:
        return self.operations.popleft()


class DeferredStream(HostStream):
    """Its operations run one by one, by `run`; waits are passed as soon as they can be."""

    def __init__(self, name: str, device: "DeferredDevice") -> None:
        super().__init__(name, device)
        self._thread.join()
        self._queue = _Held()  # type: ignore[assignment]

    def pass_waits(self) -> bool:
        """Get past the waits whose events are reached. False: there is none."""
        before = len(self._queue.operations)  # type: ignore[attr-defined]
        while self._next() is Work.WAIT and self._queue.operations[0].awaited.query():  # type: ignore[attr-defined]
            self._work_once()
        return len(self._queue.operations) < before  # type: ignore[attr-defined]

    def runnable(self) -> bool:
        """Whether the first operation could run now."""
        self.pass_waits()
        return self._next() not in (None, Work.WAIT)

    def _next(self) -> Work | None:
        operations = self._queue.operations  # type: ignore[attr-defined]
        return operations[0].work if operations and operations[0] is not None else None

    def run(self) -> None:
        """Run the first operation. `runnable` was asked before."""
        self._work_once()

    def _work(self) -> None:
        """The thread has nothing to do."""


class DeferredDevice(HostDevice):
    """See the module."""

    def create_stream(self, name: str) -> DeferredStream:
        stream = DeferredStream(name, self)
        self._streams.append(stream)
        return stream

    def runnable(self) -> list[DeferredStream]:
        return [stream for stream in self._streams if stream.runnable()]  # type: ignore[attr-defined]

    def run_one(self, rng: Random) -> bool:
        """Let a stream that can run do its next operation, or get past a wait. False: none can."""
        passed = sum(stream.pass_waits() for stream in self._streams)  # type: ignore[attr-defined]
        streams = self.runnable()
        if streams:
            rng.choice(streams).run()
        return bool(passed or streams)


class DeferredReaper:
    """Stands in for `bridge.Reaper`: its jobs, in order, are done by `report_one`."""

    made: ClassVar[list["DeferredReaper"]] = []

    def __init__(self, name: str) -> None:
        self.jobs: deque[partial[None]] = deque()
        self.made.append(self)

    def watch(self, job: Callable[[], None]) -> None:
        assert isinstance(job, partial)
        self.jobs.append(job)

    def due(self) -> bool:
        """Whether the event of the first job is reached."""
        return bool(self.jobs) and _event(self.jobs[0]).query()

    def stop(self) -> None:
        pass

    def join(self, timeout_s: float) -> bool:
        return True

    @classmethod
    def report_one(cls, rng: Random) -> bool:
        """Report the next end of some lane. False: nothing has ended."""
        due = [reaper for reaper in cls.made if reaper.due()]
        if due:
            rng.choice(due).jobs.popleft()()
        return bool(due)


def _event(job: "partial[None]") -> Event:
    event: Event = job.args[0]
    return event


def poison_after_events(pool: BasePool) -> None:
    """From now on, after every event, overwrite what is free by the core's own account: device pages and host bytes."""
    core, handle = pool._core, pool._core.handle

    def handle_and_poison(event: object, now_ns: int) -> object:
        answer = handle(event, now_ns)  # type: ignore[arg-type]
        core.check()
        _poison_pages(pool)
        _poison_host(pool)
        return answer

    core.handle = handle_and_poison  # type: ignore[method-assign, assignment]


def _poison_pages(pool: BasePool) -> None:
    ledger = pool._core.ledger
    for group in pool._core.groups():
        base = ledger.base(group)
        rows = [r for r in range(ledger.total(group)) if ledger.state_of(base + r) is PageState.FREE]
        for layer in pool.layout.groups[group].layers:
            for region in pool.memory.regions[layer]:
                region.pages[rows] = POISON


def _poison_host(pool: BasePool) -> None:
    memory, begin = pool._transfers._arena._memory, 0
    for offset, size in sorted(pool._core.host.taken().items()):
        memory[begin:offset] = POISON
        begin = offset + size
    memory[begin:] = POISON
