"""What can be asked of the core without changing it."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from enum import Enum

from swapkv.budget.victims import Victim
from swapkv.fsm.copies import dirty_pages
from swapkv.fsm.core import SwapCore
from swapkv.fsm.offload import may_leave
from swapkv.fsm.records import Chunk, Goal, Sequence
from swapkv.fsm.steps import needed
from swapkv.fsm.transitions import SETTLED, ChunkState
from swapkv.ids import GroupId, SeqId

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
    EVICTED = "EVICTED"
    """Its KV is gone: reset it and run its tokens again."""


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
    if sequence.fresh and any(chunk.state is ChunkState.GPU_READY for chunk in sequence.live_chunks()):
        return SequenceState.GPU_READY
    return SequenceState.GPU_RESIDENT if any(sequence.chunks) else SequenceState.REGISTERED


def preempt_moves_bytes(core: SwapCore, name: SeqId) -> bool:
    """Whether preempting the sequence would have to copy anything."""
    sequence = core.sequence(name)
    return any(not chunk.clean for chunk in sequence.live_chunks() if may_leave(core, chunk, sequence))


def restore_moves_bytes(core: SwapCore, name: SeqId) -> bool:
    """Whether restoring the sequence would have to copy anything or wait for a copy."""
    return any(chunk.state not in SETTLED for chunk in core.sequence(name).live_chunks())


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
    leaving = {victim.sequence for victim in victims}
    rest = {name: count for name, count in appends.items() if name not in leaving}
    freed = [chunk for name in leaving for chunk in _leaving(core, core.sequence(name))]
    for group in core.groups():
        pages = core.ledger.available(group) + core.coming(group) + sum(c.num_live for c in freed if c.group == group)
        if needed(core, rest, group) > pages:
            return False
    return True


def pages_missing(core: SwapCore, group: GroupId) -> int:
    """Pages of `group` that forwards and restores wait for beyond those that are available."""
    from swapkv.fsm.restore import missing_pages

    return max(0, missing_pages(core, group) - core.ledger.available(group))


def _may_be_preempted(sequence: Sequence) -> bool:
    return sequence.goal in (Goal.ACTIVE, Goal.PARKED) and sequence.step is None and not sequence.finishing


def _victim(core: SwapCore, sequence: Sequence) -> Victim:
    leaving = _leaving(core, sequence)
    freed = sum(chunk.num_live * core.layout.page_bytes(chunk.group) for chunk in leaving)
    return Victim(
        sequence=sequence.id,
        freed_bytes=freed,
        dirty_bytes=sum(dirty_pages(core, chunk) * core.layout.page_bytes(chunk.group) for chunk in leaving),
        restore_bytes=freed,
        fairness_ns=FAIRNESS_NS_PER_PREEMPTION * sequence.preemptions,
    )


def _leaving(core: SwapCore, sequence: Sequence) -> list[Chunk]:
    """What a preempt of the sequence would take off the device."""
    return [chunk for chunk in sequence.live_chunks() if may_leave(core, chunk, sequence)]
