"""Every public async call, cancelled wherever it can be: afterwards things are as before, or it has succeeded."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

from swapkv import PagesExhausted, Pool, PreemptOutcome, SequenceState, SwapConfig, Verify, open_pool
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.sweep import Outcome, cancel_at, sweep
from tests.kit.writing import Writer
from tests.test_pool import small_layout

pytestmark = pytest.mark.anyio

TOKENS = 21


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class HeldDevice(HostDevice):
    """Copies wait while `held` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def execute(self, operation: Operation) -> None:
        if operation.work in (Work.GATHER, Work.SCATTER):
            self.open.wait(10)
        super().execute(operation)


@asynccontextmanager
async def written_pool() -> AsyncIterator[tuple[Pool, Writer, HeldDevice]]:
    """A pool with two sequences, `a` resident and `b` off the device."""
    device = HeldDevice()
    layout = small_layout()
    config = SwapConfig(segment_bytes=1, verify=Verify.CRC32)
    async with open_pool(layout, num_pages=12, host_bytes=1 << 20, device=device, config=config) as pool:
        writer = Writer(pool)
        for name in ("b", "a"):
            pool.register(name, max_tokens=40)
            await writer.append({name: TOKENS})
            if name == "b":
                await pool.preempt(name)
        yield pool, writer, device


async def settle_and_check(pool: Pool, writer: Writer) -> None:
    """Everything is where it should be, and both sequences still have their bytes."""
    pool._core.check()
    for name in ("a", "b"):
        if name in pool._core.sequences:
            await pool.resume(name)
            await writer.check(name)
            await pool.preempt(name)
    counts = pool.statistics().pages[0]
    assert counts.owned == 0
    assert counts.quarantined == 0
    assert not pool._driver.restores
    assert not any(pool._driver.waiters._by_place.values()), "a waiter was left behind"


async def sweep_call(
    call: Callable[[Pool, Writer], Callable[[], Coroutine[Any, Any, Any]]],
    verify: Callable[[Pool, Outcome], None],
    held: bool,
) -> int:
    """Cancel `call` everywhere; with `held`, its copies do not run before the cancellation strikes."""

    async def trial(at: int) -> Outcome:
        async with written_pool() as (pool, writer, device):
            if held:
                device.open.clear()

            async def let_go() -> None:
                await anyio.wait_all_tasks_blocked()
                device.open.set()

            async with anyio.create_task_group() as group:
                group.start_soon(let_go)
                outcome = await cancel_at(call(pool, writer), at)
            verify(pool, outcome)
            await settle_and_check(pool, writer)
            return outcome

    return await sweep(trial)


@pytest.mark.parametrize("held", [False, True])
async def test_preempt_cancelled_anywhere_is_done_or_undone(held: bool) -> None:
    def verify(pool: Pool, outcome: Outcome) -> None:
        expected = SequenceState.GPU_RESIDENT if outcome.cancelled else SequenceState.OFFLOADED
        assert pool.state("a") is expected
        assert outcome.cancelled or outcome.value is PreemptOutcome.OFFLOADED

    assert await sweep_call(lambda pool, _: lambda: pool.preempt("a"), verify, held) > 1


@pytest.mark.parametrize("held", [False, True])
async def test_resume_cancelled_anywhere_is_done_or_undone(held: bool) -> None:
    def verify(pool: Pool, outcome: Outcome) -> None:
        expected = SequenceState.OFFLOADED if outcome.cancelled else SequenceState.GPU_READY
        assert pool.state("b") is expected

    assert await sweep_call(lambda pool, _: lambda: pool.resume("b"), verify, held) > 1


@pytest.mark.parametrize("held", [False, True])
async def test_gated_restore_cancelled_anywhere_is_done_or_undone(held: bool) -> None:
    def gated(pool: Pool, writer: Writer) -> Callable[[], Coroutine[Any, Any, Any]]:
        async def call() -> None:
            async with pool.restoring("b") as coming:
                for layer in range(pool.layout.num_layers):
                    await coming.wait_layer(layer)
                async with pool.forward({"b": 1}) as forward:
                    await forward.run(lambda: writer.write(forward, {"b": 1}))
                writer.written["b"].append("b")

        return call

    def verify(pool: Pool, outcome: Outcome) -> None:
        if pool.state("b") is SequenceState.OFFLOADED:
            assert outcome.cancelled
        assert pool.tokens("b") in (TOKENS, TOKENS + 1)

    async def trial(at: int) -> Outcome:
        async with written_pool() as (pool, writer, device):
            device.open.set()
            outcome = await cancel_at(gated(pool, writer), at)
            verify(pool, outcome)
            del writer.written["b"][pool.tokens("b") :]
            writer.written["b"].extend(["b"] * (pool.tokens("b") - len(writer.written["b"])))
            await settle_and_check(pool, writer)
            return outcome

    assert await sweep(trial) > 3


@pytest.mark.parametrize("held", [False, True])
async def test_forward_cancelled_while_waiting_for_pages_has_not_begun(held: bool) -> None:
    def crowded(pool: Pool, writer: Writer) -> Callable[[], Coroutine[Any, Any, Any]]:
        pool.register("c", max_tokens=40)

        async def call() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(pool.preempt, "a")
                await anyio.lowlevel.checkpoint()
                with suppress(PagesExhausted):  # the preempt was undone first: no page is on its way
                    await writer.append({"c": 32})

        return call

    def verify(pool: Pool, outcome: Outcome) -> None:
        assert pool.tokens("c") in (0, 32)
        pool.finish_nowait("c")

    assert await sweep_call(crowded, verify, held) > 1


@pytest.mark.parametrize("held", [False, True])
async def test_finish_cancelled_anywhere_is_done(held: bool) -> None:
    def leaving(pool: Pool, _: Writer) -> Callable[[], Coroutine[Any, Any, Any]]:
        return lambda: pool.finish("a")

    def verify(pool: Pool, outcome: Outcome) -> None:
        assert "a" not in pool._core.sequences

    assert await sweep_call(leaving, verify, held) > 1


async def test_forward_run_cancelled_anywhere_waits_for_its_end() -> None:
    ran: list[int] = []

    def running(pool: Pool, _: Writer) -> Callable[[], Coroutine[Any, Any, Any]]:
        async def call() -> None:
            async with pool.forward({"a": 0}) as forward:
                begun = len(ran)
                await forward.run(lambda: ran.append(1))
                assert len(ran) == begun + 1

        return call

    def verify(pool: Pool, outcome: Outcome) -> None:
        assert pool._core.sequences["a"].step is None  # type: ignore[index]

    assert await sweep_call(running, verify, held=False) > 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_preempt_with_a_plain_task_cancel_in_the_moment_of_success_succeeds_first(anyio_backend: str) -> None:
    """A plain `Task.cancel()` strikes once only: the call that has just succeeded returns, the next await raises."""
    async with written_pool() as (pool, _writer, device):
        device.open.clear()
        reached: list[str] = []

        async def victim() -> None:
            assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
            reached.append("returned")
            await asyncio.sleep(10)
            reached.append("slept")

        task = asyncio.get_running_loop().create_task(victim())
        await asyncio.sleep(0)
        end = pool._driver.waiters.end

        def end_and_cancel(kind: str, key: str, value: object = None, error: BaseException | None = None) -> None:
            end(kind, key, value, error)
            if kind == "park":
                task.cancel()

        pool._driver.waiters.end = end_and_cancel  # type: ignore[method-assign, assignment]
        device.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reached == ["returned"]
        assert pool.state("a") is SequenceState.OFFLOADED
