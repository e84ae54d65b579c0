"""Several ranks whose workers are played: a transfer is over when all have said so, and fails if it fails anywhere."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from swapkv import (
    ChecksumMismatch,
    ChunkState,
    DrainTimeout,
    PoolClosed,
    PreemptOutcome,
    SequenceState,
    SwapConfig,
    SwapError,
    TransferError,
    Verify,
)
from swapkv.fsm import commands
from swapkv.ranks.leader import RankStream
from swapkv.ranks.link import RankEvent, split_checksums
from swapkv.ranks.messages import OpenPromise, Outcome, Record, Run, SetPromise, SubmitCopy, UseUpGates, Wait
from tests import test_contract as contract
from tests.kit.ranks import LONG_S, PAGES, no_thread_left, scripted


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


def pages_stay_held_until_all_have_acknowledged(order: tuple[int, ...]) -> None:
    with scripted(4) as play:
        play.append("a", 20)
        owned = play.owned()
        play.pool.preempt("a")
        copies = play.copies()
        assert len(copies[1]) > 1
        for rank in order:
            assert play.pool.poll() == []
            assert play.owned() == owned
            assert set(play.pool.chunk_states("a")) == {ChunkState.OFFLOADING}
            for told in reversed(copies[rank]):
                play.ranks[rank].ack(told.number)
            play.settle()
        assert play.pool.poll() == [commands.Parked("a", PreemptOutcome.OFFLOADED)]  # type: ignore[arg-type]
        assert play.owned() == [0, 0]


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_pages_of_a_preempt_stay_held_until_every_rank_has_acknowledged(order: tuple[int, ...]) -> None:
    pages_stay_held_until_all_have_acknowledged(order)


def test_pages_without_the_wait_for_all_ranks_are_given_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: were one acknowledgement enough, it would fail."""
    monkeypatch.setattr(RankEvent, "all_acked", lambda event: len(event.acks) >= 1)
    with pytest.raises(AssertionError):
        pages_stay_held_until_all_have_acknowledged((1, 2, 3))


def test_every_rank_is_told_the_same_copies() -> None:
    with scripted(3) as play:
        play.append("a", 20)
        play.pool.preempt("a")
        copies = play.copies()
        assert [contract._line(told.copy) for told in copies[1]] == [contract._line(told.copy) for told in copies[2]]
        assert [(told.number, told.after) for told in copies[1]] == [(told.number, told.after) for told in copies[2]]


def test_forward_that_one_rank_has_not_ended_is_waited_for_by_the_copies_behind_it() -> None:
    with scripted(2) as play:
        with play.pool.forward({"a": 20}):
            pass
        record = play.ranks[1].hear(Record)
        play.pool.preempt("a")
        assert {told.after for told in play.copies()[1]} == {(record.number,)}


def test_failure_on_one_rank_fails_everywhere_once_all_have_ended() -> None:
    with scripted(3) as play:
        play.append("a", 20)
        owned = play.owned()
        play.pool.preempt("a")
        copies = play.copies()
        for told in copies[1]:
            play.ranks[1].ack(told.number, Outcome.FAILED, why="link down")
        play.settle()
        assert play.pool.poll() == []
        assert play.owned() == owned
        for told in copies[2]:
            play.ranks[2].ack(told.number)
        play.settle()
        (undone,) = play.pool.poll()
        assert isinstance(undone, commands.ParkUndone)
        assert isinstance(undone.cause, TransferError)
        assert "rank 1: link down" in str(undone.cause)
        assert play.pool.state("a") is SequenceState.GPU_RESIDENT
        play.pool.preempt("a")
        for rank, again in play.copies().items():
            for told in again:
                play.ranks[rank].ack(told.number)
        play.settle()
        assert isinstance(play.pool.poll()[0], commands.Parked)


def test_failures_on_several_ranks_are_all_named() -> None:
    with scripted(3, SwapConfig()) as play:
        play.append("a", 4)
        play.pool.preempt("a")
        for rank, copies in play.copies().items():
            for told in copies:
                play.ranks[rank].ack(told.number, Outcome.FAILED, why=f"cause {rank}")
        play.settle()
        (undone,) = play.pool.poll()
        assert str(undone.cause) == "rank 1: cause 1; rank 2: cause 2"  # type: ignore[union-attr]


def test_acknowledgements_that_come_again_or_late_change_nothing() -> None:
    with scripted(3) as play:
        play.append("a", 20)
        play.pool.preempt("a")
        copies = play.copies()
        for told in copies[1]:
            play.ranks[1].ack(told.number)
            play.ranks[1].ack(told.number, Outcome.FAILED, why="second thoughts")
        play.settle()
        assert play.pool.poll() == []
        for told in copies[2]:
            play.ranks[2].ack(told.number)
            play.ranks[2].ack(told.number)
        play.settle()
        assert isinstance(play.pool.poll()[0], commands.Parked)
        for told in copies[1]:
            play.ranks[1].ack(told.number, Outcome.FAILED, why="too late")
        play.settle()
        assert play.pool.poll() == []
        assert play.link.counters["repeated_acks"] == 3 * len(copies[1])
        assert play.pool.state("a") is SequenceState.OFFLOADED


