"""The host device: streams that are worker threads, over plain memory. What demo and tests run on."""

import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from queue import SimpleQueue
from typing import Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import attrs
import torch

from swapkv.config import Verify
from swapkv.errors import BudgetExhausted, DrainTimeout, PoolClosed, ProtocolError
from swapkv.streams.base import Block, Event, Region
from swapkv.streams.copies import check_block, check_pages, clone_pages, gather_blocks, scatter_blocks
from swapkv.streams.host_events import (
    HostCopyEvent,
    HostEvent,
    HostLaunched,
    HostPromise,
    Timeline,
    chained,
    transfer_error,
)

T = TypeVar("T")

_Copy: TypeAlias = Callable[[Sequence[Block], Verify], tuple[int, ...]]
_PAGE_ALIGNMENT = 4096


class Clock(Protocol):
    """What a limited link keeps time by; the module `time` is one."""

    def monotonic_ns(self) -> int: ...

    def sleep(self, seconds: float, /) -> None: ...


class Work(Enum):
    """What an operation does."""

    WAIT = "wait"
    GATHER = "gather"
    SCATTER = "scatter"
    CLONE = "clone"
    LAUNCH = "launch"


@attrs.define(kw_only=True, eq=False)
class Operation:
    """One entry of a stream's queue. `stream`: its name. `run`: does it. `blocks`: what a gather or scatter moves.

    `awaited`: what a wait waits for. `ready_ns`: when it was given and all that it had to wait for was there.
    """

    work: Work
    stream: str
    event: HostEvent
    run: Callable[[], object]
    blocks: Sequence[Block] = ()
    awaited: Event | None = None
    ready_ns: int = 0


