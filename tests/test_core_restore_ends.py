"""Restores that are cancelled, fail, hang or are shared, and those that are refused."""

from collections.abc import Callable

import pytest

from swapkv.config import SwapConfig
from swapkv.errors import DrainTimeout, KVEvicted, ProtocolError, TransferError, UnknownSequence
from swapkv.fsm import commands, events, turns
from swapkv.fsm.queries import SequenceState
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import Lane, SeqId
from tests.kit.scenes import PAGE_BYTES, copies, news, states, table, trip, with_tokens
from tests.kit.stage import GROUP, PLAIN, Stage

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")
LAYER_BYTES = PLAIN.layer_bytes[0]


@pytest.mark.parametrize("landed", range(3))
def test_cancelled_restore_drains_its_copies_and_is_as_before(landed: int) -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    stage.run(Lane.IN, 4)
    for _ in range(landed):
        stage.tell()
    assert stage.do(events.CancelRestore(A))
    assert stage.do(events.CancelRestore(A)), "twice is as good as once"
    assert news(stage, commands.LayersLost) == [commands.LayersLost(A, None)]
    assert not news(stage, commands.RestoreUndone)
    assert stage.free < 8, "the copies still write there"
    stage.come_to_rest()
    assert news(stage, commands.RestoreUndone) == [commands.RestoreUndone(A, None, 0)]
    assert (stage.state("a"), stage.free) == (SequenceState.OFFLOADED, 8)
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_cancelled_restore_that_waits_for_pages_is_over_at_once() -> None:
    stage = Stage(pages=4)
    stage.parked("a", 8)
    with_tokens(8, stage, "c")
    assert stage.restore("a")
    assert stage.do(events.CancelRestore(A))
    assert news(stage, commands.RestoreUndone) == [commands.RestoreUndone(A, None, 0)]
    stage.reads("c")


def test_cancel_that_comes_too_late_or_names_nobody_is_counted_and_ignored() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.do(events.CancelRestore(A))
    assert stage.restore("a")
    stage.come_to_rest()
    assert stage.do(events.CancelRestore(A))
    assert stage.do(events.CancelRestore(SeqId("nobody")))
    assert stage.core.counters["late_cancels"] == 3
    assert stage.state("a") is SequenceState.GPU_READY


@pytest.mark.parametrize("fate", ["fail", "reject"])
def test_failed_copy_leaves_the_sequence_off_the_device_with_its_host_copy(fate: str) -> None:
    stage = Stage()
    stage.parked("a", 7)
    stage.fate = lambda copy: fate if copy.op == 7 else "ok"
    assert stage.restore("a")
    stage.come_to_rest()
    (undone,) = news(stage, commands.RestoreUndone)
    assert isinstance(undone.cause, TransferError)
    assert (stage.state("a"), stage.free) == (SequenceState.OFFLOADED, 8)
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_rejected_copies_give_their_tokens_back() -> None:
    stage = Stage()
    stage.parked("a", 7)
    stage.fate = lambda copy: "reject"
    assert stage.restore("a")
    assert stage.core.buckets[Lane.IN].sent_bytes == 4 * PAGE_BYTES
    stage.come_to_rest()
    assert stage.core.buckets[Lane.IN].sent_bytes == 0


def test_hung_restore_is_given_up_and_its_pages_are_quarantined_until_it_ends() -> None:
    stage = Stage(config=SwapConfig(segment_bytes=1, copy_deadline_ns=10))
    stage.parked("a", 7)
    stage.fate = lambda copy: "hang"
    assert stage.restore("a")
    stage.now_ns += 10
    assert stage.do(events.Tick())
    (undone,) = news(stage, commands.RestoreUndone)
    assert isinstance(undone.cause, DrainTimeout)
    assert (stage.free, stage.core.ledger.quarantined(GROUP)) == (4, 4)
    stage.unhang()
    stage.come_to_rest()
    assert (stage.free, stage.core.counters["late_completions"]) == (8, 4)
    stage.fate = lambda copy: "ok"
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_restore_behind_copies_that_hang_and_fill_the_lane_gives_up_at_once() -> None:
    stage = Stage(config=SwapConfig(segment_bytes=1, copy_deadline_ns=10, ops_per_lane=2))
    for name in "ab":
        stage.parked(name, 2)
    stage.fate = lambda copy: "hang"
    assert stage.restore("a")
    stage.now_ns += 10
    assert stage.do(events.Tick())
    assert stage.restore("b")
    (undone,) = news(stage, commands.RestoreUndone, "b")
    assert "2 copies hang on lane IN" in str(undone.cause)
    assert stage.free == 7


def forked_and_parked() -> Stage:
    stage = with_tokens(8)
    stage.fork(A, B, 8)
    for name in "ab":
        assert stage.preempt(name)
        stage.come_to_rest()
    return stage


def test_shared_chunks_are_fetched_once_for_two_restores() -> None:
    stage = forked_and_parked()
    assert stage.restore("a")
    stage.run(Lane.IN)
    stage.tell()
    assert stage.restore("b")
    stage.come_to_rest()
    assert len(copies(stage, Lane.IN)) == 4
    assert table(stage, "a") == table(stage, "b")
    stage.reads("a")
    stage.reads("b")


