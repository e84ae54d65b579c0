"""Segments become copy commands, within the budgets; completions come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from swapkv.config import RestoreOrder, Verify
from swapkv.fsm import edit, events, hangs, offload, restore, steps, turns
from swapkv.fsm.commands import Copy, CopyItem
from swapkv.fsm.ledger import latest
from swapkv.fsm.records import Chunk, Op, Restore, Segment, Sequence
from swapkv.ids import ChunkId, Fence, GroupId, Lane, LayerId

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def first_dirty_page(core: SwapCore, chunk: Chunk) -> int:
    """The first page of the chunk that a D2H copy has to move: everything before it is in the slot already."""
    copy = chunk.copy
    if copy.offset is None or copy.generation != chunk.generation:
        return chunk.first_live
    if core.config.verify is not Verify.NONE and not continues(core, chunk):
        return chunk.first_live
    return max(chunk.first_live, copy.tokens // core.layout.page_size)


def dirty_pages(core: SwapCore, chunk: Chunk) -> int:
    """Pages that a D2H copy has to move before the chunk can leave."""
    return 0 if chunk.clean else core.layout.pages_for(chunk.tokens) - first_dirty_page(core, chunk)


def continues(core: SwapCore, chunk: Chunk) -> bool:
    """Whether the slot's checksums can be continued: they end where the whole pages of the copy end, without a gap."""
    copy = chunk.copy
    return copy.tokens // core.layout.page_size == copy.sealed_pages >= chunk.first_live and copy.tokens > 0


def cut(core: SwapCore, chunks: list[Chunk], pages: dict[ChunkId, int], order: RestoreOrder) -> Iterator[Segment]:
    """Cut chunks × all layers into segments of about `segment_bytes`.

    `pages[chunk.id]`: pages to move of each chunk. LAYER_MAJOR: every chunk's first layers before any chunk's next.
    CHUNK_MAJOR: all layers of a chunk before the next; chunks that fit whole go together.
    """
    blocks = list(_layer_blocks(core, chunks, pages, order))
    if order is RestoreOrder.LAYER_MAJOR:
        for block in blocks:
            yield from _segments(core, [c for c in chunks if c.group == block[0]], pages, block)
        return
    for group in sorted({chunk.group for chunk in chunks}):
        own, own_blocks = [c for c in chunks if c.group == group], [b for b in blocks if b[0] == group]
        for run in [own] if len(own_blocks) == 1 else [[c] for c in own]:
            for block in own_blocks:
                yield from _segments(core, run, pages, block)


def _segments(
    core: SwapCore, chunks: list[Chunk], pages: dict[ChunkId, int], block: tuple[GroupId, int, int]
) -> Iterator[Segment]:
    """Runs of chunks of one group, all with the layers `[low, high)`, of about `segment_bytes` each."""
    group, low, high = block
    page_bytes = sum(core.layout.layer_bytes[layer] for layer in core.layout.groups[group].layers[low:high])
    run: list[Chunk] = []
    run_bytes = 0
    for chunk in chunks:
        chunk_bytes = pages[chunk.id] * page_bytes
        if run and run_bytes + chunk_bytes > core.config.segment_bytes:
            yield Segment(group, run, low, high, run_bytes)
            run, run_bytes = [], 0
        run.append(chunk)
        run_bytes += chunk_bytes
    if run:
        yield Segment(group, run, low, high, run_bytes)


def _layer_blocks(
    core: SwapCore, chunks: list[Chunk], pages: dict[ChunkId, int], order: RestoreOrder
) -> Iterator[tuple[GroupId, int, int]]:
    """Layer ranges `[low, high)` of a group, in the order in which they are to be copied."""
    groups = sorted({chunk.group for chunk in chunks})
    if order is RestoreOrder.LAYER_MAJOR:
        position = dict.fromkeys(groups, 0)
        for group in core.layout.group_of_layer:
            if group in position:
                yield group, position[group], position[group] + 1
                position[group] += 1
        return
    for group in groups:
        layers = core.layout.groups[group].layers
        most = max(pages[c.id] for c in chunks if c.group == group)
        low, size = 0, 0
        for at, layer in enumerate(layers):
            layer_bytes = most * core.layout.layer_bytes[layer]
            if at > low and size + layer_bytes > core.config.segment_bytes:
                yield group, low, at
                low, size = at, 0
            size += layer_bytes
        yield group, low, len(layers)


def pump(core: SwapCore) -> None:
    """Submit what the budgets let through, each direction in its order."""
    _pump_out(core)
    _pump_in(core)


def _pump_out(core: SwapCore) -> None:
    for sequence in list(core.offloads.values()):
        work = sequence.offload
        while work is not None and work.segments:
            if not _may_submit(core, Lane.OUT, work.segments[0]):
                return
            work.ops.add(_submit(core, Lane.OUT, sequence, work.segments.popleft()).id)


