"""Preempts: what is copied, when the pages go, and how one that is cancelled, fails or hangs ends."""

import pytest

from swapkv.config import SECOND_NS, SwapConfig
from swapkv.errors import ProtocolError, TransferError
from swapkv.fsm import commands, events, offload
from swapkv.fsm.queries import SequenceState, victims
from swapkv.fsm.records import Goal
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import Fence, Lane, OpId, SeqId
from tests.kit import guards
from tests.kit.scenes import PAGE_BYTES, copies, news, states, table, trip, with_tokens
from tests.kit.stage import GROUP, PLAIN, SMALL_COPIES, Stage

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")


def test_preempt_keeps_every_page_until_the_last_copy_has_landed_then_all_leave_at_once() -> None:
    stage = with_tokens(7)
    pages = table(stage)
    assert stage.preempt("a")
    stage.run(Lane.OUT, 4)
    for _ in range(3):
        stage.tell()
        assert states(stage) == {ChunkState.OFFLOADING}
        assert table(stage) == pages
    assert not stage.told(commands.Parked, "a")
    stage.tell()
    assert states(stage) == {ChunkState.OFFLOADED}
    assert table(stage) == []
    assert (stage.told(commands.Parked, "a"), stage.free) == (True, 8)


def test_second_preempt_copies_only_what_was_written_since() -> None:
    stage = with_tokens(7)
    trip(stage)
    assert sum(copy.num_bytes for copy in copies(stage)) == 4 * PAGE_BYTES
    before = len(copies(stage))
    stage.append("a", 1)
    trip(stage)
    new = copies(stage)[before:]
    assert sum(copy.num_bytes for copy in new) == PAGE_BYTES
    assert {item.first for copy in new for item in copy.items} == {1}, "the chunk's other page is clean"
    assert stage.core.counters["clean_bytes_kept"] == 3 * PAGE_BYTES
    stage.reads("a")


def test_preempt_of_a_clean_sequence_copies_nothing_and_is_over_at_once() -> None:
    stage = with_tokens(7)
    trip(stage)
    before = len(copies(stage))
    assert stage.preempt("a")
    assert stage.state("a") is SequenceState.OFFLOADED
    assert len(copies(stage)) == before


def offload_that_would_run_before_its_forward() -> Stage:
    stage = Stage()
    stage.register("a")
    stage.append("a", 7)
    assert stage.preempt("a")
    stage.run_eagerly(Lane.OUT)
    stage.come_to_rest()
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")
    return stage


def test_offload_waits_for_the_forward_that_fills_its_pages() -> None:
    stage = offload_that_would_run_before_its_forward()
    assert {copy.after for copy in copies(stage)} == {(Fence(Lane.COMPUTE, 1),)}


def test_offload_that_waits_for_no_writer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    guards.readers_wait_for_nobody(monkeypatch)
    with pytest.raises(AssertionError, match="reads"):
        offload_that_would_run_before_its_forward()


def released_pages_in_new_hands() -> Stage:
    """A leaves while a forward still reads its pages, which go to a restore of B."""
    stage = with_tokens(8, Stage(pages=4))
    trip(stage)
    assert stage.preempt("a")
    stage.parked("b", 8)
    assert stage.restore("a")
    stage.come_to_rest()
    stage.append("a", 0)
    assert stage.preempt("a")
    assert stage.restore("b")
    stage.run_eagerly(Lane.IN)
    stage.come_to_rest()
    return stage


def test_released_pages_are_handed_on_fenced_until_the_forward_that_reads_them_is_over() -> None:
    stage = released_pages_in_new_hands()
    into_b = [copy for copy in copies(stage, Lane.IN) if copy.sequence == B]
    assert {copy.after for copy in into_b} == {(Fence(Lane.COMPUTE, 3),)}


def test_pages_that_are_not_fenced_at_release_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    guards.released_pages_are_not_fenced(monkeypatch)
    with pytest.raises(AssertionError, match="reads"):
        released_pages_in_new_hands()


def rewritten_tokens_leave_again() -> None:
    stage = with_tokens(4)
    trip(stage)
    stage.truncate(A, 2)
    stage.append("a", 2)
    trip(stage)
    stage.reads("a")


def test_tokens_that_were_taken_back_and_written_anew_are_not_clean() -> None:
    rewritten_tokens_leave_again()


@pytest.mark.parametrize("guard", [guards.every_copy_passes_for_clean, guards.truncated_chunks_keep_their_copy])
def test_stale_copy_that_passes_for_clean_is_caught(monkeypatch: pytest.MonkeyPatch, guard: object) -> None:
    guard(monkeypatch)  # type: ignore[operator]
    with pytest.raises(AssertionError, match="reads"):
        rewritten_tokens_leave_again()


def preempt_of_a_pinned_sequence() -> None:
    stage = with_tokens(4)
    step = stage.begin("a", 1)
    assert not stage.preempt("a"), "a forward pins its sequences"
    stage.end_step(step)
    stage.come_to_rest()


def test_preempt_of_a_sequence_in_a_forward_is_refused() -> None:
    preempt_of_a_pinned_sequence()


