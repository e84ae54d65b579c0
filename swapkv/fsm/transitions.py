"""The state machine of a chunk, as a table: the only place that defines a transition.

Every pair of a state and an event has an entry: `Go` (the next state), `Ignore` (a late or repeated event that
changes nothing, and why) or `Refuse` (it cannot happen there, and why).
"""

from enum import Enum
from typing import TypeAlias

import attrs

from swapkv.errors import IllegalTransition


class ChunkState(Enum):
    """Where a chunk's KV is. README draws the machine."""

    GPU_RESIDENT = "GPU_RESIDENT"
    """On the device; forward reads it and appends to the tail."""
    OFFLOADING = "OFFLOADING"
    """On the device, a D2H copy may be reading it; nobody writes."""
    OFFLOADED = "OFFLOADED"
    """Off the device; a clean tier copy holds it."""
    PREFETCHING = "PREFETCHING"
    """An H2D copy is filling its device pages; only layers whose gate has opened may be used."""
    GPU_READY = "GPU_READY"
    """On the device again, whole and verified; the next forward makes it GPU_RESIDENT."""
    EVICTED = "EVICTED"
    """Gone: it must be computed again."""

    __hash__ = object.__hash__


class ChunkEvent(Enum):
    """What can happen to a chunk."""

    APPEND = "append"
    READ = "read"
    TRUNCATE = "truncate"
    OFFLOAD = "offload"
    COMMIT_OFFLOAD = "commit offload"
    UNDO_OFFLOAD = "undo offload"
    RESTORE = "restore"
    FILLED = "filled"
    UNDO_RESTORE = "undo restore"
    DROP = "drop"

    __hash__ = object.__hash__


@attrs.frozen
class Go:
    """Move to `state`."""

    state: ChunkState


@attrs.frozen
class Ignore:
    """Stay, change nothing."""

    because: str


@attrs.frozen
class Refuse:
    """Raise `IllegalTransition`."""

    because: str


Entry: TypeAlias = Go | Ignore | Refuse

S, E = ChunkState, ChunkEvent

_OFF_DEVICE = Refuse("it is not on the device: restore it first")
_LEAVING = Refuse("an offload is reading it: cancel or await the offload first")
_COMING = Refuse("a restore is filling it: cancel or await the restore first")
_GONE = Refuse("its KV is gone: compute it again")
_ON_DEVICE = Refuse("it is on the device already")

