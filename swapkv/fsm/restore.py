"""Coming back: pages are granted, filled and verified, then the sequence's page table changes in one step."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from swapkv.budget import grants
from swapkv.config import RestoreOrder
from swapkv.errors import KVEvicted, ProtocolError
from swapkv.fsm import copies, edit, events, offload, steps
from swapkv.fsm.commands import LayerReady, LayersLost, PagesReady, Restored, RestoreUndone
from swapkv.fsm.records import Chunk, Goal, Op, Restore, Segment, Sequence
from swapkv.fsm.transitions import SETTLED, ChunkEvent, ChunkState
from swapkv.ids import GroupId, Lane, LayerId, SeqId

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def begin(core: SwapCore, event: events.BeginRestore) -> None:
    """Bring a sequence back. One that is on the device is restored already."""
    sequence = core.sequence(event.sequence)
    _refuse_if_busy(sequence)
    if sequence.goal is Goal.ACTIVE:
        core.emit(Restored(sequence.id))
        return
    sequence.goal = Goal.RESTORING
    sequence.restore = work = Restore(
        priority=sequence.priority if event.priority is None else event.priority,
        arrival=core.next_arrival(),
        arrived_ns=core.now_ns,
        base_tokens=sequence.tokens,
        layer_missing=[0] * core.layout.num_layers,
    )
    core.restores[sequence.id] = sequence
    for chunk in sequence.live_chunks():
        _count_missing(core, work, chunk)
    core.counters["restores"] += 1
    _progress(core, sequence)


def cancel(core: SwapCore, event: events.CancelRestore) -> None:
    """Undo a restore. One that is complete, or never began, is left as it is."""
    sequence = core.sequences.get(event.sequence)
    if sequence is None or sequence.restore is None:
        core.counters["late_cancels"] += 1
        return
    undo(core, sequence, None)
    settle(core, sequence)


def undo(core: SwapCore, sequence: Sequence, cause: Exception | None) -> None:
    """Submit nothing more; once what is in flight has ended, the sequence is off the device as before."""
    work = sequence.restore
    if work is None or work.undoing:
        return
    work.undoing = True
    work.cause = cause
    if cause is not None:
        core.counters["failed_restores"] += 1
    core.emit(LayersLost(sequence.id, cause))
    steps.refuse_waiting(core, sequence, f"the restore of sequence {sequence.id!r} was undone")
    _hand_over(core, work)


def landed(core: SwapCore, op: Op, checksums: tuple[int, ...]) -> None:
    """An H2D copy is complete: its layers have landed for every restore that needs these chunks."""
    mask = (1 << op.high) - (1 << op.low)
    arrived_for: Counter[SeqId] = Counter()
    for chunk in op.chunks:
        if chunk.id in op.dropped or chunk.aborting:
            continue
        chunk.landed |= mask
        arrived_for.update(chunk.refs.keys())
        if chunk.landed == (1 << len(core.layout.groups[chunk.group].layers)) - 1:
            core.move(chunk, ChunkEvent.FILLED)
    for name, count in arrived_for.items():
        sequence = core.sequences[name]
        if sequence.restore is not None:
            for layer in core.layout.groups[op.group].layers[op.low : op.high]:
                sequence.restore.layer_missing[layer] -= count


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
        _progress(core, sequence)
        return
    kept = [c for c in work.chunks if core.wanted(c) and not c.aborting]
    if work.ops or sequence.step is not None or any(c.ops for c in work.chunks if c not in kept):
        return
    _let_go(core, [c for c in work.chunks if c not in kept])
    if work.undoing:
        _put_back(core, sequence, work)
    else:
        _restart(core, sequence, work)


def grant(core: SwapCore) -> None:
    """Give pages to the restores that wait for them, as `budget.grants` plans."""
    while not core.waiting_steps and _grant(core):
        pass


def _grant(core: SwapCore) -> bool:
    """One round. True: another is due, as pages came back at once or a chunk was granted that others had waited for."""
    queue = [s for s in in_order(core) if s.restore is not None and s.restore.waiting and core.wants_device(s)]
    if not queue:
        return False
    groups = list(core.groups())
    waiting = [_as_waiting(core, s) for s in queue]
    plan = grants.plan(waiting, [core.ledger.available(g) for g in groups], [core.coming(g) for g in groups])
    came = False
    for sequence, answer in zip(queue, plan, strict=True):
        if answer is grants.Grant.REVOKE:
            revoke(core, sequence)
            came |= core.wants_device(sequence)
        elif answer is grants.Grant.ALL:
            came |= _take_pages(core, sequence, RestoreOrder.LAYER_MAJOR)
        elif answer is grants.Grant.SOME and core.config.restore_order is not RestoreOrder.LAYER_MAJOR:
            came |= _take_pages(core, sequence, RestoreOrder.CHUNK_MAJOR)
    return came


def revoke(core: SwapCore, sequence: Sequence) -> None:
    """Take the pages of a partial restore back; it keeps its place in the queue and starts over."""
    work = sequence.restore
    assert work is not None
    assert work.waiting, "a restore that has all its pages is never revoked"
    core.counters["revoked_restores"] += 1
    work.revoking = True
    _hand_over(core, work)
    settle(core, sequence)


def partial(core: SwapCore) -> list[Sequence]:
    """Restores that hold some of their pages and wait for more, the last in the queue first."""
    return [s for s in reversed(in_order(core)) if s.restore and s.restore.waiting and held_chunks(core, s)]


def in_order(core: SwapCore) -> list[Sequence]:
    """Restores under way, in the order in which they are served: priority with capped aging, then arrival.

    Before all others those that a forward waits for, in the order of the forwards.
    """

    def key(sequence: Sequence) -> tuple[float, int, int]:
        work = sequence.restore
        assert work is not None
        turn = inf if work.gated is None else work.gated
        waited = core.now_ns - work.arrived_ns
        aging = (core.config.aging_ns, core.config.aging_cap)
        return turn, grants.effective_priority(work.priority, waited, *aging), work.arrival

    return sorted(core.restores.values(), key=key) if len(core.restores) > 1 else list(core.restores.values())


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
    if chunk.state in SETTLED and not chunk.aborting:
        return
    work.chunks.append(chunk)
    under_way = chunk.state is ChunkState.PREFETCHING and not chunk.aborting
    for at, layer in enumerate(core.layout.groups[chunk.group].layers):
        work.layer_missing[layer] += not (under_way and chunk.landed >> at & 1)
    if chunk.state is ChunkState.OFFLOADED:
        work.waiting.append(chunk)
    elif not under_way:
        work.joined[chunk.id] = chunk


def _progress(core: SwapCore, sequence: Sequence) -> None:
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
    """Write the device pages of every chunk into the sequence's page tables."""
    for chunk in sequence.live_chunks():
        first = chunk.index * core.layout.chunk_pages + chunk.first_live
        sequence.tables[chunk.group].put(first, chunk.live_pages())
    for table in sequence.tables:
        table.cut(core.layout.pages_for(sequence.tokens))


