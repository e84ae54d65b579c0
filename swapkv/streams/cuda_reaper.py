"""Who finds out that work of a CUDA stream is over: a thread that sleeps on events and tells the ends in batches."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from swapkv.config import Verify
from swapkv.errors import TransferError
from swapkv.streams.base import Block, Event
from swapkv.streams.copies import hash_block
from swapkv.streams.cuda_driver import CudaContext, CudaLost, cu
from swapkv.streams.cuda_events import CudaCopyEvent, CudaEvent, CudaTimeline
from swapkv.streams.host import Work
from swapkv.streams.host_events import chained, transfer_error


@attrs.define(kw_only=True, eq=False)
class CudaOperation:
    """One entry of a stream's queue. `stream`: its name. `blocks`: what a gather or scatter moves.

    `run`: submits it; None: there is nothing to submit, only a point to record. `awaited`: what it depends on, and
    nobody has asked yet how that ended.
    """

    work: Work
    stream: str
    event: CudaEvent
    run: Callable[[], object] | None = None
    blocks: Sequence[Block] = ()
    verify: Verify = Verify.NONE
    awaited: Sequence[Event] = ()

    def fail(self, error: BaseException) -> None:
        """The driver did not take it, because of `error`."""
        what = f"{self.work.value} on stream {self.stream!r} failed"
        self.event.error = error if isinstance(error, CudaLost) else transfer_error(what, error)

    def not_run(self, cause: BaseException) -> None:
        """What it depends on has failed."""
        what = f"{self.work.value} on stream {self.stream!r} was not run: an event that it waits for failed"
        self.event.error = cause if isinstance(cause, CudaLost) else chained(what, cause)


class CudaReaper:
    """Waits for the ends of one stream's work, in order. `lose`: called when the device's context is lost."""

    def __init__(
        self, name: str, context: CudaContext, timeline: CudaTimeline, lose: Callable[[CudaLost], None]
    ) -> None:
        self._context = context
        self._timeline = timeline
        self._lose = lose
        self._submitted: deque[tuple[CudaOperation, object]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def watch(self, operation: CudaOperation, cuda_event: object) -> None:
        """`cuda_event` was recorded after the operation; None: the context is lost."""
        with self._changed:
            self._submitted.append((operation, cuda_event))
            self._changed.notify()

    def stop(self) -> None:
        """End the thread once all that it watches is over."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the end of a thread that was stopped."""
        self._thread.join()

    def _work(self) -> None:
        self._context.bind()
        while self._reap():
            pass

    def _reap(self) -> bool:
        """Wait for the end of one operation, and tell it with all those that are over by then. False: no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._submitted or self._stopped)
            if not self._submitted:
                return False
        try:
            over = self._wait_for_first()
        except CudaLost as lost:
            self._lose(lost)
            return False
        for earlier, operation in zip((None, *over), over, strict=False):
            if operation.awaited and earlier is not None:
                # what it depends on may itself depend on the earlier ones: they must not be kept back
                self._timeline.advance(earlier.event.number)
            self._finish(operation)
        return self._timeline.advance(over[-1].event.number)

    def _wait_for_first(self) -> list[CudaOperation]:
        self._context.call(cu.cuEventSynchronize, self._submitted[0][1])
        over = [self._submitted.popleft()[0]]
        while self._submitted and self._is_over(self._submitted[0][1]):
            over.append(self._submitted.popleft()[0])
        return over

    def _is_over(self, cuda_event: object) -> bool:
        if self._context.lost is not None:
            raise self._context.lost.again()
        (status,) = cu.cuEventQuery(cuda_event)
        return bool(status == cu.CUresult.CUDA_SUCCESS)

    def _finish(self, operation: CudaOperation) -> None:
        """What is left to do on the host: ask how that ended which it depended on, and hash what has come."""
        event = operation.event
        if event.error is None and (failure := first_failure(operation.awaited)) is not None:
            operation.not_run(failure)
        if isinstance(event, CudaCopyEvent) and event.error is None and operation.verify is Verify.CRC32:
            gathered = operation.blocks if operation.work is Work.GATHER else ()
            event.hashed = tuple(checksum for block in gathered for checksum in hash_block(block))


def first_failure(events: Iterable[Event]) -> BaseException | None:
    """Wait for each event on the calling thread; what the first one that failed has failed with."""
    for event in events:
        try:
            event.wait()
        except BaseException as error:  # foreign events may raise anything
            return error
    return None


def lost_track(error: TransferError) -> CudaLost:
    """No event could be recorded after work that is under way: nobody can tell when it is over."""
    return CudaLost(f"the end of work cannot be followed ({error}): end the process", "not tracked")