def _pump_in(core: SwapCore) -> None:
    """Restores in their order. One at its own cap lets others pass, unless a forward waits for it.

    That forward holds the compute lane up; a copy of another restore may wait for a page that work behind the forward
    still reads. Were that copy first in its lane, both would wait for ever.
    """
    for sequence in turns.in_order(core):
        work = sequence.restore
        while work is not None and work.segments and _within_cap(core, work):
            if not _may_submit(core, Lane.IN, work.segments[0]):
                return
            op = _submit(core, Lane.IN, sequence, work.segments.popleft())
            work.ops.add(op.id)
            work.inflight_bytes += op.num_bytes
        if work is not None and work.segments and work.gated is not None:
            return


def _within_cap(core: SwapCore, work: Restore) -> bool:
    """Whether the next segment fits in what one sequence may have in flight; one segment always does."""
    total = work.inflight_bytes + work.segments[0].num_bytes
    return not work.inflight_bytes or total <= core.config.inflight_bytes_per_sequence


def next_wake(core: SwapCore) -> int | None:
    """When the next thing happens by time alone; None: never."""
    deadlines = (hangs.deadline_ns(core, lane) for lane in (Lane.OUT, Lane.IN))
    times = [deadline for deadline in deadlines if deadline is not None]
    streaming_ns = steps.link_ready_ns(core)
    if streaming_ns is not None:
        times.append(streaming_ns)
    for lane, segment in ((Lane.OUT, _next_out(core)), (Lane.IN, _next_in(core))):
        if segment is not None and core.inflight[lane] < core.config.ops_per_lane:
            ready = core.buckets[lane].ready_ns(segment.num_bytes, core.now_ns)
            if ready > core.now_ns:
                times.append(ready)
    return min(times, default=None)


def done(core: SwapCore, event: events.CopyDone) -> None:
    """A copy is complete."""
    op = _close(core, event)
    if op is None:
        return
    core.bandwidth[op.lane].observe(op.num_bytes, event.elapsed_ns)
    core.counters["bytes_out" if op.lane is Lane.OUT else "bytes_in"] += op.num_bytes
    (offload.landed if op.lane is Lane.OUT else restore.landed)(core, op, event.checksums)
    settle(core, op)


def failed(core: SwapCore, event: events.CopyFailed) -> None:
    """A copy failed: its owner's offload or restore is undone."""
    op = _close(core, event)
    if op is None:
        return
    core.counters[f"failed_{op.lane.name.lower()}_copies"] += 1
    give_up(core, op, event.cause)
    settle(core, op)


def rejected(core: SwapCore, event: events.CopyRejected) -> None:
    """A copy was never submitted: its bytes go back to the bucket, and it counts as failed."""
    op = core.ops.get(event.op)
    if op is not None:
        core.buckets[op.lane].give_back(op.num_bytes)
    failed(core, events.CopyFailed(event.op, event.cause))


def fence_passed(core: SwapCore, event: events.FencePassed) -> None:
    """The device is past a fence: what it guarded comes free."""
    _pass(core, event.fence)


def _may_submit(core: SwapCore, lane: Lane, segment: Segment) -> bool:
    if core.inflight[lane] >= core.config.ops_per_lane:
        return False
    return core.buckets[lane].take(segment.num_bytes, core.now_ns)


def _submit(core: SwapCore, lane: Lane, sequence: Sequence, segment: Segment) -> Op:
    """Turn a segment whose bytes were taken from the bucket into a copy command."""
    op = Op(
        id=core.next_op(),
        lane=lane,
        fence=core.clock.issue(lane),
        sequence=sequence.id,
        group=segment.group,
        chunks=segment.chunks,
        firsts=[],
        low=segment.low,
        high=segment.high,
        num_bytes=segment.num_bytes,
        submitted_ns=core.now_ns,
    )
    items = tuple(_item(core, op, chunk) for chunk in segment.chunks)
    pages = np.concatenate([item.pages for item in items])
    if lane is Lane.OUT:
        after = core.ledger.before_read(pages, lane)
        core.ledger.note_read(op.fence, pages)
    else:
        after = _before_fill(core, segment.chunks)
        core.ledger.note_write(op.fence, pages)
    op.after = after
    layers = core.layout.groups[op.group].layers[op.low : op.high]
    core.ops[op.id] = op
    core.inflight[lane] += 1
    core.emit(
        Copy(
            op=op.id,
            lane=lane,
            fence=op.fence,
            sequence=sequence.id,
            group=op.group,
            layers=tuple(LayerId(layer) for layer in layers),
            items=items,
            after=after,
            num_bytes=op.num_bytes,
        )
    )
    return op


