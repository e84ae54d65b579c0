"""The life of a sequence apart from moving: register, fork, truncate, evict, finish, and what falls behind a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkv.budget import admission
from swapkv.errors import KVEvicted, ProtocolError
from swapkv.fsm import events, offload, restore, spill, steps
from swapkv.fsm.commands import Gone
from swapkv.fsm.records import NO_PAGE, Chunk, Goal, PageTable, Sequence, no_pages
from swapkv.fsm.transitions import SETTLED, ChunkEvent
from swapkv.ids import GroupId, SeqId

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def register(core: SwapCore, event: events.Register) -> None:
    """Take in a new sequence, unless the pool could not hold it even alone."""
    step_tokens = event.max_tokens if event.step_tokens is None else event.step_tokens
    if event.max_tokens < 1 or step_tokens < 1:
        raise ProtocolError(
            f"sequence {event.sequence!r}: max_tokens={event.max_tokens} and step_tokens={step_tokens} must be at least 1"
        )
    _add(core, event.sequence, event.max_tokens, step_tokens, event.priority)


def fork(core: SwapCore, event: events.Fork) -> None:
    """Share the parent's chunks with a new sequence; whoever appends first to a begun one gets a copy of its own."""
    parent = core.sequence(event.parent)
    refuse_unless_settled(parent, "forked")
    if event.max_tokens < parent.tokens:
        raise ProtocolError(f"max_tokens={event.max_tokens} is less than the parent's {parent.tokens} tokens")
    longest = max(parent.max_tokens, event.max_tokens)
    need = admission.peak_need(core.layout, longest, parent.step_tokens)
    _refuse_what_never_fits(core, event.child, admission.need_while_shared(core.layout, need))
    at_once = parent.step_tokens == parent.max_tokens
    step_tokens = event.max_tokens if at_once else min(parent.step_tokens, event.max_tokens)
    child = _add(core, event.child, event.max_tokens, step_tokens, event.priority)
    child.tokens, child.goal, child.fresh = parent.tokens, parent.goal, parent.fresh
    child.chunks = [list(chunks) for chunks in parent.chunks]
    child.tables = [table.clone() for table in parent.tables]
    child.behind, child.spilled = list(parent.behind), parent.spilled
    for chunk in child.live_chunks():
        chunk.refs[child.id] = None


def truncate(core: SwapCore, event: events.Truncate) -> None:
    """Take tokens back, such as drafts that were rejected."""
    sequence = core.sequence(event.sequence)
    refuse_unless_settled(sequence, "truncated")
    if not 0 <= event.tokens <= sequence.tokens:
        raise ProtocolError(f"tokens={event.tokens} is not within the 0 to {sequence.tokens} of {sequence.id!r}")
    _refuse_behind_window(core, sequence, event.tokens)
    _refuse_spilled(core, sequence, event.tokens)
    steps.refuse_waiting(core, sequence, f"sequence {sequence.id!r} was truncated while its forward waited for pages")
    cut_tokens(core, sequence, event.tokens)


def evict(core: SwapCore, event: events.Evict) -> None:
    """Drop the KV of a sequence that is at rest."""
    sequence = core.sequence(event.sequence)
    refuse_unless_settled(sequence, "evicted")
    steps.refuse_waiting(core, sequence, f"sequence {sequence.id!r} was evicted while its forward waited for pages")
    drop_kv(core, sequence)


def reset(core: SwapCore, event: events.Reset) -> None:
    """Let an evicted sequence begin anew."""
    sequence = core.sequence(event.sequence)
    if sequence.goal is not Goal.EVICTED:
        raise ProtocolError(f"sequence {sequence.id!r} has its KV ({sequence.tokens} tokens): evict it before a reset")
    sequence.tokens = 0
    sequence.goal = Goal.ACTIVE
    sequence.fresh = False


def finish(core: SwapCore, event: events.Finish) -> None:
    """The request is over, in whatever state it is. What is in flight ends first; then its memory is free."""
    sequence = core.sequence(event.sequence)
    steps.refuse_waiting(core, sequence, f"sequence {sequence.id!r} was finished while its forward waited for pages")
    sequence.finishing = True
    if sequence.step is None:
        leave(core, sequence)


def leave(core: SwapCore, sequence: Sequence) -> None:
    """Undo what is under way for a finished sequence, then forget it."""
    if sequence.offload is not None:
        offload.undo(core, sequence, None)
        offload.settle(core, sequence)
    if sequence.restore is not None:
        restore.undo(core, sequence, None)
        restore.settle(core, sequence)
    bury_if_over(core, sequence)


