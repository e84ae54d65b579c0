"""A rank that is gone, silent, too slow or wrong: every call says so, in bounded time, and the core hears of no end."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from swapkv import DrainTimeout, PoolClosed, SwapConfig, Verify
from swapkv.errors import BudgetExhausted
from swapkv.fsm import commands
from swapkv.ranks import RankLost, RankOptions
from swapkv.ranks.link import Link
from swapkv.ranks.messages import Ack, Agreed, Bye, Close, Failed, Message, Record
from tests.kit.ranks import LONG_S, PATIENT, no_thread_left, scripted

HASTY = RankOptions(heartbeat_s=0.02, deadline_s=0.3, start_timeout_s=LONG_S)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


def test_work_of_a_lost_rank_ends_with_the_loss() -> None:
    with scripted(2) as play:
        context = play.pool.forward({"a": 1})
        forward = context.__enter__()
        work = play.pool.run_on_workers(forward, b"")
        play.ranks[1].channel.close()
        play.is_lost()
        for call in (
            lambda: work.wait(LONG_S),
            lambda: play.pool.run_on_workers(forward, b""),
            play.pool.poll,
            lambda: context.__exit__(None, None, None),
        ):
            with pytest.raises(RankLost, match="rank 1 of 2"):
                call()


def test_rank_that_takes_no_messages_is_lost_though_it_says_that_it_lives() -> None:
    with scripted(2, options=attrs.evolve(PATIENT, backlog_max=4)) as play:
        channel = play.link.group.channels[1]
        taken = threading.Event()
        channel.send = lambda frame, timeout_s: taken.wait()  # type: ignore[method-assign, assignment, return-value]
        for _ in range(8):
            play.pool.device.create_promise()
        play.is_lost()
        taken.set()
        with pytest.raises(RankLost, match="it has not taken 4 messages"):
            play.pool.poll()


def test_mistake_of_this_rank_in_hearing_another_loses_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a thread of the link fails with, those who wait hear of it."""

    def mistaken(link: Link, rank: int, ack: Ack) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Link, "_acknowledge", mistaken)
    with scripted(2) as play:
        play.ranks[1].ack(1)
        play.is_lost()
        with pytest.raises(RankLost, match="ZeroDivisionError: a bug"):
            play.pool.poll()


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


def test_rank_that_is_lost_in_the_close_does_not_cut_the_others_short() -> None:
    with scripted(3) as play, ThreadPoolExecutor(1) as threads:
        closed = threads.submit(play.pool.close)
        play.ranks[1].hear(Close)
        play.ranks[1].channel.close()
        with play.link.lock:
            assert play.link.lock.wait_for(lambda: 1 in play.link._gone, LONG_S)
        play.ranks[2].hear(Close)
        play.ranks[2].say(Bye(("copy-out",)))
        with pytest.raises(DrainTimeout, match="rank 2's copy-out"):
            closed.result(LONG_S)


def test_ranks_that_say_good_bye_close_the_pool_cleanly_and_once() -> None:
    with scripted(3) as play, ThreadPoolExecutor(1) as threads:
        closed = threads.submit(play.pool.close)
        for rank in play.ranks.values():
            assert rank.hear(Close).timeout_ms == 8000
            rank.say(Bye(()))
        closed.result(LONG_S)
        assert play.pool.device.close(LONG_S) == []
        with pytest.raises(PoolClosed):
            play.pool.poll()
