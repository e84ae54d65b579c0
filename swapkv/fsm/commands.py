"""What the core decides: copies to submit, fences to record, and news for those who wait."""

from enum import Enum
from typing import TypeAlias

import attrs

from swapkv.ids import ChunkId, Fence, GroupId, HostOffset, Lane, LayerId, OpId, PhysicalPages, SeqId, StepId


@attrs.frozen(eq=False)
class CopyItem:
    """One chunk's part of a copy: its pages `[first, first + len(pages))` on the device and in its host slot.

    Checksums are by plane, layer by layer; empty: not asked for. Of an H2D copy, `checksums` is what the pages
    `[guard_first, guard_first + guard_pages)` of the slot must hash to. Of a D2H copy, `checksums` is the hash of the
    pages before `first`, which the first `sealed` of its pages continue for good and the others for now: so bytes that
    were copied earlier are never hashed anew, and what has happened to them since is found.
    """

    chunk: ChunkId
    pages: PhysicalPages
    first: int
    host: HostOffset
    guard_first: int
    guard_pages: int
    checksums: tuple[int, ...] = ()
    sealed: int = 0


@attrs.frozen(eq=False)
class Copy:
    """Copy `items` × `layers` on `lane` (OUT: device to host, IN: host to device) once the fences `after` have passed.

    The driver answers with `CopyDone`, `CopyFailed` or `CopyRejected`, once; `fence` passes with that answer.
    """

    op: OpId
    lane: Lane
    fence: Fence
    sequence: SeqId
    group: GroupId
    layers: tuple[LayerId, ...]
    items: tuple[CopyItem, ...]
    after: tuple[Fence, ...]
    num_bytes: int


@attrs.frozen(eq=False)
class ClonePages:
    """Copy device pages on the compute stream of `step`, before its forward; then `fence` has been reached.

    The driver answers with `FencePassed`.
    """

    step: StepId
    fence: Fence
    group: GroupId
    source: PhysicalPages
    target: PhysicalPages
    after: tuple[Fence, ...]


@attrs.frozen
class RecordFence:
    """Record `fence` on the compute stream of the step that ends. The driver answers with `FencePassed`."""

    step: StepId
    fence: Fence


@attrs.frozen
class StepGranted:
    """The step has its pages. Its stream waits for `after` before it writes to them."""

    step: StepId
    after: tuple[Fence, ...]


@attrs.frozen
class StepRefused:
    """The step will not get its pages, because a sequence that it names is gone or has left the device."""

    step: StepId
    cause: Exception


class PreemptOutcome(Enum):
    """How a preempt ended."""

    OFFLOADED = "offloaded"
    RECOMPUTE = "recompute"
    """The host tier is full: the KV was dropped, the sequence's tokens have to be run again."""


@attrs.frozen
class Parked:
    """The sequence is off the device and its pages have been given back."""

    sequence: SeqId
    outcome: PreemptOutcome


@attrs.frozen
class Spilled:
    """The chunks that were to leave are off the device, and the sequence runs on without them there."""

    sequence: SeqId


@attrs.frozen
class ParkUndone:
    """The preempt or spill was cancelled (`cause` None) or failed; the sequence is on the device as before."""

    sequence: SeqId
    cause: Exception | None


@attrs.frozen
class LayerReady:
    """The KV of `layer` is on the device, verified."""

    sequence: SeqId
    layer: LayerId


@attrs.frozen
class PagesReady:
    """Every page of the restore is there; copies are on their way."""

    sequence: SeqId


@attrs.frozen
class Restored:
    """The sequence is on the device, and its page table shows it."""

    sequence: SeqId


@attrs.frozen
class LayersLost:
    """The restore is being undone: layers that have not been told as ready will not come. `RestoreUndone` follows."""

    sequence: SeqId
    cause: Exception | None


@attrs.frozen
class RestoreUndone:
    """The restore was cancelled (`cause` None) or failed; the sequence is off the device as before.

    `voided_tokens`: tokens that a gated step had appended meanwhile and that were taken back.
    """

    sequence: SeqId
    cause: Exception | None
    voided_tokens: int


@attrs.frozen
class Gone:
    """The sequence is finished and nothing touches its memory any more."""

    sequence: SeqId


@attrs.frozen
class WakeAt:
    """Send a `Tick` at this time, at the latest. Only the earliest has to be kept: each tick tells what comes next."""

    at_ns: int


Command: TypeAlias = (
    Copy
    | ClonePages
    | RecordFence
    | StepGranted
    | StepRefused
    | Parked
    | Spilled
    | ParkUndone
    | LayerReady
    | PagesReady
    | Restored
    | LayersLost
    | RestoreUndone
    | Gone
    | WakeAt
)
