"""Streams of a CUDA device.

A stream that gets kernels is used on its caller's thread, because kernels that the caller launches next must find what
was said before. A stream that gets copies submits them on a thread of its own. A reaper waits for the ends of either:
no Python ever runs on a callback of the driver, and nobody who gives work waits for the device.
"""

import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from swapkv.config import Verify
from swapkv.errors import BudgetExhausted, DrainTimeout, PoolClosed, ProtocolError, SwapError, TransferError
from swapkv.streams.base import Block, Event, Region
from swapkv.streams.copies import check_block, check_pages, verify_block
from swapkv.streams.cuda_copies import Direction, Runs, Scratch, Way, plan, plan_clone
from swapkv.streams.cuda_driver import CudaLost, cu
from swapkv.streams.cuda_events import CudaCopyEvent, CudaEvent, CudaPromise, CudaTimeline
from swapkv.streams.cuda_reaper import CudaOperation, CudaReaper, first_failure, lost_track
from swapkv.streams.host import Work

if TYPE_CHECKING:
    from swapkv.streams.cuda import CudaDevice


class CudaStream:
    """A CUDA stream; see `Stream`. Made by `CudaDevice.create_stream` and `CudaDevice.wrap_stream`.

    Until it is given pages to gather or scatter, `wait`, `record` and `clone` reach the driver before they return, so
    kernels launched on `handle` by the same thread come after them. A wait for a promise, or for a copy that is not
    submitted yet, becomes a gate: a word of memory that the device waits for and the host sets. A kernel behind a gate
    that fails runs all the same: its output has to be dropped, as that of any void forward.

    From its first gather or scatter on it is a stream of copies: its calls are queued, and kernels launched on it are
    in no order with them. A failed `wait` fails the next gather or scatter that is given after it.
    """

    def __init__(self, name: str, device: "CudaDevice", handle: int, priority: int) -> None:
        self.name = name
        self.handle = handle
        self.priority = priority
        self._device = device
        self._timeline = CudaTimeline(device.event_pool)
        self._intake = threading.Lock()
        self._closed = False
        self._given = 0
        self._waits = 0
        self._awaited: list[Event] = []
        self._point_due = False
        self._scratch = Scratch(device.context)
        self._queue: SimpleQueue[CudaOperation | None] = SimpleQueue()
        self._submitter: threading.Thread | None = None
        self._failed_wait: BaseException | None = None
        self._unreached: list[Event] = []
        self._reaper = CudaReaper(self._thread_name("reap"), device.context, self._timeline, device.lose)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which torch, cuda.core and others take streams: its version and the handle."""
        return 0, self.handle

    def wait(self, event: Event) -> None:
        """See `Stream.wait`. Before the first copy, raises `ProtocolError` for an event that is none of CUDA's."""
        with self._intake:
            self._require_open()
            if self._submitter is None:
                self._wait_directly(event)
                self._awaited = [each for each in (*self._awaited, event) if not _has_come(each)]
            else:
                self._require_room()
                self._waits += 1
                self._point_due = True
                self._queue.put(self._operation(Work.WAIT, CudaEvent(self._timeline), awaited=[event]))

    def record(self) -> CudaEvent:
        """See `Stream.record`."""
        with self._intake:
            self._require_open()
            if self._submitter is None or self._point_due:
                return self._give(self._operation(Work.LAUNCH, CudaEvent(self._timeline)))
            return CudaEvent(self._timeline, self._given)

    def gather(self, blocks: Sequence[Block], verify: Verify) -> CudaCopyEvent:
        """See `Stream.gather`. With `verify`, the stream's reaper hashes what has come."""
        return self._copy(Work.GATHER, Direction.OUT, blocks, verify)

    def scatter(self, blocks: Sequence[Block], verify: Verify) -> CudaCopyEvent:
        """See `Stream.scatter`. With `verify`, the stream's thread waits for what the stream waits for, then hashes."""
        return self._copy(Work.SCATTER, Direction.IN, blocks, verify)

    def clone(self, regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> CudaEvent:
        """See `Stream.clone`. Raises `ProtocolError` for pages that are not there, or both source and target."""
        check_pages(regions, source)
        check_pages(regions, target)
        if len(source) != len(target):
            raise ProtocolError(f"{len(source)} source pages for {len(target)} target pages: give one for each")
        both = set(source.tolist()) & set(target.tolist())
        if both:
            raise ProtocolError(f"pages {sorted(both)} are source and target of one clone: clone to other pages")
        runs = plan_clone(regions, source.numpy(), target.numpy())
        operation = self._operation(Work.CLONE, CudaEvent(self._timeline), run=lambda: self._submit_clone(runs))
        with self._intake:
            self._require_open()
            self._require_room()
            return self._give(operation)

    def _copy(self, work: Work, direction: Direction, blocks: Sequence[Block], verify: Verify) -> CudaCopyEvent:
        blocks = tuple(blocks)
        for block in blocks:
            check_block(block, verify)
        event = CudaCopyEvent(self._timeline)

        def run() -> None:
            self._submit_copies(direction, blocks, verify)

        operation = self._operation(work, event, run=run, blocks=blocks, verify=verify)
        with self._intake:
            self._require_open()
            self._require_room()
            operation.awaited, self._awaited = self._awaited, []
            if blocks and self._submitter is None:
                self._submitter = threading.Thread(target=self._work, name=self._thread_name("submit"), daemon=True)
                self._submitter.start()
            self._give(operation)
        return event

    def _operation(self, work: Work, event: CudaEvent, **parts: object) -> CudaOperation:
        return CudaOperation(work=work, stream=self.name, event=event, **parts)  # type: ignore[arg-type]

    def _give(self, operation: CudaOperation) -> CudaEvent:
        """Number an operation, then submit or queue it. Holds the intake."""
        self._given += 1
        operation.event.number = self._given
        if self._submitter is None:
            with self._device.context:
                self._submit(operation)
        else:
            self._point_due = False
            self._queue.put(operation)
        return operation.event

    def _wait_directly(self, event: Event) -> None:
        """Put the wait into the stream now. Holds the intake."""
        gates = self._device.gates
        with self._device.context:
            if isinstance(event, CudaEvent):
                if not self._order_after(event):
                    event.timeline.when_over(event.number, gates.shut(self.handle))
            elif isinstance(event, CudaPromise):
                if not event.query():
                    event.when_set(gates.shut(self.handle))
            elif not event.query():
                raise ProtocolError(
                    f"stream {self.name!r} cannot wait for a {type(event).__name__}: wait for events of CUDA streams, "
                    "or for a promise of this device that you set"
                )

    def _order_after(self, event: CudaEvent) -> bool:
        """Have the stream wait for an event; its own are in order as it is. False: the work is not submitted yet."""
        return event.timeline is self._timeline or event.timeline.order(event.number, self._wait_on_device)

    def _wait_on_device(self, cuda_event: object) -> None:
        self._device.context.call(cu.cuStreamWaitEvent, self.handle, cuda_event, 0)

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"stream {self.name!r} of device {self._device.name!r} is closed: create a new device")

    def _require_room(self) -> None:
        depth = self._device.queue_depth
        if self._given - self._timeline.over + self._waits >= depth:
            raise BudgetExhausted(
                f"stream {self.name!r} holds {depth} operations that are not over, queue_depth={depth}: "
                "wait for some of its events, or create the device with a larger queue_depth"
            )

    def _thread_name(self, role: str) -> str:
        return f"swapkv-{self._device.name}-{self.name}-{role}"

    def _work(self) -> None:
        self._device.context.bind()
        while self._work_once():
            pass
        self._reaper.stop()

    def _work_once(self) -> bool:
        # a call per operation, so that an idle thread keeps no operation's tensors alive
        operation = self._queue.get()
        if operation is None:
            return False
        if operation.work is Work.WAIT:
            self._await(operation.awaited)
            with self._intake:
                self._waits -= 1
            return True
        if self._timeline.settled(operation.event.number):
            return False  # abandoned: nothing may be submitted any more
        if operation.work in (Work.GATHER, Work.SCATTER):
            self._settle_waits(operation)
        self._submit(operation)
        return True

    def _await(self, events: Iterable[Event]) -> None:
        """On the submitting thread: have the stream wait for events of CUDA, and wait for others here."""
        for event in events:
            try:
                if isinstance(event, CudaEvent):
                    event.timeline.wait_submitted(event.number)
                    self._order_after(event)
                    event.raise_failure()
                    self._unreached = [each for each in (*self._unreached, event) if not each.query()]
                else:
                    event.wait()
            except BaseException as error:  # foreign events may raise anything; the thread lives on
                self._failed_wait = self._failed_wait or error

    def _settle_waits(self, operation: CudaOperation) -> None:
        """How the waits before a copy ended; bytes that are to be verified have to be there first."""
        self._await(operation.awaited)
        operation.awaited = ()
        if operation.work is Work.SCATTER and operation.verify is not Verify.NONE:
            self._failed_wait = self._failed_wait or first_failure(self._unreached)
        self._unreached = []
        if self._failed_wait is not None:
            operation.not_run(self._failed_wait)
            self._failed_wait = None

    def _submit(self, operation: CudaOperation) -> None:
        """Give the operation to the driver, and an event after it. The context is current."""
        try:
            if operation.event.error is None and operation.run is not None:
                self._device.execute(operation)
        except BaseException as error:  # whatever it is, it is this operation's
            operation.fail(error)
        cuda_event = self._record_after()
        self._timeline.submit(operation.event.number, cuda_event)
        self._reaper.watch(operation, cuda_event)

    def _record_after(self) -> object:
        context = self._device.context
        try:
            cuda_event = self._device.event_pool.take()
            context.call(cu.cuEventRecord, cuda_event, self.handle)
        except TransferError as error:
            context.lost = lost_track(error)
            return None
        except CudaLost:
            return None
        return cuda_event

    def _submit_copies(self, direction: Direction, blocks: Sequence[Block], verify: Verify) -> None:
        """Blocks before one that is not what it was are still written."""
        if direction is Direction.OUT or verify is Verify.NONE:
            return self._move(direction, blocks)
        for at, block in enumerate(blocks):
            try:
                verify_block(block)
            except SwapError:
                self._move(direction, blocks[:at])
                raise
        return self._move(direction, blocks)

    def _move(self, direction: Direction, blocks: Sequence[Block]) -> None:
        runs = plan(blocks)
        way = self._device.way_for(direction, runs)
        self._device.copies.move(direction, way, runs, self.handle, self._scratch)

    def _submit_clone(self, runs: Runs) -> None:
        self._device.copies.copy(Way.BATCH, runs.near, runs.far, runs.sizes, self.handle)

    def _stop_intake(self) -> None:
        with self._intake:
            if not self._closed:
                self._closed = True
                self._queue.put(None)

    def _is_over(self, timeout_s: float) -> bool:
        """Whether all work is over within the time."""
        return self._timeline.wait_settled(self._given, timeout_s)

    def _abandon(self, error: DrainTimeout) -> None:
        self._timeline.abandon(error)

    def _lose(self, lost: CudaLost) -> None:
        self._timeline.abandon(lost)

    def _join(self) -> None:
        """All work is over: end the threads."""
        if self._submitter is not None:
            self._submitter.join()
        self._reaper.stop()
        self._reaper.join()

    def _release(self) -> None:
        """No work of the device is stuck: give back what copies needed for themselves. The context is current."""
        self._scratch.close()


def _has_come(event: Event) -> bool:
    """Whether an event is reached, and well."""
    return event.query() and first_failure([event]) is None