def test_preempt_that_ignores_the_pin_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "refuse_if_busy", lambda sequence: None)
    with pytest.raises(AssertionError):
        preempt_of_a_pinned_sequence()


def test_failed_copy_leaves_the_sequence_on_the_device_and_what_landed_stays() -> None:
    stage = with_tokens(8)
    stage.fate = lambda copy: "fail" if copy.op == 4 else "ok"
    assert stage.preempt("a")
    stage.come_to_rest()
    (undone,) = news(stage, commands.ParkUndone)
    assert isinstance(undone, commands.ParkUndone)
    assert isinstance(undone.cause, TransferError)
    assert stage.state("a") is SequenceState.GPU_RESIDENT
    stage.fate = lambda copy: "ok"
    before = len(copies(stage))
    trip(stage)
    assert sum(copy.num_bytes for copy in copies(stage)[before:]) == 2 * PAGE_BYTES, "the first chunk was clean"
    stage.reads("a")


def rejected_copies_and_their_tokens() -> None:
    stage = with_tokens(
        7, Stage(config=SwapConfig(segment_bytes=1, offload_bytes_per_s=10**6, offload_burst_bytes=10**4))
    )
    stage.fate = lambda copy: "reject"
    assert stage.preempt("a")
    bucket = stage.core.buckets[Lane.OUT]
    assert bucket.sent_bytes == 4 * PAGE_BYTES
    stage.come_to_rest()
    assert bucket.sent_bytes == 0
    assert bucket.fill_share(stage.now_ns) == 1


def test_rejected_copies_give_their_tokens_back() -> None:
    rejected_copies_and_their_tokens()


def test_tokens_that_are_not_given_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapkv.budget.bucket.TokenBucket.give_back", lambda self, num_bytes: None)
    with pytest.raises(AssertionError):
        rejected_copies_and_their_tokens()


def test_copy_rejected_after_it_was_given_up_gives_its_tokens_back_too() -> None:
    stage = with_tokens(2, Stage(config=SwapConfig(segment_bytes=1, copy_deadline_ns=10)))
    assert stage.preempt("a")
    stage.now_ns += 10
    assert stage.do(events.Tick())
    assert stage.core.counters["hung_copies"] == 2
    assert stage.do(events.CopyRejected(OpId(1), TransferError("late")))
    assert stage.core.buckets[Lane.OUT].sent_bytes == PAGE_BYTES // 2


@pytest.mark.parametrize("landed", range(4))
def test_cancelled_preempt_drains_its_copies_and_is_as_before(landed: int) -> None:
    stage = with_tokens(7)
    pages = table(stage)
    assert stage.preempt("a")
    stage.run(Lane.OUT, 4)
    for _ in range(landed):
        stage.tell()
    assert stage.do(events.CancelPreempt(A))
    assert stage.do(events.CancelPreempt(A)), "twice is as good as once"
    assert not news(stage, commands.ParkUndone)
    stage.come_to_rest()
    assert news(stage, commands.ParkUndone) == [commands.ParkUndone(A, None)]
    assert (stage.state("a"), table(stage)) == (SequenceState.GPU_RESIDENT, pages)
    stage.append("a", 1)
    stage.come_to_rest()
    stage.reads("a")


def test_cancelled_preempt_submits_nothing_more() -> None:
    stage = with_tokens(7, Stage(config=SwapConfig(segment_bytes=1, ops_per_lane=1)))
    assert stage.preempt("a")
    assert stage.do(events.CancelPreempt(A))
    stage.come_to_rest()
    assert len(copies(stage)) == 1


def test_cancel_that_comes_too_late_or_names_nobody_is_counted_and_ignored() -> None:
    stage = with_tokens(7)
    assert stage.do(events.CancelPreempt(A))
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.do(events.CancelPreempt(A))
    assert stage.do(events.CancelPreempt(SeqId("nobody")))
    assert stage.core.counters["late_cancels"] == 3
    assert stage.state("a") is SequenceState.OFFLOADED


def test_completion_that_is_repeated_or_of_an_unknown_copy_is_counted_and_ignored() -> None:
    stage = with_tokens(2)
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.do(events.CopyDone(OpId(1)))
    assert stage.do(events.CopyFailed(OpId(77), TransferError("of what?")))
    assert stage.do(events.CopyRejected(OpId(78), TransferError("of what?")))
    assert stage.do(events.FencePassed(Fence(Lane.OUT, 1)))
    assert stage.core.counters["repeated_completions"] == 3
    assert stage.core.counters["repeated_fences"] == 1
    assert stage.core.counters["bytes_out"] == PAGE_BYTES


def test_finish_while_leaving_drains_then_gives_everything_back() -> None:
    stage = with_tokens(7)
    assert stage.preempt("a")
    assert stage.finish("a")
    assert stage.finish("a"), "twice is as good as once"
    assert not stage.told(commands.Gone, "a")
    stage.come_to_rest()
    (undone,) = news(stage, commands.ParkUndone)
    assert "was finished while it was being preempted" in str(undone.cause)
    assert stage.told(commands.Gone, "a")
    assert (stage.free, stage.core.host.used) == (8, 0)


