"""Something breaks or runs full: everybody who waits is told, and nobody blocks."""

import threading
from functools import partial

import anyio
import anyio.to_thread
import pytest

from swapkv import (
    HostFull,
    HostTierFull,
    KVEvicted,
    Observer,
    Pool,
    PoolBroken,
    PoolClosed,
    PreemptOutcome,
    SequenceState,
    SwapConfig,
    SwapError,
    TransferError,
    open_pool,
)
from swapkv.errors import BudgetExhausted, IllegalTransition
from swapkv.fsm import commands
from swapkv.ids import Lane
from swapkv.stepped import SteppedPool, open_stepped_pool
from swapkv.streams.host import HostStream, Operation
from swapkv.streams.host_events import HostCopyEvent, HostEvent
from tests.faults.pools import LONG_S, SMALL, Faulty, one_on_the_device, raises
from tests.kit.stage import Stage
from tests.kit.writing import Writer
from tests.test_pool import small_layout

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_copy_that_fails_on_its_second_page_fails_everybody_who_waits_for_it() -> None:
    """KF-27: the call itself, and a forward that waits for the pages."""
    device, count = Faulty(), iter(range(100))

    def fail_second(operation: Operation) -> None:
        if next(count) == 1:
            raise OSError("page 2")

    device.fail = fail_second
    async with open_pool(small_layout(), num_pages=4, host_bytes=1 << 14, device=device, config=ONE_BY_ONE) as pool:
        writer = await one_on_the_device(pool)
        pool.register("b", max_tokens=16)
        with anyio.fail_after(LONG_S):
            async with anyio.create_task_group() as group:
                group.start_soon(raises, TransferError, partial(pool.preempt, "a"))
                await anyio.wait_all_tasks_blocked()
                group.start_soon(raises, BudgetExhausted, partial(writer.append, {"b": 16}))
                await anyio.wait_all_tasks_blocked()
                device.go.set()
        await writer.check("a")


ONE_BY_ONE = SwapConfig(segment_bytes=1)


async def break_the_pool(pool: Pool, device: Faulty) -> None:
    """Four tasks wait when the copies go on, and break it; each is told, and so is every later call."""
    writer = await one_on_the_device(pool)
    await one_on_the_device(pool, "b")
    pool.register("c", max_tokens=16)
    waiting = [partial(pool.preempt, "a"), partial(pool.finish, "a"), partial(pool.preempt, "b")]
    with anyio.fail_after(LONG_S):
        async with anyio.create_task_group() as group:
            try:
                for call in (*waiting, partial(writer.append, {"c": 12})):
                    group.start_soon(raises, PoolBroken, call)
                    await anyio.wait_all_tasks_blocked()
            finally:
                device.go.set()
    for call in (pool.preempt, pool.resume, pool.finish):
        with pytest.raises(PoolBroken, match="open a new one"):
            await call("b")
    with pytest.raises(PoolBroken):
        pool.register("d", max_tokens=8)


async def test_event_that_raises_anything_breaks_the_pool_and_kills_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-27: an error in a background thread reaches every waiter, and every later call."""

    def fail(self: HostCopyEvent, timeout_s: float | None = None) -> bool:
        HostEvent.wait(self, timeout_s)
        raise ValueError("the driver lost its mind")

    monkeypatch.setattr(HostCopyEvent, "wait", fail)
    device = Faulty()
    async with open_pool(small_layout(), **SMALL, device=device) as pool:
        await break_the_pool(pool, device)
        assert len([t for t in threading.enumerate() if "-reap-" in t.name]) == 3


async def test_invariant_that_does_not_hold_breaks_the_pool_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-27: the end of the driver ends all that wait."""

    def no_longer(*_: object) -> None:
        raise AssertionError("an invariant")

    monkeypatch.setattr("swapkv.fsm.offload.landed", no_longer)
    device = Faulty()
    async with open_pool(small_layout(), **SMALL, device=device) as pool:
        await break_the_pool(pool, device)


