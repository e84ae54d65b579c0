"""Coming back: pages are granted, filled and verified, then the sequence's page table changes in one step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from swapkv.errors import KVEvicted, ProtocolError
from swapkv.fsm import edit, events, offload, spill, steps
from swapkv.fsm.commands import LayerReady, LayersLost, PagesReady, Restored, RestoreUndone
from swapkv.fsm.records import Chunk, Goal, Op, Restore, Segment, Sequence, no_pages
from swapkv.fsm.transitions import SETTLED, ChunkEvent, ChunkState
from swapkv.ids import LayerId, SeqId

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def begin(core: SwapCore, event: events.BeginRestore) -> None:
    """Bring a sequence back, all of it or all but its first tokens. One that is on the device is restored already."""
    sequence = core.sequence(event.sequence)
    _refuse_if_busy(sequence)
    spilled = spill.whole_chunks(core, sequence, event.spilled)
    if sequence.goal is Goal.ACTIVE and sequence.spilled <= spilled:
        core.emit(Restored(sequence.id))
        return
    sequence.goal = Goal.RESTORING
    sequence.restore = work = Restore(
        priority=sequence.priority if event.priority is None else event.priority,
        arrival=core.next_arrival(),
        arrived_ns=core.now_ns,
        base_tokens=sequence.tokens,
        layer_missing=[0] * core.layout.num_layers,
        spilled=spilled,
    )
    core.restores[sequence.id] = sequence
    for chunk in sequence.live_chunks():
        _count_missing(core, work, chunk)
    core.counters["restores"] += 1
    progress(core, sequence)


def cancel(core: SwapCore, event: events.CancelRestore) -> None:
    """Undo a restore. One that is complete, or never began, is left as it is."""
    sequence = core.sequences.get(event.sequence)
    if sequence is None or sequence.restore is None:
        core.counters["late_cancels"] += 1
        return
    undo(core, sequence, None)
    settle(core, sequence)


def undo(core: SwapCore, sequence: Sequence, cause: Exception | None) -> None:
    """Submit nothing more; once what is in flight has ended, the sequence is off the device (or spilled) as before."""
    work = sequence.restore
    if work is None or work.undoing:
        return
    work.undoing = True
    work.cause = cause
    if cause is not None:
        core.counters["failed_restores"] += 1
    core.emit(LayersLost(sequence.id, cause))
    if not sequence.spilled:
        steps.refuse_waiting(core, sequence, f"the restore of sequence {sequence.id!r} was undone")
    hand_over(core, work)


def landed(core: SwapCore, op: Op, checksums: tuple[int, ...]) -> None:
    """An H2D copy is complete: its layers have landed for every restore that needs these chunks."""
    mask = (1 << op.high) - (1 << op.low)
    arrived_for: Counter[SeqId] = Counter()
    for chunk in op.chunks:
        if chunk.id in op.dropped or chunk.aborting:
            continue
        chunk.landed |= mask
        arrived_for.update(name for name in chunk.refs if counts_on(core, core.sequences[name], chunk))
        if chunk.landed == (1 << len(core.layout.groups[chunk.group].layers)) - 1:
            core.move(chunk, ChunkEvent.FILLED)
            spill.show(core, chunk)
    for name, count in arrived_for.items():
        work = core.sequences[name].restore
        assert work is not None
        for layer in core.layout.groups[op.group].layers[op.low : op.high]:
            work.layer_missing[layer] -= count


def arrived(core: SwapCore, chunk: Chunk) -> None:
    """An offload of a shared chunk was undone: restores that waited for its end have it, all layers at once."""
    for name in chunk.refs:
        sequence = core.sequences[name]
        work = sequence.restore
        if work is not None and chunk.id in work.joined:
            del work.joined[chunk.id]
            for layer in core.layout.groups[chunk.group].layers:
                work.layer_missing[layer] -= 1
            settle(core, sequence)


def settle(core: SwapCore, sequence: Sequence) -> None:
    """Look whether the restore is complete, or whether undoing it is."""
    work = sequence.restore
    if work is None:
        return
    if not work.undoing and not work.revoking:
        progress(core, sequence)
        return
    kept = [c for c in work.chunks if core.wanted(c) and not c.aborting]
    if work.ops or sequence.step is not None or any(c.ops for c in work.chunks if c not in kept):
        return
    _let_go(core, [c for c in work.chunks if c not in kept])
    if work.undoing:
        _put_back(core, sequence, work)
    else:
        _restart(core, sequence, work)


def _refuse_if_busy(sequence: Sequence) -> None:
    name = sequence.id
    if sequence.finishing:
        raise ProtocolError(f"sequence {name!r} is finishing: nothing is left to restore")
    if sequence.goal is Goal.EVICTED:
        raise KVEvicted(
            f"sequence {name!r} has no KV ({sequence.tokens} tokens were dropped): reset it, run them again"
        )
    if sequence.goal is Goal.PARKING:
        raise ProtocolError(f"sequence {name!r} is being preempted: await that, or cancel it, then restore")
    if sequence.goal is Goal.RESTORING:
        raise ProtocolError(f"sequence {name!r} is being restored already: await that")


def _count_missing(core: SwapCore, work: Restore, chunk: Chunk) -> None:
    """What the restore still needs of `chunk`."""
    if not spill.stays(core, chunk, work.spilled) or (chunk.state in SETTLED and not chunk.aborting):
        return
    work.chunks.append(chunk)
    under_way = chunk.state is ChunkState.PREFETCHING and not chunk.aborting
    for at, layer in enumerate(core.layout.groups[chunk.group].layers):
        work.layer_missing[layer] += not (under_way and chunk.landed >> at & 1)
    if chunk.state is ChunkState.OFFLOADED:
        work.waiting.append(chunk)
    elif not under_way:
        work.joined[chunk.id] = chunk


def progress(core: SwapCore, sequence: Sequence) -> None:
    """Tell which layers are there; when all are, publish the page table."""
    work = sequence.restore
    assert work is not None
    if not work.granted:
        return
    if not work.pages_told:
        work.pages_told = True
        core.emit(PagesReady(sequence.id))
    while work.layers_told < core.layout.num_layers and work.layer_missing[work.layers_told] == 0:
        core.emit(LayerReady(sequence.id, LayerId(work.layers_told)))
        work.layers_told += 1
    if work.layers_told == core.layout.num_layers:
        _publish(core, sequence)


def _publish(core: SwapCore, sequence: Sequence) -> None:
    """Everything has landed and was verified: the page table changes in one step."""
    sequence.goal = Goal.ACTIVE
    assert sequence.restore is not None
    sequence.spilled = sequence.restore.spilled
    sequence.fresh = True
    sequence.restored_ns = core.now_ns
    _over(core, sequence)
    if sequence.step is None:
        fill_tables(core, sequence)
        edit.tidy(core, sequence)
    core.emit(Restored(sequence.id))


def gate(core: SwapCore, sequence: Sequence) -> None:
    """A forward begins that waits for the layers to come: their copies go first, those of shared chunks included."""
    turn = core.next_arrival()
    for other in core.restores.values():
        work = other.restore
        assert work is not None
        needed = (sequence.id in chunk.refs for segment in work.segments for chunk in segment.chunks)
        if work.gated is None and (other is sequence or any(needed)):
            work.gated = turn
    fill_tables(core, sequence)


def fill_tables(core: SwapCore, sequence: Sequence) -> None:
    """Write the device pages of every chunk into the sequence's page tables; none for those that are streamed."""
    for table in sequence.tables:
        table.put(core.layout.pages_for(sequence.tokens), no_pages(0))
    for chunk in sequence.live_chunks():
        if spill.stays(core, chunk, sequence.spilled) or not spill.absent(chunk):
            first = chunk.index * core.layout.chunk_pages + chunk.first_live
            sequence.tables[chunk.group].put(first, chunk.live_pages())
    for table in sequence.tables:
        table.cut(core.layout.pages_for(sequence.tokens))


