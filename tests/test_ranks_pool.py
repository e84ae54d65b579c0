"""The pool of several ranks with real workers, on threads: other bytes on every rank, and all of them come back."""

import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from swapkv import (
    ChecksumMismatch,
    ChunkState,
    DrainTimeout,
    KVLayout,
    NeverFits,
    PoolClosed,
    PreemptOutcome,
    ProtocolError,
    SequenceState,
    SwapConfig,
    SwapError,
    TransferError,
    Verify,
)
from swapkv.config import HostFull
from swapkv.ranks import RankedPool, RankLost, open_ranked_pool, open_ranked_stepped_pool
from swapkv.streams.host import Work
from tests import test_contract as contract
from tests.kit.ranks import (
    CHUNK_BYTES,
    CONFIG,
    HOST_BYTES,
    LAYOUT,
    PAGES,
    ObedientDevice,
    RanksWriter,
    ScriptedRank,
    Workers,
    memory_ranks,
    no_thread_left,
)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


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


@pytest.mark.anyio
async def test_lost_rank_stops_the_pool_before_what_waits_for_it_is_let_go() -> None:
    """The other way round a reaper could tell the core of the end of a copy that has not ended."""
    groups = memory_ranks(2)
    ScriptedRank(groups[1]).hello(LAYOUT, [PAGES] * 2, HOST_BYTES)
    async with open_ranked_pool(LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES) as pool:
        link = pool.device.link
        release, stopped = link.release, []
        waiter = pool._driver.waiters.add("event", "the loss")

        def watched(cause: SwapError) -> None:
            stopped.append(pool._driver._end is not None)
            release(cause)

        link.release = watched  # type: ignore[method-assign]
        groups[1].channels[0].close()
        with pytest.raises(RankLost):
            await waiter.wait()
    assert stopped
    assert all(stopped)


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