@pytest.mark.parametrize("error", [BudgetExhausted("the queue is full"), OSError("no more handles")])
async def test_command_that_cannot_be_carried_out_breaks_the_pool(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KF-27: the core has decided, the device refused: going on would be a lie, and nobody may wait for it."""
    async with open_pool(small_layout(), **SMALL) as pool:
        writer = await one_on_the_device(pool)
        writer.fork("a", "b", max_tokens=16)

        def refuse(*_: object) -> None:
            raise error

        monkeypatch.setattr(HostStream, "clone", refuse)
        with anyio.fail_after(LONG_S):
            with pytest.raises(PoolBroken, match=str(error)):
                await writer.append({"a": 1})
            with pytest.raises(PoolBroken):
                await pool.preempt("b")
        monkeypatch.undo()


async def test_move_that_the_table_refuses_breaks_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-27: an `IllegalTransition` half way through an event is no refusal of the caller."""
    async with open_pool(small_layout(), **SMALL) as pool:
        await one_on_the_device(pool)

        def refuse(*_: object) -> None:
            raise IllegalTransition("half way")

        monkeypatch.setattr(pool._core, "handle", refuse)
        with pytest.raises(PoolBroken, match="half way"):
            await pool.preempt("a")


async def test_observer_that_raises_breaks_the_pool_by_its_own_name() -> None:
    """KF-27: what an observer raises is not swallowed, and leaves no call half told."""

    class Bad(Observer):
        def on_state(self, *_: object) -> None:
            raise KeyError("my dashboard")

    async with open_pool(small_layout(), **SMALL, observer=Bad()) as pool:
        with pytest.raises(PoolBroken, match="my dashboard"):
            pool.register("a", max_tokens=8)


@pytest.mark.parametrize("breaks", ["end", "query", "carry out"])
def test_stepped_pool_that_breaks_says_so_at_every_call(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-27: also if the device raises what it never should."""
    with open_stepped_pool(small_layout(), **SMALL) as pool:
        pool.register("a", max_tokens=8)
        with pool.forward({"a": 5}):
            pass
        pool.fork("a", "b", max_tokens=8)

        def fail(*_: object) -> None:
            raise ValueError("the driver lost its mind")

        if breaks == "carry out":
            monkeypatch.setattr(HostStream, "clone", fail)
            with pytest.raises(PoolBroken, match="lost its mind"):
                pool.forward({"a": 1})
        else:
            monkeypatch.setattr("swapkv.executor._require_over" if breaks == "end" else HOST_QUERY, fail)
            pool.preempt("a")
            with pytest.raises(PoolBroken, match="lost its mind"):
                poll_until_it_raises(pool)
        monkeypatch.undo()
        for call in (pool.poll, partial(pool.preempt, "b"), partial(pool.finish, "b")):
            with pytest.raises(PoolBroken):
                call()


HOST_QUERY = "swapkv.streams.host_events.HostEvent.query"


def poll_until_it_raises(pool: SteppedPool) -> None:
    while True:
        pool.poll()


async def test_call_that_begins_to_wait_after_the_end_does_not_wait() -> None:
    """KF-27 and KF-63: a forward is open when the pool is closed, and its work is still to come."""
    async with open_pool(small_layout(), **SMALL) as pool:
        await one_on_the_device(pool)
        with anyio.fail_after(LONG_S), pytest.raises(PoolClosed):  # noqa: PT012
            async with pool.forward({"a": 1}) as forward:
                pool._driver.stop(PoolClosed("closed meanwhile"))
                await forward.run(lambda: None)


async def test_evicted_sequence_is_a_miss_everywhere_and_holds_nothing() -> None:
    """KF-43: dropping KV drops it on the device and in the host tier, or is refused while a copy is under way."""
    device = Faulty()
    async with open_pool(small_layout(), **SMALL, device=device) as pool:
        await one_on_the_device(pool)
        async with anyio.create_task_group() as group:
            group.start_soon(pool.preempt, "a")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(SwapError, match="await or cancel that"):
                pool.evict("a")
            device.go.set()
        await pool.resume("a")
        assert pool.statistics().host_bytes_used > 0
        pool.evict("a")
        assert pool.statistics().host_bytes_used == 0
        assert pool.statistics().pages[0].owned == 0
        with pytest.raises(KVEvicted):
            await pool.resume("a")
        with pytest.raises(KVEvicted):
            await pool.preempt("a")


@pytest.mark.parametrize("host_full", list(HostFull))
async def test_preempt_without_room_is_counted_or_refused_never_silent(host_full: HostFull) -> None:
    """KF-43: falling back to recompute says so, is counted, and can be forbidden."""
    config = SwapConfig(host_full=host_full)
    host_bytes = 2 * small_layout().chunk_bytes(0)  # type: ignore[arg-type]
    async with open_pool(small_layout(), num_pages=8, host_bytes=host_bytes, config=config) as pool:
        await one_on_the_device(pool)
        await one_on_the_device(pool, "b")
        await pool.preempt("a")
        if host_full is HostFull.REFUSE:
            with pytest.raises(HostTierFull):
                await pool.preempt("b")
            assert pool.statistics().counters["host_full_refusals"] == 1
        else:
            assert await pool.preempt("b") is PreemptOutcome.RECOMPUTE
            assert pool.statistics().counters["evictions"] == 1
            assert pool.statistics().counters["evicted_tokens"] == 9


def test_drain_with_nothing_under_way_returns_at_once() -> None:
    """KF-43: waiting for nothing is legal."""
    with open_stepped_pool(small_layout(), **SMALL) as pool:
        assert pool.idle()
        assert pool.drain(0.0) == []
        assert pool.poll() == []


def test_restore_of_many_chunks_keeps_few_copies_under_way() -> None:
    """KF-52: the queue of a stream is bounded, and what is next is submitted as others end."""
    stage = Stage(pages=260, host_chunks=140, config=SwapConfig(segment_bytes=1, ops_per_lane=4))
    stage.checks_each_event = False
    stage.register("a", max_tokens=500)
    stage.append("a", 500)
    stage.come_to_rest()
    for wish in (stage.preempt, stage.restore):
        assert wish("a")
        most = 0
        while stage.device.runnable():
            most = max(most, *(len(stage.device.lanes[lane]) for lane in (Lane.OUT, Lane.IN)))
            stage.run(stage.device.runnable()[0])
            stage.tell()
        assert most == 4
    assert sum(isinstance(news, commands.Copy) for news in stage.news) == 500
    assert stage.state("a") is SequenceState.GPU_READY


async def test_calls_with_every_copy_held_up_never_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-52: the thread of the loop waits for no event; others' forwards go on beside a hundred copies."""
    device, loop = Faulty(), threading.get_ident()
    wait = HostEvent.wait

    def wait_elsewhere(self: HostEvent, timeout_s: float | None = None) -> bool:
        assert timeout_s == 0 or threading.get_ident() != loop, "the loop waits for the device"
        return wait(self, timeout_s)

    monkeypatch.setattr(HostEvent, "wait", wait_elsewhere)
    config = SwapConfig(segment_bytes=1)
    async with open_pool(small_layout(), num_pages=80, host_bytes=1 << 18, device=device, config=config) as pool:
        writer = Writer(pool)
        for name, tokens in (("a", 200), ("b", 9)):
            pool.register(name, max_tokens=240)
            await writer.append({name: tokens})
        with anyio.fail_after(LONG_S):
            async with anyio.create_task_group() as group:
                group.start_soon(pool.preempt, "a")
                await anyio.wait_all_tasks_blocked()
                for _ in range(3):
                    await writer.append({"b": 1})
                assert pool.state("a") is SequenceState.OFFLOADING
                device.go.set()
        await pool.resume("a")
        await writer.check("b")
