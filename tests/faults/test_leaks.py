"""What is held for longer than it is needed, or for ever."""

import gc
import tracemalloc
from collections.abc import Callable
from itertools import count

import pytest

from swapkv import HostDevice, PagesExhausted, ProtocolError, SwapConfig, open_pool
from swapkv.budget.extents import Extents
from swapkv.config import SECOND_NS
from swapkv.fsm import commands, events, restore
from swapkv.fsm.core import SwapCore
from swapkv.fsm.fences import FenceClock
from swapkv.fsm.ledger import PageLedger, PageState
from swapkv.fsm.queries import SequenceState
from swapkv.ids import ChunkId, GroupId, Lane, OpId, SeqId, StepId
from swapkv.statistics import PoolStatistics
from swapkv.stepped import open_stepped_pool
from tests.kit.stage import GROUP, PLAIN, Stage, careless
from tests.kit.writing import Writer
from tests.test_pool import small_layout

A = SeqId("a")
DEADLINE_NS = SECOND_NS


def test_pages_handed_out_are_copies_of_their_own() -> None:
    """KF-31: nobody keeps the allocator's arrays alive."""
    clock = FenceClock()
    ledger = PageLedger([8], clock)
    for _ in range(3):
        taken = ledger.allocate(GROUP, ChunkId(1), 5)
        assert taken.base is None
        reading = clock.issue(Lane.COMPUTE)
        ledger.note_read(reading, taken)
        ledger.release(GROUP, taken)
        again = ledger.allocate(GROUP, ChunkId(2), 6)
        assert again.base is None
        clock.complete(reading)
        ledger.pass_fence()
        ledger.release(GROUP, again)
    assert ledger.free(GROUP) == 8


def cycle(core: SwapCore, number: int) -> None:
    """The whole life of one sequence, with every end told at once."""
    name, step = SeqId(f"s{number}"), StepId(number)
    todo: list[events.Event] = [
        events.Register(name, 8),
        events.BeginStep(step, {name: 7}),
        events.EndStep(step),
        events.Preempt(name),
        events.BeginRestore(name),
        events.Finish(name),
    ]
    while todo:
        ends: list[events.Event] = []
        for command in core.handle(todo.pop(0), number):
            if isinstance(command, commands.Copy):
                ends.append(events.CopyDone(command.op))
            elif isinstance(command, commands.RecordFence):
                ends.append(events.FencePassed(command.fence))
        todo[:0] = ends


def grown(run: Callable[[int], None], warm: int, cycles: int) -> int:
    """Bytes that are held after `cycles` more than after a few."""
    run(warm)
    gc.collect()
    tracemalloc.start()
    try:
        run(20)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run(cycles)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_ledger_over_many_owners_keeps_nothing() -> None:
    """KF-31: pages of one owner in a hundred are looked at for long, and keep no old array alive."""
    ledger = PageLedger([4096], FenceClock())
    looked_at: list[object] = []

    def run(cycles: int) -> None:
        for number in range(cycles):
            pages = ledger.allocate(GROUP, ChunkId(number), 3)
            if number % 100 == 0:
                looked_at.append(pages)
            ledger.release(GROUP, pages)

    assert grown(run, warm=100, cycles=5_000) < 50 * 1000
    assert len(looked_at) > 50


