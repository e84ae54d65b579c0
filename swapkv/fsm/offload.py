"""Leaving the device: what is dirty is copied, then everything leaves in one step, or nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from swapkv.config import HostFull, RestoreOrder, Verify
from swapkv.errors import HostTierFull, KVEvicted, ProtocolError
from swapkv.fsm import copies, edit, events, restore, spill, steps
from swapkv.fsm.commands import Parked, ParkUndone, PreemptOutcome, Spilled
from swapkv.fsm.records import Chunk, Goal, Offload, Op, Sequence
from swapkv.fsm.transitions import SETTLED, ChunkEvent

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def begin(core: SwapCore, event: events.Preempt) -> None:
    """Take a sequence off the device. Chunks that another sequence needs there stay."""
    sequence = core.sequence(event.sequence)
    refuse_if_busy(sequence)
    start(core, sequence, None)


def start(core: SwapCore, sequence: Sequence, spilled: int | None) -> None:
    """Begin a preempt or, for a sequence that runs on with `spilled` chunks in the host tier, a spill."""
    chunks = leaving(core, sequence, spilled)
    if not _reserve(core, chunks):
        _no_room(core, sequence, chunks, may_drop=spilled is None)
        return
    what = "preempted" if spilled is None else "spilled"
    steps.refuse_waiting(core, sequence, f"sequence {sequence.id!r} was {what} while its forward waited for pages")
    if spilled is None:
        sequence.preemptions += 1
    core.counters["preemptions" if spilled is None else "spills"] += 1
    sequence.offload = work = Offload(goal_before=sequence.goal, spill=spilled)
    sequence.goal = Goal.PARKING
    core.offloads[sequence.id] = sequence
    _take_along(core, work, chunks)
    settle(core, sequence)


def cancel(core: SwapCore, event: events.CancelPreempt) -> None:
    """Undo a preempt or a spill. One that is complete, or never began, is left as it is."""
    sequence = core.sequences.get(event.sequence)
    if sequence is None or sequence.offload is None:
        core.counters["late_cancels"] += 1
        return
    undo(core, sequence, None)
    settle(core, sequence)


def undo(core: SwapCore, sequence: Sequence, cause: Exception | None) -> None:
    """Submit nothing more; once what is in flight has ended, everything is as before."""
    work = sequence.offload
    if work is None or work.undoing:
        return
    work.undoing = True
    work.cause = cause
    work.segments.clear()
    if cause is not None:
        core.counters["failed_preempts"] += 1


def landed(core: SwapCore, op: Op, checksums: tuple[int, ...]) -> None:
    """A D2H copy is complete: chunks of which every layer has come are clean."""
    planes = core.layout.plane_range(op.group, op.low, op.high)
    size = 2 * (planes.stop - planes.start)
    mask = (1 << op.high) - (1 << op.low)
    for at, chunk in enumerate(op.chunks):
        if chunk.id in op.dropped:
            continue
        chunk.landed |= mask
        if checksums:
            own = checksums[at * size : (at + 1) * size]
            chunk.copy.sealed_checksums[planes], chunk.copy.checksums[planes] = own[0::2], own[1::2]
        if chunk.landed == (1 << len(core.layout.groups[chunk.group].layers)) - 1:
            _now_clean(core, chunk, op, at)


def settle(core: SwapCore, sequence: Sequence) -> None:
    """If nothing is left to wait for, let the chunks leave, or put them back.

    A shared chunk that another sequence needed when the preempt began, and that nobody needs now, is taken along.
    """
    work = sequence.offload
    assert work is not None
    if work.segments or work.ops:
        return
    if work.undoing:
        _put_back(core, sequence, work)
        return
    shared = leaving(core, sequence, work.spill)
    if shared and _reserve(core, shared):
        _take_along(core, work, shared)
    if not work.segments:
        _let_go(core, sequence, work)


def may_leave(core: SwapCore, chunk: Chunk, sequence: Sequence) -> bool:
    """Whether `chunk` is on the device and settled, and nobody but `sequence` needs it there."""
    return chunk.state in SETTLED and not core.wanted(chunk, apart_from=sequence)


def let_leave(core: SwapCore, chunk: Chunk) -> None:
    """Take a settled chunk that nobody needs on the device off it, if its host copy is clean."""
    if chunk.state in SETTLED and chunk.clean and chunk.refs and not core.wanted(chunk):
        core.move(chunk, ChunkEvent.OFFLOAD)
        core.move(chunk, ChunkEvent.COMMIT_OFFLOAD)
        core.give_back_pages(chunk)


def leaving(core: SwapCore, sequence: Sequence, spilled: int | None) -> list[Chunk]:
    """What a preempt of the sequence takes off the device, or a spill of its first `spilled` chunks."""
    chunks = [chunk for chunk in sequence.live_chunks() if may_leave(core, chunk, sequence)]
    return chunks if spilled is None else [chunk for chunk in chunks if not spill.stays(core, chunk, spilled)]


def _take_along(core: SwapCore, work: Offload, chunks: list[Chunk]) -> None:
    """These chunks leave with the preempt; the dirty ones, which have slots by now, are copied first."""
    pages = {}
    for chunk in chunks:
        core.move(chunk, ChunkEvent.OFFLOAD)
        chunk.landed = 0
        pages[chunk.id] = copies.dirty_pages(core, chunk)
        core.counters["clean_bytes_kept"] += (chunk.num_live - pages[chunk.id]) * core.layout.page_bytes(chunk.group)
    work.leaving.extend(chunks)
    dirty = [chunk for chunk in chunks if pages[chunk.id]]
    work.segments.extend(copies.cut(core, dirty, pages, RestoreOrder.CHUNK_MAJOR))


def refuse_if_busy(sequence: Sequence) -> None:
    """Raise if the sequence is in no state to leave the device."""
    name = sequence.id
    if sequence.finishing:
        raise ProtocolError(f"sequence {name!r} is finishing: nothing is left to preempt")
    if sequence.step is not None:
        raise ProtocolError(f"sequence {name!r} is in forward {sequence.step}: end the forward, then preempt")
    if sequence.goal is Goal.EVICTED:
        raise KVEvicted(f"sequence {name!r} has no KV: reset it")
    if sequence.goal is Goal.PARKING:
        raise ProtocolError(f"sequence {name!r} is being preempted already: await that, or cancel it")
    if sequence.goal is Goal.RESTORING:
        raise ProtocolError(f"sequence {name!r} is being restored: cancel the restore, or await it, then preempt")


def _reserve(core: SwapCore, leaving: list[Chunk]) -> bool:
    """Host room for every dirty chunk, before any copy begins. False: there is none, and nothing was taken.

    Spare copies are reclaimed, the oldest first, until each chunk has its slot: the room may be there, but in pieces.
    """
    lacking = [c for c in leaving if c.copy.offset is None]
    needed = sum(core.layout.chunk_bytes(c.group) for c in lacking)
    room = core.host.total - core.host.used
    if room < needed and room + sum(core.layout.chunk_bytes(c.group) for c in _spares(core, leaving)) < needed:
        return False
    spares = _spares(core, leaving)
    for at, chunk in enumerate(lacking):
        while not core.take_slot(chunk):
            spare = next(spares, None)
            if spare is None:
                for other in lacking[:at]:
                    core.free_slot(other)
                return False
            core.free_slot(spare)
            core.counters["reclaimed_copies"] += 1
    return True


def _spares(core: SwapCore, leaving: list[Chunk]) -> Iterator[Chunk]:
    """Chunks whose host copies can be given up for `leaving`, the oldest copy first."""
    keep = {c.id for c in leaving}
    yield from (c for c in list(core.copied.values()) if c.id not in keep and _reclaimable(core, c))


def _reclaimable(core: SwapCore, chunk: Chunk) -> bool:
    """Whether the chunk's host copy is only a spare: its KV is on the device, and no copy or restore counts on it."""
    if chunk.ops or chunk.state not in SETTLED or spill.is_read(core, chunk):
        return False
    return all(core.sequences[name].goal is not Goal.RESTORING for name in chunk.refs)


