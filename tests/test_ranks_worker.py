"""What a worker does: the leader is played, and hears of each end once it has come, never before."""

import itertools
import queue
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from swapkv import HostDevice, PagedMemory, Verify
from swapkv.errors import MalformedMessage
from swapkv.fsm import commands
from swapkv.ids import ChunkId, Fence, GroupId, HostOffset, Lane, LayerId, OpId, SeqId
from swapkv.ranks import RankLost
from swapkv.ranks.hands import Hands, page_bases
from swapkv.ranks.messages import (
    Ack,
    Agreed,
    Bye,
    Clone,
    Close,
    Failed,
    Hello,
    Message,
    OpenPromise,
    OpenStream,
    Outcome,
    Record,
    Run,
    SetPromise,
    SubmitCopy,
    UseUpGates,
    Wait,
)
from swapkv.streams.host import Work
from swapkv.tiers.host import HostArena
from swapkv.transfers import Transfers
from tests.kit.ranks import (
    CHUNK_BYTES,
    HOST_BYTES,
    LAYOUT,
    LONG_S,
    PAGES,
    ScriptedRank,
    Workers,
    memory_ranks,
    no_thread_left,
)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


def played_leader() -> tuple[ScriptedRank, Workers]:
    """A leader that the test plays, and the worker that follows it."""
    groups = memory_ranks(2)
    leader = ScriptedRank(attrs.evolve(groups[1], channels={0: groups[0].channels[1]}))
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES)
    assert leader.hear(Hello).rank == 1
    leader.say(Agreed((PAGES,) * 2, HOST_BYTES, Verify.NONE))
    return leader, workers


def test_leader_that_is_gone_ends_its_worker() -> None:
    leader, workers = played_leader()
    leader.channel.close()
    workers.join()
    with pytest.raises(RankLost, match="rank 0 is lost"):
        raise workers.ended[1] or AssertionError


@pytest.mark.parametrize(
    "message",
    [Record(3, 1), Wait(0, 9, ""), SetPromise(4, ""), OpenStream(7, "x"), Bye(()), Hello(0, 2, (1,), 0, {})],
)
def test_worker_that_cannot_follow_says_so_and_ends(message: Message) -> None:
    leader, workers = played_leader()
    leader.say(OpenStream(0, "compute"))
    leader.say(message)
    assert "MalformedMessage" in leader.hear(Failed).reason
    leader.channel.close()
    workers.join()
    assert isinstance(workers.ended[1], MalformedMessage)


def copy_out(
    number: int,
    *,
    lane: Lane = Lane.OUT,
    group: int = 0,
    layer: int = 0,
    pages: tuple[int, ...] = (0, 1),
    host: int = 0,
    after: tuple[int, ...] = (),
    **item: int,
) -> SubmitCopy:
    """A copy of two pages to the begin of the host tier, or what a test makes of it."""
    whole = {"first": 0, "guard_first": 0, "guard_pages": 2} | item
    items = (commands.CopyItem(ChunkId(1), np.array(pages), host=HostOffset(host), **whole),)  # type: ignore[arg-type]
    fence, layers = Fence(lane, number), (LayerId(layer),)
    copy = commands.Copy(OpId(number), lane, fence, SeqId("a"), GroupId(group), layers, items, (), 1)
    return SubmitCopy(number, copy, after)


@pytest.mark.parametrize(
    "damage",
    [
        {"group": 2},
        {"layer": 1},
        {"pages": (1, PAGES)},
        {"host": HOST_BYTES - CHUNK_BYTES + 1},
        {"guard_first": 1},
        {"sealed": 3},
    ],
)
def test_copy_that_leaves_a_workers_memory_is_refused_and_the_next_one_done(damage: dict[str, Any]) -> None:
    leader, workers = played_leader()
    leader.say(copy_out(1, **damage))
    leader.say(copy_out(2))
    acks = {ack.number: ack for ack in (leader.hear(Ack), leader.hear(Ack))}
    assert acks[1].outcome is Outcome.FAILED
    assert "not accepted" in acks[1].reason
    assert acks[2].outcome is Outcome.DONE
    leader.say(Close(1000))
    assert leader.hear(Bye) == Bye(())
    workers.join()
    assert workers.ended[1] is None


def begun(leader: ScriptedRank) -> None:
    """The worker has begun all that it was told, and an unrelated copy has gone there and back: nothing else has ended."""
    number = next(NUMBERS)
    leader.say(copy_out(number))
    assert [leader.hear(Ack).number] == [number]


def acks(leader: ScriptedRank, count: int) -> list[Ack]:
    """The next acknowledgements, in the order in which the worker says them."""
    return [leader.hear(Ack) for _ in range(count)]


def let_go(leader: ScriptedRank, workers: Workers) -> None:
    """The leader closes; the worker has nothing left that is stuck."""
    leader.say(Close(int(LONG_S * 1000)))
    assert leader.hear(Bye) == Bye(())
    workers.join()
    assert workers.ended[1] is None


NUMBERS = itertools.count(1000)
NOTHING = b'{"do": "launch_nothing"}'