def test_checksums_of_every_rank_come_back_to_that_rank() -> None:
    with scripted(3, SwapConfig(verify=Verify.CRC32)) as play:
        play.append("a", 6)
        play.pool.preempt("a")
        said: dict[int, list[tuple[int, ...]]] = {}
        for rank, copies in play.copies().items():
            for told in copies:
                planes = sum(len(item.checksums) for item in told.copy.items)
                said.setdefault(rank, []).append(tuple(range(1000 * rank, 1000 * rank + 2 * planes)))
                assert {checksum for item in told.copy.items for checksum in item.checksums} == {0}
                play.ranks[rank].ack(told.number, checksums=said[rank][-1])
        play.settle()
        assert isinstance(play.pool.poll()[0], commands.Parked)
        play.pool.restore("a")
        for rank, copies in play.copies().items():
            wanted = {checksum for told in said[rank] for checksum in told[1::2]}
            assert {c for told in copies for item in told.copy.items for c in item.checksums} == wanted


def test_checksum_mismatch_on_one_rank_is_a_mismatch_that_names_it() -> None:
    with scripted(2, SwapConfig()) as play:
        play.append("a", 4)
        play.pool.preempt("a")
        for told in play.copies()[1]:
            play.ranks[1].ack(told.number, Outcome.MISMATCH, why="stored bytes hash to 1, expected 2")
        play.settle()
        (undone,) = play.pool.poll()
        assert isinstance(undone, commands.ParkUndone)
        assert isinstance(undone.cause, ChecksumMismatch)
        assert str(undone.cause).startswith("rank 1: ")


def test_checksums_that_are_missing_fail_the_copy() -> None:
    with scripted(2, SwapConfig(verify=Verify.CRC32)) as play:
        play.append("a", 4)
        play.pool.preempt("a")
        for told in play.copies()[1]:
            play.ranks[1].ack(told.number, checksums=(1,))
        play.settle()
        (undone,) = play.pool.poll()
        assert "rank 1: 1 checksums" in str(undone.cause)  # type: ignore[union-attr]


def test_split_checksums_gives_each_rank_its_own() -> None:
    together = tuple(1 << 0 | rank << 32 | 3 << 64 for rank in (2, 5))
    assert [split_checksums(together, rank) for rank in range(3)] == [(1, 1), (2, 5), (3, 3)]


def test_promises_are_kept_and_failed_on_every_rank() -> None:
    with scripted(2) as play:
        rank, device, compute = play.ranks[1], play.pool.device, play.pool.compute
        assert isinstance(compute, RankStream)
        for error in (None, TransferError("no layer")):
            promise = device.create_promise()
            assert rank.hear(OpenPromise) == OpenPromise(promise.number)
            compute.wait(promise)
            assert rank.hear(Wait) == Wait(compute.number, promise.number, "")
            compute.run(b"", [promise])
            assert rank.hear(Run).gates == (promise.number,)
            promise.set(error)
            promise.set(TransferError("too late"))
            failure = "" if error is None else "no layer"
            assert rank.hear(SetPromise) == SetPromise(promise.number, failure)
            compute.wait(promise)
            assert rank.hear(Wait) == Wait(compute.number, promise.number, failure)
            compute.run(b"", [promise])
            assert rank.hear((SetPromise, Run)).gates == ((0,) if error is None else (-1,))  # type: ignore[union-attr]
            with suppress(SwapError):
                compute.gather((), Verify.NONE)
            assert rank.hear(UseUpGates) == UseUpGates(compute.number)


def test_forward_on_another_stream_waits_for_the_one_before_on_every_rank() -> None:
    with scripted(2) as play:
        with play.pool.forward({"a": 20}):
            pass
        before = play.ranks[1].hear(Record)
        with play.pool.forward({"a": 1}, stream=play.pool.create_stream("other")):
            pass
        assert play.ranks[1].hear((Wait, Record)) == Wait(1, before.number, "")


def test_copy_that_this_rank_does_not_take_is_told_to_nobody() -> None:
    with scripted(2, SwapConfig()) as play:
        play.append("a", 4)
        play.pool.device.local.close(LONG_S)
        play.pool.preempt("a")
        (undone,) = play.pool.poll()
        assert isinstance(undone, commands.ParkUndone)
        assert isinstance(undone.cause, PoolClosed)
        play.link.tell(Record(0, 99))
        assert play.ranks[1].hear((SubmitCopy, Record)) == Record(0, 99)


def test_copy_that_one_rank_never_ends_is_quarantined_until_it_does() -> None:
    with scripted(2, SwapConfig(copy_deadline_ns=1)) as play:
        play.append("a", 20)
        play.pool.preempt("a")
        copies = play.copies()
        news: list[Any] = []
        while not news:
            news += play.pool.poll()
        (undone,) = news
        assert isinstance(undone, commands.ParkUndone)
        assert isinstance(undone.cause, DrainTimeout)
        assert play.pool.statistics().counters["hung_copies"] == len(copies[1])
        play.pool.finish("a")
        assert play.pool.poll() == [commands.Gone("a")]  # type: ignore[arg-type]
        assert all(pages.quarantined for pages in play.pool.statistics().pages)
        for told in copies[1]:
            play.ranks[1].ack(told.number)
        play.settle()
        play.pool.poll()
        assert all(pages.free == PAGES for pages in play.pool.statistics().pages)