def bury_if_over(core: SwapCore, sequence: Sequence) -> None:
    """Forget a finished sequence once nothing is under way for it."""
    busy = sequence.step is not None or sequence.offload is not None or sequence.restore is not None
    if not sequence.finishing or busy or core.sequences.get(sequence.id) is not sequence:
        return
    _unref_all(core, sequence)
    sequence.goal = Goal.GONE
    del core.sequences[sequence.id]
    core.emit(Gone(sequence.id))


def drop_kv(core: SwapCore, sequence: Sequence) -> None:
    """The sequence's KV is gone; what it shares stays with the others."""
    core.counters["evictions"] += 1
    core.counters["evicted_tokens"] += sequence.tokens
    sequence.goal = Goal.EVICTED
    sequence.spilled = 0
    _unref_all(core, sequence)


def cut_tokens(core: SwapCore, sequence: Sequence, tokens: int) -> None:
    """Forget the tokens from position `tokens` on, and the pages beyond them."""
    layout = core.layout
    sequence.tokens = tokens
    whole, rest = divmod(tokens, layout.chunk_tokens)
    for group in core.groups():
        chunks = sequence.chunks[group]
        while len(chunks) > whole + bool(rest):
            gone = chunks.pop()
            if gone is not None:
                unref(core, gone, sequence)
        sequence.behind[group] = min(sequence.behind[group], len(chunks))
        tail = chunks[whole] if rest else None
        if tail is not None and len(tail.refs) == 1:
            shorten(core, tail, rest)
        sequence.tables[group].cut(layout.pages_for(tokens))


def shorten(core: SwapCore, chunk: Chunk, tokens: int) -> None:
    """The chunk holds only `tokens` tokens from now on; a copy made before is clean at most up to there."""
    if chunk.tokens > tokens:
        core.move(chunk, ChunkEvent.TRUNCATE)
        chunk.tokens = tokens
        chunk.generation += 1
        chunk.copy.tokens = min(chunk.copy.tokens, tokens)
        chunk.copy.generation = chunk.generation
    pages = core.layout.pages_for(tokens)
    if chunk.held > pages:
        core.ledger.release(chunk.group, chunk.pages[pages : chunk.held].copy())
        chunk.pages[pages : chunk.held] = NO_PAGE
        chunk.held = pages


def tidy(core: SwapCore, sequence: Sequence) -> None:
    """Let go of pages that a sequence at rest on the device will not use again: behind the window, and those beyond its
    last token that a chunk kept for others who shared it.
    """
    running = sequence.goal is Goal.ACTIVE or (sequence.goal is Goal.RESTORING and sequence.spilled)
    if not running or sequence.step is not None:
        return
    trim_window(core, sequence)
    for group in core.groups():
        tail = open_tail(core, sequence, group)
        if tail is not None and len(tail.refs) == 1:
            shorten(core, tail, tokens_in(core, sequence, tail))


def trim_window(core: SwapCore, sequence: Sequence) -> None:
    """Let go of pages that no later token will read."""
    for group in core.groups():
        if core.layout.groups[group].window is not None:
            _trim(core, sequence, group, core.layout.first_needed_page(group, sequence.tokens))