def test_core_over_many_sequences_keeps_nothing() -> None:
    """KF-31."""
    core = SwapCore(PLAIN, [64], 64 * PLAIN.chunk_bytes(GROUP))
    numbers = count(1)

    def run(cycles: int) -> None:
        for _ in range(cycles):
            cycle(core, next(numbers))

    assert grown(run, warm=100, cycles=250) < 250 * 40
    assert not core.sequences


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_pool_over_many_sequences_keeps_nothing(anyio_backend: str) -> None:
    """KF-31: neither the names of those that are gone, nor the places of those that have waited."""
    async with open_pool(small_layout(), num_pages=8, host_bytes=1 << 16) as pool:
        writer = Writer(pool)
        for number in range(30):
            name = f"s{number}"
            pool.register(name, max_tokens=32)
            await writer.append({name: 9})
            with pytest.raises(ProtocolError):
                await writer.append({name: 99})
            await pool.preempt(name)
            pool.register("other", max_tokens=32)
            await writer.append({"other": 32})
            pool.register("third", max_tokens=8)
            with pytest.raises(PagesExhausted):
                await writer.append({"third": 8})
            await pool.finish("third")
            await pool.finish("other")
            await pool.resume(name)
            await pool.finish(name)
        await pool._driver.reached(pool.compute.record())
        driver = pool._driver
        for held in (driver.waiters._by_place, driver.restores, driver._touched, driver._states):
            assert not held
        for held in (driver.executor._fences, driver.executor._forwards, pool._core.chunks, pool._core.ops):
            assert not held


def test_stepped_pool_over_many_sequences_keeps_nothing() -> None:
    """KF-31."""
    with open_stepped_pool(small_layout(), num_pages=8, host_bytes=1 << 16) as pool:
        for number in range(30):
            name = f"s{number}"
            pool.register(name, max_tokens=32)
            with pool.forward({name: 9}):
                pass
            for call in (pool.preempt, pool.restore, pool.finish):
                call(name)
                pool.drain(60)
        driver = pool._driver
        for held in (driver.executor._fences, driver.executor._forwards, driver._news, pool._core.ops):
            assert not held
        assert not any(driver._work.values())


def restore_cancelled_with_its_copies_under_way() -> None:
    stage = Stage(pages=4, config=SwapConfig(segment_bytes=1, copy_deadline_ns=DEADLINE_NS))
    stage.parked("a", 7)
    assert stage.restore("a")
    assert stage.do(events.CancelRestore(A))
    assert stage.free == 0, "pages that are being written were given away"
    assert not stage.told(commands.RestoreUndone, "a")
    stage.come_to_rest()
    assert stage.told(commands.RestoreUndone, "a")
    assert stage.free == 4
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_restore_cancelled_with_its_copies_under_way_frees_its_pages_once_they_end() -> None:
    """KF-33 (a): the end that comes later is taken in, though nobody waits for it."""
    restore_cancelled_with_its_copies_under_way()


