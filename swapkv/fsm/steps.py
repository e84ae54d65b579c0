"""Forward passes: room for the tokens to come, pins while they are computed, a fence when they were submitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from swapkv.errors import KVEvicted, PagesExhausted, ProtocolError
from swapkv.fsm import edit, events, offload, restore, spill, turns
from swapkv.fsm.commands import ClonePages, RecordFence, StepGranted, StepRefused
from swapkv.fsm.ledger import latest
from swapkv.fsm.records import Chunk, Goal, Sequence, Step
from swapkv.fsm.transitions import ChunkEvent, ChunkState
from swapkv.ids import ChunkId, Fence, GroupId, Lane, PhysicalPages, SeqId, StepId

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def begin(core: SwapCore, event: events.BeginStep) -> None:
    """Ask for a forward pass. It is granted at once, or when pages that are on their way have come."""
    if event.step in core.steps:
        raise ProtocolError(f"forward {event.step} is under way already: give every forward an id of its own")
    if not event.appends:
        raise ProtocolError("a forward needs at least one sequence")
    sequences = [core.sequence(name) for name in event.appends]
    for sequence in sequences:
        _refuse_if_busy(core, sequence, event.appends[sequence.id])
    step = Step(id=event.step, appends=dict(event.appends), arrived_ns=core.now_ns)
    lack = _lack(core, step)
    if lack and not _may_come(core, lack):
        raise _exhausted(core, step, lack)
    core.steps[step.id] = step
    core.waiting_steps.append(step)


def cancel(core: SwapCore, event: events.CancelStep) -> None:
    """Give up a forward that still waits for pages; one that was granted has to be ended or voided."""
    step = core.steps.get(event.step)
    if step is None:
        core.counters["late_cancels"] += 1
        return
    if step.granted:
        raise ProtocolError(f"forward {step.id} has its pages: end it or void it")
    core.waiting_steps.remove(step)
    del core.steps[step.id]


def end(core: SwapCore, event: events.EndStep) -> None:
    """The forward was submitted: its tokens count, and its pages are fenced until the device is done with them."""
    step = _granted(core, event.step)
    fence = _close(core, step)
    for name, count in step.appends.items():
        sequence = core.sequences[name]
        if sequence.restore is not None and sequence.restore.undoing and not sequence.spilled:
            sequence.restore.voided_tokens += count
        else:
            _commit(core, sequence, count, fence)
        sequence.step = None
        edit.tidy(core, sequence)
    _after(core, step)


def void(core: SwapCore, event: events.VoidStep) -> None:
    """The forward failed or was given up: what it wrote does not count."""
    step = _granted(core, event.step)
    fence = _close(core, step)
    for name in step.appends:
        sequence = core.sequences[name]
        for pages in _pages_by_group(core, sequence):
            core.ledger.note_write(fence, pages)
        sequence.step = None
        edit.cut_tokens(core, sequence, sequence.tokens)
        edit.tidy(core, sequence)
    _after(core, step)


def grant(core: SwapCore) -> None:
    """Grant waiting forwards in their order; refuse the first one if its pages will not come."""
    while core.waiting_steps:
        step = core.waiting_steps[0]
        lack = _lack(core, step)
        if not lack:
            streamed_bytes = spill.streamed_bytes(core, step)
            if not core.buckets[Lane.IN].take(streamed_bytes, core.now_ns):
                return
            core.counters["streamed_bytes"] += streamed_bytes
            core.waiting_steps.popleft()
            _grant(core, step)
        elif not _may_come(core, lack):
            _refuse(core, step, _exhausted(core, step, lack))
        elif not _revoke_one(core, lack):
            return


def link_ready_ns(core: SwapCore) -> int | None:
    """When the link will let a forward begin that has its pages and streams; None: none waits for that."""
    if not core.waiting_steps or _lack(core, core.waiting_steps[0]):
        return None
    return core.buckets[Lane.IN].ready_ns(spill.streamed_bytes(core, core.waiting_steps[0]), core.now_ns)


def refuse_waiting(core: SwapCore, sequence: Sequence, why: str) -> None:
    """A sequence is leaving: forwards that name it and still wait for pages will not happen."""
    for step in [s for s in core.waiting_steps if sequence.id in s.appends]:
        _refuse(core, step, ProtocolError(why))


def _refuse_if_busy(core: SwapCore, sequence: Sequence, count: int) -> None:
    name = sequence.id
    if count < 0:
        raise ProtocolError(f"appending {count} tokens to sequence {name!r}: give 0 or more")
    if sequence.finishing:
        raise ProtocolError(f"sequence {name!r} is finishing: it takes part in no forward")
    if sequence.step is not None or any(name in s.appends for s in core.waiting_steps):
        raise ProtocolError(f"sequence {name!r} is in a forward already: end that one first")
    if sequence.goal is Goal.EVICTED:
        raise KVEvicted(
            f"sequence {name!r} has no KV ({sequence.tokens} tokens were dropped): reset it, run them again"
        )
    if sequence.goal is not Goal.ACTIVE and not may_begin(sequence):
        raise ProtocolError(f"sequence {name!r} is {sequence.goal.value}: restore it before the forward")
    if count and is_gated(sequence) and not _owns_tail(core, sequence):
        raise ProtocolError(
            f"sequence {name!r} shares its tail: await the whole restore before a forward appends to it"
        )
    if sequence.tokens + count > sequence.max_tokens:
        raise ProtocolError(
            f"sequence {name!r} has {sequence.tokens} tokens, {count} more exceed its max_tokens={sequence.max_tokens}: "
            "register it with a larger max_tokens"
        )


def may_begin(sequence: Sequence) -> bool:
    """Whether a forward may begin while the sequence is being restored: on open gates, or reading in the host tier."""
    work = sequence.restore
    return work is not None and bool(sequence.spilled or (work.granted and not work.spilled))


def is_gated(sequence: Sequence) -> bool:
    """Whether a forward over the sequence waits for layers of its restore."""
    return sequence.restore is not None and not sequence.spilled


def needed(core: SwapCore, appends: Mapping[SeqId, int], group: GroupId) -> int:
    """New pages of `group` that a forward takes, private copies of shared tails included.

    Of the sequences that share a tail, the last one to part with it needs no copy.
    """
    layout = core.layout
    pages = 0
    sharers: dict[ChunkId, int] = {}
    for name, count in appends.items():
        if count == 0:
            continue
        sequence = core.sequences[name]
        pages += layout.pages_for(sequence.tokens + count) - layout.pages_for(sequence.tokens)
        tail = edit.open_tail(core, sequence, group)
        if tail is not None:
            left = sharers.setdefault(tail.id, len(tail.refs))
            if left > 1 and edit.costs_copy(core, tail, sequence):
                pages += layout.pages_for(edit.tokens_in(core, sequence, tail)) - tail.first_live
            sharers[tail.id] = left - 1
    return pages


def _owns_tail(core: SwapCore, sequence: Sequence) -> bool:
    """Whether appending needs no copy of a shared tail."""
    tails = [edit.open_tail(core, sequence, group) for group in core.groups()]
    return all(t is None or (len(t.refs) == 1 and t.tokens == edit.tokens_in(core, sequence, t)) for t in tails)


def _lack(core: SwapCore, step: Step) -> dict[GroupId, int]:
    """Pages by group that are missing for `step`; empty: it can be granted."""
    lack = {}
    for group in core.groups():
        missing = needed(core, step.appends, group) - core.ledger.available(group)
        if missing > 0:
            lack[group] = missing
    return lack


def _may_come(core: SwapCore, lack: dict[GroupId, int]) -> bool:
    """Whether what is missing is on its way, or held by partial restores that can be revoked."""
    for group, missing in lack.items():
        held = sum(c.num_live for s in turns.partial(core) for c in turns.held_chunks(core, s) if c.group == group)
        if missing > core.coming(group) + held:
            return False
    return True


def _revoke_one(core: SwapCore, lack: dict[GroupId, int]) -> bool:
    """Take back the pages of the partial restore that is last in the queue, unless enough are on their way."""
    if all(missing <= core.coming(group) for group, missing in lack.items()):
        return False
    for sequence in turns.partial(core):
        if any(chunk.group in lack for chunk in turns.held_chunks(core, sequence)):
            turns.revoke(core, sequence)
            return True
    return False


def _exhausted(core: SwapCore, step: Step, lack: dict[GroupId, int]) -> PagesExhausted:
    core.counters["pages_exhausted"] += 1
    missing = ", ".join(f"{pages} of layer group {group}" for group, pages in lack.items())
    return PagesExhausted(
        f"forward {step.id} over {list(step.appends)} lacks pages ({missing}) and none are on their way: preempt or "
        "finish a sequence, then ask again"
    )


def _refuse(core: SwapCore, step: Step, cause: Exception) -> None:
    core.waiting_steps.remove(step)
    del core.steps[step.id]
    core.emit(StepRefused(step.id, cause))


def _grant(core: SwapCore, step: Step) -> None:
    """Hand out the pages and pin the sequences."""
    step.granted = True
    after: list[Fence] = []
    for name, count in step.appends.items():
        sequence = core.sequences[name]
        sequence.step = step.id
        if sequence.fresh:
            sequence.fresh = False
            _take_over(core, sequence)
        if is_gated(sequence):
            restore.gate(core, sequence)
        spill.pin(core, step, sequence)
        for group in core.groups():
            after.extend(_grow(core, sequence, count, group))
    core.emit(StepGranted(step.id, latest(after)))


def _take_over(core: SwapCore, sequence: Sequence) -> None:
    """The first forward after a restore makes its chunks resident."""
    for chunk in sequence.live_chunks():
        if chunk.state is ChunkState.GPU_READY:
            core.move(chunk, ChunkEvent.READ)


def _grow(core: SwapCore, sequence: Sequence, count: int, group: GroupId) -> tuple[Fence, ...]:
    """Give the sequence pages for `count` more tokens; the answer is what a writer of them waits for."""
    if count == 0:
        return ()
    layout, chunks = core.layout, sequence.chunks[group]
    tail = edit.open_tail(core, sequence, group)
    after: Iterable[Fence] = () if tail is None else _make_writable(core, sequence, tail)
    total = layout.pages_for(sequence.tokens + count)
    position = layout.pages_for(sequence.tokens)
    after = list(after)
    while position < total:
        index = position // layout.chunk_pages
        if index == len(chunks):
            chunks.append(core.new_chunk(group, index, sequence))
        chunk = chunks[index]
        assert chunk is not None
        size = min(total, (index + 1) * layout.chunk_pages) - position
        pages = core.ledger.allocate(group, chunk.id, size)
        chunk.pages[chunk.held : chunk.held + size] = pages
        chunk.held += size
        sequence.tables[group].put(position, pages)
        after.extend(core.ledger.before_write(pages, Lane.COMPUTE))
        position += size
    return tuple(after)


def _make_writable(core: SwapCore, sequence: Sequence, tail: Chunk) -> tuple[Fence, ...]:
    """Make the begun chunk the sequence's own, as long as the sequence is: copied if others need it, cut if it was longer.

    The answer is what a writer of it waits for; while it is being restored, the gates of its layers say that.
    """
    tokens = edit.tokens_in(core, sequence, tail)
    if len(tail.refs) > 1 and not edit.costs_copy(core, tail, sequence):
        tail = edit.take_from(core, tail, sequence)
    if len(tail.refs) == 1:
        edit.shorten(core, tail, tokens)
        if is_gated(sequence):
            return ()
        return core.ledger.before_write(tail.pages[tail.held - 1 : tail.held], Lane.COMPUTE)
    own = core.new_chunk(tail.group, tail.index, sequence)
    end = core.layout.pages_for(tokens)
    own.tokens, own.held, own.first_live = tokens, end, tail.first_live
    own.pages[own.first_live : end] = core.ledger.allocate(tail.group, own.id, own.num_live)
    source, target = tail.pages[tail.first_live : end].copy(), own.live_pages().copy()
    after = core.ledger.before_read(source, Lane.COMPUTE) + core.ledger.before_write(target, Lane.COMPUTE)
    fence = core.clock.issue(Lane.COMPUTE)
    core.ledger.note_read(fence, source)
    core.ledger.note_write(fence, target)
    assert sequence.step is not None
    core.emit(ClonePages(sequence.step, fence, tail.group, source, target, latest(after)))
    sequence.chunks[tail.group][tail.index] = own
    sequence.tables[tail.group].put(tail.index * core.layout.chunk_pages + own.first_live, target)
    core.counters["tails_copied_on_write"] += 1
    edit.unref(core, tail, sequence)
    return ()


def _granted(core: SwapCore, name: StepId) -> Step:
    step = core.steps.get(name)
    if step is None or not step.granted:
        raise ProtocolError(f"forward {name} is not under way: begin it and await its pages first")
    return step


def _close(core: SwapCore, step: Step) -> Fence:
    """Fence every page that the forward reads."""
    del core.steps[step.id]
    fence = core.clock.issue(Lane.COMPUTE)
    core.emit(RecordFence(step.id, fence))
    spill.unpin(step, fence)
    for name in step.appends:
        for pages in _pages_by_group(core, core.sequences[name]):
            core.ledger.note_read(fence, pages)
    return fence


def _pages_by_group(core: SwapCore, sequence: Sequence) -> list[PhysicalPages]:
    """The device pages of the sequence, group by group."""
    tables = (sequence.tables[group].pages for group in core.groups())
    return [pages[pages >= 0] if len(pages) and pages.min() < 0 else pages for pages in tables]


def _commit(core: SwapCore, sequence: Sequence, count: int, fence: Fence) -> None:
    """`count` more tokens are written, all of them in the last chunks of each group."""
    if count == 0:
        return
    layout = core.layout
    first_page = sequence.tokens // layout.page_size
    first_chunk = sequence.tokens // layout.chunk_tokens
    sequence.tokens += count
    for group in core.groups():
        core.ledger.note_write(fence, sequence.tables[group].pages[first_page:])
        for chunk in sequence.chunks[group][first_chunk:]:
            assert chunk is not None
            core.move(chunk, ChunkEvent.APPEND)
            chunk.tokens = edit.tokens_in(core, sequence, chunk)


def _after(core: SwapCore, step: Step) -> None:
    """The pins are gone: what waited for that goes on."""
    for name in step.appends:
        sequence = core.sequences[name]
        if is_gated(sequence):
            for table in sequence.tables:
                table.cut(0)
        if sequence.restore is not None:
            restore.settle(core, sequence)
        if sequence.spilled:
            for chunk in sequence.live_chunks():
                offload.let_leave(core, chunk)
        if sequence.finishing:
            edit.leave(core, sequence)
