"""The pool as an asyncio (or trio) program sees it. `driver` is how it works, `sessions` what some calls hand out."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from itertools import count

import anyio
import anyio.to_thread
import torch

from swapkv.budget.victims import Victim, rank
from swapkv.config import SECOND_NS, SwapConfig
from swapkv.driver import Driver
from swapkv.errors import DrainTimeout, PoolClosed, ProtocolError, SwapError, WouldBlock
from swapkv.fsm import events, queries
from swapkv.fsm.commands import PreemptOutcome
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import GroupId, Lane, SeqId, StepId
from swapkv.layout import KVLayout
from swapkv.observer import Observer
from swapkv.sessions import Forward, Restoring
from swapkv.statistics import LinkStatistics, PageCounts, PoolStatistics
from swapkv.streams.base import Device, Stream
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory
from swapkv.tiers.host import HostArena
from swapkv.transfers import Transfers
from swapkv.waiters import Undone

ASSUMED_BYTES_PER_S = 10e9
CLOSE_TIMEOUT_S = 10.0


class Pool:
    """The KV pages of one device, and the host memory that they overflow into. Made by `open_pool`.

    All calls belong on the thread of the event loop that opened the pool. Calls that may wait are async; each has a
    `_nowait` twin that raises `WouldBlock` instead. A call either does what it says or, if it raises (cancellation
    included), leaves things as they were; once it is over, nothing in flight touches what it named.

    Every call raises `UnknownSequence` for a name that is not registered, `ProtocolError` if the sequence's state does
    not allow it, `PoolClosed` after `close`, and `PoolBroken` after a failure that leaves nothing to rely on.

    `memory`: the device pages, by layer and plane. `compute`: the stream of forwards that name no other.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        host_memory: torch.Tensor,
        device: Device,
        config: SwapConfig,
        observer: Observer | None,
    ) -> None:
        pages = [memory.num_pages(GroupId(g)) for g in range(len(layout.groups))]
        self.layout = layout
        self.memory = memory
        self.config = config
        self._device = device
        self._core = SwapCore(layout, pages, host_memory.numel(), config)
        bases = [self._core.ledger.base(g) for g in self._core.groups()]
        self._transfers = Transfers(layout, memory, HostArena(layout, host_memory), device, config.verify, bases)
        self.compute: Stream = device.create_stream("compute")
        self._driver = Driver(self._core, self._transfers, device, observer)
        self._step_ids = count(1)
        self._closed = False

    def register(self, name: str, *, max_tokens: int, step_tokens: int | None = None, priority: int = 0) -> None:
        """Take in a new sequence, which has no KV yet.

        `max_tokens`: the longest that it will get. `step_tokens`: the most tokens that one forward adds (None: all at
        once); it matters for layers with a window. `priority`: of its restores, lower first.
        Raises `NeverFits`, with the need and the limit, if the pool could not hold it even alone.
        """
        self._driver.tell(events.Register(SeqId(name), max_tokens, step_tokens, priority))

    def fork(self, parent: str, child: str, *, max_tokens: int, priority: int = 0) -> None:
        """A new sequence with the parent's tokens. Chunks are shared; a begun one is copied by whoever appends first."""
        self._driver.tell(events.Fork(SeqId(parent), SeqId(child), max_tokens, priority))

    def truncate(self, name: str, *, tokens: int) -> None:
        """Take back every token from position `tokens` on, such as drafts that were rejected."""
        self._driver.tell(events.Truncate(SeqId(name), tokens))

    def evict(self, name: str) -> None:
        """Drop the sequence's KV, on the device and in the host tier; `reset` it, then run its tokens again."""
        self._driver.tell(events.Evict(SeqId(name)))

    def reset(self, name: str) -> None:
        """Let a sequence whose KV was dropped begin anew, with no tokens."""
        self._driver.tell(events.Reset(SeqId(name)))

    async def finish(self, name: str) -> None:
        """The request is over, in whatever state it is: copies in flight end, then its pages and host memory are free.

        Cancellation does not stop it: the call completes, then the cancellation strikes.
        """
        waiter = self._driver.waiters.add("gone", SeqId(name))
        try:
            self._driver.tell(events.Finish(SeqId(name)))
        except SwapError:
            self._driver.waiters.drop(waiter)
            raise
        with anyio.CancelScope(shield=True):
            await waiter.wait()

    def finish_nowait(self, name: str) -> None:
        """Like `finish`. Raises `WouldBlock` while a copy or a forward of the sequence is under way."""
        if queries.in_transit(self._core, SeqId(name)):
            raise WouldBlock(f"sequence {name!r} is {self.state(name).value} or in a forward: use `await finish`")
        self._driver.tell(events.Finish(SeqId(name)))

    @asynccontextmanager
    async def forward(self, appends: Mapping[str, int], *, stream: Stream | None = None) -> AsyncIterator[Forward]:
        """A forward pass over the sequences of `appends`, each with room for that many more tokens.

        Enter it; launch what reads and writes the pages of `Forward.page_tables` on `stream` (None: `compute`); leave
        it: the tokens count, and a fence keeps the pages until the device is done with them. Left by an exception, the
        tokens do not count. Meanwhile the sequences are pinned.

        Waits while pages that it lacks are on their way. Raises `PagesExhausted` if none are: preempt or finish a
        sequence, then ask again. Cancelled while it waits, nothing has happened.
        """
        stream = self.compute if stream is None else stream
        step = self._begin(appends, stream)
        waiter = self._driver.waiters.add("step", step)

        def undo() -> None:
            self._driver.tell(events.CancelStep(step))
            self._driver.waiters.end("step", step, error=Undone())

        try:
            self._driver.tell(events.BeginStep(step, _by_id(appends)))
            await waiter.settle(undo)
        except BaseException:
            self._driver.waiters.drop(waiter)
            self._driver.forget_forward(step)
            raise
        with self._inside(step, stream) as forward:
            yield forward

    def forward_nowait(
        self, appends: Mapping[str, int], *, stream: Stream | None = None
    ) -> AbstractContextManager[Forward]:
        """Like `forward`, for a plain `with`. Raises `WouldBlock` if pages that it lacks are on their way."""
        stream = self.compute if stream is None else stream
        step = self._begin(appends, stream)
        waiter = self._driver.waiters.add("step", step)
        try:
            self._driver.tell(events.BeginStep(step, _by_id(appends)))
            if not waiter.done:
                self._driver.tell(events.CancelStep(step))
                raise WouldBlock(f"pages for a forward over {list(appends)} are on their way: use `async with forward`")
            waiter.result()
        except BaseException:
            self._driver.waiters.drop(waiter)
            self._driver.forget_forward(step)
            raise
        return self._inside(step, stream)

    async def preempt(self, name: str) -> PreemptOutcome:
        """Take the sequence off the device; pages that other sequences share and need stay.

        Returns when its pages are free: OFFLOADED, or RECOMPUTE if the host tier was full and its KV was dropped
        instead (`SwapConfig.host_full`). Only pages written since the last copy are moved.
        Raises `HostTierFull` if that is not allowed, `TransferError` if a copy failed. Then, and when cancelled, the
        sequence is on the device as before.
        """
        waiter = self._driver.waiters.add("park", SeqId(name))
        try:
            self._driver.tell(events.Preempt(SeqId(name)))
        except BaseException:
            self._driver.waiters.drop(waiter)
            raise
        outcome = await waiter.settle(lambda: self._driver.tell(events.CancelPreempt(SeqId(name))))
        assert isinstance(outcome, PreemptOutcome)
        return outcome

    def preempt_nowait(self, name: str) -> PreemptOutcome:
        """Like `preempt`. Raises `WouldBlock` if anything would have to be copied."""
        if queries.preempt_moves_bytes(self._core, SeqId(name)):
            raise WouldBlock(f"sequence {name!r} has pages without a clean copy: use `await preempt`")
        waiter = self._driver.waiters.add("park", SeqId(name))
        try:
            self._driver.tell(events.Preempt(SeqId(name)))
        except BaseException:
            self._driver.waiters.drop(waiter)
            raise
        outcome = waiter.result()
        assert isinstance(outcome, PreemptOutcome)
        return outcome

    def restoring(self, name: str, *, priority: int | None = None) -> Restoring:
        """Bring the sequence back, layer by layer: `async with pool.restoring(name) as coming:`. See `Restoring`.

        Waits for its turn, for pages and for the restore budget; lower `priority` goes first (None: as registered).
        Raises `KVEvicted` if there is nothing to restore, `TransferError` (`ChecksumMismatch`) if a copy failed. Then,
        and when cancelled, the sequence is off the device as before.
        """
        return Restoring(self._driver, self._device, SeqId(name), priority)

    async def resume(self, name: str, *, priority: int | None = None) -> None:
        """Bring the sequence back and return when all of it is on the device. See `restoring`."""
        async with self.restoring(name, priority=priority):
            pass

    def resume_nowait(self, name: str) -> None:
        """Like `resume`. Raises `WouldBlock` if anything would have to be copied."""
        if queries.restore_moves_bytes(self._core, SeqId(name)):
            raise WouldBlock(f"sequence {name!r} has chunks off the device: use `await resume`")
        self._driver.tell(events.BeginRestore(SeqId(name)))

    def state(self, name: str) -> SequenceState:
        """The sequence's state, derived from its chunks."""
        return queries.state_of(self._core.sequence(SeqId(name)))

    def tokens(self, name: str) -> int:
        """How many tokens the sequence has."""
        return self._core.sequence(SeqId(name)).tokens

    def chunk_states(self, name: str) -> tuple[ChunkState, ...]:
        """The state of each chunk that the sequence still needs, group by group, in order."""
        return tuple(chunk.state for chunk in self._core.sequence(SeqId(name)).live_chunks())

    def victims(self) -> list[Victim]:
        """Sequences that could be preempted now, the best victim first: most bytes freed for the time that it costs.

        Costs follow the measured rates of the links (10 GB/s before the first copy).
        """
        out, into = (self._core.bandwidth[lane].bytes_per_s or ASSUMED_BYTES_PER_S for lane in (Lane.OUT, Lane.IN))
        candidates = queries.victims(self._core)
        return rank(candidates, out_ns_per_byte=SECOND_NS / out, in_ns_per_byte=SECOND_NS / into)

    def statistics(self) -> PoolStatistics:
        """A snapshot. Never raises, not even on a closed pool."""
        core = self._core
        states = Counter(queries.state_of(sequence).value for sequence in core.sequences.values())
        return PoolStatistics(
            pages=tuple(_page_counts(core, group) for group in core.groups()),
            host_bytes_used=core.host.used,
            host_bytes_total=core.host.total,
            sequences=dict(states),
            out=_link(core, Lane.OUT),
            into=_link(core, Lane.IN),
            counters=dict(core.counters),
        )

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Take no more calls, end what waits with `PoolClosed`, let copies in flight end, stop all threads. Idempotent.

        Raises `DrainTimeout`, naming what is stuck, if that takes longer than `timeout_s`; the pool is closed then,
        too, but its memory must not be used for anything else. Cancellation does not stop it.
        """
        if self._closed:
            return
        self._closed = True
        self._driver.stop(PoolClosed("the pool is closed: open a new one"))
        with anyio.CancelScope(shield=True):
            stuck = await anyio.to_thread.run_sync(self._driver.shut_down, timeout_s)
        if stuck:
            raise DrainTimeout(
                f"closing the pool: {', '.join(stuck)} did not end within {timeout_s} s; their threads are left behind "
                "and may still touch the pool's memory: find out what hangs, then end the process"
            )

    def _begin(self, appends: Mapping[str, int], stream: Stream) -> StepId:
        self._driver.require_open()
        step = StepId(next(self._step_ids))
        self._driver.expect_forward(step, list(_by_id(appends)), stream)
        return step

    @contextmanager
    def _inside(self, step: StepId, stream: Stream) -> Iterator[Forward]:
        """The forward is granted: end it, or void it if the block raises."""
        try:
            yield Forward(self._driver, self._transfers, stream)
        except BaseException:
            self._driver.tell(events.VoidStep(step))
            raise
        self._driver.tell(events.EndStep(step))


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
    pages = [num_pages] * len(layout.groups) if isinstance(num_pages, int) else list(num_pages)
    if len(pages) != len(layout.groups) or min(pages) < 1:
        raise ProtocolError(f"num_pages={num_pages} must be at least 1, for each of {len(layout.groups)} layer groups")
    if host_bytes < 0:
        raise ProtocolError(f"host_bytes={host_bytes} must be 0 or more")
    device = HostDevice() if device is None else device
    if memory is None:
        memory = PagedMemory.allocate(layout, pages, device)
    found = [memory.num_pages(GroupId(g)) for g in range(len(layout.groups))]
    if found != pages:
        raise ProtocolError(f"the memory has {found} pages by layer group, num_pages says {pages}: make them equal")
    host_memory = device.allocate_pinned(host_bytes)
    pool = Pool(layout, memory, host_memory, device, config or SwapConfig(), observer)
    try:
        yield pool
    finally:
        await pool.close()


def _by_id(appends: Mapping[str, int]) -> dict[SeqId, int]:
    return {SeqId(name): tokens for name, tokens in appends.items()}


def _page_counts(core: SwapCore, group: GroupId) -> PageCounts:
    ledger = core.ledger
    return PageCounts(
        free=ledger.free(group),
        owned=ledger.owned(group),
        fenced=ledger.fenced(group),
        quarantined=ledger.quarantined(group),
    )


def _link(core: SwapCore, lane: Lane) -> LinkStatistics:
    return LinkStatistics(
        bytes_copied=core.counters["bytes_out" if lane is Lane.OUT else "bytes_in"],
        bytes_per_s=core.bandwidth[lane].bytes_per_s,
        copies_in_flight=core.inflight[lane],
        bucket_fill=core.buckets[lane].fill_share(core.now_ns),
    )
