"""Every public async call, cancelled wherever it can be: afterwards things are as before, or it has succeeded."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Any, TypeAlias

import anyio
import attrs
import pytest

from swapkv import (
    Forward,
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
from swapkv.fsm import events
from swapkv.ids import SeqId
from swapkv.streams.host import HostDevice, Operation, Work
from swapkv.waiters import Waiters
from tests.kit.sweep import Outcome, cancel_at, sweep
from tests.kit.writing import Writer

TOKENS = 21
Call: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]


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


@attrs.frozen
class Sweep:
    """A call that is cancelled everywhere. `call` makes it for a pool that `prepare` has set up; `verify` looks at it after."""

    call: Callable[[Pool, Writer, HeldDevice], Call]
    verify: Callable[[Pool, Writer, Outcome], None]
    prepare: Callable[[Pool, Writer], Awaitable[None]] = attrs.field(
        default=lambda pool, writer: _nothing(pool, writer)
    )


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
        try:
            yield pool, writer, device
        finally:
            device.open.set()


class When(Enum):
    """Where a call is cancelled."""

    FREE = "suspended"
    HELD = "suspended, its copies in flight"
    """Copies and callables do not run before everything is blocked."""
    NEWS = "in the moment of news"
    """Right after something that it, or another call, waits for has come, before it can go on."""


async def cancel_everywhere(tried: Sweep, when: When) -> int:
    """Cancel the call wherever it can be, in a pool of its own each time; returns how many places there were."""

    async def trial(at: int) -> Outcome:
        async with written_pool() as (pool, writer, device):
            if when is When.HELD:
                device.open.clear()
            await tried.prepare(pool, writer)
            call = tried.call(pool, writer, device)

            async def let_go() -> None:
                await anyio.wait_all_tasks_blocked()
                device.open.set()

            async with anyio.create_task_group() as group:
                group.start_soon(let_go)
                outcome = await (_cancel_at_news(pool, call, at) if when is When.NEWS else cancel_at(call, at))
                tried.verify(pool, writer, outcome)
            await _settle_and_check(pool, writer)
            return outcome

    return await sweep(trial)


async def _cancel_at_news(pool: Pool, call: Call, at: int) -> Outcome:
    """Like `cancel_at`, but counts news instead of suspensions."""
    outcome = Outcome(at=at, suspensions=0, cancelled=True)
    waiters = pool._driver.waiters
    with anyio.CancelScope() as scope:

        def end(kind: str, key: Hashable, value: object = None, error: BaseException | None = None) -> None:
            Waiters.end(waiters, kind, key, value, error)
            outcome.suspensions += 1
            if outcome.suspensions == at:
                scope.cancel()

        waiters.end = end  # type: ignore[method-assign]
        try:
            outcome.value = await call()
            outcome.cancelled = False
        finally:
            del waiters.end  # type: ignore[method-assign]
    return outcome


async def _settle_and_check(pool: Pool, writer: Writer) -> None:
    """Nothing is left of the call, and all sequences still have their bytes."""
    core = pool._core
    core.check()
    assert not core.steps, "a forward was left behind"
    assert not pool._executor._forwards, "a forward's stream was left behind"
    assert not pool._driver.restores, "a restore was left behind"
    assert not pool._driver.waiters._by_place, "a waiter was left behind"
    for name in list(core.offloads):
        await pool._driver.waiters.add("park", name).wait()
    for name in list(core.sequences):
        await pool.preempt(name)
    for name in list(core.sequences):
        await pool.resume(name)
        await writer.check(name)
        await pool.preempt(name)
    counts = pool.statistics().pages[0]
    assert counts.owned == counts.quarantined == 0


async def _nothing(pool: Pool, writer: Writer) -> None:
    """Nothing else is going on."""


def _preempted(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    expected = SequenceState.GPU_RESIDENT if outcome.cancelled else SequenceState.OFFLOADED
    assert pool.state("a") is expected
    assert outcome.cancelled or outcome.value is PreemptOutcome.OFFLOADED


def _spilled(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.state("a") is (SequenceState.GPU_RESIDENT if outcome.cancelled else SequenceState.SPILLED)


async def _spilled_before(pool: Pool, writer: Writer) -> None:
    """`a` is spilled already, whether or not copies are held afterwards."""
    gate: threading.Event = pool.device.open  # type: ignore[attr-defined]
    held = not gate.is_set()
    gate.set()
    await pool.spill("a")
    if held:
        gate.clear()


def _resumed_spilled(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.state("a") is (SequenceState.SPILLED if outcome.cancelled else SequenceState.GPU_READY)


def _resumed_in_part(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.state("b") is (SequenceState.OFFLOADED if outcome.cancelled else SequenceState.SPILLED)


def _resumed(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.state("b") is (SequenceState.OFFLOADED if outcome.cancelled else SequenceState.GPU_READY)


async def _full(pool: Pool, writer: Writer) -> None:
    """Every page is taken: `c` has those that `b` would need."""
    pool.register("c", max_tokens=40)
    await writer.append({"c": 24})


def _crowded_resume(pool: Pool, writer: Writer, device: HeldDevice) -> Call:
    async def call() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.resume, "b")
            await anyio.lowlevel.checkpoint()
            await pool.preempt("a")

    return call


def _both_or_neither(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    """Each of the two calls is done or undone by itself; the restore cannot be done without the preempt."""
    assert pool.state("a") in (SequenceState.GPU_RESIDENT, SequenceState.OFFLOADED)
    assert pool.state("b") in (SequenceState.OFFLOADED, SequenceState.GPU_READY)
    assert outcome.cancelled or pool.state("b") is SequenceState.GPU_READY


def _gated(pool: Pool, writer: Writer, device: HeldDevice) -> Call:
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
    else:
        assert pool.state("b") in (SequenceState.GPU_READY, SequenceState.GPU_RESIDENT)
    assert pool.tokens("b") in (TOKENS, TOKENS + 1)
    writer.written["b"] = ["b"] * pool.tokens("b")


async def _newcomer(pool: Pool, writer: Writer) -> None:
    """`c` needs more pages than are free."""
    pool.register("c", max_tokens=40)


async def _leaver(pool: Pool, writer: Writer) -> None:
    """`a` is on its way."""
    pool._tell(events.Preempt(SeqId("a")))


async def _newcomer_and_leaver(pool: Pool, writer: Writer) -> None:
    """`c` needs pages that `a` is about to give back."""
    await _newcomer(pool, writer)
    await _leaver(pool, writer)


def _crowded_forward(pool: Pool, writer: Writer, device: HeldDevice) -> Call:
    async def call() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.preempt, "a")
            await anyio.lowlevel.checkpoint()
            with suppress(PagesExhausted):  # the preempt was undone first: no page is on its way
                await writer.append({"c": 32})

    return call


def _refused_forward(pool: Pool, writer: Writer, device: HeldDevice) -> Call:
    async def call() -> None:
        with pytest.raises(PagesExhausted):
            await writer.append({"c": 32})

    return call


def _written_or_not(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert pool.tokens("c") in (0, 32)


def _running(pool: Pool, writer: Writer, device: HeldDevice) -> Call:
    def compute(forward: Forward) -> None:
        device.open.wait(10)
        writer.write(forward, {"a": 1})
        writer.written["a"].append("a")

    async def call() -> None:
        async with pool.forward({"a": 1}) as forward:
            await forward.run(lambda: compute(forward))
            await anyio.lowlevel.checkpoint()

    return call


def _ran(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    """A callable that was launched has run when the call returns; its token counts unless it was cancelled."""
    assert pool.tokens("a") == TOKENS + (not outcome.cancelled)
    assert outcome.cancelled or len(writer.written["a"]) == TOKENS + 1
    assert pool.compute.record().query(), "the callable is still to run"
    del writer.written["a"][pool.tokens("a") :]


def _gone(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    assert "a" not in pool._core.sequences


SWEEPS = {
    "preempt": Sweep(lambda pool, *_: lambda: pool.preempt("a"), _preempted),
    "spill": Sweep(lambda pool, *_: lambda: pool.spill("a"), _spilled),
    "resume of what is spilled": Sweep(lambda pool, *_: lambda: pool.resume("a"), _resumed_spilled, _spilled_before),
    "resume in part": Sweep(lambda pool, *_: lambda: pool.resume("b", spilled=TOKENS), _resumed_in_part),
    "resume": Sweep(lambda pool, *_: lambda: pool.resume("b"), _resumed),
    "resume waiting for pages": Sweep(_crowded_resume, _both_or_neither, _full),
    "gated restore": Sweep(_gated, _gated_ended),
    "forward waiting for pages": Sweep(
        lambda _, writer, __: lambda: writer.append({"c": 32}), _written_or_not, _newcomer_and_leaver
    ),
    "forward waiting for a preempt that is cancelled": Sweep(_crowded_forward, _written_or_not, _newcomer),
    "forward without pages": Sweep(_refused_forward, _written_or_not, _newcomer),
    "forward run": Sweep(_running, _ran),
    "finish": Sweep(lambda pool, *_: lambda: pool.finish("a"), _gone),
    "finish while it is preempted": Sweep(lambda pool, *_: lambda: pool.finish("a"), _gone, _leaver),
}
