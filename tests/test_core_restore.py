"""Restores: the switch of the page table, order, budgets, and pages that are scarce."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from swapkv.config import SECOND_NS, RestoreOrder, SwapConfig
from swapkv.fsm import commands, events, restore, turns
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState
from swapkv.fsm.records import Restore, Sequence
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import Fence, Lane, LayerId, SeqId
from tests.kit import guards
from tests.kit.scenes import copies, news, states, table, with_tokens
from tests.kit.stage import PLAIN, Stage

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")
LAYER_BYTES = PLAIN.layer_bytes[0]


def order(stage: Stage, name: str = "a") -> list[tuple[list[int], tuple[LayerId, ...]]]:
    """What each H2D copy of a sequence moves: the first chunk is 0, and so on; and its layers."""
    chunks = [chunk.id for chunk in stage.core.sequences[SeqId(name)].live_chunks()]
    return [([chunks.index(item.chunk) for item in c.items], c.layers) for c in copies(stage, Lane.IN, name)]


def test_restored_sequence_has_no_page_table_until_the_last_copy_has_landed() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    assert states(stage) == {ChunkState.PREFETCHING}
    stage.run(Lane.IN, 4)
    for _ in range(3):
        stage.tell()
        assert table(stage) == []
        assert not stage.told(commands.Restored, "a")
    stage.tell()
    assert len(table(stage)) == 4
    assert states(stage) == {ChunkState.GPU_READY}
    assert stage.state("a") is SequenceState.GPU_READY
    stage.reads("a")
    assert stage.state("a") is SequenceState.GPU_RESIDENT


def test_restored_layers_are_told_in_order_though_copies_land_in_any() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    stage.run(Lane.IN, 4)
    stage.tell(at=3)
    stage.tell(at=2)
    assert news(stage, commands.LayerReady) == [], "layer 1 is there, layer 0 is not"
    stage.tell()
    stage.tell()
    assert news(stage, commands.LayerReady) == [commands.LayerReady(A, LayerId(0)), commands.LayerReady(A, LayerId(1))]


def test_restore_with_all_its_pages_goes_layer_by_layer() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    assert order(stage) == [([0], (0,)), ([1], (0,)), ([0], (1,)), ([1], (1,))]


def test_restore_that_is_told_to_goes_chunk_by_chunk_though_a_chunk_takes_two_segments() -> None:
    stage = Stage(config=SwapConfig(segment_bytes=1, restore_order=RestoreOrder.CHUNK_MAJOR))
    stage.parked("a", 7)
    assert stage.restore("a")
    assert order(stage) == [([0], (0,)), ([0], (1,)), ([1], (0,)), ([1], (1,))]


def test_restore_whose_chunks_fit_a_segment_moves_several_at_once() -> None:
    stage = Stage(config=SwapConfig(segment_bytes=4 * LAYER_BYTES))
    stage.parked("a", 7)
    assert stage.restore("a")
    assert order(stage) == [([0, 1], (0,)), ([0, 1], (1,))]


def scarce(restore_order: RestoreOrder = RestoreOrder.AUTO) -> Stage:
    """A has 8 tokens and is coming, but half of its 4 pages are held by C."""
    stage = Stage(pages=4, config=SwapConfig(segment_bytes=1, restore_order=restore_order))
    stage.parked("a", 8)
    with_tokens(4, stage, "c")
    assert stage.restore("a")
    return stage


def test_restore_that_lacks_pages_begins_chunk_by_chunk_with_those_that_are_there() -> None:
    stage = scarce()
    stage.come_to_rest()
    assert order(stage) == [([0], (0,)), ([0], (1,))]
    assert not news(stage, commands.PagesReady)
    assert stage.finish("c")
    assert stage.told(commands.PagesReady, "a")
    stage.come_to_rest()
    stage.reads("a")


def test_layer_major_restore_waits_for_all_its_pages() -> None:
    stage = scarce(RestoreOrder.LAYER_MAJOR)
    stage.come_to_rest()
    assert (order(stage), stage.free) == ([], 2)
    assert stage.finish("c")
    assert [layers for _, layers in order(stage)] == [(0,), (0,), (1,), (1,)]


def test_sequence_at_its_in_flight_cap_lets_others_pass() -> None:
    stage = Stage(config=SwapConfig(segment_bytes=1, inflight_bytes_per_sequence=2 * LAYER_BYTES))
    for name in "ab":
        stage.parked(name, 8)
    for name in "ab":
        assert stage.restore(name)
    assert [copy.sequence for copy in copies(stage, Lane.IN)] == [A, B]
    for sequence in stage.core.sequences.values():
        assert sequence.restore is not None
        assert sequence.restore.inflight_bytes == 2 * LAYER_BYTES
    stage.run(Lane.IN)
    stage.tell()
    assert [copy.sequence for copy in copies(stage, Lane.IN)] == [A, B, A]
    stage.come_to_rest()
    stage.reads("a")
    stage.reads("b")


def test_segment_larger_than_the_in_flight_cap_goes_alone() -> None:
    stage = Stage(config=SwapConfig(segment_bytes=1, inflight_bytes_per_sequence=1))
    stage.parked("a", 8)
    assert stage.restore("a")
    assert len(copies(stage, Lane.IN)) == 1
    stage.come_to_rest()
    stage.reads("a")


def test_restore_budget_spaces_the_copies_and_asks_to_be_woken() -> None:
    rate = 2 * LAYER_BYTES
    stage = Stage(config=SwapConfig(segment_bytes=1, restore_bytes_per_s=rate, restore_burst_bytes=rate))
    stage.parked("a", 8)
    assert stage.restore("a")
    times = [stage.now_ns]
    while stage.core.restores:
        stage.come_to_rest()
        if stage.core.restores:
            assert stage.wake()
            times.append(stage.now_ns)
    assert [after - before for before, after in pairwise(times)] == [SECOND_NS] * 3
    assert len(copies(stage, Lane.IN)) == 4


def budget_behind_a_sequence_at_its_cap() -> None:
    """A is first in line and at its cap; B may go, once the budget lets it: the core asks to be woken for B."""
    config = SwapConfig(
        segment_bytes=1,
        restore_bytes_per_s=2 * LAYER_BYTES,
        restore_burst_bytes=2 * LAYER_BYTES,
        inflight_bytes_per_sequence=1,
        copy_deadline_ns=100 * SECOND_NS,
    )
    stage = Stage(config=config)
    stage.parked("a", 2)
    stage.parked("b", 8)
    assert stage.restore("a")
    assert stage.restore("b")
    assert [copy.sequence for copy in copies(stage, Lane.IN)] == [A], "half of the bucket is left"
    assert stage.wake()
    assert stage.now_ns == SECOND_NS // 2
    assert [copy.sequence for copy in copies(stage, Lane.IN)] == [A, B]


def test_core_asks_to_be_woken_for_whom_the_budget_holds_back_not_for_whom_the_cap_does() -> None:
    budget_behind_a_sequence_at_its_cap()


def test_tick_that_answers_an_earlier_alarm_has_the_core_ask_anew() -> None:
    """A driver keeps the earliest alarm only; one that was superseded must not swallow the one that counts."""
    rate = 2 * LAYER_BYTES
    stage = Stage(config=SwapConfig(segment_bytes=1, restore_bytes_per_s=rate, restore_burst_bytes=rate))
    stage.parked("a", 8)
    assert stage.restore("a")
    stage.come_to_rest()
    stage.wake_ns = None
    assert stage.do(events.Tick())
    assert stage.wake_ns == SECOND_NS


def restore_into_pages_that_a_forward_reads() -> Stage:
    """C's pages go to A while C's last forward has not run. They are not the first pages: D has those."""
    stage = Stage(pages=8)
    stage.parked("a", 8)
    with_tokens(8, stage, "d")
    with_tokens(8, stage, "c")
    stage.append("c", 0)
    assert stage.finish("c")
    assert stage.restore("a")
    assert stage.told(commands.PagesReady, "a")
    stage.run_eagerly(Lane.IN)
    stage.come_to_rest()
    stage.reads("a")
    return stage


def test_copy_into_reused_pages_waits_for_their_last_reader() -> None:
    stage = restore_into_pages_that_a_forward_reads()
    assert {copy.after for copy in copies(stage, Lane.IN)} == {(Fence(Lane.COMPUTE, 4),)}


@pytest.mark.parametrize(
    "guard",
    [
        guards.writers_wait_for_nobody,
        guards.released_pages_are_not_fenced,
        guards.hazards_are_keyed_by_place_in_the_copy,
    ],
)
def test_copy_into_reused_pages_without_its_wait_is_caught(
    monkeypatch: pytest.MonkeyPatch, guard: Callable[[pytest.MonkeyPatch], None]
) -> None:
    guard(monkeypatch)
    with pytest.raises(AssertionError, match="reads"):
        restore_into_pages_that_a_forward_reads()


def test_lower_priority_goes_first_then_who_came_first() -> None:
    stage = Stage(pages=12, config=SwapConfig(segment_bytes=1, ops_per_lane=1))
    for name in "abc":
        stage.parked(name, 2)
    for name, priority in (("a", 2), ("b", 1), ("c", 1)):
        assert stage.restore(name, priority=priority)
    stage.come_to_rest()
    assert [copy.sequence for copy in copies(stage, Lane.IN)] == [A, B, B, C, C, A], "a's first copy was under way"


@pytest.mark.parametrize(("waited_ns", "first"), [(0, B), (99, B), (100, A), (10**9, A)])
def test_restore_that_waits_ages_up_to_its_cap(waited_ns: int, first: SeqId) -> None:
    stage = Stage(pages=4, config=SwapConfig(segment_bytes=1, aging_ns=100, aging_cap=1))
    for name in "ab":
        stage.parked(name, 8)
    with_tokens(8, stage, "c")
    assert stage.restore("a", priority=5)
    stage.now_ns += waited_ns
    assert stage.restore("b", priority=4)
    assert stage.finish("c")
    stage.come_to_rest()
    (restored,) = news(stage, commands.Restored)
    assert restored.sequence == first


def test_priority_out_of_the_reach_of_aging_is_never_passed() -> None:
    stage = Stage(pages=4, config=SwapConfig(segment_bytes=1, aging_ns=100, aging_cap=1))
    for name in "ab":
        stage.parked(name, 8)
    with_tokens(8, stage, "c")
    assert stage.restore("a", priority=6)
    stage.now_ns += 10**9
    assert stage.restore("b", priority=4)
    assert stage.finish("c")
    stage.come_to_rest()
    assert news(stage, commands.Restored) == [commands.Restored(B)]


def test_two_restores_of_scarce_pages_do_not_block_each_other() -> None:
    stage = Stage(pages=6)
    for name in "ab":
        stage.parked(name, 8)
    with_tokens(4, stage, "c")
    assert stage.restore("a")
    assert stage.restore("b")
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.GPU_READY
    assert copies(stage, Lane.IN, "b") == []
    assert stage.preempt("a")
    stage.come_to_rest()
    stage.reads("b")


def partial_restore_and_a_head() -> Stage:
    """B waits for 2 of its 4 pages, nothing moves, and C comes, which needs 2 and goes first."""
    stage = Stage(pages=4)
    stage.parked("b", 8)
    stage.parked("c", 4)
    with_tokens(4, stage, "a")
    assert stage.restore("b", priority=5)
    stage.come_to_rest()
    assert (stage.free, stage.state("b")) == (0, SequenceState.PREFETCHING)
    assert stage.restore("c", priority=0)
    return stage


def test_pages_of_a_revoked_restore_go_to_the_head_at_once() -> None:
    stage = partial_restore_and_a_head()
    assert stage.core.counters["revoked_restores"] == 1
    assert stage.told(commands.PagesReady, "c")
    stage.come_to_rest()
    stage.reads("c")
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.preempt("c")
    stage.come_to_rest()
    stage.reads("b")


def test_head_that_waits_for_pages_that_are_there_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    one_round = turns._grant
    monkeypatch.setattr(turns, "_grant", lambda core: one_round(core) and False)
    with pytest.raises(AssertionError, match="waits for pages that are there"):
        partial_restore_and_a_head()


def revoked_restore_whose_shared_chunk_is_let_go() -> None:
    """A's restore of a chunk is cancelled and drains; B, which shares it, waits for that and is revoked meanwhile."""
    stage = Stage(pages=8)
    stage.register("a", max_tokens=12)
    stage.append("a", 4)
    stage.come_to_rest()
    stage.fork(A, B, 12)
    stage.append("b", 8)
    stage.come_to_rest()
    for name in "ab":
        assert stage.preempt(name)
        stage.come_to_rest()
    stage.parked("c", 8)
    with_tokens(8, stage, "d")
    assert stage.restore("a")
    assert stage.do(events.CancelRestore(A))
    assert stage.restore("b", priority=5)
    assert stage.restore("c", priority=0)
    assert stage.core.counters["revoked_restores"] == 1
    stage.come_to_rest()
    stage.reads("c")
    for name in "cd":
        assert stage.finish(name)
    stage.come_to_rest()
    stage.reads("b")
    assert stage.free == 2


def test_revoked_restore_asks_once_for_a_chunk_that_another_let_go_meanwhile() -> None:
    revoked_restore_whose_shared_chunk_is_let_go()


def test_revoked_restore_that_keeps_what_it_waited_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    start_over = restore._restart

    def keep(core: SwapCore, sequence: Sequence, work: Restore) -> None:
        kept = list(work.waiting)
        start_over(core, sequence, work)
        work.waiting.extendleft(kept)

    monkeypatch.setattr(restore, "_restart", keep)
    with pytest.raises(AssertionError, match="waits for pages twice"):
        revoked_restore_whose_shared_chunk_is_let_go()
