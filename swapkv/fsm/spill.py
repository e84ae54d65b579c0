"""Running with KV in the host tier: which chunks a sequence needs on the device, and who reads the others where they are.

A *spilled* sequence runs although its first chunks may be off the device. Its page tables have no page for them; its
forwards read the clean host copies, which nobody may write to until the device is past those forwards. Layers with a
window and the chunk that the next token goes into are always on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapkv.errors import ProtocolError
from swapkv.fsm import events, offload
from swapkv.fsm.records import Chunk, Goal, Sequence, Step
from swapkv.fsm.transitions import ON_DEVICE, ChunkState
from swapkv.ids import Fence

if TYPE_CHECKING:
    from swapkv.fsm.core import SwapCore


def begin(core: SwapCore, event: events.Spill) -> None:
    """Take whole chunks off the device, the first ones, and let the sequence run on without them there."""
    sequence = core.sequence(event.sequence)
    offload.refuse_if_busy(sequence)
    if sequence.goal is not Goal.ACTIVE:
        raise ProtocolError(
            f"sequence {sequence.id!r} is {sequence.goal.value}: restore it with its first tokens spilled instead"
        )
    spilled = max(sequence.spilled, whole_chunks(core, sequence, event.tokens))
    offload.start(core, sequence, spilled)


def whole_chunks(core: SwapCore, sequence: Sequence, tokens: int | None) -> int:
    """How many chunks the first `tokens` tokens of the sequence fill; None: all of its tokens. Raises `ProtocolError`."""
    if tokens is not None and tokens < 0:
        raise ProtocolError(f"spilling {tokens} tokens of sequence {sequence.id!r}: give 0 or more, or None for all")
    most = sequence.tokens if tokens is None else min(tokens, sequence.tokens)
    return most // core.layout.chunk_tokens


def stays(core: SwapCore, chunk: Chunk, spilled: int) -> bool:
    """Whether a sequence that runs with `spilled` chunks in the host tier has `chunk` on the device all the same."""
    return chunk.index >= spilled or core.layout.groups[chunk.group].window is not None


def needs(core: SwapCore, sequence: Sequence, chunk: Chunk) -> bool:
    """Whether the sequence needs `chunk` on the device: for a forward under way, as long as it is active, once it is
    restored, or if its preempt is undone.
    """
    if sequence.step is not None and not (sequence.spilled and absent(chunk)):
        return True
    if sequence.finishing and sequence.step is None:
        return False
    work = sequence.restore
    if work is not None and work.goes_on:
        return stays(core, chunk, work.spilled)
    goal = sequence.goal if sequence.offload is None else sequence.offload.goal_before
    if goal is Goal.ACTIVE or sequence.spilled:
        return stays(core, chunk, sequence.spilled)
    return False


def absent(chunk: Chunk) -> bool:
    """Whether the chunk is not on the device, or not yet."""
    return chunk.state not in ON_DEVICE or chunk.state is ChunkState.PREFETCHING


def show(core: SwapCore, chunk: Chunk) -> None:
    """The chunk has come to the device: spilled sequences read it there from now on."""
    for name in chunk.refs:
        sequence = core.sequences[name]
        if sequence.spilled:
            sequence.tables[chunk.group].put(
                chunk.index * core.layout.chunk_pages + chunk.first_live, chunk.live_pages()
            )


def hide(core: SwapCore, chunk: Chunk) -> None:
    """The chunk leaves the device: spilled sequences read it in the host tier from now on."""
    for name in chunk.refs:
        sequence = core.sequences[name]
        if sequence.spilled:
            sequence.tables[chunk.group].clear(chunk.index * core.layout.chunk_pages, core.layout.chunk_pages)


def streamed(core: SwapCore, sequence: Sequence) -> list[Chunk]:
    """What a forward over the sequence reads in the host tier."""
    if not sequence.spilled:
        return []
    return [chunk for chunk in sequence.live_chunks() if absent(chunk) and not stays(core, chunk, sequence.spilled)]


def streamed_bytes(core: SwapCore, step: Step) -> int:
    """Bytes that a forward reads in the host tier."""
    chunks = (chunk for name in step.appends for chunk in streamed(core, core.sequences[name]))
    return sum(core.layout.page_bytes(chunk.group) * core.layout.chunk_pages for chunk in chunks)


def pin(core: SwapCore, step: Step, sequence: Sequence) -> None:
    """A forward begins: the host copies that it reads stay as they are."""
    chunks = streamed(core, sequence)
    for chunk in chunks:
        assert chunk.clean, f"chunk {chunk.id} is to be read in the host tier without a clean copy"
        chunk.copy.readers += 1
    step.streamed += chunks


def unpin(step: Step, fence: Fence) -> None:
    """The forward was submitted: the host copies that it reads stay until the device is past `fence`."""
    for chunk in step.streamed:
        chunk.copy.readers -= 1
        chunk.copy.read = fence


def is_read(core: SwapCore, chunk: Chunk) -> bool:
    """Whether a forward may still read the chunk's host copy."""
    copy = chunk.copy
    return bool(copy.readers) or (copy.read is not None and not core.clock.passed(copy.read))
