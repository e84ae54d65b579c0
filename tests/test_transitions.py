"""The table of the state machine: complete, and with the edges that the design names, no others."""

import re
from collections import Counter

import pytest

from swapkv.errors import IllegalTransition
from swapkv.fsm.transitions import (
    ON_DEVICE,
    SETTLED,
    TABLE,
    ChunkEvent,
    ChunkState,
    Go,
    Ignore,
    Refuse,
    mermaid,
    step,
)

S, E = ChunkState, ChunkEvent
PAIRS = [(state, event) for state in S for event in E]
EDGES = {
    (state, event): entry.state
    for state, row in TABLE.items()
    for event, entry in row.items()
    if isinstance(entry, Go) and entry.state is not state
}


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_table_of_every_pair_goes_ignores_or_refuses_with_a_reason(state: ChunkState, event: ChunkEvent) -> None:
    entry = TABLE[state][event]
    if isinstance(entry, Go):
        assert step(state, event) is entry.state
    elif isinstance(entry, Ignore):
        assert entry.because
        assert step(state, event) is state
    else:
        assert isinstance(entry, Refuse)
        with pytest.raises(IllegalTransition, match=f"{event.value} of a chunk in {state.value}: {entry.because}"):
            step(state, event)


def test_table_has_no_entries_beyond_states_and_events() -> None:
    assert {(state, event) for state, row in TABLE.items() for event in row} == set(PAIRS)


def test_edges_that_change_the_state_are_those_of_the_design() -> None:
    assert EDGES == {
        (S.GPU_RESIDENT, E.OFFLOAD): S.OFFLOADING,
        (S.GPU_READY, E.OFFLOAD): S.OFFLOADING,
        (S.OFFLOADING, E.COMMIT_OFFLOAD): S.OFFLOADED,
        (S.OFFLOADING, E.UNDO_OFFLOAD): S.GPU_RESIDENT,
        (S.OFFLOADED, E.RESTORE): S.PREFETCHING,
        (S.PREFETCHING, E.FILLED): S.GPU_READY,
        (S.PREFETCHING, E.UNDO_RESTORE): S.OFFLOADED,
        (S.GPU_READY, E.READ): S.GPU_RESIDENT,
        (S.GPU_READY, E.UNDO_RESTORE): S.OFFLOADED,
        (S.GPU_RESIDENT, E.DROP): S.EVICTED,
        (S.GPU_READY, E.DROP): S.EVICTED,
        (S.OFFLOADED, E.DROP): S.EVICTED,
    }


def test_evicted_is_reached_by_a_drop_from_settled_states_only_and_never_left() -> None:
    assert {pair for pair, after in EDGES.items() if after is S.EVICTED} == {
        (state, E.DROP) for state in SETTLED | {S.OFFLOADED}
    }
    assert not any(state is S.EVICTED for state, _ in EDGES)


@pytest.mark.parametrize("state", [S.OFFLOADING, S.PREFETCHING])
def test_state_with_a_copy_under_way_refuses_a_drop(state: ChunkState) -> None:
    assert isinstance(TABLE[state][E.DROP], Refuse)


@pytest.mark.parametrize("event", [E.COMMIT_OFFLOAD, E.UNDO_OFFLOAD, E.FILLED, E.UNDO_RESTORE])
@pytest.mark.parametrize("state", S)
def test_completion_or_undo_that_comes_late_is_ignored_never_refused(state: ChunkState, event: ChunkEvent) -> None:
    assert not isinstance(TABLE[state][event], Refuse)


@pytest.mark.parametrize("state", set(S) - ON_DEVICE)
def test_state_off_the_device_refuses_forwards(state: ChunkState) -> None:
    assert isinstance(TABLE[state][E.READ], Refuse)
    assert isinstance(TABLE[state][E.APPEND], Refuse)


def test_every_state_is_reachable_from_the_first() -> None:
    reached = {S.GPU_RESIDENT}
    for _ in S:
        reached |= {after for (state, _), after in EDGES.items() if state in reached}
    assert reached == set(S)


def test_mermaid_lists_each_edge_that_changes_the_state_once() -> None:
    first, start, *lines = mermaid().splitlines()
    assert (first, start) == ("stateDiagram-v2", "    [*] --> GPU_RESIDENT: forward fills it")
    drawn = Counter(
        (match[1], event, match[2])
        for match in (re.fullmatch(r"    (\w+) --> (\w+): (.+)", line) for line in lines)
        if match is not None
        for event in match[3].split(", ")
    )
    assert drawn == Counter((state.value, event.value, after.value) for (state, event), after in EDGES.items())
    arrows = [line.partition(":")[0] for line in lines]
    assert len(set(arrows)) == len(arrows), "two lines for one arrow"