def open_tail(core: SwapCore, sequence: Sequence, group: GroupId) -> Chunk | None:
    """The chunk that the next token goes into, if it has been begun."""
    if sequence.tokens % core.layout.chunk_tokens == 0:
        return None
    return sequence.chunks[group][sequence.tokens // core.layout.chunk_tokens]


def tokens_in(core: SwapCore, sequence: Sequence, chunk: Chunk) -> int:
    """How many of the sequence's tokens lie in `chunk`."""
    return max(0, min(core.layout.chunk_tokens, sequence.tokens - chunk.index * core.layout.chunk_tokens))


def costs_copy(core: SwapCore, chunk: Chunk, sequence: Sequence) -> bool:
    """Whether the others that share `chunk` need it where it is, so that the sequence can only get a copy of it."""
    return len(chunk.refs) > 1 and not (chunk.clean and offload.may_leave(core, chunk, sequence))


def take_from(core: SwapCore, chunk: Chunk, sequence: Sequence) -> Chunk:
    """Split a shared chunk: the sequence keeps the device pages, the others the host copy."""
    own = core.new_chunk(chunk.group, chunk.index, sequence)
    own.tokens, own.held, own.first_live = chunk.tokens, chunk.held, chunk.first_live
    own.pages[:] = chunk.pages
    core.ledger.hand_over(own.live_pages(), own.id)
    core.move(chunk, ChunkEvent.OFFLOAD)
    core.move(chunk, ChunkEvent.COMMIT_OFFLOAD)
    chunk.pages[: chunk.held] = NO_PAGE
    chunk.held = 0
    del chunk.refs[sequence.id]
    spill.hide(core, chunk)
    sequence.chunks[chunk.group][chunk.index] = own
    return own


def unref(core: SwapCore, chunk: Chunk, sequence: Sequence) -> None:
    """The sequence does not need the chunk any more; without any other it is dropped."""
    del chunk.refs[sequence.id]
    if len(chunk.refs) == 1:
        tidy(core, core.sequences[next(iter(chunk.refs))])
    if chunk.refs:
        offload.let_leave(core, chunk)
        return
    core.move(chunk, ChunkEvent.DROP)
    if chunk.held:
        core.give_back_pages(chunk)
    core.free_slot(chunk)
    del core.chunks[chunk.id]


def refuse_unless_settled(sequence: Sequence, what: str) -> None:
    """Raise `ProtocolError` if the sequence is in a forward, on its way, or gone."""
    if sequence.finishing or sequence.step is not None:
        why = "finishing" if sequence.finishing else f"in forward {sequence.step}"
        raise ProtocolError(f"sequence {sequence.id!r} is {why}: it cannot be {what} now")
    if sequence.goal is Goal.EVICTED:
        raise KVEvicted(f"sequence {sequence.id!r} has no KV: reset it before it is {what}")
    if sequence.goal not in (Goal.ACTIVE, Goal.PARKED):
        raise ProtocolError(
            f"sequence {sequence.id!r} is {sequence.goal.value}: await or cancel that, then it can be {what}"
        )


def _add(core: SwapCore, name: SeqId, max_tokens: int, step_tokens: int, priority: int) -> Sequence:
    if name in core.sequences:
        raise ProtocolError(f"sequence {name!r} is registered already: finish it first or choose another name")
    _refuse_what_never_fits(core, name, admission.peak_need(core.layout, max_tokens, step_tokens))
    sequence = Sequence(
        id=name,
        priority=priority,
        max_tokens=max_tokens,
        step_tokens=step_tokens,
        chunks=[[] for _ in core.groups()],
        tables=[PageTable() for _ in core.groups()],
        behind=[0 for _ in core.groups()],
    )
    core.sequences[name] = sequence
    return sequence


def _refuse_what_never_fits(core: SwapCore, name: SeqId, need: admission.Need) -> None:
    totals = [core.ledger.total(g) - core.ledger.quarantined(g) for g in core.groups()]
    admission.refuse_what_never_fits(name, need, totals, core.host.total, core.config.host_full)


def _refuse_behind_window(core: SwapCore, sequence: Sequence, tokens: int) -> None:
    for group in core.groups():
        window = core.layout.groups[group].window
        behind = sequence.behind[group]
        if window is None or not sequence.chunks[group]:
            continue
        first = behind * core.layout.chunk_pages
        tail = sequence.chunks[group][behind] if behind < len(sequence.chunks[group]) else None
        first += tail.first_live if tail is not None else 0
        if max(0, tokens - window) // core.layout.page_size < first:
            raise ProtocolError(
                f"sequence {sequence.id!r} cut to {tokens} tokens would read behind the window of {window} tokens, where "
                f"pages were let go: set truncate_slack={core.layout.truncate_slack} of the layout higher"
            )


def _refuse_spilled(core: SwapCore, sequence: Sequence, tokens: int) -> None:
    spilled_tokens = sequence.spilled * core.layout.chunk_tokens
    if tokens < spilled_tokens:
        raise ProtocolError(
            f"sequence {sequence.id!r} cut to {tokens} tokens would end in the {spilled_tokens} that are spilled: restore "
            "it, at least from there on, then truncate"
        )


def _trim(core: SwapCore, sequence: Sequence, group: GroupId, first_page: int) -> None:
    chunk_pages = core.layout.chunk_pages
    chunks, table = sequence.chunks[group], sequence.tables[group]
    while (sequence.behind[group] + 1) * chunk_pages <= first_page:
        index = sequence.behind[group]
        chunk = chunks[index]
        chunks[index] = None
        table.put(index * chunk_pages, no_pages(chunk_pages))
        sequence.behind[group] = index + 1
        if chunk is not None:
            unref(core, chunk, sequence)
    index = sequence.behind[group]
    chunk = chunks[index] if index < len(chunks) else None
    keep = first_page - index * chunk_pages
    if chunk is None or keep <= chunk.first_live or len(chunk.refs) > 1 or chunk.state not in SETTLED:
        return
    core.ledger.release(group, chunk.pages[chunk.first_live : keep].copy())
    chunk.pages[chunk.first_live : keep] = NO_PAGE
    table.put(index * chunk_pages + chunk.first_live, no_pages(keep - chunk.first_live))
    chunk.first_live = keep


def _unref_all(core: SwapCore, sequence: Sequence) -> None:
    chunks = sequence.live_chunks()
    sequence.chunks = [[] for _ in core.groups()]
    sequence.behind = [0 for _ in core.groups()]
    for table in sequence.tables:
        table.cut(0)
    for chunk in chunks:
        unref(core, chunk, sequence)
