"""A pool's calls: what they refuse, what they wait for, and whom they name."""

import threading
from collections.abc import Callable

import anyio
import pytest

from swapkv import (
    NeverFits,
    PoolClosed,
    PreemptOutcome,
    ProtocolError,
    SwapConfig,
    UnknownSequence,
    WouldBlock,
)
from swapkv.streams.host import Operation, Work
from tests.kit.small_pool import FaultyDevice, pool_of
from tests.kit.writing import Writer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_pool_finish_while_copies_are_in_flight_waits_for_them() -> None:
    device = FaultyDevice()
    async with pool_of(config=SwapConfig(segment_bytes=1), device=device) as pool:
        writer = Writer(pool)
        for phase in (Work.GATHER, Work.SCATTER):
            started, let_go = threading.Event(), threading.Event()
            pool.register("a", max_tokens=32)
            await writer.append({"a": 20})
            if phase is Work.SCATTER:
                await pool.preempt("a")

            def hold(
                operation: Operation,
                phase: Work = phase,
                started: threading.Event = started,
                let_go: threading.Event = let_go,
            ) -> None:
                if operation.work is phase:
                    started.set()
                    let_go.wait(10)

            device.fault = hold

            async def move(
                call: Callable[[str], object] = pool.preempt if phase is Work.GATHER else pool.resume,
            ) -> None:
                with pytest.raises(ProtocolError, match="finished while"):
                    await call("a")  # type: ignore[misc]

            async with anyio.create_task_group() as group:
                group.start_soon(move)
                await anyio.to_thread.run_sync(started.wait)
                with pytest.raises(WouldBlock):
                    pool.finish_nowait("a")
                group.start_soon(pool.finish, "a")
                await anyio.lowlevel.checkpoint()
                let_go.set()
            with pytest.raises(UnknownSequence):
                pool.state("a")
            device.fault = lambda operation: None
            counts = pool.statistics().pages[0]
            assert counts.free + counts.fenced == counts.total


async def test_pool_nowait_twins_refuse_only_what_would_wait() -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        with pool.forward_nowait({"a": 9}) as forward:
            writer.write(forward, {"a": 9})
        writer.written["a"] = ["a"] * 9
        with pytest.raises(WouldBlock, match="await preempt"):
            pool.preempt_nowait("a")
        await pool.preempt("a")
        with pytest.raises(WouldBlock, match="await resume"):
            pool.resume_nowait("a")
        await pool.resume("a")
        assert pool.preempt_nowait("a") is PreemptOutcome.OFFLOADED
        await pool.resume("a")
        pool.resume_nowait("a")
        await writer.check("a")
        pool.finish_nowait("a")


async def test_pool_bad_calls_name_the_value_and_the_remedy() -> None:
    async with pool_of(pages=4) as pool:
        with pytest.raises(NeverFits, match=r"needs 9 pages .* has 4"):
            pool.register("big", max_tokens=33)
        pool.register("a", max_tokens=8)
        with pytest.raises(ProtocolError, match="registered already"):
            pool.register("a", max_tokens=8)
        with pytest.raises(ProtocolError, match="max_tokens=8"):
            await Writer(pool).append({"a": 9})
        with pytest.raises(ProtocolError, match="-1 tokens"):
            await Writer(pool).append({"a": -1})
        with pytest.raises(UnknownSequence, match="register it first"):
            await pool.preempt("nobody")
        with pytest.raises(UnknownSequence):
            await pool.finish("nobody")
        async with pool.forward({"a": 1}):
            with pytest.raises(ProtocolError, match="end the forward"):
                await pool.preempt("a")
        with pytest.raises(ProtocolError, match="evict it before"):
            pool.reset("a")


async def test_pool_call_from_another_thread_is_refused() -> None:
    async with pool_of() as pool:
        with pytest.raises(ProtocolError, match="another thread"):
            await anyio.to_thread.run_sync(lambda: pool.register("a", max_tokens=8))


async def test_pool_closed_refuses_calls_and_leaves_no_threads() -> None:
    threads = set(threading.enumerate())
    async with pool_of() as pool:
        pool.register("a", max_tokens=8)
    await pool.close()
    with pytest.raises(PoolClosed):
        pool.register("b", max_tokens=8)
    left = [t.name for t in threading.enumerate() if t not in threads and t.name.startswith("swapkv")]
    assert not left
    assert pool.statistics().sequences == {"REGISTERED": 1}


async def test_pool_victims_prefer_the_one_that_costs_least() -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        for name in ("dirty", "clean"):
            pool.register(name, max_tokens=16)
            await writer.append({name: 16})
        await pool.preempt("clean")
        await pool.resume("clean")
        await pool.preempt("dirty")
        await pool.resume("dirty")
        await writer.append({"dirty": 0})
        assert {victim.sequence for victim in pool.victims()} == {"dirty", "clean"}
        assert all(victim.freed_bytes == 4 * pool.layout.page_bytes(0) for victim in pool.victims())  # type: ignore[arg-type]
