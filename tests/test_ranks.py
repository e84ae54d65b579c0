"""Several ranks whose workers are played: a transfer is over when all have said so, and fails if it fails anywhere."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
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
from swapkv.errors import BudgetExhausted
from swapkv.fsm import commands
from swapkv.ranks import (
    RankedSteppedPool,
    RankLost,
    RankOptions,
    open_ranked_stepped_pool,
)
from swapkv.ranks.leader import RankStream
from swapkv.ranks.link import RankEvent, split_checksums
from swapkv.ranks.messages import (
    Agreed,
    Close,
    Failed,
    Message,
    OpenPromise,
    Outcome,
    Record,
    Run,
    SetPromise,
    SubmitCopy,
    UseUpGates,
    Wait,
)
from tests import test_contract as contract
from tests.kit.ranks import (
    CONFIG,
    HOST_BYTES,
    LAYOUT,
    LONG_S,
    PAGES,
    PATIENT,
    ScriptedRank,
    memory_ranks,
    no_thread_left,
)

HASTY = RankOptions(heartbeat_s=0.02, deadline_s=0.3, start_timeout_s=LONG_S)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


class Scripted:
    """A stepped pool whose workers are played by the test. `ranks[r]`: rank `r`, from 1."""

    def __init__(self, pool: RankedSteppedPool, ranks: dict[int, ScriptedRank]) -> None:
        self.pool = pool
        self.ranks = ranks
        self.link = pool._device.link

    def append(self, name: str, tokens: int) -> None:
        """A forward; every rank's part of it is over at once."""
        with self.pool.forward({name: tokens}):
            pass
        for rank in self.ranks.values():
            rank.ack(rank.hear(Record).number)
        self.settle()
        self.pool.poll()

    def copies(self) -> dict[int, list[SubmitCopy]]:
        """Every copy under way, as each rank is told of it. This rank's own part is over."""
        for work in itertools.chain(*self.pool._driver._work.values()):
            work.event.local.wait()  # type: ignore[attr-defined]
        count = sum(self.pool._core.inflight)
        return {number: [rank.hear(SubmitCopy) for _ in range(count)] for number, rank in self.ranks.items()}

    def settle(self) -> None:
        """All that the ranks have said has reached the pool: each says an odd, last thing, which is counted."""
        before = self.link.counters["unknown_acks"]
        for rank in self.ranks.values():
            rank.ack(1 << 40)
        with self.link.lock:
            wanted = before + len(self.ranks)
            assert self.link.lock.wait_for(lambda: self.link.counters["unknown_acks"] == wanted, LONG_S)

    def owned(self) -> list[int]:
        return [pages.owned for pages in self.pool.statistics().pages]

    def is_lost(self) -> None:
        """Wait until the pool has found a rank lost."""
        with self.link.lock:
            assert self.link.lock.wait_for(lambda: isinstance(self.link.end, RankLost), LONG_S)


@contextmanager
def scripted(size: int, config: SwapConfig = CONFIG, options: RankOptions = PATIENT) -> Iterator[Scripted]:
    groups = memory_ranks(size, options)
    ranks = {group.rank: ScriptedRank(group) for group in groups[1:]}
    for rank in ranks.values():
        rank.hello(LAYOUT, [PAGES] * 2, HOST_BYTES)
    with open_ranked_stepped_pool(
        LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES, config=config
    ) as pool:
        pool.register("a", max_tokens=40)
        try:
            yield Scripted(pool, ranks)
        finally:
            for rank in ranks.values():  # they were only played: the pool need not wait for them
                rank.channel.close()


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
        rank, device, compute = play.ranks[1], play.pool._device, play.pool.compute
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


