"""Whose turn it is: restores wait for pages in a queue, and give pages back that one before them needs."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from swapkv.budget import grants
from swapkv.config import RestoreOrder
from swapkv.fsm import copies, restore, spill
from swapkv.fsm.records import Chunk, Sequence
from swapkv.fsm.transitions import ChunkEvent, ChunkState
from swapkv.ids import GroupId, Lane

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def grant(core: SwapCore) -> None:
    """Give pages to the restores that wait for them, as `budget.grants` plans."""
    while not core.waiting_steps and _grant(core):
        pass


def _grant(core: SwapCore) -> bool:
    """One round. True: another is due, as pages came back at once or a chunk was granted that others had waited for."""
    queue = [s for s in in_order(core) if s.restore is not None and s.restore.waiting and s.restore.goes_on]
    if not queue:
        return False
    groups = list(core.groups())
    waiting = [_as_waiting(core, s) for s in queue]
    plan = grants.plan(waiting, [core.ledger.available(g) for g in groups], [core.coming(g) for g in groups])
    came = False
    for sequence, answer in zip(queue, plan, strict=True):
        if answer is grants.Grant.REVOKE:
            revoke(core, sequence)
            came |= sequence.restore is not None and sequence.restore.goes_on
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
    restore.hand_over(core, work)
    restore.settle(core, sequence)


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


def missing_pages(core: SwapCore, group: GroupId) -> int:
    """Pages of `group` that restores wait for."""
    works = (s.restore for s in core.restores.values())
    return sum(_pages_needed(core, c) for w in works if w is not None for c in w.waiting if c.group == group)


def held_chunks(core: SwapCore, sequence: Sequence) -> list[Chunk]:
    """Chunks whose device pages only this restore needs, and would give back.

    Those that it has fetched, and those that others have left to it and that have a clean copy.
    """
    assert sequence.restore is not None
    fetched = {chunk.id for chunk in sequence.restore.chunks}
    return [
        chunk
        for chunk in sequence.live_chunks()
        if chunk.num_live
        and chunk.state is not ChunkState.OFFLOADING
        and (chunk.id in fetched or chunk.clean)
        and not (sequence.spilled and spill.stays(core, chunk, sequence.spilled))
        and not core.wanted(chunk, apart_from=sequence)
    ]


def _as_waiting(core: SwapCore, sequence: Sequence) -> grants.Waiting:
    work = sequence.restore
    assert work is not None
    missing, held = [0] * len(core.layout.groups), [0] * len(core.layout.groups)
    for chunk in work.waiting:
        missing[chunk.group] += _pages_needed(core, chunk)
    for chunk in held_chunks(core, sequence):
        held[chunk.group] += chunk.num_live
    return grants.Waiting(missing=tuple(missing), held=tuple(held))


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
    restore.progress(core, sequence)
    return joined


def _tell_joined(core: SwapCore, granted: list[Chunk]) -> bool:
    """Other restores that waited for pages of the same chunks share what is under way now. False: there are none."""
    joined = False
    for chunk in granted:
        for name in chunk.refs:
            other = core.sequences[name].restore
            if other is not None and chunk in other.waiting:
                other.waiting.remove(chunk)
                restore.progress(core, core.sequences[name])
                joined = True
    return joined
