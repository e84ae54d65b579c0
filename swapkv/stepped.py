"""The pool for engines that step: it never waits and needs no event loop; `poll` once a step says what has happened."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from swapkv.basepool import BasePool, allocate
from swapkv.closing import close_within
from swapkv.config import SECOND_NS, SwapConfig
from swapkv.errors import DrainTimeout, PoolClosed, SwapError
from swapkv.executor import Executor
from swapkv.forward import Forward
from swapkv.fsm import commands, events
from swapkv.ids import SeqId
from swapkv.layout import KVLayout
from swapkv.observer import Observer
from swapkv.stepdriver import News, StepDriver
from swapkv.streams.base import Device, Stream
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory
from swapkv.transfers import Transfers

CLOSE_TIMEOUT_S = 10.0


class SteppedPool(BasePool):
    """The pool of an engine that steps. Made by `open_stepped_pool`. See `BasePool` for what every pool offers.

    `preempt`, `spill`, `restore`, `finish` and their cancellations begin something and return; its end is in the answer of a
    later `poll` (or the next one, if there was nothing to copy). All calls belong on one thread. Each raises what its
    async twin in `Pool` raises at once; a copy that fails later is news with a `cause`.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        host_memory: torch.Tensor,
        device: Device,
        config: SwapConfig,
        observer: Observer | None,
        transfers: type[Transfers] = Transfers,
    ) -> None:
        super().__init__(layout, memory, host_memory, device, config, transfers)
        self._driver = StepDriver(self._core, self._transfers, observer)
        self._closed = False

    def forward(self, appends: Mapping[str, int], *, stream: Stream | None = None) -> AbstractContextManager[Forward]:
        """A forward pass, for a plain `with`; see `Pool.forward`.

        Raises `WouldBlock` if pages that it lacks are on their way (try again after a `poll`), `PagesExhausted` if
        none are (preempt or finish a sequence first). Nothing has happened then.
        """
        step, stream = self._enter_forward(appends, stream)
        return self._inside(step, Forward(self._core, self._transfers, stream))

    def preempt(self, name: str) -> None:
        """Begin to take the sequence off the device. News: `Parked`, or `ParkUndone` with the cause."""
        self._tell(events.Preempt(SeqId(name)))

    def spill(self, name: str, *, tokens: int | None = None) -> None:
        """Begin to take the first `tokens` tokens off the device, for a sequence that runs on; see `Pool.spill`.

        News: `Spilled`, or `ParkUndone` with the cause; `cancel_preempt` undoes it.
        """
        self._tell(events.Spill(SeqId(name), tokens))

    def cancel_preempt(self, name: str) -> None:
        """Undo a preempt or a spill that is under way, if there is one. News: `ParkUndone`, once its copies have ended."""
        self._tell(events.CancelPreempt(SeqId(name)))

    def restore(self, name: str, *, priority: int | None = None, spilled: int = 0) -> None:
        """Begin to bring the sequence back, but for its first `spilled` tokens as far as they fill chunks.

        News: `PagesReady`, `LayerReady` for each layer, `Restored`.

        If it fails: `LayersLost` at once, and `RestoreUndone` with the cause once its copies have ended.
        """
        self._tell(events.BeginRestore(SeqId(name), priority, spilled))

    def cancel_restore(self, name: str) -> None:
        """Undo a restore that is under way, if there is one. News: `LayersLost`, then `RestoreUndone`."""
        self._tell(events.CancelRestore(SeqId(name)))

    def finish(self, name: str) -> None:
        """The request is over, in whatever state it is. News: `Gone`, once nothing touches its memory any more."""
        self._tell(events.Finish(SeqId(name)))

    def poll(self) -> list[News]:
        """Take in what the device has done, and return the news since the last call. Never blocks.

        Raises `PoolBroken` if the device or an invariant has failed for good.
        """
        return self._driver.poll()

    def idle(self) -> bool:
        """Whether nothing is under way on the device: another `poll` would bring no news by itself."""
        return self._driver.idle()

    def drain(self, timeout_s: float) -> list[News]:
        """Poll until nothing is under way, blocking, and return all news. Raises `DrainTimeout` after `timeout_s`."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * SECOND_NS)
        news = self.poll()
        while not self.idle():
            left_s = (deadline_ns - time.monotonic_ns()) / SECOND_NS
            if left_s <= 0:
                raise DrainTimeout(f"copies or forwards are still under way after {timeout_s} s: {self.statistics()}")
            self._wait(left_s)
            news += self.poll()
        return news

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Take no more calls, let copies in flight end, stop all threads. Idempotent.

        Raises `DrainTimeout`, naming what is stuck, if that takes longer; the pool is closed then, too.
        """
        if self._closed:
            return
        self._closed = True
        self._driver.stop(PoolClosed("the pool is closed: open a new one"))
        stuck = close_within(self.device, timeout_s)
        if stuck:
            raise DrainTimeout(
                f"closing the pool: {', '.join(stuck)} did not end within {timeout_s} s; their threads are left behind "
                "and may still touch the pool's memory: find out what hangs, then end the process"
            )

    @property
    def _executor(self) -> Executor:
        return self._driver.executor

    def _tell(self, event: events.Event) -> list[commands.Command]:
        return self._driver.tell(event)

    def _wait(self, timeout_s: float) -> None:
        """Block until the oldest work of some lane has ended, or it is time for a tick."""
        if self._driver.wake_ns is not None:
            timeout_s = min(timeout_s, max(0.0, (self._driver.wake_ns - time.monotonic_ns()) / SECOND_NS))
        work = self._driver.oldest()
        if work is None:
            time.sleep(timeout_s)
            return
        with suppress(SwapError):  # `finish` tells how it ended
            work.event.wait(timeout_s)


@contextmanager
def open_stepped_pool(
    layout: KVLayout,
    *,
    num_pages: int | Sequence[int],
    host_bytes: int,
    device: Device | None = None,
    memory: PagedMemory | None = None,
    config: SwapConfig | None = None,
    observer: Observer | None = None,
) -> Iterator[SteppedPool]:
    """Open a pool for an engine that steps: `with open_stepped_pool(layout, …) as pool:`. See `open_pool`."""
    device = HostDevice() if device is None else device
    memory, host_memory = allocate(layout, num_pages, host_bytes, device, memory)
    pool = SteppedPool(layout, memory, host_memory, device, config or SwapConfig(), observer)
    try:
        yield pool
    finally:
        pool.close()