def two_restores_that_share_a_chunk() -> None:
    """A and B lack 4 pages each, of which 2 are the same: with 6 there, both can go."""
    stage = Stage(pages=6)
    stage.register("a")
    stage.append("a", 4)
    stage.come_to_rest()
    stage.fork(A, B, 8)
    for name in "ab":
        stage.append(name, 4)
        stage.come_to_rest()
    for name in "ab":
        assert stage.preempt(name)
        stage.come_to_rest()
    stage.register("d", max_tokens=12)
    stage.append("d", 12)
    stage.come_to_rest()
    for name in "ab":
        assert stage.restore(name)
    assert stage.finish("d")
    assert {ready.sequence for ready in news(stage, commands.PagesReady)} == {A, B}
    stage.come_to_rest()
    stage.reads("b")


def test_two_restores_that_share_a_chunk_are_granted_together_if_that_is_enough() -> None:
    two_restores_that_share_a_chunk()


def test_restore_whose_shared_chunk_is_granted_to_another_must_not_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell = turns._tell_joined
    monkeypatch.setattr(turns, "_tell_joined", lambda core, granted: tell(core, granted) and False)
    with pytest.raises(AssertionError, match="waits for pages that are there"):
        two_restores_that_share_a_chunk()


def test_refused_event_does_not_even_move_the_clock() -> None:
    stage = Stage()
    with pytest.raises(UnknownSequence):
        stage.core.handle(events.BeginRestore(A), 10**9)
    assert stage.core.now_ns == 0


def test_restore_that_joined_another_goes_on_when_that_one_is_cancelled() -> None:
    stage = forked_and_parked()
    assert stage.restore("a")
    stage.run(Lane.IN, 2)
    stage.tell()
    assert stage.restore("b")
    assert stage.do(events.CancelRestore(A))
    stage.come_to_rest()
    assert (stage.state("a"), stage.state("b")) == (SequenceState.OFFLOADED, SequenceState.GPU_READY)
    assert len(copies(stage, Lane.IN)) == 4
    stage.reads("b")


def test_restore_that_comes_while_a_cancelled_one_drains_fetches_the_chunks_anew() -> None:
    stage = forked_and_parked()
    assert stage.restore("a")
    assert stage.do(events.CancelRestore(A))
    assert stage.restore("b")
    stage.come_to_rest()
    assert len(copies(stage, Lane.IN)) == 8
    stage.reads("b")


def test_restore_of_a_chunk_that_another_still_takes_off_the_device_gets_it_without_a_copy() -> None:
    stage = with_tokens(4)
    stage.fork(A, B, 8)
    assert stage.preempt("b")
    assert stage.preempt("a")
    assert states(stage, "b") == {ChunkState.OFFLOADING}
    assert stage.restore("b")
    stage.come_to_rest()
    assert (stage.state("a"), stage.state("b")) == (SequenceState.OFFLOADED, SequenceState.GPU_RESIDENT)
    assert copies(stage, Lane.IN) == []
    stage.reads("b")


def test_failure_of_a_shared_copy_undoes_every_restore_that_counted_on_it() -> None:
    stage = forked_and_parked()
    assert stage.restore("a")
    assert stage.restore("b")
    stage.device.lanes[Lane.IN].clear()
    cause = TransferError("gone")
    for copy in copies(stage, Lane.IN):
        assert stage.do(events.CopyFailed(copy.op, cause))
    assert {undone.sequence: undone.cause for undone in news(stage, commands.RestoreUndone)} == {A: cause, B: cause}
    assert stage.free == 8


def test_finish_while_coming_drains_then_gives_everything_back() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    assert stage.finish("a")
    assert stage.finish("a"), "twice is as good as once"
    assert not stage.told(commands.Gone, "a")
    stage.come_to_rest()
    (undone,) = news(stage, commands.RestoreUndone)
    assert "was finished while it was being restored" in str(undone.cause)
    assert stage.told(commands.Gone, "a")
    assert (stage.free, stage.core.host.used) == (8, 0)


def test_restore_of_a_sequence_on_the_device_or_without_kv_is_over_at_once() -> None:
    stage = with_tokens(4)
    assert stage.restore("a")
    stage.register("b")
    assert stage.preempt("b")
    assert stage.restore("b")
    assert news(stage, commands.Restored) == [commands.Restored(A), commands.Restored(B)]


def leaving(stage: Stage) -> None:
    assert stage.preempt("a")


def coming(stage: Stage) -> None:
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.restore("a")


def finishing(stage: Stage) -> None:
    assert stage.preempt("a")
    assert stage.finish("a")


def evicted(stage: Stage) -> None:
    assert stage.do(events.Evict(A))


@pytest.mark.parametrize(
    ("before", "error", "message"),
    [
        (leaving, ProtocolError, "is being preempted: await that, or cancel it, then restore"),
        (coming, ProtocolError, "is being restored already: await that"),
        (finishing, ProtocolError, "is finishing: nothing is left to restore"),
        (evicted, KVEvicted, r"has no KV \(7 tokens were dropped\): reset it, run them again"),
    ],
)
def test_restore_that_the_state_does_not_allow_is_refused_with_the_remedy(
    before: Callable[[Stage], None], error: type[Exception], message: str
) -> None:
    stage = with_tokens(7)
    before(stage)
    with pytest.raises(error, match=message):
        stage.core.handle(events.BeginRestore(A), stage.now_ns)


def test_restore_of_an_unknown_sequence_is_refused() -> None:
    with pytest.raises(UnknownSequence, match="'a' is not registered"):
        Stage().core.handle(events.BeginRestore(A), 0)


def test_restored_sequence_is_clean_and_leaves_again_without_a_copy() -> None:
    stage = with_tokens(7)
    trip(stage)
    before = len(copies(stage))
    trip(stage)
    assert len(copies(stage)) == before
    stage.reads("a")