def _no_room(core: SwapCore, sequence: Sequence, leaving: list[Chunk], *, may_drop: bool) -> None:
    """The host tier is full: refuse, or drop the KV and have it computed again."""
    needed = sum(core.layout.chunk_bytes(c.group) for c in leaving if c.copy.offset is None)
    if core.config.host_full is HostFull.REFUSE or not may_drop:
        core.counters["host_full_refusals"] += 1
        raise HostTierFull(
            f"offloading sequence {sequence.id!r} needs {needed} bytes of host memory, {core.host.total - core.host.used} "
            f"of {core.host.total} are free: finish a sequence, raise host_bytes, or set host_full=RECOMPUTE"
        )
    steps.refuse_waiting(core, sequence, f"sequence {sequence.id!r} was evicted while its forward waited for pages")
    sequence.preemptions += 1
    core.counters["preemptions"] += 1
    edit.drop_kv(core, sequence)
    core.emit(Parked(sequence.id, PreemptOutcome.RECOMPUTE))


def _now_clean(core: SwapCore, chunk: Chunk, op: Op, at: int) -> None:
    """The slot holds the tokens that were copied, unless some were taken back and written anew meanwhile."""
    copy, tokens = chunk.copy, op.tokens[at]
    if chunk.generation != op.generations[at]:
        return
    if not copies.continues(core, chunk):
        copy.guard_first = op.firsts[at]
    copy.tokens = tokens
    copy.generation = chunk.generation
    copy.version = core.next_version()
    copy.sealed_pages = tokens // core.layout.page_size
    copy.guard_pages = core.layout.pages_for(tokens) - copy.guard_first


