"""Every invariant of the core, asserted. Slow on purpose: it looks at everything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from swapkv.fsm import spill
from swapkv.fsm.records import NO_PAGE, Chunk, Goal, Sequence
from swapkv.fsm.transitions import ON_DEVICE, SETTLED, ChunkState
from swapkv.fsm.turns import in_order
from swapkv.ids import ChunkId, GroupId, Lane

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def check(core: SwapCore) -> None:
    """Raise `AssertionError` for the first invariant that does not hold."""
    core.ledger.check()
    _check_owners(core)
    for chunk in core.chunks.values():
        _check_chunk(core, chunk)
    for sequence in core.sequences.values():
        _check_sequence(core, sequence)
    _check_host(core)
    _check_ops(core)
    _check_steps(core)
    _check_head(core)


def _check_owners(core: SwapCore) -> None:
    """The ledger and the chunks tell the same story, and no page is in two chunks."""
    owners = np.full_like(core.ledger.owners(), NO_PAGE)
    for chunk in core.chunks.values():
        pages = chunk.live_pages()
        assert (pages >= 0).all(), f"chunk {chunk.id} lacks a page"
        assert (owners[pages] == NO_PAGE).all(), f"chunk {chunk.id} shares a page with another"
        owners[pages] = chunk.id
    assert (owners == core.ledger.owners()).all(), "the ledger names another owner than the chunks do"


def _check_chunk(core: SwapCore, chunk: Chunk) -> None:
    assert chunk.refs, f"chunk {chunk.id} is referred to by nobody"
    assert all(chunk in core.sequences[name].live_chunks() for name in chunk.refs)
    assert 0 < chunk.tokens <= core.layout.chunk_tokens or chunk.on_device
    if chunk.state in ON_DEVICE:
        assert chunk.held >= core.layout.pages_for(chunk.tokens), f"chunk {chunk.id} has too few pages"
    else:
        assert chunk.num_live == 0, f"chunk {chunk.id} is {chunk.state.value} and owns pages"
    voiding = any(_undoing(core.sequences[name]) for name in chunk.refs)
    if chunk.state is ChunkState.OFFLOADED and not voiding:
        assert chunk.clean, f"chunk {chunk.id} is off the device without a clean copy"
    if chunk.state is ChunkState.OFFLOADED or not chunk.ops:
        assert not chunk.ops, f"chunk {chunk.id} is at rest with a copy under way"
    if chunk.ops:
        assert chunk.state in (ChunkState.OFFLOADING, ChunkState.PREFETCHING)
    assert chunk.copy.generation <= chunk.generation
    assert (chunk.copy.offset is not None) == (chunk.id in core.copied)


def _check_sequence(core: SwapCore, sequence: Sequence) -> None:
    states = {chunk.state for chunk in sequence.live_chunks()}
    assert all(sequence.id in chunk.refs for chunk in sequence.live_chunks())
    assert (sequence.offload is not None) == (sequence.goal is Goal.PARKING) == (sequence.id in core.offloads)
    assert (sequence.restore is not None) == (sequence.goal is Goal.RESTORING) == (sequence.id in core.restores)
    if sequence.goal is Goal.ACTIVE or sequence.spilled:
        _check_running(core, sequence)
        _check_tables(core, sequence)
    elif sequence.step is None:
        assert sequence.goal is Goal.PARKING or not any(len(t) for t in sequence.tables), "a table of absent pages"
    if sequence.goal is Goal.EVICTED:
        assert not states
    if sequence.restore is not None:
        waiting = list(sequence.restore.waiting)
        assert all(chunk.state is ChunkState.OFFLOADED for chunk in waiting), "a chunk waits for pages that it has"
        assert len({chunk.id for chunk in waiting}) == len(waiting), "a chunk waits for pages twice"
        assert not any(chunk.id in sequence.restore.joined for chunk in waiting)
    if sequence.goal in (Goal.ACTIVE, Goal.PARKED):
        for group in core.groups():
            assert len(sequence.chunks[group]) >= -(-sequence.tokens // core.layout.chunk_tokens)


def _check_running(core: SwapCore, sequence: Sequence) -> None:
    """What the sequence's forwards read is on the device, but for spilled chunks: those have a clean copy at least."""
    assert sequence.goal in (Goal.ACTIVE, Goal.PARKING, Goal.RESTORING)
    for chunk in sequence.live_chunks():
        if not spill.stays(core, chunk, sequence.spilled):
            assert chunk.clean or not spill.absent(chunk), f"chunk {chunk.id} is nowhere to be read"
        elif sequence.goal is not Goal.PARKING and not sequence.finishing:
            assert chunk.state in SETTLED, (sequence.id, chunk.id, chunk.state)
            ready = chunk.state is ChunkState.GPU_READY
            assert not ready or sequence.fresh or sequence.spilled or _shared(sequence)


