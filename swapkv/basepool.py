"""What every pool offers, whichever driver runs it: the calls that never wait, and what can be asked."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import ClassVar, TypeVar

import torch

from swapkv.budget.victims import Victim, choose, rank
from swapkv.config import SECOND_NS, SwapConfig
from swapkv.errors import ProtocolError, WouldBlock
from swapkv.executor import Executor
from swapkv.forward import Forward
from swapkv.fsm import commands, events, queries
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import GroupId, Lane, SeqId, StepId
from swapkv.layout import KVLayout
from swapkv.statistics import LinkStatistics, PageCounts, PoolStatistics
from swapkv.streams.base import Device, ProbedDevice, Stream
from swapkv.streams.memory import PagedMemory
from swapkv.tiers.host import HostArena
from swapkv.transfers import Transfers

F = TypeVar("F", bound=Forward)


class BasePool(ABC):
    """The KV pages of one device, and the host memory that they overflow into.

    A call either does what it says or, if it raises, leaves things as they were. Every call raises `UnknownSequence`
    for a name that is not registered, `ProtocolError` if the sequence's state does not allow it, `PoolClosed` after
    `close`, and `PoolBroken` after a failure that leaves nothing to rely on.

    `memory`: the device pages, by layer and plane. `device`: what they are on. `compute`: the stream of forwards that
    name no other.
    """

    assumed_bytes_per_s: ClassVar[float] = 10e9

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        host_memory: torch.Tensor,
        device: Device,
        config: SwapConfig,
        transfers: type[Transfers] = Transfers,
    ) -> None:
        pages = [memory.num_pages(GroupId(g)) for g in range(len(layout.groups))]
        self.layout = layout
        self.memory = memory
        self.config = config
        self.device = device
        self._core = SwapCore(layout, pages, host_memory.numel(), config)
        bases = [self._core.ledger.base(g) for g in self._core.groups()]
        self._transfers = transfers(layout, memory, HostArena(layout, host_memory), device, config.verify, bases)
        self.compute: Stream = device.create_stream("compute")
        self._step_ids = count(1)

    @property
    @abstractmethod
    def _executor(self) -> Executor: ...

    @abstractmethod
    def _tell(self, event: events.Event) -> list[commands.Command]:
        """Put one event to the core, carry out its answer and return it."""

    def register(self, name: str, *, max_tokens: int, step_tokens: int | None = None, priority: int = 0) -> None:
        """Take in a new sequence, which has no KV yet.

        `max_tokens`: the longest that it will get. `step_tokens`: the most tokens that one forward adds (None: all at
        once); it matters for layers with a window. `priority`: of its restores, lower first.
        Raises `NeverFits`, with the need and the limit, if the pool could not hold it even alone.
        """
        self._tell(events.Register(SeqId(name), max_tokens, step_tokens, priority))

    def fork(self, parent: str, child: str, *, max_tokens: int, priority: int = 0) -> None:
        """A new sequence with the parent's tokens. Chunks are shared; a begun one is copied by whoever appends first."""
        self._tell(events.Fork(SeqId(parent), SeqId(child), max_tokens, priority))

    def truncate(self, name: str, *, tokens: int) -> None:
        """Take back every token from position `tokens` on, such as drafts that were rejected."""
        self._tell(events.Truncate(SeqId(name), tokens))

    def evict(self, name: str) -> None:
        """Drop the sequence's KV, on the device and in the host tier; `reset` it, then run its tokens again."""
        self._tell(events.Evict(SeqId(name)))

    def reset(self, name: str) -> None:
        """Let a sequence whose KV was dropped begin anew, with no tokens."""
        self._tell(events.Reset(SeqId(name)))

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
        out, into = (self._core.bandwidth[lane].bytes_per_s or self.assumed_bytes_per_s for lane in (Lane.OUT, Lane.IN))
        candidates = queries.victims(self._core)
        return rank(candidates, out_ns_per_byte=SECOND_NS / out, in_ns_per_byte=SECOND_NS / into)

    def victims_for(self, appends: Mapping[str, int], *, spare: Container[str] = ()) -> list[Victim]:
        """Just enough of these sequences to preempt, so that a forward over all the others of them has its pages.

        Pages that are free or on their way count, so a second call does not name more victims while the first ones are
        leaving. Best victims first; those in `spare` only if the others are not enough. Empty: none has to leave.
        """
        wishes = by_id(appends)
        if queries.suffices(self._core, wishes, ()):
            return []
        ranked = [victim for victim in self.victims() if victim.sequence in wishes]
        ranked.sort(key=lambda victim: victim.sequence in spare)
        return choose(ranked, lambda victims: queries.suffices(self._core, wishes, victims))

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
            ways=self.device.chosen_ways() if isinstance(self.device, ProbedDevice) else (),
        )

    def _enter_forward(self, appends: Mapping[str, int], stream: Stream | None) -> tuple[StepId, Stream]:
        """A forward that is granted at once. Raises `PagesExhausted` or `WouldBlock`, and nothing has happened."""
        stream = self.compute if stream is None else stream
        step = self._expect(appends, stream)
        try:
            answer = self._tell(events.BeginStep(step, by_id(appends)))
            refused = next((c for c in answer if isinstance(c, commands.StepRefused)), None)
            if refused is not None:
                raise refused.cause
            if not any(isinstance(c, commands.StepGranted) and c.step == step for c in answer):
                self._tell(events.CancelStep(step))
                raise WouldBlock(
                    f"pages for a forward over {list(appends)}, or link tokens if it streams, are on their way: wait for them"
                )
        except BaseException:
            self._executor.forget_forward(step)
            raise
        return step, stream

    def _expect(self, appends: Mapping[str, int], stream: Stream) -> StepId:
        """Number a forward, and name its stream, before the core is asked."""
        step = StepId(next(self._step_ids))
        self._executor.expect_forward(step, list(by_id(appends)), stream)
        return step

    @contextmanager
    def _inside(self, step: StepId, forward: F) -> Iterator[F]:
        """The forward is granted: end it, or void it if the block raises."""
        try:
            yield forward
        except BaseException:
            self._tell(events.VoidStep(step))
            raise
        self._tell(events.EndStep(step))


def allocate(
    layout: KVLayout, num_pages: int | Sequence[int], host_bytes: int, device: Device, memory: PagedMemory | None
) -> tuple[PagedMemory, torch.Tensor]:
    """Device pages (unless `memory` is given) and the host tier. Raises `ProtocolError` for sizes that do not fit."""
    pages = [num_pages] * len(layout.groups) if isinstance(num_pages, int) else list(num_pages)
    if len(pages) != len(layout.groups) or min(pages) < 1:
        raise ProtocolError(f"num_pages={num_pages} must be at least 1, for each of {len(layout.groups)} layer groups")
    if host_bytes < 0:
        raise ProtocolError(f"host_bytes={host_bytes} must be 0 or more")
    if memory is None:
        memory = PagedMemory.allocate(layout, pages, device)
    found = [memory.num_pages(GroupId(g)) for g in range(len(layout.groups))]
    if found != pages:
        raise ProtocolError(f"the memory has {found} pages by layer group, num_pages says {pages}: make them equal")
    return memory, device.allocate_pinned(host_bytes)


def by_id(appends: Mapping[str, int]) -> dict[SeqId, int]:
    """The same with names as ids."""
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
