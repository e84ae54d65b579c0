"""The Chrome trace: what happened, for https://ui.perfetto.dev or chrome://tracing.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TextIO, TypeAlias

from swapkv.observe.records import CopyRecord, Record, StateRecord, StepRecord, TransitionRecord
from swapkv.observe.spans import state_spans, time_bounds

Event: TypeAlias = dict[str, object]


class _Process(IntEnum):
    """The groups of tracks, from top to bottom."""

    REQUESTS = 1
    LINKS = 2
    COMPUTE = 3
    CHUNKS = 4


_LINK_NAMES = {"OUT": "OUT (D2H)", "IN": "IN (H2D)"}


def write_trace(records: Iterable[Record], path: Path) -> None:
    """Writes the records as Chrome trace-event JSON; `path` appears, or is replaced, only once it is whole.

    Processes: "requests" (a track a sequence, a slice a state), "links" (a slice a copy; copies in flight together
    lie on tracks of their own), "compute" (a slice a step), "chunks" (a track a chunk that ever moved).
    Times are µs since the earliest record, which `otherData.origin_ns` keeps. Raises `OSError` as the file system does.
    """
    if path.exists() and not path.is_file():  # a pipe or device: it is written to, never replaced
        with path.open("w", encoding="utf-8") as file:
            _write_json(file, tuple(records))
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            _write_json(file, tuple(records))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_json(file: TextIO, records: Sequence[Record]) -> None:
    origin_ns, _ = time_bounds(records)
    separator = "\n"
    file.write('{"displayTimeUnit":"ms","otherData":')
    file.write(json.dumps({"producer": "swapkv", "origin_ns": origin_ns}))
    file.write(',"traceEvents":[')
    for event in _Trace(origin_ns).events(records):
        file.write(separator)
        file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
        separator = ",\n"
    file.write("\n]}\n")


class _Subtracks:
    """Gives spans that overlap tracks of their own, the lowest free one first. They come ordered by begin."""

    def __init__(self) -> None:
        self._free_at_ns: list[int] = []

    def place(self, begin_ns: int, end_ns: int) -> int:
        for index, free_at_ns in enumerate(self._free_at_ns):
            if free_at_ns <= begin_ns:
                self._free_at_ns[index] = end_ns
                return index
        self._free_at_ns.append(end_ns)
        return len(self._free_at_ns) - 1


class _Trace:
    """Makes the events, one at a time; tracks get their numbers as they are first used, their names at the end."""

    def __init__(self, origin_ns: int) -> None:
        self._origin_ns = origin_ns
        self._tracks: dict[tuple[_Process, str], int] = {}

    def events(self, records: Sequence[Record]) -> Iterator[Event]:
        yield from self._requests(records)
        yield from self._links(records)
        yield from self._steps(records)
        yield from self._chunks(records)
        yield from self._metadata()

    def _requests(self, records: Sequence[Record]) -> Iterator[Event]:
        for span in state_spans(records):
            args: Event = {"sequence": span.sequence}
            if span.state == "FINISHED":
                yield self._instant(_Process.REQUESTS, span.sequence, span.state, span.begin_ns, args)
            else:
                yield self._slice(_Process.REQUESTS, span.sequence, span.state, (span.begin_ns, span.end_ns), args)

    def _links(self, records: Sequence[Record]) -> Iterator[Event]:
        copies = sorted((r for r in records if isinstance(r, CopyRecord)), key=lambda copy: copy.begin_ns)
        subtracks: dict[str, _Subtracks] = {}
        for copy in copies:
            index = subtracks.setdefault(copy.lane, _Subtracks()).place(copy.begin_ns, copy.end_ns)
            track = _numbered(_LINK_NAMES.get(copy.lane, copy.lane), index)
            name = ", ".join(copy.sequences) or f"op {copy.op}"
            name = name if copy.error is None else f"{name} (failed)"
            yield self._slice(_Process.LINKS, track, name, (copy.begin_ns, copy.end_ns), _copy_args(copy))

    def _steps(self, records: Sequence[Record]) -> Iterator[Event]:
        steps = sorted((r for r in records if isinstance(r, StepRecord)), key=lambda step: step.begin_ns)
        subtracks = _Subtracks()
        for step in steps:
            track = _numbered("steps", subtracks.place(step.begin_ns, step.end_ns))
            args: Event = {"sequences": list(step.sequences), "batch": len(step.sequences)}
            name = f"step of {len(step.sequences)}"
            yield self._slice(_Process.COMPUTE, track, name, (step.begin_ns, step.end_ns), args)

    def _chunks(self, records: Sequence[Record]) -> Iterator[Event]:
        """A chunk's last state lasts until all its sequences have finished, or to the end."""
        _, horizon_ns = time_bounds(records)
        moves = sorted((r for r in records if isinstance(r, TransitionRecord)), key=lambda move: move.at_ns)
        current: dict[int, TransitionRecord] = {}
        for move in moves:
            if (last := current.get(move.chunk)) is not None:
                yield self._chunk_state(last, move.at_ns)
            current[move.chunk] = move
        finishes = {r.sequence: r.at_ns for r in records if isinstance(r, StateRecord) and r.state == "FINISHED"}
        for last in current.values():
            end_ns = max((finishes.get(name, horizon_ns) for name in last.sequences), default=last.at_ns)
            yield self._chunk_state(last, max(end_ns, last.at_ns))

    def _chunk_state(self, move: TransitionRecord, end_ns: int) -> Event:
        args: Event = {"chunk": move.chunk, "sequences": list(move.sequences), "before": move.before}
        return self._slice(_Process.CHUNKS, f"chunk {move.chunk}", move.after, (move.at_ns, end_ns), args)

    def _slice(self, process: _Process, track: str, name: str, span_ns: tuple[int, int], args: Event) -> Event:
        begin_ns, end_ns = span_ns
        event = self._event(process, track, name, begin_ns, args)
        return event | {"ph": "X", "dur": _microseconds(max(0, end_ns - begin_ns))}

    def _instant(self, process: _Process, track: str, name: str, at_ns: int, args: Event) -> Event:
        return self._event(process, track, name, at_ns, args) | {"ph": "i", "s": "t"}

    def _event(self, process: _Process, track: str, name: str, at_ns: int, args: Event) -> Event:
        return {
            "name": name,
            "cat": process.name.lower(),
            "ts": _microseconds(at_ns - self._origin_ns),
            "pid": process.value,
            "tid": self._tracks.setdefault((process, track), len(self._tracks) + 100),
            "args": args,
        }

    def _metadata(self) -> Iterator[Event]:
        for process in _Process:
            yield _metadata("process_name", process, 0, {"name": process.name.lower()})
            yield _metadata("process_sort_index", process, 0, {"sort_index": process.value})
        for index, ((process, track), tid) in enumerate(sorted(self._tracks.items(), key=_track_order)):
            yield _metadata("thread_name", process, tid, {"name": track})
            yield _metadata("thread_sort_index", process, tid, {"sort_index": index})


def _copy_args(copy: CopyRecord) -> Event:
    duration_ns = copy.end_ns - copy.begin_ns
    return {
        "op": copy.op,
        "bytes": copy.num_bytes,
        "chunks": copy.chunks,
        "sequences": list(copy.sequences),
        "GB/s": round(copy.num_bytes / duration_ns, 3) if duration_ns > 0 else None,
        "error": copy.error,
    }


def _metadata(name: str, process: _Process, tid: int, args: Event) -> Event:
    return {"name": name, "ph": "M", "pid": process.value, "tid": tid, "args": args}


def _track_order(item: tuple[tuple[_Process, str], int]) -> tuple[int, int, int]:
    """As first used, but the subtracks of a link together, OUT above IN."""
    (process, track), tid = item
    links = tuple(_LINK_NAMES.values())
    rank = next((i for i, name in enumerate(links) if track.startswith(name)), len(links))
    return process.value, rank if process is _Process.LINKS else 0, tid


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name} +{index}"


def _microseconds(ns: int) -> float:
    return ns / 1000
