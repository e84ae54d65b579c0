"""The Chrome trace obeys the trace-event format and holds every record once."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swapkv.observe.chrome import write_trace
from swapkv.observe.records import CopyRecord, Record, Recorder, StateRecord, StepRecord, TransitionRecord

ORIGIN_NS = 7_000_000_000


def at(ms: float) -> int:
    return ORIGIN_NS + round(ms * 1e6)


def state(ms: float, sequence: str, name: str) -> StateRecord:
    return StateRecord(at_ns=at(ms), sequence=sequence, state=name)


def copy(begin_ms: float, end_ms: float, lane: str, op: int, error: str | None = None) -> CopyRecord:
    return CopyRecord(
        begin_ns=at(begin_ms),
        end_ns=at(end_ms),
        lane=lane,
        op=op,
        num_bytes=4_000_000,
        chunks=2,
        sequences=("a",),
        error=error,
    )


def move(ms: float, chunk: int, before: str, after: str) -> TransitionRecord:
    return TransitionRecord(at_ns=at(ms), chunk=chunk, sequences=("a",), before=before, after=after)


RECORDS: tuple[Record, ...] = (
    state(0, "a", "REGISTERED"),
    state(1, "a", "GPU_RESIDENT"),
    state(1.5, "b", "REGISTERED"),
    StepRecord(begin_ns=at(2), end_ns=at(3.001001), sequences=("a",)),
    move(4, 0, "GPU_RESIDENT", "OFFLOADING"),
    state(4, "a", "OFFLOADING"),
    copy(4, 6, "OUT", 1),
    copy(5, 8, "OUT", 2),
    move(8, 0, "OFFLOADING", "OFFLOADED"),
    state(8, "a", "OFFLOADED"),
    copy(8, 9, "OUT", 3, error="cudaErrorUnknown"),
    copy(9, 10, "IN", 4),
    state(12, "a", "FINISHED"),
    StepRecord(begin_ns=at(12), end_ns=at(20), sequences=("b",)),
)


def events_of(tmp_path: Path, records: tuple[Record, ...] = RECORDS) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    write_trace(records, path)
    trace = json.loads(path.read_text("utf-8"))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def tracks(events: list[dict[str, Any]], process: str) -> dict[str, list[dict[str, Any]]]:
    """The slices and instants of a process by the name of their track."""
    pids = [e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process]
    assert len(pids) == 1
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pids[0]}
    return {
        name: [e for e in events if e["pid"] == pids[0] and e["tid"] == tid and e["ph"] != "M"]
        for tid, name in names.items()
    }


def assert_valid(events: list[dict[str, Any]]) -> None:
    """The rules of the format for the phases M, X and i; slices of a track are disjoint, to the nanosecond."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            continue
        assert (event["pid"], event["tid"]) in named
        assert isinstance(event["ts"], float)
        assert event["ts"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            continue
        assert event["ph"] == "X"
        assert event["dur"] >= 0
        span = (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        spans.setdefault((event["pid"], event["tid"]), []).append(span)
    for track in spans.values():
        for (_, end), (begin, _) in pairwise(sorted(track)):
            assert begin >= end


def test_trace_of_a_run_follows_the_format(tmp_path: Path) -> None:
    assert_valid(events_of(tmp_path))


def test_trace_check_refuses_overlapping_slices(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    slices = [event for event in events if event["ph"] == "X" and event["dur"] > 0]
    events.append(slices[0] | {"ts": slices[0]["ts"] + 0.001})
    with pytest.raises(AssertionError):
        assert_valid(events)


def test_requests_show_their_states_as_slices_up_to_finish(tmp_path: Path) -> None:
    requests = tracks(events_of(tmp_path), "requests")
    shown = [(e["name"], e["ph"], e["ts"], e.get("dur")) for e in requests["a"]]
    assert shown == [
        ("REGISTERED", "X", 0.0, 1000.0),
        ("GPU_RESIDENT", "X", 1000.0, 3000.0),
        ("OFFLOADING", "X", 4000.0, 4000.0),
        ("OFFLOADED", "X", 8000.0, 4000.0),
        ("FINISHED", "i", 12000.0, None),
    ]


def test_request_that_did_not_finish_keeps_its_state_to_the_end(tmp_path: Path) -> None:
    [only] = tracks(events_of(tmp_path), "requests")["b"]
    assert (only["ts"], only["dur"]) == (1500.0, 18500.0)


def test_copies_in_flight_together_get_tracks_of_their_own(tmp_path: Path) -> None:
    links = tracks(events_of(tmp_path), "links")
    ops = {name: [event["args"]["op"] for event in events] for name, events in links.items()}
    assert ops == {"OUT (D2H)": [1, 3], "OUT (D2H) +1": [2], "IN (H2D)": [4]}


def test_copy_tells_what_it_moved_and_how_it_ended(tmp_path: Path) -> None:
    first, failed = tracks(events_of(tmp_path), "links")["OUT (D2H)"]
    expected = {"op": 1, "bytes": 4_000_000, "chunks": 2, "sequences": ["a"], "GB/s": 2.0, "error": None}
    assert first["args"] == expected
    assert failed["args"]["error"] == "cudaErrorUnknown"
    assert "failed" in failed["name"]


def test_steps_and_chunks_have_processes_of_their_own(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    assert [e["args"]["sequences"] for e in tracks(events, "compute")["steps"]] == [["a"], ["b"]]
    chunk = tracks(events, "chunks")["chunk 0"]
    assert [(e["name"], e["ts"], e["dur"]) for e in chunk] == [
        ("OFFLOADING", 4000.0, 4000.0),
        ("OFFLOADED", 8000.0, 4000.0),
    ]
    assert chunk[0]["args"]["before"] == "GPU_RESIDENT"


def test_tracks_of_links_are_sorted_out_above_in(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    links = [e for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    names = [e["args"]["name"] for e in sorted(links, key=lambda e: order[e["pid"], e["tid"]])]
    assert names == ["OUT (D2H)", "OUT (D2H) +1", "IN (H2D)"]


def test_trace_keeps_the_origin_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(RECORDS, path)
    assert json.loads(path.read_text("utf-8"))["otherData"]["origin_ns"] == ORIGIN_NS


def test_trace_of_a_recorder_equals_that_of_its_records(tmp_path: Path) -> None:
    recorder = Recorder()
    for record in RECORDS:
        recorder.add(record)
    write_trace(recorder, tmp_path / "recorder.json")
    write_trace(iter(RECORDS), tmp_path / "iterator.json")
    assert (tmp_path / "recorder.json").read_bytes() == (tmp_path / "iterator.json").read_bytes()


def test_trace_of_nothing_is_still_a_trace(tmp_path: Path) -> None:
    events = events_of(tmp_path, ())
    assert_valid(events)
    assert {event["ph"] for event in events} == {"M"}


def test_trace_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    unwritable = CopyRecord(
        begin_ns=0, end_ns=1, lane="OUT", op=object(), num_bytes=1, chunks=1, sequences=(), error=None  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(TypeError):
        write_trace([*RECORDS, unwritable], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_trace_into_a_pipe_is_written_and_the_pipe_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        write_trace(RECORDS, pipe)
        assert json.loads(read.result(timeout=30))["traceEvents"]
    assert pipe.is_fifo()