def _check_tables(core: SwapCore, sequence: Sequence) -> None:
    """The page tables are what the chunks own, in order."""
    for group in core.groups():
        expected = np.full(len(sequence.tables[group]), NO_PAGE, dtype=np.int64)
        for chunk in sequence.chunks[group]:
            if chunk is not None and not spill.absent(chunk):
                first = chunk.index * core.layout.chunk_pages + chunk.first_live
                expected[first : first + chunk.num_live] = chunk.live_pages()[: max(0, len(expected) - first)]
        assert (expected == sequence.tables[group].pages).all(), f"the page table of {sequence.id!r} is not its chunks'"
        more = 0 if sequence.step is None else core.steps[sequence.step].appends[sequence.id]
        assert len(expected) == core.layout.pages_for(sequence.tokens + more)


def _check_host(core: SwapCore) -> None:
    """Every host slot belongs to one chunk, or waits for a hung copy."""
    slots = {int(c.copy.offset) for c in core.copied.values() if c.copy.offset is not None}
    assert len(slots) == len(core.copied)
    stuck = {int(offset) for offset, _ in core.stuck_slots}
    taken = core.host.taken()
    assert slots | stuck == taken.keys(), "a host slot is lost"
    assert not slots & stuck, "a host slot is shared"
    assert sum(taken.values()) == core.host.used <= core.host.total
    end = 0
    for offset, size in sorted(taken.items()):
        assert offset >= end, "two host slots overlap"
        end = offset + size
    assert end <= core.host.total


def _check_ops(core: SwapCore) -> None:
    for lane in (Lane.OUT, Lane.IN):
        assert core.inflight[lane] == sum(op.lane is lane for op in core.ops.values())
        assert core.inflight[lane] <= core.config.ops_per_lane
    for sequence in core.restores.values():
        assert sequence.restore is not None
        ops = [core.ops[op] for op in sequence.restore.ops]
        assert sequence.restore.inflight_bytes == sum(op.num_bytes for op in ops)
    named = {op for chunk in core.chunks.values() for op in chunk.ops}
    assert named <= core.ops.keys(), "a chunk waits for a copy that is over"


def _check_steps(core: SwapCore) -> None:
    _check_readers(core)
    pinned = {name: step.id for step in core.steps.values() if step.granted for name in step.appends}
    assert pinned == {s.id: s.step for s in core.sequences.values() if s.step is not None}, "a pin without a forward"


def _check_readers(core: SwapCore) -> None:
    """Every host copy that a forward reads is pinned by it, and nothing else is."""
    readers: Counter[ChunkId] = Counter(chunk.id for step in core.steps.values() for chunk in step.streamed)
    for chunk in core.chunks.values():
        assert chunk.copy.readers == readers[chunk.id], f"chunk {chunk.id} has other readers than it says"
        assert not chunk.copy.readers or chunk.clean, f"a forward reads a stale copy of chunk {chunk.id}"


def _check_head(core: SwapCore) -> None:
    """Nobody waits for pages that are there."""
    if core.waiting_steps:
        return
    for sequence in in_order(core):
        if sequence.restore is not None and sequence.restore.waiting and sequence.restore.goes_on:
            needed = [0] * len(core.layout.groups)
            for chunk in sequence.restore.waiting:
                needed[chunk.group] += core.layout.pages_for(chunk.tokens) - chunk.first_live
            lacks = any(pages > core.ledger.available(GroupId(group)) for group, pages in enumerate(needed))
            assert lacks, f"restore of {sequence.id!r} waits for pages that are there"
            return


def _shared(sequence: Sequence) -> bool:
    return any(len(chunk.refs) > 1 for chunk in sequence.live_chunks())


def _undoing(sequence: Sequence) -> bool:
    return sequence.restore is not None and sequence.restore.undoing