def test_work_of_a_lost_rank_ends_with_the_loss() -> None:
    with scripted(2) as play, pytest.raises(RankLost), play.pool.forward({"a": 1}) as forward:  # noqa: PT012
        work = play.pool.run_on_workers(forward, b"")
        play.ranks[1].channel.close()
        play.is_lost()
        with pytest.raises(RankLost, match="rank 1 of 2"):
            work.wait(LONG_S)
        with pytest.raises(RankLost):
            play.pool.run_on_workers(forward, b"")
        with pytest.raises(RankLost):
            play.pool.poll()


def test_copy_that_this_rank_does_not_take_is_told_to_nobody() -> None:
    with scripted(2, SwapConfig()) as play:
        play.append("a", 4)
        play.pool._device.local.close(LONG_S)
        play.pool.preempt("a")
        (undone,) = play.pool.poll()
        assert isinstance(undone, commands.ParkUndone)
        assert isinstance(undone.cause, PoolClosed)
        play.link.tell(Record(0, 99))
        assert play.ranks[1].hear((SubmitCopy, Record)) == Record(0, 99)


def test_workers_far_behind_refuse_copies_and_then_count_as_lost() -> None:
    with scripted(2, SwapConfig(), attrs.evolve(PATIENT, backlog_max=4)) as play:
        play.append("a", 4)
        for _ in range(2):
            with play.pool.forward({"a": 0}):
                pass
        play.pool.poll()
        play.pool.preempt("a")
        (undone,) = play.pool.poll()
        assert isinstance(undone, commands.ParkUndone)
        assert isinstance(undone.cause, BudgetExhausted)
        with pytest.raises(RankLost, match="rank 1 of 2"):  # noqa: PT012
            for _ in range(3):
                with play.pool.forward({"a": 0}):
                    pass
            play.pool.poll()


@pytest.mark.parametrize("broken", [b"", b"garbage", b"SKVR" + bytes(20)])
def test_worker_that_talks_nonsense_is_lost(broken: bytes) -> None:
    with scripted(3) as play:
        play.append("a", 4)
        play.pool.preempt("a")
        play.copies()
        play.ranks[2].channel.send(broken or b"\0", LONG_S)
        play.is_lost()
        with pytest.raises(RankLost, match="rank 2 of 3 is lost \\(MalformedMessage"):
            play.pool.poll()


@pytest.mark.parametrize("message", [Close(1), Agreed((1,), 1, Verify.NONE), Record(0, 1)])
def test_worker_that_talks_like_a_leader_is_lost(message: Message) -> None:
    with scripted(2) as play:
        play.ranks[1].say(message)
        play.is_lost()
        with pytest.raises(RankLost, match="which only the leader says"):
            play.pool.poll()


def test_worker_that_cannot_go_on_is_lost_and_its_reason_told() -> None:
    with scripted(2) as play:
        play.ranks[1].say(Failed("OSError: no such device"))
        play.is_lost()
        with pytest.raises(RankLost, match=r"rank 1 of 2 .*no such device"):
            play.pool.preempt("a")


def test_worker_that_falls_silent_is_lost() -> None:
    with scripted(2, options=HASTY) as play:
        play.is_lost()
        with pytest.raises(RankLost, match="rank 1 of 2 is lost \\(TimeoutError"):
            play.pool.poll()


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


def test_core_of_a_lost_rank_does_not_hear_of_an_end() -> None:
    """What the lost rank had to do may still be under way there: it has not ended, so its pages are nobody else's."""
    with scripted(3) as play:
        play.append("a", 20)
        play.pool.preempt("a")
        owned, ops = play.owned(), dict(play.pool._core.ops)
        for told in play.copies()[1]:
            play.ranks[1].ack(told.number)
        play.ranks[2].channel.close()
        play.is_lost()
        for call in (play.pool.poll, lambda: play.pool.preempt("a"), lambda: play.pool.register("b", max_tokens=1)):
            with pytest.raises(RankLost, match="rank 2 of 3"):
                call()
        assert play.owned() == owned
        assert play.pool._core.ops == ops
        with pytest.raises(RankLost):
            play.pool.drain(1)
