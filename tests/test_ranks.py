"""Several ranks in one process: a transfer is over when all of them have said so, and fails everywhere if it fails anywhere."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from swapkv import (
    ChecksumMismatch,
    ChunkState,
    DrainTimeout,
    HostDevice,
    KVDtype,
    KVLayout,
    NeverFits,
    PagedMemory,
    PoolClosed,
    PreemptOutcome,
    ProtocolError,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
)
from swapkv.config import HostFull
from swapkv.errors import BudgetExhausted, MalformedMessage
from swapkv.fsm import commands
from swapkv.ids import Fence, Lane
from swapkv.ranks import (
    RankedPool,
    RankedSteppedPool,
    RankGroup,
    RankLost,
    RankOptions,
    RankWorker,
    open_ranked_pool,
    open_ranked_stepped_pool,
)
from swapkv.ranks.agreement import agree
from swapkv.ranks.link import RankEvent, split_checksums
from swapkv.ranks.messages import (
    Ack,
    Agreed,
    Bye,
    Close,
    Failed,
    Hello,
    Message,
    OpenStream,
    Outcome,
    Record,
    SetPromise,
    SubmitCopy,
    Wait,
)
from swapkv.streams.host import Work
from tests import test_contract as contract
from tests.kit.ranks import (
    LONG_S,
    PATIENT,
    ObedientDevice,
    RanksWriter,
    ScriptedRank,
    Workers,
    memory_ranks,
    no_thread_left,
)

LAYOUT = KVLayout.dense(
    num_layers=3,
    num_kv_heads=1,
    head_dim=8,
    dtype=KVDtype.FLOAT32,
    page_size=4,
    chunk_tokens=8,
    windows=[None, 6, None],
)
CONFIG = SwapConfig(segment_bytes=512)
PAGES = 14
HOST_BYTES = 1 << 14
CHUNK_BYTES = LAYOUT.chunk_bytes(0)  # type: ignore[arg-type]
HASTY = RankOptions(heartbeat_s=0.02, deadline_s=0.3, start_timeout_s=LONG_S)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


class Playing:
    """An async pool whose workers are real, on threads."""

    def __init__(self, pool: RankedPool, workers: Workers, device: ObedientDevice) -> None:
        self.pool = pool
        self.workers = workers
        self.device = device
        self.writer = RanksWriter(pool)


class opened:  # noqa: N801
    """`async with opened(size) as playing:`, with everything ended afterwards."""

    def __init__(
        self, size: int, config: SwapConfig = CONFIG, pages: int = PAGES, host_bytes: int = HOST_BYTES
    ) -> None:
        self._groups = memory_ranks(size)
        self._workers = Workers(LAYOUT, self._groups, pages, host_bytes)
        self._device = ObedientDevice()
        self._pool = open_ranked_pool(
            LAYOUT, ranks=self._groups[0], num_pages=PAGES, host_bytes=HOST_BYTES, config=config, device=self._device
        )

    async def __aenter__(self) -> Playing:
        return Playing(await self._pool.__aenter__(), self._workers, self._device)

    async def __aexit__(self, *error: Any) -> None:
        self._device.let_go()
        await self._pool.__aexit__(*error)
        self._workers.join()
        if error[0] is None:
            assert not any(self._workers.ended.values()), self._workers.ended


@pytest.mark.anyio
@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_bytes_of_every_rank_come_back(size: int, verify: Verify) -> None:
    async with opened(size, SwapConfig(segment_bytes=512, verify=verify)) as playing:
        pool, writer = playing.pool, playing.writer
        for name in ("a", "b"):
            pool.register(name, max_tokens=40)
        await writer.append(a=13, b=3)
        assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
        await writer.append(b=21)
        await pool.resume("a")
        await writer.check("a")
        await writer.append(a=2)
        await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")
        await writer.check("b")
        assert pool.statistics().counters["clean_bytes_kept"] > 0


@pytest.mark.anyio
async def test_forked_tail_is_copied_on_every_rank() -> None:
    async with opened(2) as playing:
        pool, writer = playing.pool, playing.writer
        pool.register("a", max_tokens=40)
        await writer.append(a=14)
        pool.fork("a", "b", max_tokens=40)
        writer.written["b"] = list(writer.written["a"])
        await writer.append(b=1)
        await writer.append(a=1)
        assert pool.statistics().counters["tails_copied_on_write"] == 2
        await writer.check("a")
        await writer.check("b")


@pytest.mark.anyio
async def test_restore_gates_the_layers_of_a_forward_on_every_rank() -> None:
    async with opened(2, SwapConfig(segment_bytes=1)) as playing:
        pool, writer = playing.pool, playing.writer
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        await pool.preempt("a")
        await writer.order("hold", work="scatter")
        async with pool.restoring("a") as coming:
            gates = [coming.layer_event(layer) for layer in range(LAYOUT.num_layers)]
            async with pool.forward({"a": 0}) as forward:
                order = {"do": "tokens", "parts": [writer.part(forward, "a")], "write": False}
                read = pool.run_on_workers(forward, json.dumps(order).encode(), gates=gates)
            assert not gates[0].query()
            assert not read.query()
            pool.compute.run(b'{"do": "let_go"}', ())  # type: ignore[attr-defined]
        await pool._driver.reached(read)
        assert read.wait(0)


@pytest.mark.anyio
async def test_restore_that_fails_on_a_worker_fails_the_gates_of_every_rank_and_nothing_behind_them() -> None:
    async with opened(3, SwapConfig(segment_bytes=1)) as playing:
        pool, writer = playing.pool, playing.writer
        for name in ("a", "b"):
            pool.register(name, max_tokens=40)
        await writer.append(a=13, b=3)
        await pool.preempt("a")
        playing.workers.devices[2].failing.append(Work.SCATTER)
        with pytest.raises(TransferError, match=r"rank 2: .*link down"):  # noqa: PT012
            async with pool.restoring("a") as coming:
                for layer in range(LAYOUT.num_layers):
                    coming.gate(layer, pool.compute)
        assert pool.state("a") is SequenceState.OFFLOADED
        await writer.append(b=3)
        await writer.check("b")
        await pool.resume("a")
        await writer.check("a")


@pytest.mark.anyio
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("work", [Work.GATHER, Work.SCATTER])
async def test_copy_that_fails_on_one_rank_leaves_every_rank_as_before(rank: int, work: Work) -> None:
    async with opened(2) as playing:
        pool, writer = playing.pool, playing.writer
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        device = playing.workers.devices[1] if rank else playing.device
        if work is Work.SCATTER:
            await pool.preempt("a")
        device.failing.append(work)
        with pytest.raises(TransferError, match=f"rank {rank}: .*link down"):
            await (pool.preempt("a") if work is Work.GATHER else pool.resume("a"))
        assert pool.state("a") is (SequenceState.GPU_RESIDENT if work is Work.GATHER else SequenceState.OFFLOADED)
        if work is Work.GATHER:
            await writer.check("a")
            await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")


@pytest.mark.anyio
async def test_bytes_that_change_on_a_workers_host_are_found_and_not_used() -> None:
    async with opened(2, SwapConfig(verify=Verify.CRC32)) as playing:
        pool, writer = playing.pool, playing.writer
        pool.register("a", max_tokens=40)
        await writer.append(a=6)
        await pool.preempt("a")
        await writer.order("damage", offset=3)
        with pytest.raises(ChecksumMismatch, match="rank 1: "):
            await pool.resume("a")
        await writer.order("damage", offset=3)
        await pool.resume("a")
        await writer.check("a")


@pytest.mark.anyio
async def test_cancelled_preempt_returns_once_a_slow_rank_has_ended() -> None:
    async with opened(2) as playing:
        pool, writer = playing.pool, playing.writer
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        device = playing.workers.devices[1]
        device.hold(Work.GATHER)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.preempt, "a")
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                with anyio.CancelScope(shield=True):
                    await anyio.wait_all_tasks_blocked()
                    assert set(pool.chunk_states("a")) == {ChunkState.OFFLOADING}
                    device.let_go()
        assert pool.state("a") is SequenceState.GPU_RESIDENT
        await writer.check("a")


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["refuse", "refuse_later"])
async def test_forward_that_raises_on_a_worker_fails_at_the_leader(how: str) -> None:
    async with opened(2) as playing:
        pool, writer = playing.pool, playing.writer
        pool.register("a", max_tokens=40)
        await writer.append(a=5)
        with pytest.raises(TransferError, match=r"rank 1: .*not to"):
            async with pool.forward({"a": 3}) as forward:
                await pool.run_on_workers_and_wait(forward, json.dumps({"do": how}).encode())
        assert pool.tokens("a") == 5
        await writer.append(a=3)
        await writer.check("a")


@pytest.mark.anyio
async def test_forward_on_a_stream_of_one_rank_is_refused() -> None:
    async with opened(2) as playing:
        pool = playing.pool
        pool.register("a", max_tokens=40)
        alone = playing.device.create_stream("alone")
        with pytest.raises(ProtocolError, match="create_stream"):
            async with pool.forward({"a": 1}, stream=alone):
                pass
        async with pool.forward({"a": 1}, stream=pool.create_stream("together")):
            pass
        assert pool.tokens("a") == 1


@pytest.mark.anyio
async def test_capacity_is_the_least_of_all_ranks() -> None:
    async with opened(3, SwapConfig(host_full=HostFull.REFUSE), pages=PAGES - 2, host_bytes=CHUNK_BYTES) as playing:
        pool, statistics = playing.pool, playing.pool.statistics()
        assert [pages.total for pages in statistics.pages] == [PAGES - 2] * 2
        assert statistics.host_bytes_total == CHUNK_BYTES
        assert pool.memory.num_pages(0) == PAGES - 2  # type: ignore[arg-type]
        with pytest.raises(NeverFits):
            pool.register("a", max_tokens=4 * PAGES)


def test_leader_with_memory_of_its_own_uses_the_first_pages() -> None:
    groups = memory_ranks(2)
    device = HostDevice()
    memory = PagedMemory.allocate(LAYOUT, [PAGES] * 2, device)
    workers = Workers(LAYOUT, groups, [5, 9], HOST_BYTES)
    with open_ranked_stepped_pool(
        LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES, device=device, memory=memory
    ) as pool:
        assert [pages.total for pages in pool.statistics().pages] == [5, 9]
        assert pool.memory.plane(0, "k").data_ptr() == memory.plane(0, "k").data_ptr()
        assert len(pool.memory.plane(0, "k")) == 5
    workers.join()


@pytest.mark.anyio
async def test_ranks_of_unlike_layouts_are_all_refused_by_field_and_rank() -> None:
    groups = memory_ranks(3)
    other = attrs.evolve(LAYOUT, chunk_tokens=16)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES, {2: other})
    named = r"chunk_tokens: 8 on ranks \[0, 1\], 16 on ranks \[2\]"
    with pytest.raises(ProtocolError, match=named):
        async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES):
            pass
    workers.join()
    for rank in (1, 2):
        with pytest.raises(ProtocolError, match=named):
            raise workers.ended[rank]  # type: ignore[misc]


def test_rank_that_calls_itself_another_is_refused() -> None:
    own, other = (Hello(rank, 2 + rank, (1,), 0, {}) for rank in range(2))
    with pytest.raises(ProtocolError, match="rank 1 of 2 calls itself 1 of 3"):
        agree({0: own, 1: other}, Verify.NONE)


def test_fields_that_one_rank_lacks_are_named() -> None:
    own, other = Hello(0, 2, (1,), 0, {"x": "1"}), Hello(1, 2, (1,), 0, {})
    with pytest.raises(ProtocolError, match=r"x: 1 on ranks \[0\], absent on ranks \[1\]"):
        agree({0: own, 1: other}, Verify.NONE)


@pytest.mark.anyio
async def test_rank_that_does_not_come_is_named_and_the_others_are_let_go() -> None:
    groups = memory_ranks(3, attrs.evolve(PATIENT, heartbeat_s=0.02, start_timeout_s=0.5))
    workers = Workers(LAYOUT, groups[:2], PAGES, HOST_BYTES)
    with pytest.raises(RankLost, match="rank 2 of 3"):
        async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES):
            pass
    workers.join()
    assert isinstance(workers.ended[1], ProtocolError | RankLost)


@pytest.mark.anyio
async def test_cancelled_open_lets_the_ranks_go() -> None:
    groups = memory_ranks(3)
    workers = Workers(LAYOUT, groups[:2], PAGES, HOST_BYTES)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def open_it() -> None:
                async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES):
                    raise AssertionError("rank 2 is not there")

            tasks.start_soon(open_it)
            await anyio.wait_all_tasks_blocked()
            groups[2].channels[0].close()
            scope.cancel()
    workers.join()
    assert isinstance(workers.ended[1], ProtocolError | RankLost)


@pytest.mark.anyio
async def test_rank_that_is_lost_ends_every_call_that_waits() -> None:
    groups = memory_ranks(3)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES)
    errors: list[BaseException] = []
    async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES, config=CONFIG) as pool:
        writer = RanksWriter(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=40)
        await writer.append(a=13, b=13)
        for device in workers.devices.values():
            device.hold(Work.GATHER)

        async def preempt(name: str) -> None:
            with pytest.raises(RankLost, match="rank 2 of 3 is lost") as raised:
                await pool.preempt(name)
            errors.append(raised.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(preempt, "a")
            tasks.start_soon(preempt, "b")
            await anyio.wait_all_tasks_blocked()
            assert not errors
            groups[2].channels[0].close()
        assert len(errors) == 2
        for call in (lambda: pool.register("c", max_tokens=1), lambda: pool.forward_nowait({"a": 1}).__enter__()):
            with pytest.raises(RankLost):
                call()
        assert {pool.state(name) for name in ("a", "b")} == {SequenceState.OFFLOADING}
        for device in workers.devices.values():
            device.let_go()
    workers.join()
    assert workers.ended[1] is None
    assert isinstance(workers.ended[2], RankLost)


@pytest.mark.anyio
async def test_leader_that_is_gone_ends_its_workers() -> None:
    groups = memory_ranks(2)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES)
    ScriptedRank(attrs.evolve(groups[1], channels={0: groups[0].channels[1]})).say(Agreed((PAGES,) * 2, 0, Verify.NONE))
    groups[0].channels[1].close()
    workers.join()
    assert isinstance(workers.ended[1], RankLost)
    assert "rank 0 is lost" in str(workers.ended[1])


@pytest.mark.parametrize(
    "message",
    [
        Record(3, 1),
        Wait(0, 9, ""),
        SetPromise(4, ""),
        OpenStream(7, "x"),
        Bye(()),
        Hello(0, 2, (1,), 0, {}),
    ],
)
def test_worker_that_cannot_follow_says_so_and_ends(message: Message) -> None:
    groups = memory_ranks(2)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES)
    leader = ScriptedRank(attrs.evolve(groups[1], channels={0: groups[0].channels[1]}))
    assert leader.hear(Hello).rank == 1
    leader.say(Agreed((PAGES,) * 2, HOST_BYTES, Verify.NONE))
    leader.say(OpenStream(0, "compute"))
    leader.say(message)
    assert "MalformedMessage" in leader.hear(Failed).reason
    leader.channel.close()
    workers.join()
    assert isinstance(workers.ended[1], MalformedMessage)


@pytest.mark.parametrize("damage", ["group", "layer", "page", "slot", "guard", "sealed"])
def test_worker_refuses_copies_that_leave_its_memory(damage: str) -> None:
    """Nothing of such a copy is carried out, and the worker lives on."""
    groups = memory_ranks(2)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES)
    leader = ScriptedRank(attrs.evolve(groups[1], channels={0: groups[0].channels[1]}))
    leader.say(Agreed((PAGES,) * 2, HOST_BYTES, Verify.NONE))
    item: dict[str, Any] = {"pages": np.array([1, 2]), "first": 0, "host": 0, "guard_first": 0, "guard_pages": 2}
    copy: dict[str, Any] = {"group": 0, "layers": (0,)}
    copy |= {"group": {"group": 2}, "layer": {"layers": (1,)}}.get(damage, {})
    item |= {
        "page": {"pages": np.array([1, PAGES])},
        "slot": {"host": HOST_BYTES - CHUNK_BYTES + 1},
        "guard": {"guard_first": 1},
        "sealed": {"sealed": 3},
    }.get(damage, {})
    for number, part in enumerate((item, {**item, "pages": np.array([0, 1]), **_SOUND}), 1):
        whole = {"group": 0, "layers": (0,)} if number == 2 else copy
        items = (commands.CopyItem(chunk=1, **part),)  # type: ignore[arg-type]
        told = commands.Copy(
            op=number,
            lane=Lane.OUT,
            fence=Fence(Lane.OUT, number),
            sequence="a",
            items=items,
            after=(),
            num_bytes=1,
            **whole,
        )  # type: ignore[arg-type]
        leader.say(SubmitCopy(number, told, ()))
    acks = {ack.number: ack for ack in (leader.hear(Ack), leader.hear(Ack))}
    assert acks[1].outcome is Outcome.FAILED
    assert "not accepted" in acks[1].reason
    assert acks[2].outcome is Outcome.DONE
    leader.say(Close(1000))
    assert leader.hear(Bye) == Bye(())
    workers.join()
    assert workers.ended[1] is None


_SOUND = {"host": 0, "guard_first": 0, "sealed": 0}


@pytest.mark.anyio
async def test_worker_whose_copy_hangs_is_named_when_the_pool_is_closed() -> None:
    groups = memory_ranks(2)
    workers = Workers(LAYOUT, groups, PAGES, HOST_BYTES)
    pool = open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES)
    async with pool as opened_pool:
        opened_pool.register("a", max_tokens=40)
        await RanksWriter(opened_pool).append(a=13)
        workers.devices[1].hold(Work.GATHER)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_preempt_until_closed, opened_pool)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(DrainTimeout, match="rank 1's copy-out"):
                await opened_pool.close(0.5)
    workers.join()


async def _preempt_until_closed(pool: RankedPool) -> None:
    with pytest.raises(PoolClosed):
        await pool.preempt("a")


@pytest.mark.anyio
async def test_gates_of_one_rank_are_refused_for_workers() -> None:
    async with opened(2) as playing:
        pool = playing.pool
        pool.register("a", max_tokens=40)
        async with pool.forward({"a": 1}) as forward:
            with pytest.raises(ProtocolError, match="layer_event"):
                pool.run_on_workers(forward, b"", gates=[playing.device.create_promise()])


def test_group_with_the_wrong_channels_is_refused() -> None:
    for rank, size in ((0, 2), (1, 2), (2, 2)):
        with pytest.raises(ProtocolError, match="channels"):
            RankGroup(rank=rank, size=size, channels={})
    with pytest.raises(ProtocolError, match="rank 0 leads"):
        RankWorker(LAYOUT, ranks=memory_ranks(1)[0], num_pages=1, host_bytes=0)


@pytest.mark.parametrize(
    "wrong", [{"heartbeat_s": 0.0}, {"deadline_s": -1.0}, {"heartbeat_s": 2.0, "deadline_s": 3.0}, {"backlog_max": 0}]
)
def test_options_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        RankOptions(**wrong)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", contract.SCENARIOS)
def test_ranks_told_the_same_as_one_device_decide_the_same(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is the ordinary case of the same code; where a copy fails does not matter: here, on the last rank."""
    scenario = contract.SCENARIOS[name]
    groups = memory_ranks(size)
    workers = Workers(contract.LAYOUT, groups, contract.PAGES, contract.HOST_BYTES)
    own = ObedientDevice()
    device = workers.devices[size - 1] if size > 1 else own

    def open_here(layout: KVLayout, **options: Any) -> Any:
        return open_ranked_stepped_pool(layout, ranks=groups[0], **(options | {"device": own}))

    device.fail_next = lambda lane: device.failing.append(  # type: ignore[attr-defined]
        Work.GATHER if lane == "OUT" else Work.SCATTER
    )
    monkeypatch.setattr(contract, "FailingDevice", lambda: device)
    expected = contract.on_virtual(scenario, monkeypatch)
    monkeypatch.setattr(contract, "open_stepped_pool", open_here)
    assert contract.on_stepped(scenario, monkeypatch) == expected
    workers.join()
