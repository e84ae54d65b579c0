"""What the core remembers: chunks and their tier copies, sequences, and the work under way."""

from collections import deque
from enum import Enum

import attrs
import numpy as np

from swapkv.fsm.transitions import ON_DEVICE, ChunkState
from swapkv.ids import ChunkId, Fence, GroupId, HostOffset, Lane, OpId, PhysicalPages, SeqId, StepId

NO_PAGE = -1


def no_pages(count: int) -> PhysicalPages:
    """`count` places without a page."""
    return np.full(count, NO_PAGE, dtype=np.int64)


@attrs.define(eq=False)
class TierCopy:
    """A chunk's copy in the host tier.

    The first `tokens` tokens of the slot equal the device's, as of the chunk's `generation`. Checksums are by plane of
    the group: `checksums` over the slot's pages `[guard_first, guard_first + guard_pages)`, `sealed_checksums` over
    those before `sealed_pages`, which will not be copied again.

    `version`: another one whenever the slot may hold other bytes. `readers`: forwards under way that read the slot;
    `read`: the last one that has ended.
    """

    offset: HostOffset | None = None
    tokens: int = 0
    generation: int = 0
    checksums: list[int] = attrs.field(factory=list)
    sealed_checksums: list[int] = attrs.field(factory=list)
    sealed_pages: int = 0
    guard_first: int = 0
    guard_pages: int = 0
    version: int = 0
    readers: int = 0
    read: Fence | None = None


@attrs.define(eq=False)
class Chunk:
    """A run of consecutive logical pages of one layer group: the unit of state, transfer, checksum and storage.

    `pages[i]`: the device page of the chunk's page `i`, NO_PAGE where there is none; `held` of them are in use, of
    which the first `first_live` have been given back (they fell behind the window). `generation` counts how often
    written tokens were taken back, so that a copy made before is never taken for clean after. `fill_after`: what had
    touched the pages when they were granted; the copies that fill them wait for that.
    """

    id: ChunkId
    group: GroupId
    index: int
    pages: PhysicalPages
    state: ChunkState = ChunkState.GPU_RESIDENT
    tokens: int = 0
    held: int = 0
    first_live: int = 0
    generation: int = 0
    copy: TierCopy = attrs.field(factory=TierCopy)
    refs: dict[SeqId, None] = attrs.field(factory=dict)
    ops: set[OpId] = attrs.field(factory=set)
    landed: int = 0
    fill_after: tuple[Fence, ...] = ()
    aborting: bool = False

    @property
    def num_live(self) -> int:
        """Device pages in use."""
        return max(0, self.held - self.first_live)

    @property
    def clean(self) -> bool:
        """Whether the host copy holds every token as it is: dropping the device pages costs nothing."""
        copy = self.copy
        return copy.offset is not None and copy.generation == self.generation and copy.tokens >= self.tokens

    @property
    def on_device(self) -> bool:
        return self.state in ON_DEVICE

    def live_pages(self) -> PhysicalPages:
        """The device pages in use, in logical order."""
        return self.pages[self.first_live : self.held]


class PageTable:
    """A sequence's device pages of one group, by logical page; grows at the end."""

    def __init__(self) -> None:
        self._buffer = no_pages(16)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def pages(self) -> PhysicalPages:
        """All pages, NO_PAGE where there is none. A view: copy it to keep it."""
        return self._buffer[: self._length]

    def put(self, first: int, pages: PhysicalPages) -> None:
        """Set the pages from logical page `first` on."""
        end = first + len(pages)
        while end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer, no_pages(len(self._buffer))))
        self._buffer[first:end] = pages
        self._length = max(self._length, end)

    def clear(self, first: int, count: int) -> None:
        """Forget the pages `[first, first + count)`, as far as the table goes."""
        self.pages[first : first + count] = NO_PAGE

    def cut(self, length: int) -> None:
        """Forget the pages from `length` on."""
        self._buffer[length : self._length] = NO_PAGE
        self._length = min(length, self._length)

    def clone(self) -> "PageTable":
        twin = PageTable()
        twin.put(0, self.pages)
        return twin


class Goal(Enum):
    """What the caller wants of a sequence: an intent. Its state is derived from its chunks."""

    ACTIVE = "active"
    PARKING = "parking"
    PARKED = "parked"
    RESTORING = "restoring"
    EVICTED = "evicted"
    GONE = "gone"

    __hash__ = object.__hash__