def test_restore_cancelled_that_does_not_wait_for_its_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-33 (a), without its guard."""
    monkeypatch.setattr(restore, "settle", careless(restore.settle, "restore"))
    monkeypatch.setattr(PageLedger, "note_write", lambda self, fence, pages: None)
    with pytest.raises(AssertionError, match="given away"):
        restore_cancelled_with_its_copies_under_way()


def test_restore_cancelled_whose_copies_never_end_is_let_go_at_the_deadline() -> None:
    """KF-33 (b): the pages are quarantined and counted, not freed; when the copies end after all, they come back."""
    stage = Stage(pages=6, config=SwapConfig(segment_bytes=1, copy_deadline_ns=DEADLINE_NS))
    stage.parked("a", 7)
    stage.fate = lambda copy: "hang"
    assert stage.restore("a")
    assert stage.do(events.CancelRestore(A))
    stage.now_ns += DEADLINE_NS - 1
    assert stage.do(events.Tick())
    assert not stage.told(commands.RestoreUndone, "a")
    stage.now_ns += 1
    assert stage.do(events.Tick())
    assert stage.told(commands.RestoreUndone, "a")
    assert stage.core.ledger.quarantined(GROUP) == 4
    assert stage.core.counters["hung_copies"] == 4
    assert stage.free == 2
    stage.register("b", max_tokens=4)
    stage.append("b", 3)
    stage.unhang()
    stage.come_to_rest()
    assert stage.core.counters["late_completions"] == 4
    assert stage.core.ledger.quarantined(GROUP) == 0
    assert stage.free == 4
    stage.fate = lambda copy: "ok"
    stage.reads("b")
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_resume_of_what_is_there_a_thousand_times_holds_nothing(anyio_backend: str) -> None:
    """KF-34: looking a copy up takes no pin."""
    async with open_pool(small_layout(), num_pages=8, host_bytes=1 << 14) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=16)
        await writer.append({"a": 9})
        await pool.preempt("a")
        await pool.resume("a")
        before = held(pool.statistics())
        for _ in range(1000):
            await pool.resume("a")
            pool.resume_nowait("a")
        assert held(pool.statistics()) == before
        pool.register("b", max_tokens=16)
        await writer.append({"b": 16})
        await pool.preempt("a")
        pool._core.check()
        await pool.finish("a")
        await pool.finish("b")
        assert pool.statistics().host_bytes_used == 0


def held(statistics: PoolStatistics) -> tuple[object, ...]:
    return statistics.pages, statistics.host_bytes_used, statistics.into.copies_in_flight


def test_restore_given_up_between_its_wish_and_its_pages_holds_nothing() -> None:
    """KF-34: the copy that was to be read can be given up the moment the wish is taken back."""
    stage = Stage(pages=4, host_chunks=4)
    stage.parked("a", 7)
    stage.register("b")
    stage.append("b", 7)
    stage.come_to_rest()
    for _ in range(10):
        assert stage.restore("a")
        assert stage.do(events.CancelRestore(A))
        assert stage.state("a") is SequenceState.OFFLOADED
    assert stage.do(events.Evict(A))
    assert stage.core.host.used == 0


def test_release_of_what_was_released_is_refused_at_the_faulty_call() -> None:
    """KF-34: no count is ever set back to zero."""
    ledger, extents = PageLedger([4], FenceClock()), Extents(64)
    pages = ledger.allocate(GroupId(0), ChunkId(1), 2)
    ledger.release(GroupId(0), pages)
    with pytest.raises(AssertionError, match="released twice"):
        ledger.release(GroupId(0), pages)
    assert ledger.state_of(int(pages[0])) is PageState.FREE
    offset = extents.allocate(16)
    assert offset is not None
    extents.free(offset)
    with pytest.raises(ProtocolError, match="freed already"):
        extents.free(offset)


def test_completion_told_twice_or_of_a_copy_that_never_was_is_counted_and_ignored() -> None:
    """KF-34 and KF-37."""
    stage = Stage()
    stage.parked("a", 7)
    before = stage.free, stage.core.host.used
    for op in (1, 2, 999):
        assert stage.do(events.CopyDone(OpId(op)))
    assert stage.core.counters["repeated_completions"] == 3
    assert (stage.free, stage.core.host.used) == before


@pytest.mark.parametrize("num_bytes", [1, 4097, 4_100_000, (1 << 22) + 1])
def test_pinned_memory_takes_what_was_asked_for_and_a_page(num_bytes: int) -> None:
    """KF-50: one allocation of its own, not rounded up to a power of two."""
    memory = HostDevice().allocate_pinned(num_bytes)
    assert memory.numel() == num_bytes
    assert memory.untyped_storage().nbytes() <= num_bytes + 4096


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pool_allocates_its_host_tier_once_and_reports_its_size(anyio_backend: str) -> None:
    """KF-50: budgets count the bytes that are there."""
    asked: list[int] = []

    class Recording(HostDevice):
        def allocate_pinned(self, num_bytes: int) -> object:  # type: ignore[override]
            asked.append(num_bytes)
            return super().allocate_pinned(num_bytes)

    async with open_pool(small_layout(), num_pages=8, host_bytes=4_100_000, device=Recording()) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=16)
        await writer.append({"a": 9})
        await pool.preempt("a")
        assert asked == [4_100_000]
        assert pool.statistics().host_bytes_total == 4_100_000
