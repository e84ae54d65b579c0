"""What fails or is cancelled in a pool leaves things as before, and says so."""

import threading
from collections.abc import Callable

import anyio
import pytest

from swapkv import (
    ChecksumMismatch,
    KVEvicted,
    PoolBroken,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
)
from swapkv.streams.host import Operation, Work
from tests.kit.small_pool import FaultyDevice, pool_of
from tests.kit.writing import Writer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_pool_forward_that_raises_appends_nothing() -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 5})
        with pytest.raises(ZeroDivisionError):
            async with pool.forward({"a": 9}) as forward:
                await forward.run(lambda: 1 // 0)
        assert pool.tokens("a") == 5
        await writer.append({"a": 2})
        await writer.check("a")


@pytest.mark.parametrize("way", [Work.GATHER, Work.SCATTER])
async def test_pool_failed_copy_leaves_things_as_before(way: Work) -> None:
    device = FaultyDevice()
    async with pool_of(config=SwapConfig(segment_bytes=1), device=device) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 20})
        if way is Work.SCATTER:
            await pool.preempt("a")
        before = pool.state("a")
        countdown = iter([False, False, True])

        def fail_third(operation: Operation) -> None:
            if operation.work is way and next(countdown, False):
                raise OSError("link down")

        device.fault = fail_third
        with pytest.raises(TransferError, match="failed"):
            await (pool.preempt("a") if way is Work.GATHER else pool.resume("a"))
        assert pool.state("a") is before
        device.fault = lambda operation: None
        if way is Work.GATHER:
            await writer.check("a")
            await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")


async def test_pool_flipped_byte_in_the_host_tier_is_found() -> None:
    async with pool_of(config=SwapConfig(verify=Verify.CRC32)) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 20})
        await pool.preempt("a")
        pool._transfers._arena._memory[100] ^= 1
        with pytest.raises(ChecksumMismatch, match="recompute"):
            await pool.resume("a")
        assert pool.state("a") is SequenceState.OFFLOADED
        pool.evict("a")
        with pytest.raises(KVEvicted):
            await pool.resume("a")
        pool.reset("a")
        writer.written["a"].clear()
        await writer.append({"a": 20})
        await writer.check("a")


async def test_pool_cancelled_preempt_and_resume_leave_things_as_before() -> None:
    device = FaultyDevice()
    async with pool_of(config=SwapConfig(segment_bytes=1), device=device) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 20})
        for work, call, before in (
            (Work.GATHER, pool.preempt, SequenceState.GPU_RESIDENT),
            (Work.SCATTER, pool.resume, SequenceState.OFFLOADED),
        ):
            started, let_go = threading.Event(), threading.Event()

            def hold(
                operation: Operation,
                work: Work = work,
                started: threading.Event = started,
                let_go: threading.Event = let_go,
            ) -> None:
                if operation.work is work:
                    started.set()
                    let_go.wait(10)

            device.fault = hold
            scope = anyio.CancelScope()

            async def cancelled(call: Callable[[str], object] = call, scope: anyio.CancelScope = scope) -> None:
                with scope:
                    await call("a")  # type: ignore[misc]

            async with anyio.create_task_group() as group:
                group.start_soon(cancelled)
                await anyio.to_thread.run_sync(started.wait)
                scope.cancel()
                await anyio.wait_all_tasks_blocked()
                let_go.set()
            assert scope.cancelled_caught
            assert pool.state("a") is before
            device.fault = lambda operation: None
            await call("a")
        await writer.check("a")


async def test_pool_broken_core_fails_every_waiter_and_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=8)
        await writer.append({"a": 8})

        def break_down(*_: object) -> None:
            raise AssertionError("an invariant does not hold")

        monkeypatch.setattr("swapkv.fsm.offload._now_clean", break_down)
        with pytest.raises(PoolBroken, match="an invariant does not hold"):
            await pool.preempt("a")
        monkeypatch.undo()
        with pytest.raises(PoolBroken):
            await pool.resume("a")
