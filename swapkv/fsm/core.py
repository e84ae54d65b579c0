"""The core: it is told what happened and answers what to do. No I/O, no clock, no threads.

`SwapCore.handle(event, now_ns) -> list[Command]`. The three drivers run this same class. The rules of each concern are
functions in the files beside it: `steps` (forward passes), `offload`, `restore`, `copies` (segments and their ends),
`turns` (whose restore gets pages), `spill` (running with KV in the host tier), `hangs` (copies that do not end),
`edit` (fork, truncate, finish). They move chunks by `SwapCore.move` only, along the table of `transitions`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swapkv.budget.bandwidth import Bandwidth
from swapkv.budget.bucket import TokenBucket
from swapkv.budget.extents import Extents
from swapkv.config import SECOND_NS, SwapConfig
from swapkv.errors import IllegalTransition, ProtocolError, SwapError, UnknownSequence
from swapkv.fsm import copies, edit, events, hangs, offload, restore, spill, steps, turns
from swapkv.fsm.commands import Command, WakeAt
from swapkv.fsm.fences import FenceClock
from swapkv.fsm.ledger import PageLedger
from swapkv.fsm.records import NO_PAGE, Chunk, Goal, Op, Step, no_pages
from swapkv.fsm.records import Sequence as SequenceRecord
from swapkv.fsm.transitions import ChunkEvent, ChunkState, step
from swapkv.ids import ChunkId, Fence, GroupId, HostOffset, Lane, OpId, SeqId, StepId
from swapkv.layout import KVLayout

BURST_NS = SECOND_NS // 100

TransitionListener = Callable[[Chunk, ChunkState, ChunkState, int], None]


class SwapCore:
    """Decides for one device pool with `pages_per_group[g]` pages of each layer group and one host tier.

    Attributes are for the files of this package and for those who inspect; everybody else uses `handle` and the
    queries. `counters` counts what happened, by name. `on_transition` is told of every move of a chunk.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages_per_group: Sequence[int],
        host_bytes: int,
        config: SwapConfig | None = None,
        on_transition: TransitionListener | None = None,
    ) -> None:
        if len(pages_per_group) != len(layout.groups) or min(pages_per_group) < 1:
            raise ProtocolError(
                f"pages_per_group={list(pages_per_group)} must name at least 1 page for each of the layout's "
                f"{len(layout.groups)} layer groups"
            )
        if host_bytes < 0:
            raise ProtocolError(f"host_bytes={host_bytes} must be 0 or more")
        self.layout = layout
        self.config = config or SwapConfig()
        self.on_transition = on_transition
        self.clock = FenceClock()
        self.ledger = PageLedger(pages_per_group, self.clock)
        self.host = Extents(host_bytes)
        self.sequences: dict[SeqId, SequenceRecord] = {}
        self.chunks: dict[ChunkId, Chunk] = {}
        self.copied: dict[ChunkId, Chunk] = {}
        self.ops: dict[OpId, Op] = {}
        self.inflight = [0] * len(Lane)
        self.moved_ns = [0] * len(Lane)
        self.steps: dict[StepId, Step] = {}
        self.waiting_steps: deque[Step] = deque()
        self.offloads: dict[SeqId, SequenceRecord] = {}
        self.restores: dict[SeqId, SequenceRecord] = {}
        self.buckets = self._buckets()
        self.bandwidth = {Lane.OUT: Bandwidth(), Lane.IN: Bandwidth()}
        self.counters: Counter[str] = Counter()
        self.stuck_slots: list[tuple[HostOffset, Fence]] = []
        self.now_ns = 0
        self._out: list[Command] = []
        self._next_chunk = 0
        self._next_op = 0
        self._next_arrival = 0
        self._next_version = 0
        self._armed_ns: int | None = None

    def handle(self, event: events.Event, now_ns: int) -> list[Command]:
        """Take in one event and return what is to be done, in order.

        Raises `ProtocolError` or `BudgetExhausted` for a wish that the present state does not allow; nothing has
        changed then. `now_ns` never goes back.
        """
        before_ns, self.now_ns = self.now_ns, max(self.now_ns, now_ns)
        self._out = []
        try:
            _HANDLERS[type(event)](self, event)
        except SwapError:
            self.now_ns = before_ns
            raise
        hangs.expire(self)
        self._grant()
        while hangs.give_up_unsubmitted(self):
            self._grant()
        copies.pump(self)
        self._arm()
        return self._out

    def emit(self, command: Command) -> None:
        """Add to the answer of the present event."""
        self._out.append(command)

    def move(self, chunk: Chunk, event: ChunkEvent) -> None:
        """Move `chunk` along the table. Raises `IllegalTransition` naming the chunk where the table refuses."""
        before = chunk.state
        try:
            chunk.state = step(before, event)
        except IllegalTransition as error:
            raise IllegalTransition(f"chunk {chunk.id} of {list(chunk.refs)}: {error}") from None
        if chunk.state is not before and self.on_transition is not None:
            self.on_transition(chunk, before, chunk.state, self.now_ns)

    def sequence(self, name: SeqId) -> SequenceRecord:
        """The record of a sequence. Raises `UnknownSequence`."""
        found = self.sequences.get(name)
        if found is None:
            raise UnknownSequence(f"sequence {name!r} is not registered (or has finished): register it first")
        return found

    def groups(self) -> Iterable[GroupId]:
        """Every layer group."""
        return (GroupId(g) for g in range(len(self.layout.groups)))

    def new_chunk(self, group: GroupId, index: int, sequence: SequenceRecord) -> Chunk:
        """A chunk without pages, referred to by `sequence`."""
        pages = no_pages(self.layout.chunk_pages)
        chunk = Chunk(id=ChunkId(self._next_chunk), group=group, index=index, pages=pages)
        self._next_chunk += 1
        chunk.refs[sequence.id] = None
        self.chunks[chunk.id] = chunk
        return chunk

    def next_op(self) -> OpId:
        self._next_op += 1
        return OpId(self._next_op)

    def next_version(self) -> int:
        self._next_version += 1
        return self._next_version

    def next_arrival(self) -> int:
        self._next_arrival += 1
        return self._next_arrival

    def wanted(self, chunk: Chunk, apart_from: SequenceRecord | None = None) -> bool:
        """Whether any sequence (apart from one) needs `chunk` on the device; a forward under way does, even a void one."""
        return any(
            spill.needs(self, self.sequences[name], chunk)
            for name in chunk.refs
            if apart_from is None or name != apart_from.id
        )

    def give_back_pages(self, chunk: Chunk) -> None:
        """The chunk is off the device: its pages go back to the ledger."""
        spill.hide(self, chunk)
        self.ledger.release(chunk.group, chunk.live_pages())
        chunk.pages[: chunk.held] = NO_PAGE
        chunk.held = 0

    def free_slot(self, chunk: Chunk) -> None:
        """Give the chunk's host copy up, if there is one; the slot is free once no forward reads it any more."""
        copy = chunk.copy
        if copy.offset is None:
            return
        assert not copy.readers, f"a forward reads the host copy of chunk {chunk.id}"
        if copy.read is None or self.clock.passed(copy.read):
            self.host.free(copy.offset)
        else:
            self.stuck_slots.append((copy.offset, copy.read))
        self.forget_copy(chunk)

    def forget_copy(self, chunk: Chunk) -> None:
        """The chunk has no host copy any more; its slot belongs to somebody else."""
        del self.copied[chunk.id]
        chunk.copy.offset = None
        chunk.copy.tokens = 0
        chunk.copy.read = None

    def take_slot(self, chunk: Chunk) -> bool:
        """Give the chunk a host slot if it has none. False: there is no room."""
        if chunk.copy.offset is not None:
            return True
        offset = self.host.allocate(self.layout.chunk_bytes(chunk.group))
        if offset is None:
            return False
        chunk.copy.offset = HostOffset(offset)
        chunk.copy.tokens = 0
        chunk.copy.generation = chunk.generation
        planes = self.layout.plane_range(chunk.group, 0, len(self.layout.groups[chunk.group].layers)).stop
        chunk.copy.checksums = [0] * planes
        chunk.copy.sealed_checksums = [0] * planes
        chunk.copy.sealed_pages = 0
        chunk.copy.version = self.next_version()
        self.copied[chunk.id] = chunk
        return True

    def coming(self, group: GroupId) -> int:
        """Pages of `group` that are not available yet but on their way: leaving, or given back by a restore."""
        pages = 0
        for sequence in self.offloads.values():
            assert sequence.offload is not None
            if not sequence.offload.undoing:
                pages += sum(c.num_live for c in sequence.offload.leaving if c.group == group)
        for sequence in self.restores.values():
            if sequence.restore is not None and not sequence.restore.goes_on:
                pages += sum(c.num_live for c in turns.held_chunks(self, sequence) if c.group == group)
        return pages

    def check(self) -> None:
        """Assert every invariant. For tests and for those who doubt: it looks at everything."""
        from swapkv.fsm.check import check

        check(self)

    def _grant(self) -> None:
        """Give the pages that are there to those who wait."""
        steps.grant(self)
        turns.grant(self)

    def _buckets(self) -> dict[Lane, TokenBucket]:
        def bucket(rate: int | None, burst: int | None) -> TokenBucket:
            if burst is None:
                burst = max(1, (rate or 0) * BURST_NS // SECOND_NS)
            return TokenBucket(rate, burst)

        config = self.config
        return {
            Lane.OUT: bucket(config.offload_bytes_per_s, config.offload_burst_bytes),
            Lane.IN: bucket(config.restore_bytes_per_s, config.restore_burst_bytes),
        }

    def _arm(self) -> None:
        """Ask for a tick when a bucket will let the next segment through, or a copy will be overdue."""
        wake = copies.next_wake(self)
        if self._armed_ns is not None and self._armed_ns <= self.now_ns:
            self._armed_ns = None
        if wake is not None and (self._armed_ns is None or wake < self._armed_ns):
            self._armed_ns = wake
            self.emit(WakeAt(wake))


def _tick(core: SwapCore, event: events.Tick) -> None:
    """Time alone: what it brings about is done after every event. The tick may answer any `WakeAt`: ask anew."""
    core._armed_ns = None


_HANDLERS: dict[type, Callable[[SwapCore, Any], None]] = {
    events.Register: edit.register,
    events.BeginStep: steps.begin,
    events.CancelStep: steps.cancel,
    events.EndStep: steps.end,
    events.VoidStep: steps.void,
    events.Preempt: offload.begin,
    events.Spill: spill.begin,
    events.CancelPreempt: offload.cancel,
    events.BeginRestore: restore.begin,
    events.CancelRestore: restore.cancel,
    events.Evict: edit.evict,
    events.Reset: edit.reset,
    events.Fork: edit.fork,
    events.Truncate: edit.truncate,
    events.Finish: edit.finish,
    events.CopyDone: copies.done,
    events.CopyFailed: copies.failed,
    events.CopyRejected: copies.rejected,
    events.FencePassed: copies.fence_passed,
    events.Tick: _tick,
}

__all__ = ["Goal", "SwapCore"]