def _let_go(core: SwapCore, sequence: Sequence, work: Offload) -> None:
    """Every chunk has a clean copy: all leave the device at once."""
    sequence.spilled = work.spill or 0
    for chunk in work.leaving:
        assert chunk.clean, f"chunk {chunk.id} would leave the device without a clean copy"
        if core.wanted(chunk, apart_from=sequence):
            core.move(chunk, ChunkEvent.UNDO_OFFLOAD)
            restore.arrived(core, chunk)
        else:
            core.move(chunk, ChunkEvent.COMMIT_OFFLOAD)
            core.give_back_pages(chunk)
    if work.spill is None:
        for table in sequence.tables:
            table.cut(0)
    sequence.goal = Goal.PARKED if work.spill is None else Goal.ACTIVE
    _over(core, sequence)
    for chunk in sequence.live_chunks():
        let_leave(core, chunk)
    core.emit(Parked(sequence.id, PreemptOutcome.OFFLOADED) if work.spill is None else Spilled(sequence.id))


def _put_back(core: SwapCore, sequence: Sequence, work: Offload) -> None:
    """The preempt or spill is undone: every chunk is resident again; copies that were complete stay."""
    for chunk in work.leaving:
        if not chunk.clean:
            _distrust(core, chunk)
        core.move(chunk, ChunkEvent.UNDO_OFFLOAD)
        restore.arrived(core, chunk)
    sequence.goal = work.goal_before
    _over(core, sequence)
    cause = work.cause
    if cause is None and sequence.finishing:
        cause = ProtocolError(f"sequence {sequence.id!r} was finished while it was being preempted")
    core.emit(ParkUndone(sequence.id, cause))


def _distrust(core: SwapCore, chunk: Chunk) -> None:
    """A copy of the dirty pages did not complete: only whole pages before them still hold in the slot.

    With checksums nothing holds: those of some layers may be of the new bytes already.
    """
    if chunk.copy.offset is None:
        return
    chunk.copy.tokens -= chunk.copy.tokens % core.layout.page_size
    if chunk.copy.tokens == 0 or core.config.verify is not Verify.NONE:
        core.free_slot(chunk)


def _over(core: SwapCore, sequence: Sequence) -> None:
    sequence.offload = None
    del core.offloads[sequence.id]
