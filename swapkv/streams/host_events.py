"""The events of host streams: points on the timeline of a worker thread, and promises."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from swapkv.errors import ProtocolError, SwapError, TransferError

T = TypeVar("T")


class Timeline:
    """How far a stream has come. Work is numbered from 1 in the order in which it was given, and ends in that order.

    `over`: the last work that ended, well or not. `worker`: the identity of the thread that does the work.
    """

    def __init__(self) -> None:
        self.over = 0
        self.worker: int | None = None
        self._abandoned: SwapError | None = None
        self._changed = threading.Condition(threading.Lock())

    def settled(self, number: int) -> bool:
        """Whether work `number` is over or abandoned."""
        return self.over >= number or self._abandoned is not None

    def failure(self, number: int) -> SwapError | None:
        """Why work `number` never ends, if it was abandoned."""
        return None if self.over >= number else self._abandoned

    def wait_settled(self, number: int, timeout_s: float | None) -> bool:
        """Block until work `number` is settled. False: the time ran out first.

        Raises `ProtocolError` on the worker's own thread if that would never be: wait on another thread or stream.
        """
        if self.settled(number):
            return True
        if timeout_s is None and threading.get_ident() == self.worker:
            raise ProtocolError(
                f"work {number} awaited by work {self.over + 1} of the same stream: that would never end; "
                "wait on another thread or stream"
            )
        with self._changed:
            return self._changed.wait_for(lambda: self.settled(number), timeout_s)

    def advance(self, number: int) -> bool:
        """Work `number` is over. False: the timeline was abandoned before."""
        with self._changed:
            if self._abandoned is None:
                self.over = number
                self._changed.notify_all()
            return self._abandoned is None

    def abandon(self, error: SwapError) -> None:
        """Let all that is not over fail with `error`, for good."""
        with self._changed:
            self._abandoned = error
            self._changed.notify_all()


class HostEvent:
    """A point in a host stream's work; see `Event`. `number`: the work that ends there; `error`: why it failed."""

    def __init__(self, timeline: Timeline, number: int = 0) -> None:
        self.timeline = timeline
        self.number = number
        self.error: TransferError | None = None

    def query(self) -> bool:
        return self.timeline.settled(self.number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`. Raises `ProtocolError` where the awaited work would have to end before itself."""
        if not self.timeline.wait_settled(self.number, timeout_s):
            return False
        self._raise_failure()
        return True

    def _raise_failure(self) -> None:
        error = self.error or self.timeline.failure(self.number)
        if error is not None:
            raise error

    def _require_success(self) -> None:
        if not self.query():
            raise ProtocolError("the work of this event is not over: `wait` for the event first")
        self._raise_failure()


class HostCopyEvent(HostEvent):
    """The event of a gather or scatter; see `CopyEvent`."""

    _checksums: tuple[int, ...] = ()

    def checksums(self) -> tuple[int, ...]:
        """See `CopyEvent.checksums`."""
        self._require_success()
        return self._checksums

    def run(self, copy: Callable[[], tuple[int, ...]]) -> None:
        """Call `copy` and keep the checksums that it returns."""
        self._checksums = copy()


class HostLaunched(HostEvent, Generic[T]):
    """The event of a launched callable; see `Launched`."""

    _returned: T
    _raised: BaseException | None = None

    def result(self) -> T:
        """See `Launched.result`."""
        self._require_success()
        if self._raised is not None:
            raise self._raised
        return self._returned

    def run(self, function: Callable[[], T]) -> None:
        """Call `function` and keep what it returns or raises."""
        try:
            self._returned = function()
        except BaseException as error:  # the caller's, whatever it is: `result` hands it back
            self._raised = error


class HostPromise:
    """An event that the host sets; see `Promise`."""

    def __init__(self) -> None:
        self._is_set = False
        self._error: TransferError | None = None
        self._changed = threading.Condition(threading.Lock())

    def set(self, error: BaseException | None = None) -> None:
        """See `Promise.set`. `wait` raises `error` if it is a `TransferError`, else one that chains it."""
        with self._changed:
            if not self._is_set:
                self._error = None if error is None else transfer_error("a promise failed", error)
                self._is_set = True
                self._changed.notify_all()

    def query(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`."""
        with self._changed:
            if not self._changed.wait_for(self.query, timeout_s):
                return False
        if self._error is not None:
            raise self._error
        return True


def transfer_error(what: str, error: BaseException) -> TransferError:
    """`error` itself if it is a `TransferError`, else one that says `what` and chains it."""
    return error if isinstance(error, TransferError) else chained(f"{what}: {error!r}", error)


def chained(message: str, cause: BaseException) -> TransferError:
    """What `raise TransferError(message) from cause` would raise."""
    error = TransferError(message)
    error.__cause__ = cause
    return error