class HostStream:
    """A worker thread that does what it is given in order; see `Stream` and `ComputeStream`.

    A failed `wait` fails the next operation that is given after it and is no clone, and only that one: give operations
    that depend on each other from one thread. Made by `HostDevice.create_stream`.
    """

    def __init__(self, name: str, device: "HostDevice") -> None:
        self.name = name
        self._device = device
        self._timeline = Timeline()
        self._intake = threading.Lock()
        self._given = 0
        self._closed = False
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._failed_wait: BaseException | None = None
        self._ready_ns = 0
        self._thread = threading.Thread(target=self._work, name=f"swapkv-{device.name}-{name}", daemon=True)
        self._thread.start()

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        if self._is_worker():
            event.wait()
        else:
            self._give(Work.WAIT, HostEvent(self._timeline), event.wait, awaited=event)

    def record(self) -> HostEvent:
        """See `Stream.record`. Takes no place in the queue."""
        if self._is_worker():
            return HostEvent(self._timeline, self._timeline.over)
        with self._intake:
            self._require_open()
            return HostEvent(self._timeline, self._given)

    def gather(self, blocks: Sequence[Block], verify: Verify) -> HostCopyEvent:
        """See `Stream.gather`."""
        return self._copy(Work.GATHER, gather_blocks, blocks, verify)

    def scatter(self, blocks: Sequence[Block], verify: Verify) -> HostCopyEvent:
        """See `Stream.scatter`."""
        return self._copy(Work.SCATTER, scatter_blocks, blocks, verify)

    def clone(self, regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> HostEvent:
        """See `Stream.clone`. Raises `ProtocolError` for pages that are not there or lists of unequal length."""
        check_pages(regions, source)
        check_pages(regions, target)
        if len(source) != len(target):
            raise ProtocolError(f"{len(source)} source pages for {len(target)} target pages: give one for each")
        event = HostEvent(self._timeline)
        self._give(Work.CLONE, event, lambda: clone_pages(regions, source, target))
        return event

    def launch(self, function: Callable[[], T]) -> HostLaunched[T]:
        """See `ComputeStream.launch`. Thread-local modes of torch (`inference_mode`, …) are for `function` to enter."""
        event: HostLaunched[T] = HostLaunched(self._timeline)
        self._give(Work.LAUNCH, event, lambda: event.run(function))
        return event

    def _copy(self, work: Work, copy: _Copy, blocks: Sequence[Block], verify: Verify) -> HostCopyEvent:
        blocks = tuple(blocks)
        for block in blocks:
            check_block(block, verify)
        event = HostCopyEvent(self._timeline)
        self._give(work, event, lambda: event.run(lambda: copy(blocks, verify)), blocks)
        return event

    def _give(
        self,
        work: Work,
        event: HostEvent,
        run: Callable[[], object],
        blocks: Sequence[Block] = (),
        awaited: Event | None = None,
    ) -> None:
        now_ns = self._device.clock.monotonic_ns()
        operation = Operation(
            work=work, stream=self.name, event=event, run=run, blocks=blocks, awaited=awaited, ready_ns=now_ns
        )
        depth = self._device.queue_depth
        with self._intake:
            self._require_open()
            if self._given - self._timeline.over >= depth:
                raise BudgetExhausted(
                    f"stream {self.name!r} holds {depth} operations that are not over, queue_depth={depth}: "
                    "wait for some of its events, or create the device with a larger queue_depth"
                )
            self._given += 1
            event.number = self._given
            self._queue.put(operation)

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"stream {self.name!r} of device {self._device.name!r} is closed: create a new device")

    def _is_worker(self) -> bool:
        return threading.get_ident() == self._timeline.worker

    def _work(self) -> None:
        self._timeline.worker = threading.get_ident()
        while self._work_once():
            pass
        self._timeline.worker = None  # the number of a thread that ended is given to a new one

    def _work_once(self) -> bool:
        # a call per operation, so that an idle worker keeps no operation's tensors alive
        operation = self._queue.get()
        number = self._timeline.over + 1
        if operation is None or self._timeline.settled(number):
            return False
        if operation.work is Work.WAIT:
            self._wait(operation)
        else:
            self._run(operation)
        return self._timeline.advance(number)

    def _wait(self, operation: Operation) -> None:
        assert operation.awaited is not None
        there_already = operation.awaited.query()
        try:
            operation.run()
            if not there_already:
                self._ready_ns = self._device.clock.monotonic_ns()
        except BaseException as error:  # foreign events may raise anything; the worker lives on
            if self._failed_wait is None:
                self._failed_wait = error

    def _run(self, operation: Operation) -> None:
        failed_wait = None
        if operation.work is not Work.CLONE:
            failed_wait, self._failed_wait = self._failed_wait, None
        what = f"{operation.work.value} on stream {self.name!r}"
        if failed_wait is not None:
            operation.event.error = chained(f"{what} was not run: an event that it waits for failed", failed_wait)
            return
        operation.ready_ns = max(operation.ready_ns, self._ready_ns)
        try:
            self._device.execute(operation)
            if not operation.blocks:
                self._ready_ns = self._device.clock.monotonic_ns()
        except BaseException as error:  # whatever it is, it is this operation's; the worker lives on
            operation.event.error = transfer_error(f"{what} failed", error)

    def _stop_intake(self) -> None:
        with self._intake:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def _is_over(self, deadline_s: float) -> bool:
        """Whether all work is over by `deadline_s` (of `time.monotonic`)."""
        return self._timeline.wait_settled(self._given, max(0.0, deadline_s - time.monotonic()))