def test_worker_stream_waits_for_a_promise_until_it_is_kept() -> None:
    leader, workers = played_leader()
    for told in (OpenStream(0, "compute"), OpenPromise(1), Wait(0, 1, ""), Run(2, 0, NOTHING, ()), Record(0, 3)):
        leader.say(told)
    begun(leader)
    leader.say(SetPromise(1, ""))
    assert [(ack.number, ack.outcome) for ack in acks(leader, 2)] == [(2, Outcome.DONE), (3, Outcome.DONE)]
    let_go(leader, workers)


@pytest.mark.parametrize("when", ["before", "after"])
def test_worker_stream_that_waited_for_a_failed_promise_fails_its_next_work_only(when: str) -> None:
    leader, workers = played_leader()
    leader.say(OpenStream(0, "compute"))
    leader.say(OpenPromise(1))
    if when == "after":
        leader.say(SetPromise(1, "no layer"))
    leader.say(Wait(0, 1, "no layer" if when == "after" else ""))
    leader.say(Run(2, 0, NOTHING, ()))
    leader.say(Run(3, 0, NOTHING, ()))
    if when == "before":
        leader.say(SetPromise(1, "no layer"))
    first, second = acks(leader, 2)
    assert (first.number, first.outcome) == (2, Outcome.FAILED)
    assert "no layer" in first.reason or "an event that it waits for failed" in first.reason
    assert (second.number, second.outcome) == (3, Outcome.DONE)
    let_go(leader, workers)


def test_worker_stream_whose_failed_gate_is_used_up_fails_nothing() -> None:
    leader, workers = played_leader()
    for told in (OpenStream(0, "compute"), Wait(0, 0, "no layer"), UseUpGates(0), Run(1, 0, NOTHING, ())):
        leader.say(told)
    assert acks(leader, 1)[0].outcome is Outcome.DONE
    let_go(leader, workers)


@pytest.mark.parametrize(("gate", "outcome"), [(0, Outcome.DONE), (-1, Outcome.FAILED), (1, Outcome.DONE)])
def test_worker_forward_sees_its_gates_as_the_leader_does(gate: int, outcome: Outcome) -> None:
    leader, workers = played_leader()
    for told in (OpenStream(0, "compute"), OpenPromise(1), Run(2, 0, b'{"do": "pass_gates"}', (gate,))):
        leader.say(told)
    if gate > 0:
        begun(leader)
    leader.say(SetPromise(1, ""))
    assert [(ack.number, ack.outcome) for ack in acks(leader, 1)] == [(2, outcome)]
    let_go(leader, workers)


def test_worker_copy_starts_after_the_forward_that_it_waits_for() -> None:
    """The copy in is behind the record of a stream that a promise holds up."""
    leader, workers = played_leader()
    for told in (OpenStream(0, "compute"), OpenPromise(1), Wait(0, 1, ""), Run(2, 0, NOTHING, ()), Record(0, 3)):
        leader.say(told)
    leader.say(copy_out(4, lane=Lane.IN, after=(3,)))
    begun(leader)
    assert Work.SCATTER not in workers.devices[1].ran
    leader.say(SetPromise(1, ""))
    assert {ack.number for ack in acks(leader, 3)} == {2, 3, 4}
    assert workers.devices[1].ran[-2:] == [Work.LAUNCH, Work.SCATTER]
    let_go(leader, workers)


def test_worker_clone_starts_after_the_copy_that_it_waits_for() -> None:
    leader, workers = played_leader()
    workers.devices[1].hold(Work.SCATTER)
    pages = np.array([0]), np.array([1])
    leader.say(OpenStream(0, "compute"))
    leader.say(copy_out(1, lane=Lane.IN))
    leader.say(Clone(2, 0, GroupId(0), *pages, (1,)))
    begun(leader)
    assert Work.CLONE not in workers.devices[1].ran
    workers.devices[1].let_go()
    assert {ack.number for ack in acks(leader, 2)} == {1, 2}
    let_go(leader, workers)


def test_worker_that_closes_does_not_call_a_stuck_copy_over() -> None:
    leader, workers = played_leader()
    workers.devices[1].hold(Work.GATHER)
    leader.say(copy_out(1))
    leader.say(Close(100))
    last = leader.hear((Ack, Bye))
    assert isinstance(last, Bye)
    assert last.stuck == ("copy-out",)
    workers.join()


def test_worker_that_closes_fails_promises_that_were_not_kept() -> None:
    leader, workers = played_leader()
    for told in (OpenStream(0, "compute"), OpenPromise(1), Wait(0, 1, ""), Run(2, 0, NOTHING, ())):
        leader.say(told)
    let_go(leader, workers)


def test_worker_forgets_events_that_are_reached() -> None:
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()
    device = HostDevice()
    memory = PagedMemory.allocate(LAYOUT, [PAGES] * 2, device)
    arena = HostArena(LAYOUT, device.allocate_pinned(HOST_BYTES))
    transfers = Transfers(LAYOUT, memory, arena, device, Verify.NONE, page_bases([PAGES] * 2))
    agreed = Agreed((PAGES,) * 2, HOST_BYTES, Verify.NONE)
    hands = Hands(LAYOUT, 1, device, memory, transfers, agreed, told.put, None)
    hands.carry_out(OpenStream(0, "compute"))
    for number in range(1, 50):
        hands.carry_out(Record(0, number) if number % 2 else copy_out(number, after=(number - 1,)))
    for _ in range(1, 50):
        told.get(timeout=LONG_S)
    assert not hands._events
    assert hands.close(LONG_S) == []