TABLE: dict[ChunkState, dict[ChunkEvent, Entry]] = {
    S.GPU_RESIDENT: {
        E.APPEND: Go(S.GPU_RESIDENT),
        E.READ: Go(S.GPU_RESIDENT),
        E.TRUNCATE: Go(S.GPU_RESIDENT),
        E.OFFLOAD: Go(S.OFFLOADING),
        E.COMMIT_OFFLOAD: Ignore("the offload was undone before its last copy completed"),
        E.UNDO_OFFLOAD: Ignore("the offload was undone already"),
        E.RESTORE: _ON_DEVICE,
        E.FILLED: Ignore("a repeated completion"),
        E.UNDO_RESTORE: Ignore("a forward has taken it over: the restore is complete"),
        E.DROP: Go(S.EVICTED),
    },
    S.OFFLOADING: {
        E.APPEND: _LEAVING,
        E.READ: _LEAVING,
        E.TRUNCATE: _LEAVING,
        E.OFFLOAD: Ignore("it is leaving already"),
        E.COMMIT_OFFLOAD: Go(S.OFFLOADED),
        E.UNDO_OFFLOAD: Go(S.GPU_RESIDENT),
        E.RESTORE: Refuse("it has not left: undo the offload instead"),
        E.FILLED: Ignore("a late completion of a restore that was over"),
        E.UNDO_RESTORE: Ignore("the restore was over"),
        E.DROP: Refuse("a copy may be reading it: undo the offload first"),
    },
    S.OFFLOADED: {
        E.APPEND: _OFF_DEVICE,
        E.READ: _OFF_DEVICE,
        E.TRUNCATE: Go(S.OFFLOADED),
        E.OFFLOAD: Ignore("it has left already"),
        E.COMMIT_OFFLOAD: Ignore("a repeated completion"),
        E.UNDO_OFFLOAD: Ignore("the offload was complete: cancelling it came too late"),
        E.RESTORE: Go(S.PREFETCHING),
        E.FILLED: Ignore("a late completion of a restore that was undone"),
        E.UNDO_RESTORE: Ignore("the restore was undone already"),
        E.DROP: Go(S.EVICTED),
    },
    S.PREFETCHING: {
        E.APPEND: Go(S.PREFETCHING),
        E.READ: Go(S.PREFETCHING),
        E.TRUNCATE: Go(S.PREFETCHING),
        E.OFFLOAD: _COMING,
        E.COMMIT_OFFLOAD: Ignore("a repeated completion of the offload before"),
        E.UNDO_OFFLOAD: Ignore("the offload was complete: cancelling it came too late"),
        E.RESTORE: Ignore("it is coming already"),
        E.FILLED: Go(S.GPU_READY),
        E.UNDO_RESTORE: Go(S.OFFLOADED),
        E.DROP: Refuse("a copy may be writing its pages: undo the restore first"),
    },
    S.GPU_READY: {
        E.APPEND: Go(S.GPU_READY),
        E.READ: Go(S.GPU_RESIDENT),
        E.TRUNCATE: Go(S.GPU_READY),
        E.OFFLOAD: Go(S.OFFLOADING),
        E.COMMIT_OFFLOAD: Ignore("a repeated completion of the offload before"),
        E.UNDO_OFFLOAD: Ignore("the offload was complete: cancelling it came too late"),
        E.RESTORE: _ON_DEVICE,
        E.FILLED: Ignore("a repeated completion"),
        E.UNDO_RESTORE: Go(S.OFFLOADED),
        E.DROP: Go(S.EVICTED),
    },
    S.EVICTED: {
        E.APPEND: _GONE,
        E.READ: _GONE,
        E.TRUNCATE: _GONE,
        E.OFFLOAD: _GONE,
        E.COMMIT_OFFLOAD: Ignore("a late completion: nobody needs the copy"),
        E.UNDO_OFFLOAD: Ignore("nothing is left to undo"),
        E.RESTORE: _GONE,
        E.FILLED: Ignore("a late completion: nobody needs the pages"),
        E.UNDO_RESTORE: Ignore("nothing is left to undo"),
        E.DROP: Ignore("it was dropped already"),
    },
}

ON_DEVICE = frozenset({S.GPU_RESIDENT, S.OFFLOADING, S.PREFETCHING, S.GPU_READY})
"""States in which a chunk owns device pages."""

SETTLED = frozenset({S.GPU_RESIDENT, S.GPU_READY})
"""States in which a chunk is on the device and no copy touches it."""


def step(state: ChunkState, event: ChunkEvent) -> ChunkState:
    """The state after `event`. Raises `IllegalTransition` where the table refuses it."""
    entry = TABLE[state][event]
    if isinstance(entry, Go):
        return entry.state
    if isinstance(entry, Ignore):
        return state
    raise IllegalTransition(f"{event.value} of a chunk in {state.value}: {entry.because}")


def mermaid() -> str:
    """The machine as a Mermaid state diagram: every edge of the table that changes the state."""
    edges: dict[tuple[ChunkState, ChunkState], list[str]] = {}
    for state, row in TABLE.items():
        for event, entry in row.items():
            if isinstance(entry, Go) and entry.state is not state:
                edges.setdefault((state, entry.state), []).append(event.value)
    lines = ["stateDiagram-v2", "    [*] --> GPU_RESIDENT: forward fills it"]
    lines += [f"    {a.value} --> {b.value}: {', '.join(events)}" for (a, b), events in edges.items()]
    return "\n".join(lines)
