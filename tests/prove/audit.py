"""What must hold in every state of a world, beyond the core's own `check()`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from swapkv.fsm import commands, events, queries
from swapkv.fsm.copies import next_wake
from swapkv.fsm.core import SwapCore
from swapkv.fsm.ledger import PageState
from swapkv.fsm.records import Chunk, Goal, Sequence
from swapkv.fsm.transitions import ChunkState
from swapkv.fsm.turns import in_order
from swapkv.ids import Fence, GroupId, Lane, SeqId
from tests.prove.cloning import clone_core
from tests.prove.lanes import POISON, Device, Move, Pass, Stamps, Twin, pages_of
from tests.prove.violation import Violation

if TYPE_CHECKING:
    from tests.prove.world import World

FILLED = frozenset({ChunkState.GPU_RESIDENT, ChunkState.OFFLOADING, ChunkState.GPU_READY})


def audit(world: World) -> None:
    """Raise `AssertionError` (`Violation`) for the first promise that is broken."""
    world.core.check()
    check_untouched(world)
    check_lengths(world)
    check_contents(world)
    check_links(world)
    check_rest(world)
    check_settled(world)


def check_untouched(world: World) -> None:
    """Nothing that was submitted touches a page or a slot that is free."""
    free = set(np.flatnonzero(world.core.ledger._state == PageState.FREE).tolist())
    taken = world.core.host._taken
    for lane in (lane for device in world.ranks for lane in device.lanes):
        for work in lane:
            touched = free & pages_of(work)
            if touched:
                raise Violation(f"pages {sorted(touched)} are free and {type(work).__name__} will touch them")
            if isinstance(work, Move) and any(item.host not in taken for item in work.items):
                raise Violation(f"copy {work.op} will touch a host slot that is free")
    waiting = [work.rows for device in world.ranks for work in device.lanes[Lane.COMPUTE] if isinstance(work, Pass)]
    rows = [row for rows in (*waiting, *(opened.rows for opened in world.open.values())) for row in rows]
    if any(slot not in taken for row in rows for pages in row.away for _, slot, _ in pages):
        raise Violation("a forward will read a host slot that is free")
    for opened in world.open.values():
        pages = sorted({page for row in opened.rows for table in row.tables for page in table if page >= 0})
        if any(world.core.ledger._state[page] != PageState.OWNED for page in pages):
            raise Violation("a forward's pages are not its own any more")


def check_lengths(world: World) -> None:
    """The core counts as many tokens as the model."""
    for name, sequence in world.core.sequences.items():
        voiding = sequence.restore is not None and sequence.restore.undoing
        if sequence.goal is not Goal.EVICTED and not voiding and sequence.tokens != len(world.tokens[name]):
            raise Violation(f"{name!r} has {sequence.tokens} tokens, should have {len(world.tokens[name])}")


def check_contents(world: World) -> None:
    """Whatever the core takes for settled holds the right stamps, on the device and in the host tier."""
    for device in world.ranks:
        _check_contents(world, device)


def _check_contents(world: World, device: Device) -> None:
    busy = {page for work in device.lanes[Lane.COMPUTE] for page in _written(work, world.core.layout.page_size)}
    seen: set[int] = set()
    for name, sequence in world.core.sequences.items():
        if sequence.restore is not None and sequence.restore.undoing:
            continue
        for chunk in sequence.live_chunks():
            expected = _expected(world, sequence, chunk)
            if chunk.state in FILLED:
                _check_device(device, name, chunk, expected, busy)
            if chunk.id not in seen and not chunk.ops:
                seen.add(chunk.id)
                _check_host(device, name, chunk, expected)


def check_links(world: World) -> None:
    """Link tokens are conserved, and whoever waits for time alone will be woken."""
    core = world.core
    for lane, bucket in core.buckets.items():
        if bucket.sent_bytes != world.sent[lane]:
            raise Violation(f"{lane.name}: {bucket.sent_bytes} bytes are booked, {world.sent[lane]} were sent")
    armed_ns = core._armed_ns
    wake_ns = next_wake(core)
    if wake_ns is not None and (armed_ns is None or armed_ns > wake_ns):
        raise Violation(f"something is due at {wake_ns}, the alarm is set to {armed_ns}")
    first = {op.lane: op for op in reversed(core.ops.values()) if not op.hung}
    moving = any(all(core.clock.passed(fence) for fence in op.after) for op in first.values())
    if moving and (armed_ns is None or armed_ns > core.now_ns + core.config.copy_deadline_ns):
        raise Violation("copies are under way and nobody would notice if they hang")


def check_rest(world: World) -> None:
    """When nothing is under way, nobody waits for it; whoever waits for pages could not have them."""
    core = world.core
    ranks = range(len(world.ranks))
    moves = world.reports or any(world.can_run(lane, r) for lane in Lane for r in ranks) or _waits_for_time(world)
    busy = any(any(device.lanes) for device in world.ranks)
    if world.lost:
        return
    if busy and not moves:
        raise Violation("the lanes wait for one another")
    if busy or world.open or moves:
        return
    if core.offloads or core.waiting_steps or core.ops:
        raise Violation("nothing is under way and an offload, a forward or a copy waits for it")
    for name, sequence in core.restores.items():
        work = sequence.restore
        assert work is not None
        if not work.waiting or work.joined or work.undoing or work.revoking:
            raise Violation(f"nothing is under way and the restore of {name!r} waits for it")
    victims = {victim.sequence for victim in queries.victims(core) if victim.freed_bytes}
    for chunk in core.chunks.values():
        if chunk.on_device and not core.wanted(chunk) and (chunk.clean or not victims & chunk.refs.keys()):
            raise Violation(
                f"chunk {chunk.index} of {list(chunk.refs)} keeps its pages, and none of these wants to run"
            )
    head = next(iter(in_order(core)), None)
    if head is not None and head.restore is not None:
        first = head.restore.waiting[0]
        if core.layout.pages_for(first.tokens) - first.first_live <= core.ledger.available(first.group):
            raise Violation(f"the restore of {head.id!r} waits for pages that are there")


def check_settled(world: World) -> None:
    """The core has done all that it could: being asked once more brings nothing.

    Except for a part of the pages of a restore that has just become the first of the queue. It may be granted with the
    next event: `check_rest` knows that there will be one.
    """
    core = world.core
    if any(sequence.restore is not None and sequence.restore.waiting for sequence in core.restores.values()):
        core = clone_core(core)
    for more in core.handle(events.Tick(), world.now_ns):
        if isinstance(more, commands.WakeAt) or (isinstance(more, commands.Copy) and _is_partial(core, more)):
            continue
        raise Violation(f"{type(more).__name__} had to wait for the next event")


def _is_partial(core: SwapCore, copy: commands.Copy) -> bool:
    work = core.sequences[copy.sequence].restore
    return work is not None and bool(work.waiting)


def check_exhausted(world: World, appends: Mapping[str, int]) -> None:
    """A forward was refused for want of pages: even with all that are on their way there are too few."""
    core = world.core
    for group in core.groups():
        needed = sum(_new_pages(world, name, count, group) for name, count in appends.items())
        coming = core.ledger.free(group) + core.ledger.fenced(group)
        for sequence in core.offloads.values():
            work = sequence.offload
            if work is not None and not work.undoing:
                coming += sum(c.num_live for c in work.leaving if c.group == group and not core.wanted(c, sequence))
        if needed > coming:
            return
    raise Violation(f"a forward over {dict(appends)} is refused though its pages are on their way")


def check_hand_over(world: World, after: tuple[Fence, ...]) -> None:
    """Nobody is given a page that a copy which hangs may still touch.

    A later copy of its lane that has been reported as over touches nothing; that it stands behind is then no matter.
    """
    stuck = [op.fence for op in world.core.ops.values() if op.hung]
    for fence in after:
        reported = fence.value in world.core.clock._reported_ahead[fence.lane]
        if not reported and any(fence.lane is hung.lane and fence >= hung for hung in stuck):
            raise Violation(f"new work waits for {fence}, which hangs")


def _new_pages(world: World, name: str, count: int, group: GroupId) -> int:
    core, layout = world.core, world.core.layout
    sequence = core.sequences[SeqId(name)]
    if not count:
        return 0
    new = layout.pages_for(sequence.tokens + count) - layout.pages_for(sequence.tokens)
    index, rest = divmod(sequence.tokens, layout.chunk_tokens)
    tail = sequence.chunks[group][index] if rest else None
    return new + (layout.pages_for(rest) - tail.first_live if tail is not None and len(tail.refs) > 1 else 0)


def _waits_for_time(world: World) -> bool:
    wake = next_wake(world.core)
    return wake is not None and not world.core.ops


def _written(work: object, page_size: int) -> set[int]:
    """Device pages that work of the compute lane will write."""
    if isinstance(work, Twin):
        return set(work.target)
    if not isinstance(work, Pass):
        return set()
    return {
        table[position // page_size]
        for row in work.rows
        for table in row.tables
        for position in range(len(row.reads), len(row.reads) + len(row.writes))
    }


def _expected(world: World, sequence: Sequence, chunk: Chunk) -> Stamps:
    first = chunk.index * world.core.layout.chunk_tokens
    return world.tokens[sequence.id][first : first + world.core.layout.chunk_tokens]


def _check_device(device: Device, name: SeqId, chunk: Chunk, expected: Stamps, busy: set[int]) -> None:
    layout = device.layout
    pages = chunk.pages.tolist()
    for position, stamp in enumerate(expected):
        page = pages[position // layout.page_size]
        if position // layout.page_size < chunk.first_live or page in busy:
            continue
        for layer in layout.groups[chunk.group].layers:
            found = device.pages[page * device.num_layers + layer][position % layout.page_size]
            if found != stamp:
                _wrong(name, chunk, position, layer, "on the device", found)


def _check_host(device: Device, name: SeqId, chunk: Chunk, expected: Stamps) -> None:
    layout, copy = device.layout, chunk.copy
    if copy.offset is None or copy.generation != chunk.generation:
        return
    first = chunk.first_live * layout.page_size
    for position, stamp in enumerate(expected[: copy.tokens]):
        for layer in layout.groups[chunk.group].layers if position >= first else ():
            place = (copy.offset, int(layer), position // layout.page_size)
            found = device.slots.get(place, device.poisoned)[position % layout.page_size]
            if found != stamp:
                _wrong(name, chunk, position, layer, "in the host tier", found)


def _wrong(name: SeqId, chunk: Chunk, position: int, layer: int, where: str, found: int) -> None:
    what = "poison" if found == POISON else f"stamp {found}"
    raise Violation(f"chunk {chunk.index} of {name!r}: position {position} of layer {layer} is {what} {where}")
