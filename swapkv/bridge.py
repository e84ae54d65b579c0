"""Between the threads of a device and the event loop: reports cross over in batches, alarms ring on time.

Works on asyncio and trio alike, and needs no task of its own: a cancelled task cannot take the pool down with it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")


class LoopBridge(Generic[T]):
    """Delivers reports, posted from any thread, to `receive` on the loop's thread: one wake-up for all that wait."""

    def __init__(self, receive: Callable[[list[T]], None]) -> None:
        self._receive = receive
        native: Any = anyio.lowlevel.current_token().native_token
        self._call_soon: Callable[[Callable[[], None]], object] = (
            native.call_soon_threadsafe if hasattr(native, "call_soon_threadsafe") else native.run_sync_soon
        )
        self._reports: deque[T] = deque()
        self._lock = threading.Lock()
        self._scheduled = False
        self.thread = threading.get_ident()

    def post(self, report: T) -> None:
        """Hand over one report. Never blocks; after the loop has ended the report is dropped."""
        with self._lock:
            self._reports.append(report)
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._call_soon(self._deliver)
        except RuntimeError:  # the loop is closed: nobody is left to tell (trio's RunFinishedError is one, too)
            return

    def _deliver(self) -> None:
        with self._lock:
            self._scheduled = False
            reports = list(self._reports)
            self._reports.clear()
        self._receive(reports)


class Alarm:
    """A thread that calls `ring` once the earliest of the set times has come."""

    def __init__(self, name: str, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at_ns: int | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def set(self, at_ns: int) -> None:
        """Ring at `at_ns` of `time.monotonic_ns`, or earlier if an earlier time is set."""
        with self._changed:
            if self._at_ns is None or at_ns < self._at_ns:
                self._at_ns = at_ns
                self._changed.notify()

    def close(self) -> None:
        """Ring no more and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                wait_ns = None if self._at_ns is None else self._at_ns - time.monotonic_ns()
                if wait_ns is None or wait_ns > 0:
                    self._changed.wait(None if wait_ns is None else wait_ns / 1e9)
                    continue
                self._at_ns = None
            self._ring()


class Reaper:
    """A thread that runs jobs in order: each waits for an event of one lane and reports how it ended."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def watch(self, job: Callable[[], None]) -> None:
        """Run `job`, which may block, after those before it."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of a thread that was stopped. False: a job is stuck, and the thread is left behind."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def postpone_cancellation() -> None:
    """The task was cancelled in the moment in which its call succeeded: let the call return, cancel the next one.

    A cancelled anyio scope (and trio always) cancels the next call by itself. A plain `asyncio.Task.cancel()` is
    delivered once only, so it is asked for again; the task's count of cancellations stays the same.
    """
    if anyio.current_effective_deadline() == float("-inf"):
        return
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    if task is not None:
        task.uncancel()
        task.cancel()
