"""The pool as an asyncio (or trio) program sees it. `driver` is how it works, `sessions` what some calls hand out."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager

import anyio
import anyio.to_thread
import torch

from swapkv.basepool import BasePool, allocate, by_id
from swapkv.config import SwapConfig
from swapkv.driver import Driver
from swapkv.errors import DrainTimeout, PoolClosed, WouldBlock
from swapkv.executor import Executor
from swapkv.fsm import commands, events, queries
from swapkv.fsm.commands import PreemptOutcome
from swapkv.ids import SeqId
from swapkv.layout import KVLayout
from swapkv.observer import Observer
from swapkv.sessions import AsyncForward, Restoring
from swapkv.streams.base import Device, Stream
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory
from swapkv.transfers import Transfers
from swapkv.waiters import Undone, Waiter

CLOSE_TIMEOUT_S = 10.0


class Pool(BasePool):
    """The pool of an asyncio or trio program. Made by `open_pool`. See `BasePool` for what every pool offers.

    All calls belong on the thread of the event loop that opened the pool. Calls that may wait are async; each has a
    `_nowait` twin that raises `WouldBlock` instead. Cancelled, a call leaves things as they were; once it is over,
    nothing in flight touches what it named.
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
        self._driver = Driver(self._core, self._transfers, device, observer)
        self._closing: anyio.Event | None = None

    @property
    def _executor(self) -> Executor:
        return self._driver.executor

    def _tell(self, event: events.Event) -> list[commands.Command]:
        return self._driver.tell(event)

    async def finish(self, name: str) -> None:
        """The request is over, in whatever state it is: copies in flight end, then its pages and host memory are free.

        Cancellation does not stop it: the call completes, then the cancellation strikes.
        """
        waiter = self._ask("gone", events.Finish(SeqId(name)))
        with anyio.CancelScope(shield=True):
            await waiter.wait()

    def finish_nowait(self, name: str) -> None:
        """Like `finish`. Raises `WouldBlock` while a copy or a forward of the sequence is under way."""
        if queries.in_transit(self._core, SeqId(name)):
            raise WouldBlock(f"sequence {name!r} is {self.state(name).value} or in a forward: use `await finish`")
        self._tell(events.Finish(SeqId(name)))

    @asynccontextmanager
    async def forward(self, appends: Mapping[str, int], *, stream: Stream | None = None) -> AsyncIterator[AsyncForward]:
        """A forward pass over the sequences of `appends`, each with room for that many more tokens.

        Enter it; launch what reads and writes the pages of `Forward.page_tables` on `stream` (None: `compute`); leave
        it: the tokens count, and a fence keeps the pages until the device is done with them. Left by an exception, the
        tokens do not count. Meanwhile the sequences are pinned.

        Waits while pages that it lacks are on their way. Raises `PagesExhausted` if none are: preempt or finish a
        sequence, then ask again. Cancelled while it waits, nothing has happened.
        """
        self._driver.require_open()
        stream = self.compute if stream is None else stream
        step = self._expect(appends, stream)
        waiter = self._driver.waiters.add("step", step)

        def undo() -> None:
            self._tell(events.CancelStep(step))
            self._driver.waiters.end("step", step, error=Undone())

        try:
            self._tell(events.BeginStep(step, by_id(appends)))
            await waiter.settle(undo)
        except BaseException:
            self._driver.waiters.drop(waiter)
            self._executor.forget_forward(step)
            raise
        with self._inside(step, AsyncForward(self._driver, self._transfers, stream)) as forward:
            yield forward

    def forward_nowait(
        self, appends: Mapping[str, int], *, stream: Stream | None = None
    ) -> AbstractContextManager[AsyncForward]:
        """Like `forward`, for a plain `with`. Raises `WouldBlock` if pages that it lacks are on their way."""
        self._driver.require_open()
        step, stream = self._enter_forward(appends, stream)
        return self._inside(step, AsyncForward(self._driver, self._transfers, stream))

    async def preempt(self, name: str) -> PreemptOutcome:
        """Take the sequence off the device; pages that other sequences share and need stay.

        Returns when its pages are free: OFFLOADED, or RECOMPUTE if the host tier was full and its KV was dropped
        instead (`SwapConfig.host_full`). Only pages written since the last copy are moved.
        Raises `HostTierFull` if that is not allowed, `TransferError` if a copy failed. Then, and when cancelled, the
        sequence is on the device as before.
        """
        waiter = self._ask("park", events.Preempt(SeqId(name)))
        outcome = await waiter.settle(lambda: self._tell(events.CancelPreempt(SeqId(name))))
        assert isinstance(outcome, PreemptOutcome)
        return outcome

    def preempt_nowait(self, name: str) -> PreemptOutcome:
        """Like `preempt`. Raises `WouldBlock` if anything would have to be copied."""
        if queries.preempt_moves_bytes(self._core, SeqId(name)):
            raise WouldBlock(f"sequence {name!r} has pages without a clean copy: use `await preempt`")
        answer = self._tell(events.Preempt(SeqId(name)))
        return next(command.outcome for command in answer if isinstance(command, commands.Parked))

    async def spill(self, name: str, *, tokens: int | None = None) -> None:
        """Let the sequence run on while its first `tokens` tokens (None: all), as far as they fill chunks, leave the device.

        Its forwards read them in the host tier: see `Forward.layer_kv`. Layers with a window keep theirs, and pages that
        other sequences share and need stay. `resume` brings the tokens back. Returns when their pages are free.
        Raises `HostTierFull`, or `TransferError` if a copy failed. Then, and when cancelled, nothing has changed.
        """
        waiter = self._ask("park", events.Spill(SeqId(name), tokens))
        await waiter.settle(lambda: self._tell(events.CancelPreempt(SeqId(name))))

    def spill_nowait(self, name: str, *, tokens: int | None = None) -> None:
        """Like `spill`. Raises `WouldBlock` if anything would have to be copied."""
        if queries.spill_moves_bytes(self._core, SeqId(name), tokens):
            raise WouldBlock(f"sequence {name!r} has chunks without a clean copy: use `await spill`")
        self._tell(events.Spill(SeqId(name), tokens))

    def restoring(self, name: str, *, priority: int | None = None, spilled: int = 0) -> Restoring:
        """Bring the sequence back, layer by layer: `async with pool.restoring(name) as coming:`. See `Restoring`.

        Waits for its turn, for pages and for the restore budget; lower `priority` goes first (None: as registered).
        `spilled`: the first tokens, as far as they fill chunks, stay in the host tier as after a `spill`.
        Raises `KVEvicted` if there is nothing to restore, `TransferError` (`ChecksumMismatch`) if a copy failed. Then,
        and when cancelled, the sequence is off the device (or spilled) as before. A spilled sequence may take part in
        forwards meanwhile: what has come is read on the device, the rest in the host tier.
        """
        return Restoring(self._driver, self.device, events.BeginRestore(SeqId(name), priority, spilled))

    async def resume(self, name: str, *, priority: int | None = None, spilled: int = 0) -> None:
        """Bring the sequence back and return when all of it (but for `spilled`) is on the device. See `restoring`."""
        async with self.restoring(name, priority=priority, spilled=spilled):
            pass

    def resume_nowait(self, name: str, *, spilled: int = 0) -> None:
        """Like `resume`. Raises `WouldBlock` if anything would have to be copied."""
        if queries.restore_moves_bytes(self._core, SeqId(name), spilled):
            raise WouldBlock(f"sequence {name!r} has chunks off the device: use `await resume`")
        self._tell(events.BeginRestore(SeqId(name), None, spilled))

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Take no more calls, end what waits with `PoolClosed`, let copies in flight end, stop all threads. Idempotent.

        Raises `DrainTimeout`, naming what is stuck, if that takes longer than `timeout_s`; the pool is closed then,
        too, but its memory must not be used for anything else. Cancellation does not stop it.
        """
        if self._closing is not None:
            with anyio.CancelScope(shield=True):
                await self._closing.wait()
            return
        self._closing = anyio.Event()
        self._driver.stop(PoolClosed("the pool is closed: open a new one"))
        try:
            with anyio.CancelScope(shield=True):
                # a limiter of its own: threads that the program has blocked elsewhere must not hold the close up
                limiter = anyio.CapacityLimiter(1)
                stuck = await anyio.to_thread.run_sync(self._driver.shut_down, timeout_s, limiter=limiter)
        finally:
            self._closing.set()
        if stuck:
            raise DrainTimeout(
                f"closing the pool: {', '.join(stuck)} did not end within {timeout_s} s; their threads are left behind "
                "and may still touch the pool's memory: find out what hangs, then end the process"
            )

    def _ask(self, news: str, event: events.Preempt | events.Spill | events.Finish) -> Waiter:
        """Put a wish to the core, and be told when its `news` comes."""
        waiter = self._driver.waiters.add(news, event.sequence)
        try:
            self._tell(event)
        except BaseException:
            self._driver.waiters.drop(waiter)
            raise
        return waiter


@asynccontextmanager
async def open_pool(
    layout: KVLayout,
    *,
    num_pages: int | Sequence[int],
    host_bytes: int,
    device: Device | None = None,
    memory: PagedMemory | None = None,
    config: SwapConfig | None = None,
    observer: Observer | None = None,
) -> AsyncIterator[Pool]:
    """Open a pool: `async with open_pool(layout, num_pages=…, host_bytes=…) as pool:`.

    `num_pages`: device pages of each layer group (one number: the same for all). `host_bytes`: the host tier, allocated
    at once and pre-faulted. `device`: None for a host device of its own, without a link limit; a device is closed with
    the pool. `memory`: device pages that exist already (of an engine), with as many pages as `num_pages` says.
    Raises `ProtocolError` for sizes that do not fit together.
    """
    device = HostDevice() if device is None else device
    memory, host_memory = allocate(layout, num_pages, host_bytes, device, memory)
    pool = Pool(layout, memory, host_memory, device, config or SwapConfig(), observer)
    try:
        yield pool
    finally:
        await pool.close()