def hand_over(core: SwapCore, work: Restore) -> None:
    """Segments that another restore needs go on under its name; other chunks are let go of."""
    heirs: dict[int, Restore] = {}
    for chunk in work.chunks:
        heir = _heir(core, chunk)
        if heir is not None:
            heirs[chunk.id] = heir
        elif chunk.state is ChunkState.PREFETCHING:
            chunk.aborting = True
    for segment in work.segments:
        for heir in {id(heirs[c.id]): heirs[c.id] for c in segment.chunks if c.id in heirs}.values():
            chunks = [c for c in segment.chunks if heirs.get(c.id) is heir]
            share = Segment(segment.group, chunks, segment.low, segment.high, _bytes(core, segment, chunks))
            heir.segments.append(share)
    work.segments.clear()
    work.waiting.clear()


def counts_on(core: SwapCore, sequence: Sequence, chunk: Chunk) -> bool:
    """Whether a restore of the sequence is under way that brings `chunk` back."""
    work = sequence.restore
    return work is not None and sequence.id in chunk.refs and spill.stays(core, chunk, work.spilled)


def _heir(core: SwapCore, chunk: Chunk) -> Restore | None:
    """Another restore that needs `chunk`, if it is on its way."""
    if chunk.state is not ChunkState.PREFETCHING or chunk.aborting:
        return None
    for name in chunk.refs:
        other = core.sequences[name]
        if other.restore is not None and other.restore.goes_on and counts_on(core, other, chunk):
            return other.restore
    return None