def _as_waiting(core: SwapCore, sequence: Sequence) -> grants.Waiting:
    work = sequence.restore
    assert work is not None
    missing, held = [0] * len(core.layout.groups), [0] * len(core.layout.groups)
    for chunk in work.waiting:
        missing[chunk.group] += _pages_needed(core, chunk)
    for chunk in held_chunks(core, sequence):
        held[chunk.group] += chunk.num_live
    return grants.Waiting(missing=tuple(missing), held=tuple(held))


def held_chunks(core: SwapCore, sequence: Sequence) -> list[Chunk]:
    """Chunks whose device pages only this restore needs."""
    assert sequence.restore is not None
    return [c for c in sequence.restore.chunks if c.num_live and not core.wanted(c, apart_from=sequence)]


def _pages_needed(core: SwapCore, chunk: Chunk) -> int:
    return core.layout.pages_for(chunk.tokens) - chunk.first_live


def _take_pages(core: SwapCore, sequence: Sequence, order: RestoreOrder) -> bool:
    """Grant pages to the chunks that wait, as far as they go, and cut their copies. True: others had waited for them."""
    work = sequence.restore
    assert work is not None
    if core.config.restore_order is RestoreOrder.CHUNK_MAJOR:
        order = RestoreOrder.CHUNK_MAJOR
    granted: list[Chunk] = []
    while work.waiting and _pages_needed(core, work.waiting[0]) <= core.ledger.available(work.waiting[0].group):
        chunk = work.waiting.popleft()
        needed = _pages_needed(core, chunk)
        core.move(chunk, ChunkEvent.RESTORE)
        chunk.landed = 0
        chunk.held = chunk.first_live + needed
        pages = core.ledger.allocate(chunk.group, chunk.id, needed)
        chunk.pages[chunk.first_live : chunk.held] = pages
        chunk.fill_after = core.ledger.before_write(pages, Lane.IN)
        granted.append(chunk)
    counts = {chunk.id: chunk.num_live for chunk in granted}
    work.segments.extend(copies.cut(core, granted, counts, order))
    if not granted:
        return False
    joined = _tell_joined(core, granted)
    _progress(core, sequence)
    return joined


def _tell_joined(core: SwapCore, granted: list[Chunk]) -> bool:
    """Other restores that waited for pages of the same chunks share what is under way now. False: there are none."""
    joined = False
    for chunk in granted:
        for name in chunk.refs:
            other = core.sequences[name].restore
            if other is not None and chunk in other.waiting:
                other.waiting.remove(chunk)
                _progress(core, core.sequences[name])
                joined = True
    return joined


def _hand_over(core: SwapCore, work: Restore) -> None:
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


def _heir(core: SwapCore, chunk: Chunk) -> Restore | None:
    """Another restore that needs `chunk`, if it is on its way."""
    if chunk.state is not ChunkState.PREFETCHING or chunk.aborting:
        return None
    for name in chunk.refs:
        other = core.sequences[name]
        if other.goal is Goal.RESTORING and core.wants_device(other):
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
    """The restore is undone: the sequence is off the device, as long as it was when the restore began."""
    voided = sequence.tokens - work.base_tokens + work.voided_tokens
    edit.cut_tokens(core, sequence, work.base_tokens)
    for table in sequence.tables:
        table.cut(0)
    sequence.goal = Goal.PARKED
    _over(core, sequence)
    for chunk in sequence.live_chunks():
        offload.let_leave(core, chunk)
    cause = work.cause
    if cause is None and sequence.finishing:
        cause = ProtocolError(f"sequence {sequence.id!r} was finished while it was being restored")
    core.emit(RestoreUndone(sequence.id, cause, voided))


def _restart(core: SwapCore, sequence: Sequence, work: Restore) -> None:
    """The pages of a revoked restore are given back: count anew what it needs."""
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


def missing_pages(core: SwapCore, group: GroupId) -> int:
    """Pages of `group` that restores wait for."""
    works = (s.restore for s in core.restores.values())
    return sum(_pages_needed(core, c) for w in works if w is not None for c in w.waiting if c.group == group)