def _before_fill(core: SwapCore, chunks: list[Chunk]) -> tuple[Fence, ...]:
    """What a copy into `chunks` waits for: whoever had touched the pages when they were granted.

    A forward that came after the grant is not among them: it waits for this copy, behind its gate.
    """
    fences = latest(fence for chunk in chunks for fence in chunk.fill_after)
    return tuple(fence for fence in fences if not core.clock.passed(fence))


def _item(core: SwapCore, op: Op, chunk: Chunk) -> CopyItem:
    """What one chunk contributes to a copy; from here on the copy touches it."""
    chunk.ops.add(op.id)
    copy = chunk.copy
    assert copy.offset is not None
    if op.lane is Lane.OUT:
        first, end = first_dirty_page(core, chunk), core.layout.pages_for(chunk.tokens)
        sums, sealed = copy.sealed_checksums, chunk.tokens // core.layout.page_size - first
        if not continues(core, chunk):
            sums = [0] * len(sums)
    else:
        first, end = chunk.first_live, core.layout.pages_for(copy.tokens)
        sums, sealed = copy.checksums, 0
    op.firsts.append(first)
    op.tokens.append(chunk.tokens)
    op.generations.append(chunk.generation)
    checked = core.config.verify is not Verify.NONE
    return CopyItem(
        chunk=chunk.id,
        pages=chunk.pages[first:end].copy(),
        first=first,
        host=copy.offset,
        guard_first=copy.guard_first,
        guard_pages=copy.guard_pages,
        checksums=tuple(sums[core.layout.plane_range(op.group, op.low, op.high)]) if checked else (),
        sealed=sealed,
    )


def _close(core: SwapCore, event: events.CopyDone | events.CopyFailed) -> Op | None:
    """Take the op off the books; None for an op that is unknown, was answered before, or had been given up."""
    op = core.ops.pop(event.op, None)
    if op is None:
        core.counters["repeated_completions"] += 1
        return None
    _pass(core, op.fence)
    core.inflight[op.lane] -= 1
    if op.hung:
        core.counters["late_completions"] += 1
        return None
    detach(core, op)
    return op


def _pass(core: SwapCore, fence: Fence) -> None:
    if not core.clock.complete(fence):
        core.counters["repeated_fences"] += 1
        return
    core.moved_ns[fence.lane] = core.now_ns
    core.ledger.pass_fence()
    for offset, last in core.stuck_slots:
        if core.clock.passed(last):
            core.host.free(offset)
    core.stuck_slots = [(offset, last) for offset, last in core.stuck_slots if not core.clock.passed(last)]


def detach(core: SwapCore, op: Op) -> None:
    """Nobody waits for this op any more."""
    for chunk in op.chunks:
        chunk.ops.discard(op.id)
    sequence = core.sequences.get(op.sequence)
    if sequence is not None and sequence.offload is not None:
        sequence.offload.ops.discard(op.id)
    if sequence is not None and sequence.restore is not None and op.id in sequence.restore.ops:
        sequence.restore.ops.discard(op.id)
        sequence.restore.inflight_bytes -= op.num_bytes


def give_up(core: SwapCore, op: Op, cause: Exception) -> None:
    """Undo everything that counted on this op."""
    for name in {op.sequence: None} | {name: None for chunk in op.chunks for name in chunk.refs}:
        sequence = core.sequences.get(name)
        if sequence is None:
            continue
        if op.lane is Lane.OUT and sequence.id == op.sequence:
            offload.undo(core, sequence, cause)
        if op.lane is Lane.IN and any(restore.counts_on(core, sequence, chunk) for chunk in op.chunks):
            restore.undo(core, sequence, cause)


def settle(core: SwapCore, op: Op) -> None:
    """Whoever waited for the op looks again."""
    for name in {op.sequence: None} | {name: None for chunk in op.chunks for name in chunk.refs}:
        sequence = core.sequences.get(name)
        if sequence is not None and sequence.offload is not None:
            offload.settle(core, sequence)
        if sequence is not None and sequence.restore is not None:
            restore.settle(core, sequence)
        if sequence is not None:
            edit.bury_if_over(core, sequence)


def _next_out(core: SwapCore) -> Segment | None:
    works = (s.offload for s in core.offloads.values())
    return next((w.segments[0] for w in works if w is not None and w.segments), None)


def _next_in(core: SwapCore) -> Segment | None:
    """The segment that the pump stopped at."""
    works = (s.restore for s in turns.in_order(core))
    for work in (w for w in works if w is not None and w.segments):
        if _within_cap(core, work):
            return work.segments[0]
        if work.gated is not None:
            return None
    return None
