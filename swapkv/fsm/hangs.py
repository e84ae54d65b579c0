"""Copies that hang: what they may still touch is quarantined, and whoever counted on them gives up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkv.errors import DrainTimeout
from swapkv.fsm import copies, offload, restore
from swapkv.fsm.records import Op, Sequence
from swapkv.fsm.transitions import ChunkEvent
from swapkv.ids import Lane

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def expire(core: SwapCore) -> None:
    """Let go of copies that hang.

    A copy hangs if its lane has made no progress for the deadline, and nothing that it waits for is still to come. What
    was submitted behind it hangs with it.
    """
    overdue: list[Op] = []
    for lane in (Lane.OUT, Lane.IN):
        deadline = deadline_ns(core, lane)
        if deadline is not None and core.now_ns >= deadline:
            overdue += [op for op in core.ops.values() if op.lane is lane and not op.hung]
    for op in overdue:
        _quarantine(core, op)
    for op in overdue:
        cause = DrainTimeout(
            f"copy {op.id} ({op.lane.name}, {op.num_bytes} bytes of sequence {op.sequence!r}) has made no progress for "
            f"{core.config.copy_deadline_ns} ns; what it may still touch is quarantined: check the device or tier"
        )
        copies.give_up(core, op, cause)
        copies.settle(core, op)


def give_up_unsubmitted(core: SwapCore) -> bool:
    """Undo what waits for a lane that is full of copies that hang: its turn will not come. False: nothing does."""
    found = False
    for lane, moving, undo, settle in (
        (Lane.OUT, core.offloads, offload.undo, offload.settle),
        (Lane.IN, core.restores, restore.undo, restore.settle),
    ):
        if core.inflight[lane] < core.config.ops_per_lane or _oldest(core, lane) is not None:
            continue
        cause = DrainTimeout(
            f"{core.inflight[lane]} copies hang on lane {lane.name}, as many as ops_per_lane lets through, so no other "
            "can be submitted: check the device or tier"
        )
        for sequence in [s for s in moving.values() if _has_unsubmitted(s)]:
            undo(core, sequence, cause)
            settle(core, sequence)
            found = True
    return found


def deadline_ns(core: SwapCore, lane: Lane) -> int | None:
    """When the first copy of `lane` is overdue, counted from the last thing that let it go on.

    None: there is no copy, or it waits for work of another lane.
    """
    head = _oldest(core, lane)
    if head is None or not all(core.clock.passed(fence) for fence in head.after):
        return None
    began = [core.moved_ns[lane] for lane in {head.lane} | {fence.lane for fence in head.after}]
    return max(head.submitted_ns, *began) + core.config.copy_deadline_ns


def _oldest(core: SwapCore, lane: Lane) -> Op | None:
    """The first copy of `lane` that has not been given up."""
    return next((op for op in core.ops.values() if op.lane is lane and not op.hung), None)


def _has_unsubmitted(sequence: Sequence) -> bool:
    work = sequence.offload or sequence.restore
    return work is not None and bool(work.segments)


def _quarantine(core: SwapCore, op: Op) -> None:
    """Nobody may use what a hung copy still writes: device pages of an H2D copy, the host slot of a D2H copy."""
    core.counters["hung_copies"] += 1
    op.hung = True
    core.ledger.mark_stuck(op.fence)
    for chunk in op.chunks:
        if chunk.id in op.dropped:
            continue
        last = max(core.ops[other].fence for other in chunk.ops)
        for other in chunk.ops:
            core.ops[other].dropped.add(chunk.id)
        if op.lane is Lane.IN:
            core.give_back_pages(chunk)
            core.move(chunk, ChunkEvent.UNDO_RESTORE)
        elif chunk.copy.offset is not None:
            core.stuck_slots.append((chunk.copy.offset, last))
            core.forget_copy(chunk)
        chunk.ops.clear()
    copies.detach(core, op)
