"""Every public async call, cancelled wherever it can be: afterwards things are as before, or it has succeeded."""

import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import anyio
import attrs

from swapkv import (
    KVDtype,
    KVLayout,
    PagesExhausted,
    Pool,
    PreemptOutcome,
    SequenceState,
    SwapConfig,
    Verify,
    open_pool,
)
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.sweep import Outcome, cancel_at, sweep
from tests.kit.writing import Writer

TOKENS = 21
Call: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]


@attrs.frozen
class Sweep:
    """A call that is cancelled everywhere. `call` makes it for a pool; `verify` looks at the pool after it."""

    call: Callable[[Pool, Writer], Call]
    verify: Callable[[Pool, Writer, Outcome], None]


class HeldDevice(HostDevice):
    """Copies wait while `open` is clear."""

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
    layout = KVLayout.dense(
        num_layers=2, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32, page_size=4, chunk_tokens=8
    )
    config = SwapConfig(segment_bytes=1, verify=Verify.CRC32)
    async with open_pool(layout, num_pages=12, host_bytes=1 << 20, device=device, config=config) as pool:
        writer = Writer(pool)
        for name in ("b", "a"):
            pool.register(name, max_tokens=40)
            await writer.append({name: TOKENS})
            if name == "b":
                await pool.preempt(name)
        yield pool, writer, device


async def cancel_everywhere(tried: Sweep, *, held: bool) -> int:
    """Cancel the call at every suspension; returns how many there were.

    With `held`, its copies do not run before everything is blocked, so that the cancellation finds them in flight.
    """

    async def trial(at: int) -> Outcome:
        async with written_pool() as (pool, writer, device):
            if held:
                device.open.clear()

            async def let_go() -> None:
                await anyio.wait_all_tasks_blocked()
                device.open.set()

            async with anyio.create_task_group() as group:
                group.start_soon(let_go)
                outcome = await cancel_at(tried.call(pool, writer), at)
            tried.verify(pool, writer, outcome)
            await _settle_and_check(pool, writer)
            return outcome

    return await sweep(trial)


async def _settle_and_check(pool: Pool, writer: Writer) -> None:
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


def _preempted(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    expected = SequenceState.GPU_RESIDENT if outcome.cancelled else SequenceState.OFFLOADED
    assert pool.state("a") is expected
    assert outcome.cancelled or outcome.value is PreemptOutcome.OFFLOADED


def _resumed(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.state("b") is (SequenceState.OFFLOADED if outcome.cancelled else SequenceState.GPU_READY)


def _gated(pool: Pool, writer: Writer) -> Call:
    async def call() -> None:
        async with pool.restoring("b") as coming:
            for layer in range(pool.layout.num_layers):
                await coming.wait_layer(layer)
            async with pool.forward({"b": 1}) as forward:
                await forward.run(lambda: writer.write(forward, {"b": 1}))

    return call


def _gated_ended(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    if pool.state("b") is SequenceState.OFFLOADED:
        assert outcome.cancelled
        assert pool.tokens("b") == TOKENS
    assert pool.tokens("b") in (TOKENS, TOKENS + 1)
    writer.written["b"] = ["b"] * pool.tokens("b")


def _crowded(pool: Pool, writer: Writer) -> Call:
    pool.register("c", max_tokens=40)

    async def call() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.preempt, "a")
            await anyio.lowlevel.checkpoint()
            with suppress(PagesExhausted):  # the preempt was undone first: no page is on its way
                await writer.append({"c": 32})

    return call


def _uncrowded(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.tokens("c") in (0, 32)
    pool.finish_nowait("c")


def _gone(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert "a" not in pool._core.sequences


def _running(pool: Pool, writer: Writer) -> Call:
    ran: list[int] = []

    async def call() -> None:
        async with pool.forward({"a": 0}) as forward:
            await forward.run(lambda: ran.append(1))
            assert ran

    return call


def _ran(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool._core.sequences["a"].step is None  # type: ignore[index]


SWEEPS = {
    "preempt": Sweep(lambda pool, _: lambda: pool.preempt("a"), _preempted),
    "resume": Sweep(lambda pool, _: lambda: pool.resume("b"), _resumed),
    "gated restore": Sweep(_gated, _gated_ended),
    "forward waiting for pages": Sweep(_crowded, _uncrowded),
    "forward run": Sweep(_running, _ran),
    "finish": Sweep(lambda pool, _: lambda: pool.finish("a"), _gone),
}


def count_cancel_points() -> int:
    """Sweep everything on asyncio and trio, held and not; returns how many cancellations were tried."""
    points = 0
    for backend in ("asyncio", "trio"):
        for tried in SWEEPS.values():
            for held in (False, True):
                points += anyio.run(lambda tried=tried, held=held: cancel_everywhere(tried, held=held), backend=backend)
    return points
