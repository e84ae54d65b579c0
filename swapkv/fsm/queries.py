"""What can be asked of the core without changing it."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from enum import Enum

import attrs

from swapkv.budget.victims import Victim
from swapkv.fsm.copies import dirty_pages
from swapkv.fsm.core import SwapCore
from swapkv.fsm.offload import leaving
from swapkv.fsm.records import Goal, Sequence
from swapkv.fsm.spill import stays, streamed, whole_chunks
from swapkv.fsm.steps import needed
from swapkv.fsm.transitions import SETTLED, ChunkState
from swapkv.ids import GroupId, HostOffset, SeqId

FAIRNESS_NS_PER_PREEMPTION = 1_000_000.0


class SequenceState(Enum):
    """A sequence's state, derived from its chunks and from what was asked for it."""

    REGISTERED = "REGISTERED"
    """It has no KV yet."""
    GPU_RESIDENT = "GPU_RESIDENT"
    OFFLOADING = "OFFLOADING"
    OFFLOADED = "OFFLOADED"
    PREFETCHING = "PREFETCHING"
    GPU_READY = "GPU_READY"
    SPILLED = "SPILLED"
    """It runs, though its first chunks may be off the device: its forwards read them in the host tier."""
    EVICTED = "EVICTED"
    """Its KV is gone: reset it and run its tokens again."""


@attrs.frozen
class HostPages:
    """Logical pages `[first, first + count)` of a sequence that stand in the host tier, in order, from `slot` on.

    `version`: another one whenever the slot may hold other bytes.
    """

    first: int
    count: int
    slot: HostOffset
    version: int


_BY_GOAL = {
    Goal.PARKING: SequenceState.OFFLOADING,
    Goal.PARKED: SequenceState.OFFLOADED,
    Goal.RESTORING: SequenceState.PREFETCHING,
    Goal.EVICTED: SequenceState.EVICTED,
}


def state_of(sequence: Sequence) -> SequenceState:
    """The derived state of one sequence."""
    if sequence.goal in _BY_GOAL:
        return _BY_GOAL[sequence.goal]
    if sequence.spilled:
        return SequenceState.SPILLED
    if sequence.fresh and any(chunk.state is ChunkState.GPU_READY for chunk in sequence.live_chunks()):
        return SequenceState.GPU_READY
    return SequenceState.GPU_RESIDENT if any(sequence.chunks) else SequenceState.REGISTERED


def host_pages(core: SwapCore, name: SeqId, group: GroupId) -> list[HostPages]:
    """What a forward over the sequence reads in the host tier; its page table of the group has no pages for that."""
    found = []
    for chunk in streamed(core, core.sequence(name)):
        if chunk.group == group:
            assert chunk.copy.offset is not None
            pages = core.layout.chunk_pages
            found.append(HostPages(chunk.index * pages, pages, chunk.copy.offset, chunk.copy.version))
    return found


def spill_moves_bytes(core: SwapCore, name: SeqId, tokens: int | None) -> bool:
    """Whether a spill of the sequence's first tokens would have to copy anything."""
    sequence = core.sequence(name)
    return any(not chunk.clean for chunk in leaving(core, sequence, whole_chunks(core, sequence, tokens)))


def preempt_moves_bytes(core: SwapCore, name: SeqId) -> bool:
    """Whether preempting the sequence would have to copy anything."""
    return any(not chunk.clean for chunk in leaving(core, core.sequence(name), None))


def restore_moves_bytes(core: SwapCore, name: SeqId, spilled: int = 0) -> bool:
    """Whether restoring the sequence but for its first `spilled` tokens would have to copy anything or wait for it."""
    sequence = core.sequence(name)
    chunks = whole_chunks(core, sequence, spilled)
    return any(c.state not in SETTLED for c in sequence.live_chunks() if stays(core, c, chunks))


def in_transit(core: SwapCore, name: SeqId) -> bool:
    """Whether an offload, a restore or a forward of the sequence is under way."""
    sequence = core.sequence(name)
    return sequence.offload is not None or sequence.restore is not None or sequence.step is not None


def victims(core: SwapCore) -> list[Victim]:
    """What preempting each sequence would free and cost: all that are on the device and in no forward.

    A parked one is among them if it has pages there: chunks that it shared, whose last user on the device has gone
    before they had a copy. Preempting it again takes them off.
    """
    candidates = [_victim(core, s) for s in core.sequences.values() if _may_be_preempted(s)]
    return [v for v in candidates if v.freed_bytes or core.sequences[v.sequence].goal is Goal.ACTIVE]


def suffices(core: SwapCore, appends: Mapping[SeqId, int], victims: SequenceOf[Victim]) -> bool:
    """Whether a forward over `appends`, but for the victims, has its pages once these and all others on their way are free."""
    going = {victim.sequence for victim in victims}
    rest = {name: count for name, count in appends.items() if name not in going}
    freed = [chunk for name in going for chunk in leaving(core, core.sequence(name), None)]
    for group in core.groups():
        pages = core.ledger.available(group) + core.coming(group) + sum(c.num_live for c in freed if c.group == group)
        if needed(core, rest, group) > pages:
            return False
    return True


def pages_missing(core: SwapCore, group: GroupId) -> int:
    """Pages of `group` that forwards and restores wait for beyond those that are available."""
    from swapkv.fsm.turns import missing_pages

    return max(0, missing_pages(core, group) - core.ledger.available(group))


def _may_be_preempted(sequence: Sequence) -> bool:
    return sequence.goal in (Goal.ACTIVE, Goal.PARKED) and sequence.step is None and not sequence.finishing


def _victim(core: SwapCore, sequence: Sequence) -> Victim:
    chunks = leaving(core, sequence, None)
    freed = sum(chunk.num_live * core.layout.page_bytes(chunk.group) for chunk in chunks)
    return Victim(
        sequence=sequence.id,
        freed_bytes=freed,
        dirty_bytes=sum(dirty_pages(core, chunk) * core.layout.page_bytes(chunk.group) for chunk in chunks),
        restore_bytes=freed,
        fairness_ns=FAIRNESS_NS_PER_PREEMPTION * sequence.preemptions,
    )