@attrs.define(eq=False)
class Offload:
    """One `preempt` or `spill` under way: every chunk in `leaving` gets a clean copy, then all leave in one step.

    `spill`: how many chunks of the sequence will be read in the host tier from then on; None: it stops running.
    """

    goal_before: Goal
    spill: int | None = None
    leaving: list[Chunk] = attrs.field(factory=list)
    segments: deque["Segment"] = attrs.field(factory=deque)
    ops: set[OpId] = attrs.field(factory=set)
    undoing: bool = False
    cause: Exception | None = None


@attrs.define(eq=False)
class Restore:
    """One `restore` under way: its chunks get pages, are filled, and are published in one step.

    `chunks`: those that were not on the device. `waiting`: of these, the ones that lack pages. `joined`: those whose
    end of an earlier offload or restore has to be awaited first. `segments`: granted, not yet submitted.
    `layer_missing[l]`: chunks of which layer `l` has not landed. `base_tokens`: the length to fall back to if it fails.
    `gated`: when a forward began that waits for its layers (None: none has). `spilled`: chunks that stay in the host
    tier, as in `Sequence`.
    """

    priority: int
    arrival: int
    arrived_ns: int
    base_tokens: int
    layer_missing: list[int]
    spilled: int = 0
    chunks: list[Chunk] = attrs.field(factory=list)
    waiting: deque[Chunk] = attrs.field(factory=deque)
    joined: dict[ChunkId, Chunk] = attrs.field(factory=dict)
    segments: deque["Segment"] = attrs.field(factory=deque)
    ops: set[OpId] = attrs.field(factory=set)
    inflight_bytes: int = 0
    voided_tokens: int = 0
    pages_told: bool = False
    layers_told: int = 0
    undoing: bool = False
    revoking: bool = False
    gated: int | None = None
    cause: Exception | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it is neither being undone nor giving its pages back."""
        return not (self.undoing or self.revoking)

    @property
    def granted(self) -> bool:
        """Whether every chunk has its pages."""
        return self.goes_on and not (self.waiting or self.joined)


@attrs.define(eq=False)
class Sequence:
    """One request's KV. `chunks[g][i]` is None once the chunk fell behind the window of group `g`.

    `behind[g]`: the first chunk that did not. `step`: the forward that pins it. `fresh`: restored, and no forward since.
    `step_tokens`: the most tokens that one forward adds. `spilled`: of each group without a window so many chunks, the
    first ones, may be off the device while the sequence runs: its forwards read them in the host tier.
    """

    id: SeqId
    priority: int
    max_tokens: int
    step_tokens: int
    chunks: list[list[Chunk | None]]
    tables: list[PageTable]
    behind: list[int]
    goal: Goal = Goal.ACTIVE
    tokens: int = 0
    step: StepId | None = None
    finishing: bool = False
    fresh: bool = False
    offload: Offload | None = None
    restore: Restore | None = None
    preemptions: int = 0
    restored_ns: int | None = None
    spilled: int = 0

    def live_chunks(self) -> list[Chunk]:
        """Every chunk that is still held, group by group."""
        return [chunk for chunks in self.chunks for chunk in chunks if chunk is not None]


@attrs.define(eq=False)
class Segment:
    """A chunk range × layer range of one group, not yet submitted. Layers are positions within the group."""

    group: GroupId
    chunks: list[Chunk]
    low: int
    high: int
    num_bytes: int


@attrs.define(eq=False)
class Op:
    """A copy command that was submitted and is not over.

    `firsts`, `tokens`, `generations`: of each chunk, when it was submitted. `dropped`: chunks that have been taken out
    of its hands. `hung`: past its deadline; its owner has given it up.
    """

    id: OpId
    lane: Lane
    fence: Fence
    sequence: SeqId
    group: GroupId
    chunks: list[Chunk]
    firsts: list[int]
    low: int
    high: int
    num_bytes: int
    submitted_ns: int
    after: tuple[Fence, ...] = ()
    tokens: list[int] = attrs.field(factory=list)
    generations: list[int] = attrs.field(factory=list)
    dropped: set[ChunkId] = attrs.field(factory=set)
    hung: bool = False


@attrs.define(eq=False)
class Step:
    """A forward pass. Waiting until `granted`; then its sequences are pinned until it ends.

    `streamed`: chunks that it reads in the host tier.
    """

    id: StepId
    appends: dict[SeqId, int]
    granted: bool = False
    void: set[SeqId] = attrs.field(factory=set)
    arrived_ns: int = 0
    streamed: list[Chunk] = attrs.field(factory=list)
