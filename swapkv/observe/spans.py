"""Records as spans of time: how long each sequence was in each state."""

from collections.abc import Iterable, Sequence

import attrs

from swapkv.observe.records import CopyRecord, Record, StateRecord, StepRecord


@attrs.frozen(kw_only=True)
class StateSpan:
    """How long a sequence stayed in a state. FINISHED is a moment: its span is empty."""

    sequence: str
    state: str
    begin_ns: int
    end_ns: int


def state_spans(records: Sequence[Record]) -> list[StateSpan]:
    """The states of all sequences, by begin. One that has not finished keeps its last state until the last record."""
    _, horizon_ns = time_bounds(records)
    changes = sorted((r for r in records if isinstance(r, StateRecord)), key=lambda change: change.at_ns)
    spans: list[StateSpan] = []
    current: dict[str, StateRecord] = {}
    for change in changes:
        if (last := current.get(change.sequence)) is not None:
            spans.append(_span(last, change.at_ns))
        current[change.sequence] = change
    spans.extend(_span(last, horizon_ns) for last in current.values())
    return sorted(spans, key=lambda span: span.begin_ns)


def _span(change: StateRecord, end_ns: int) -> StateSpan:
    if change.state == "FINISHED":
        end_ns = change.at_ns
    return StateSpan(sequence=change.sequence, state=change.state, begin_ns=change.at_ns, end_ns=end_ns)


def time_bounds(records: Iterable[Record]) -> tuple[int, int]:
    """The first and the last nanosecond that any record names; `(0, 0)` when there are none."""
    times = [t for record in records for t in _times(record)]
    return (min(times), max(times)) if times else (0, 0)


def _times(record: Record) -> tuple[int, ...]:
    if isinstance(record, CopyRecord | StepRecord):
        return record.begin_ns, record.end_ns
    return (record.at_ns,)
