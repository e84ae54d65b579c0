"""The events of CUDA streams: points on a stream's timeline, promises, and gates that keep a stream waiting for the host."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from swapkv.errors import BudgetExhausted, ProtocolError, SwapError
from swapkv.streams.cuda_driver import CudaContext, EventPool, cu
from swapkv.streams.host_events import HostPromise, Timeline

GATES = 1024
"""How many decisions of the host streams can wait for at a time: one page of memory."""

_PORTABLE_AND_MAPPED = 0x01 | 0x02
_AT_LEAST = 0


class CudaTimeline(Timeline):
    """How far a CUDA stream has come, in three strides: work is given, then submitted to the driver, then over.

    A stream can only be told to wait for what is submitted: an event that was never recorded is waited for by nobody.
    `submitted`: the last work that was.
    """

    def __init__(self, pool: EventPool) -> None:
        super().__init__()
        self.submitted = 0
        self._pool = pool
        self._events: dict[int, Any] = {}
        self._listeners: list[tuple[int, Callable[[], None]]] = []

    def submit(self, number: int, event: Any) -> None:
        """Work `number` is with the driver, and `event` recorded after it (None: the device is lost)."""
        with self._changed:
            self.submitted = number
            if event is not None:
                self._events[number] = event
            self._changed.notify_all()

    def wait_submitted(self, number: int) -> None:
        """Block until work `number` is submitted, or will never be."""
        with self._changed:
            self._changed.wait_for(lambda: self.submitted >= number or self.settled(number))

    def order(self, number: int, wait_on_device: Callable[[Any], None]) -> bool:
        """Have a stream wait for work `number`, unless it is over. False: it is not submitted yet."""
        with self._changed:
            if self.settled(number):
                return True
            if self.submitted < number:
                return False
            if number in self._events:
                wait_on_device(self._events[number])
            return True

    def when_over(self, number: int, listener: Callable[[], None]) -> None:
        """Call `listener` once work `number` is over: now, or on the thread that finds out."""
        with self._changed:
            if not self.settled(number):
                self._listeners.append((number, listener))
                return
        listener()

    def advance(self, number: int) -> bool:
        """See `Timeline.advance`. The events of what is over are used again."""
        with self._changed:
            for passed in [n for n in self._events if n <= number]:
                self._pool.give_back(self._events.pop(passed))
            called = [listener for n, listener in self._listeners if n <= number]
            self._listeners = [pair for pair in self._listeners if pair[0] > number]
        goes_on = super().advance(number)
        for listener in called:
            listener()
        return goes_on


class CudaEvent:
    """A point in a CUDA stream's work; see `Event`. `number`: the work that ends there; `error`: why it failed."""

    def __init__(self, timeline: CudaTimeline, number: int = 0) -> None:
        self.timeline = timeline
        self.number = number
        self.error: SwapError | None = None

    def query(self) -> bool:
        return self.timeline.settled(self.number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`. Raises `CudaLost` if the device is lost."""
        if not self.timeline.wait_settled(self.number, timeout_s):
            return False
        self.raise_failure()
        return True

    def raise_failure(self) -> None:
        """Raise why the work failed, if that is known by now."""
        error = self.error or self.timeline.failure(self.number)
        if error is not None:
            raise error


class CudaCopyEvent(CudaEvent):
    """The event of a gather or scatter; see `CopyEvent`."""

    hashed: tuple[int, ...] = ()

    def checksums(self) -> tuple[int, ...]:
        """See `CopyEvent.checksums`."""
        if not self.query():
            raise ProtocolError("the work of this event is not over: `wait` for the event first")
        self.raise_failure()
        return self.hashed


class CudaPromise(HostPromise):
    """An event that the host sets; streams that wait for it have a gate each."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: list[Callable[[], None]] = []

    def set(self, error: BaseException | None = None) -> None:
        """See `Promise.set`. A kernel behind the gate runs even if the promise fails: its output has to be dropped."""
        super().set(error)
        with self._changed:
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()

    def when_set(self, listener: Callable[[], None]) -> None:
        """Call `listener` once the promise is set: now, or on the thread that sets it."""
        with self._changed:
            if not self._is_set:
                self._listeners.append(listener)
                return
        listener()


class Gates:
    """Words of pinned memory that streams wait for and the host sets (`cuStreamWaitValue32`).

    A word only grows: who waits for an earlier value than it has goes on, so it can be used again at once.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        with context:
            self._memory = context.call(cu.cuMemHostAlloc, GATES * 4, _PORTABLE_AND_MAPPED)
            self._address = int(context.call(cu.cuMemHostGetDevicePointer, self._memory, 0))
        array = (ctypes.c_uint32 * GATES).from_address(int(self._memory))
        self._words = np.frombuffer(memoryview(array), dtype=np.uint32)
        self._words[:] = 0
        self._next = np.zeros(GATES, dtype=np.uint32)
        self._free = list(range(GATES))
        self._lock = threading.Lock()

    def shut(self, stream: int) -> Callable[[], None]:
        """Keep `stream` waiting until the function that is returned is called, once. The context is current.

        Raises `BudgetExhausted` if all gates are shut.
        """
        with self._lock:
            if not self._free:
                raise BudgetExhausted(f"{GATES} gates are shut: let some of the events that streams wait for come")
            word = self._free.pop()
            self._next[word] += 1
            value = int(self._next[word])
        address = self._address + 4 * word
        try:
            self._context.call(cu.cuStreamWaitValue32, stream, address, cu.cuuint32_t(value), _AT_LEAST)
        except SwapError:
            self._open(word, value)
            raise
        return lambda: self._open(word, value)

    def _open(self, word: int, value: int) -> None:
        with self._lock:
            self._words[word] = value
            self._free.append(word)

    def close(self) -> None:
        """Give the memory back: no stream waits any more."""
        with self._context:
            cu.cuMemFreeHost(self._memory)