def test_offload_budget_spaces_the_copies_and_asks_to_be_woken() -> None:
    rate = PAGE_BYTES // 2
    config = SwapConfig(segment_bytes=1, offload_bytes_per_s=rate, offload_burst_bytes=rate)
    stage = with_tokens(6, Stage(config=config))
    assert stage.preempt("a")
    sent = [0]
    while stage.core.offloads:
        stage.come_to_rest()
        if stage.core.offloads:
            before = len(copies(stage))
            assert stage.wake()
            assert len(copies(stage)) == before + 1, "woken for nothing"
            sent.append(stage.now_ns)
    sizes = [copy.num_bytes for copy in copies(stage)]
    assert sizes == [2 * rate, 2 * rate, rate, rate]
    assert sent == [0, 2 * SECOND_NS, 4 * SECOND_NS, 5 * SECOND_NS], "a copy larger than the burst leaves a debt"


def test_small_copy_of_a_later_preempt_does_not_overtake_a_large_one_that_waits_for_the_budget() -> None:
    rate = PAGE_BYTES
    config = SwapConfig(segment_bytes=1, offload_bytes_per_s=rate, offload_burst_bytes=rate)
    stage = with_tokens(8, Stage(config=config))
    with_tokens(2, stage, "b")
    assert stage.preempt("a")
    assert stage.preempt("b")
    while stage.core.offloads:
        stage.come_to_rest()
        stage.wake()
    assert [copy.sequence for copy in copies(stage)] == [A] * 4 + [B] * 2


def test_shared_chunk_stays_while_a_sequence_needs_it_and_leaves_with_the_last() -> None:
    stage = with_tokens(4)
    stage.fork(A, B, 8)
    assert stage.preempt("a")
    assert stage.state("a") is SequenceState.OFFLOADED, "nothing of it may leave"
    assert (copies(stage), stage.free) == ([], 6)
    assert stage.preempt("b")
    stage.come_to_rest()
    assert (len(copies(stage)), stage.free) == (2, 8)
    assert stage.core.host.used == PLAIN.chunk_bytes(GROUP), "stored once"


def test_chunk_whose_other_user_parks_meanwhile_is_taken_along() -> None:
    stage = with_tokens(4)
    stage.fork(A, B, 8)
    stage.append("a", 4)
    stage.come_to_rest()
    assert stage.preempt("a")
    assert len(copies(stage)) == 2, "the shared chunk is needed by b"
    assert stage.preempt("b")
    assert stage.state("b") is SequenceState.OFFLOADED
    stage.come_to_rest()
    assert len(copies(stage)) == 4
    assert stage.free == 8


def test_parked_sequence_whose_shared_pages_stayed_is_a_victim_and_can_be_preempted_again() -> None:
    stage = with_tokens(4)
    stage.fork(A, B, 8)
    assert stage.preempt("a")
    assert stage.finish("b")
    assert stage.state("a") is SequenceState.OFFLOADED
    assert stage.free == 6, "a's only copy is on the device"
    (victim,) = victims(stage.core)
    assert (victim.sequence, victim.freed_bytes, victim.dirty_bytes) == (A, 2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.free == 8
    assert victims(stage.core) == []
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_victim_counts_only_its_dirty_pages_as_bytes_to_write() -> None:
    stage = with_tokens(7)
    trip(stage)
    assert victims(stage.core)[0].dirty_bytes == 0
    stage.append("a", 1)
    (victim,) = victims(stage.core)
    assert (victim.freed_bytes, victim.dirty_bytes) == (4 * PAGE_BYTES, PAGE_BYTES)
    assert victim.fairness_ns > 0, "it has been preempted before"


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (Goal.PARKING, "is being preempted already: await that, or cancel it"),
        (Goal.RESTORING, "is being restored: cancel the restore, or await it, then preempt"),
    ],
)
def test_preempt_of_a_sequence_under_way_is_refused_with_the_remedy(goal: Goal, message: str) -> None:
    stage = with_tokens(4)
    assert stage.preempt("a")
    if goal is Goal.RESTORING:
        stage.come_to_rest()
        assert stage.restore("a")
    assert stage.core.sequences[A].goal is goal
    with pytest.raises(ProtocolError, match=message):
        stage.core.handle(events.Preempt(A), 0)


def test_preempt_of_a_sequence_without_kv_or_already_parked_is_over_at_once() -> None:
    stage = Stage()
    stage.register("a")
    assert stage.preempt("a")
    assert stage.preempt("a")
    assert news(stage, commands.Parked) == [commands.Parked(A, commands.PreemptOutcome.OFFLOADED)] * 2


def test_copies_of_one_segment_size_carry_several_chunks() -> None:
    stage = with_tokens(8, Stage(config=SwapConfig()))
    assert stage.preempt("a")
    (copy,) = copies(stage)
    assert (len(copy.items), copy.layers, copy.num_bytes) == (2, (0, 1), 4 * PAGE_BYTES)
    assert SMALL_COPIES.segment_bytes < copy.num_bytes
