"""What the core is told: wishes of the caller, completions of the device, and time."""

from typing import TypeAlias

import attrs

from swapkv.ids import Fence, OpId, SeqId, StepId


@attrs.frozen
class Register:
    """A new sequence without KV. `step_tokens`: the most tokens one forward will add (None: all at once)."""

    sequence: SeqId
    max_tokens: int
    step_tokens: int | None = None
    priority: int = 0


@attrs.frozen
class BeginStep:
    """A forward pass over the sequences of `appends`, each of which gets room for that many more tokens."""

    step: StepId
    appends: dict[SeqId, int]


@attrs.frozen
class CancelStep:
    """The caller no longer waits for the step's pages."""

    step: StepId


@attrs.frozen
class EndStep:
    """The forward was submitted; the tokens that it appended count from now on."""

    step: StepId


@attrs.frozen
class VoidStep:
    """The forward failed: the tokens that it was to append do not count."""

    step: StepId


@attrs.frozen
class Preempt:
    """Take the sequence off the device."""

    sequence: SeqId


@attrs.frozen
class Spill:
    """Take the first `tokens` tokens (None: all), as far as they fill chunks, off the device; the sequence runs on.

    Its forwards read them in the host tier. Layers with a window keep theirs.
    """

    sequence: SeqId
    tokens: int | None = None


@attrs.frozen
class CancelPreempt:
    """Undo a preempt or a spill that is under way."""

    sequence: SeqId


@attrs.frozen
class BeginRestore:
    """Bring the sequence back. A lower `priority` goes first; None: the one it was registered with.

    `spilled`: so many tokens, the first ones, stay where they are, as after a `Spill`.
    """

    sequence: SeqId
    priority: int | None = None
    spilled: int = 0


@attrs.frozen
class CancelRestore:
    """Undo a restore that is under way."""

    sequence: SeqId


@attrs.frozen
class Evict:
    """Drop the sequence's KV, on the device and in every tier; its tokens will be run again."""

    sequence: SeqId


@attrs.frozen
class Reset:
    """Make an evicted sequence active again, with no tokens."""

    sequence: SeqId


@attrs.frozen
class Fork:
    """A new sequence that shares the KV of `parent`."""

    parent: SeqId
    child: SeqId
    max_tokens: int
    priority: int = 0


@attrs.frozen
class Truncate:
    """Take back every token from position `tokens` on."""

    sequence: SeqId
    tokens: int


@attrs.frozen
class Finish:
    """The request is over; its KV is not needed any more."""

    sequence: SeqId


@attrs.frozen
class CopyDone:
    """A copy is complete and, where asked for, verified.

    `checksums`: of a D2H copy, two for each chunk and then each plane: up to the sealed pages, and up to the last;
    empty without verification. `elapsed_ns`: how long
    the link was busy with it; 0: not measured.
    """

    op: OpId
    checksums: tuple[int, ...] = ()
    elapsed_ns: int = 0


@attrs.frozen
class CopyFailed:
    """A copy failed; it touches no memory any more."""

    op: OpId
    cause: Exception


@attrs.frozen
class CopyRejected:
    """A copy was not even submitted: it has touched nothing and used nothing of the link."""

    op: OpId
    cause: Exception


@attrs.frozen
class FencePassed:
    """The device has reached `fence`."""

    fence: Fence


@attrs.frozen
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Register
    | BeginStep
    | CancelStep
    | EndStep
    | VoidStep
    | Preempt
    | Spill
    | CancelPreempt
    | BeginRestore
    | CancelRestore
    | Evict
    | Reset
    | Fork
    | Truncate
    | Finish
    | CopyDone
    | CopyFailed
    | CopyRejected
    | FencePassed
    | Tick
)