class _Link:
    """One direction of the link: bytes that pass through it one after the other."""

    def __init__(self, bytes_per_s: int, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._busy_until_ns = 0
        self._lock = threading.Lock()

    def carry(self, num_bytes: int, copy: Callable[[], object], ready_ns: int) -> None:
        """Run `copy`, then sleep until the link would have carried its bytes, if that is later.

        A link begins with a copy that was `ready` as soon as it is done with the one before: how long this thread took
        to wake up in between is not the link's time.
        """
        copy()
        with self._lock:
            carried_ns = num_bytes * 1_000_000_000 // self._bytes_per_s
            self._busy_until_ns = until_ns = max(ready_ns, self._busy_until_ns) + carried_ns
        remaining_ns = until_ns - self._clock.monotonic_ns()
        if remaining_ns > 0:
            self._clock.sleep(remaining_ns / 1_000_000_000)


class HostDevice:
    """Host memory as a device; see `Device`. Its streams are `ComputeStream`s.

    `link_bytes_per_s`: what the link carries in each direction (gather: out, scatter: in), all streams together; a
    copy is over when the link would have carried it. None: as fast as memory is. `queue_depth`: the operations that a
    stream holds at most. `clock`: what the link keeps time by. Raises `ProtocolError` for limits below 1.
    """

    def __init__(
        self,
        *,
        name: str = "host",
        link_bytes_per_s: int | None = None,
        queue_depth: int = 1024,
        clock: Clock = time,
    ) -> None:
        if link_bytes_per_s is not None and link_bytes_per_s < 1:
            raise ProtocolError(f"link_bytes_per_s={link_bytes_per_s} must be at least 1, or None for no limit")
        if queue_depth < 1:
            raise ProtocolError(f"queue_depth={queue_depth} must be at least 1; without it, 1024 operations fit")
        self.name = name
        self.link_bytes_per_s = link_bytes_per_s
        self.queue_depth = queue_depth
        self.clock = clock
        self._links: dict[Work, _Link] = {}
        if link_bytes_per_s is not None:
            self._links = {way: _Link(link_bytes_per_s, clock) for way in (Work.GATHER, Work.SCATTER)}
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._streams: list[HostStream] = []
        self._promises: WeakSet[HostPromise] = WeakSet()
        self._stuck: tuple[str, ...] = ()

    def create_stream(self, name: str) -> HostStream:
        """A stream with a thread `swapkv-<device>-<name>`. Raises `PoolClosed` after `close`."""
        with self._lock:
            self._require_open()
            stream = HostStream(name, self)
            self._streams.append(stream)
            return stream

    def create_promise(self) -> HostPromise:
        """A promise that is not set. Raises `PoolClosed` after `close`."""
        with self._lock:
            self._require_open()
            promise = HostPromise()
            self._promises.add(promise)
            return promise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory, uint8 `[num_bytes]`, zeroed and pre-faulted, its address a multiple of 4096.

        Raises `ProtocolError` for a negative size, `BudgetExhausted` if there is not as much: ask for less.
        """
        if num_bytes < 0:
            raise ProtocolError(f"num_bytes={num_bytes} must be 0 or more")
        try:
            memory = torch.empty(num_bytes + _PAGE_ALIGNMENT, dtype=torch.uint8).zero_()
        except RuntimeError as error:
            raise BudgetExhausted(f"the host has no {num_bytes} bytes left: ask for less or free some") from error
        begin = -memory.data_ptr() % _PAGE_ALIGNMENT
        return memory[begin : begin + num_bytes]

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """The same as `allocate`: here all memory is the device's."""
        return self.allocate(num_bytes)

    def execute(self, operation: Operation) -> None:
        """Run one operation, on its stream's thread; what it raises fails the operation's event.

        The one place to override in order to delay, fail or corrupt work. Waits do not pass through here, nor does
        work that a failed wait has failed.
        """
        link = self._links.get(operation.work)
        if link is None:
            operation.run()
        else:
            link.carry(sum(block.num_bytes for block in operation.blocks), operation.run, operation.ready_ns)

    def close(self, timeout_s: float) -> list[str]:
        """See `Device.close`. The threads of streams that are named end when what holds them up lets go of them.

        Every call returns the names that the first one found. Raises `ProtocolError` on a stream's own thread.
        """
        if any(stream._is_worker() for stream in self._streams):
            raise ProtocolError(f"device {self.name!r} closed from one of its streams: close it from another thread")
        with self._closing:
            with self._lock:
                streams, self._streams, self._closed = self._streams, [], True
            self._stuck += tuple(self._stop(streams, timeout_s))
            return list(self._stuck)

    def _stop(self, streams: list[HostStream], timeout_s: float) -> list[str]:
        deadline_s = time.monotonic() + timeout_s
        for stream in streams:
            stream._stop_intake()
        stuck = [stream for stream in streams if not stream._is_over(deadline_s)]
        if stuck:
            self._abandon(stuck, timeout_s)
        for stream in streams:
            if stream not in stuck:
                stream._thread.join()
        return [stream.name for stream in stuck]

    def _abandon(self, stuck: list[HostStream], timeout_s: float) -> None:
        advice = f"within {timeout_s} s of closing device {self.name!r}: do not reuse what the work touches"
        for stream in stuck:
            stream._timeline.abandon(DrainTimeout(f"stream {stream.name!r} did not end its work {advice}"))
        for promise in tuple(self._promises):
            promise.set(DrainTimeout(f"a promise was not set {advice}"))

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"device {self.name!r} is closed: create a new one")
