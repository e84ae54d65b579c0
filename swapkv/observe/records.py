"""What happened, as plain records: the pool writes them, the trace and the timeline read them."""

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class TransitionRecord:
    """A chunk moved along the state machine. `before` and `after` are names of `ChunkState`."""

    at_ns: int
    chunk: int
    sequences: tuple[str, ...]
    before: str
    after: str


@attrs.frozen(kw_only=True)
class StateRecord:
    """A sequence's derived state changed. `state` is a name of `SequenceState`."""

    at_ns: int
    sequence: str
    state: str


@attrs.frozen(kw_only=True)
class CopyRecord:
    """One copy command, from its submission to its completion. `lane` is "OUT" (D2H) or "IN" (H2D)."""

    begin_ns: int
    end_ns: int
    lane: str
    op: int
    num_bytes: int
    chunks: int
    sequences: tuple[str, ...]
    error: str | None


@attrs.frozen(kw_only=True)
class StepRecord:
    """One forward pass over `sequences`."""

    begin_ns: int
    end_ns: int
    sequences: tuple[str, ...]


Record: TypeAlias = TransitionRecord | StateRecord | CopyRecord | StepRecord


class Recorder:
    """Keeps the last `limit` records, oldest first; `dropped` counts those that were pushed out."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self._records: deque[Record] = deque(maxlen=limit)
        self.dropped = 0

    def add(self, record: Record) -> None:
        if len(self._records) == self._records.maxlen:
            self.dropped += 1
        self._records.append(record)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)