def _bytes(core: SwapCore, segment: Segment, chunks: list[Chunk]) -> int:
    layers = core.layout.groups[segment.group].layers[segment.low : segment.high]
    page_bytes = sum(core.layout.layer_bytes[layer] for layer in layers)
    return page_bytes * sum(core.layout.pages_for(c.copy.tokens) - c.first_live for c in chunks)


def _let_go(core: SwapCore, chunks: list[Chunk]) -> None:
    """Chunks that were being fetched go back to OFFLOADED; a restore that joined them meanwhile fetches them anew."""
    for chunk in chunks:
        if chunk.state in (ChunkState.PREFETCHING, ChunkState.GPU_READY):
            core.move(chunk, ChunkEvent.UNDO_RESTORE)
            core.give_back_pages(chunk)
        chunk.aborting = False
        for name in chunk.refs:
            other = core.sequences[name].restore
            if other is not None and chunk.id in other.joined and chunk.state is ChunkState.OFFLOADED:
                del other.joined[chunk.id]
                other.waiting.append(chunk)


def _put_back(core: SwapCore, sequence: Sequence, work: Restore) -> None:
    """The restore is undone: the sequence is off the device, as long as it was when the restore began.

    One that had been running spilled goes on so, with the tokens that it has got meanwhile.
    """
    voided = 0
    if not sequence.spilled:
        voided = sequence.tokens - work.base_tokens + work.voided_tokens
        edit.cut_tokens(core, sequence, work.base_tokens)
        for table in sequence.tables:
            table.cut(0)
    sequence.goal = Goal.ACTIVE if sequence.spilled else Goal.PARKED
    _over(core, sequence)
    edit.tidy(core, sequence)
    for chunk in sequence.live_chunks():
        offload.let_leave(core, chunk)
    cause = work.cause
    if cause is None and sequence.finishing:
        cause = ProtocolError(f"sequence {sequence.id!r} was finished while it was being restored")
    core.emit(RestoreUndone(sequence.id, cause, voided))


def _restart(core: SwapCore, sequence: Sequence, work: Restore) -> None:
    """The pages of a revoked restore are given back: count anew what it needs."""
    for chunk in sequence.live_chunks():
        offload.let_leave(core, chunk)
    work.revoking = False
    work.chunks.clear()
    work.waiting.clear()
    work.joined.clear()
    work.layer_missing = [0] * core.layout.num_layers
    for chunk in sequence.live_chunks():
        _count_missing(core, work, chunk)


def _over(core: SwapCore, sequence: Sequence) -> None:
    sequence.restore = None
    del core.restores[sequence.id]
