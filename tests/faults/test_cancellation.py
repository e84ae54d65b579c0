"""A call that is taken back, at the worst moment."""

from collections.abc import Awaitable, Callable
from random import Random

import anyio
import pytest

from swapkv import PagesExhausted, PreemptOutcome, ProtocolError, SequenceState, SwapConfig, UnknownSequence, open_pool
from swapkv.budget.bucket import TokenBucket
from swapkv.config import SECOND_NS
from swapkv.fsm import commands, events, restore
from swapkv.fsm.ledger import PageLedger
from swapkv.ids import Lane, OpId, SeqId
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.stage import GROUP, Stage, careless
from tests.kit.writing import Writer
from tests.test_pool import small_layout

A = SeqId("a")
COPIES = 4
POINTS = 2 * COPIES + 2
"""Before anything, after each copy has run, after each end was told, and after all of it."""


def abort_of_a_restore(event: events.Event, point: int) -> None:
    """At `point` of a restore of four copies; then somebody else takes all pages, and writes."""
    stage = Stage(pages=4)
    stage.parked("a", 7)
    stage.register("b")
    if point:
        assert stage.restore("a")
    for step in range(1, point):
        stage.run(Lane.IN) if step % 2 else stage.tell()
    assert stage.do(event)
    if stage.free:
        assert not any(op.lane is Lane.IN for op in stage.core.ops.values()), "pages were given away too early"
    stage.come_to_rest()
    if "a" in stage.core.sequences:
        assert stage.state("a") in (SequenceState.OFFLOADED, SequenceState.GPU_READY)
        assert stage.do(events.CancelRestore(A)), "again, and too late"
        if stage.state("a") is SequenceState.GPU_READY:
            assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.free == 4
    stage.append("b", 7)
    stage.reads("b")
    assert stage.finish("b")
    stage.come_to_rest()
    if "a" in stage.core.sequences:
        assert stage.restore("a")
        stage.come_to_rest()
        stage.reads("a")


@pytest.mark.parametrize("event", [events.CancelRestore(A), events.Finish(A)], ids=["cancelled", "finished"])
@pytest.mark.parametrize("point", range(POINTS))
def test_restore_aborted_at_any_point_frees_its_pages_once_and_never_early(point: int, event: events.Event) -> None:
    """KF-36: before, between, after the last copy, after its end but before that is told, and after all."""
    abort_of_a_restore(event, point)


def test_restore_aborted_that_frees_its_pages_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-36, without its guard."""
    monkeypatch.setattr(restore, "settle", careless(restore.settle, "restore"))
    monkeypatch.setattr(PageLedger, "note_write", lambda self, fence, pages: None)
    with pytest.raises(AssertionError, match="too early"):
        abort_of_a_restore(events.CancelRestore(A), point=2)


@pytest.mark.parametrize("order", ["out first", "in first", "mixed"])
def test_offload_and_restore_that_share_a_chunk_cancelled_together_end_in_any_order(order: str) -> None:
    """KF-37: a sequence has one of them at a time, two that share chunks have both; then comes an unknown end."""
    stage = Stage(pages=10)
    stage.register("a")
    stage.append("a", 4)
    stage.come_to_rest()
    stage.fork(A, SeqId("b"), 8)
    for name in ("a", "b"):
        stage.append(name, 3)
        stage.come_to_rest()
    assert stage.preempt("b")
    stage.come_to_rest()
    assert stage.preempt("a")
    assert not stage.restore("a"), "one at a time"
    assert stage.restore("b")
    for kind in (events.CancelPreempt, events.CancelRestore):
        for name in ("a", "b"):
            assert stage.do(kind(SeqId(name)))
    for lane in {"out first": [Lane.OUT, Lane.IN], "in first": [Lane.IN, Lane.OUT], "mixed": []}[order]:
        stage.run_eagerly(lane)
        while stage.reports:
            stage.tell()
    rng = Random(1)
    while stage.run_lane(rng):
        pass
    while stage.report(rng):
        pass
    assert stage.do(events.CopyDone(OpId(999)))
    assert stage.do(events.CopyFailed(OpId(998), OSError()))
    assert stage.core.counters["repeated_completions"] == 2
    assert not stage.core.ops
    assert stage.state("a") is SequenceState.GPU_RESIDENT
    assert stage.state("b") is SequenceState.OFFLOADED
    stage.reads("a")
    assert stage.restore("b")
    stage.come_to_rest()
    stage.reads("b")


def new(stage: Stage) -> None:
    stage.register("a")


def resident(stage: Stage) -> None:
    stage.register("a")
    stage.append("a", 7)
    stage.come_to_rest()


def computing(stage: Stage) -> None:
    stage.register("a")
    stage.append("a", 7)


def in_a_forward(stage: Stage) -> None:
    stage.register("a")
    stage.begin("a", 7)


def leaving(stage: Stage) -> None:
    resident(stage)
    assert stage.preempt("a")


def off(stage: Stage) -> None:
    stage.parked("a", 7)


def waiting_for_pages(stage: Stage) -> None:
    stage.parked("a", 7)
    stage.register("crowd", max_tokens=8)
    stage.append("crowd", 7)
    stage.come_to_rest()
    assert stage.restore("a")


def coming(stage: Stage) -> None:
    stage.parked("a", 7)
    assert stage.restore("a")


def back(stage: Stage) -> None:
    coming(stage)
    stage.come_to_rest()


def gone(stage: Stage) -> None:
    stage.parked("a", 7)
    assert stage.do(events.Evict(A))
    stage.tokens[A] = []


STATES = [new, resident, computing, in_a_forward, leaving, off, waiting_for_pages, coming, back, gone]


@pytest.mark.parametrize("reach", STATES)
def test_cancel_in_any_state_twice_is_legal_and_changes_nobody_else(reach: Callable[[Stage], None]) -> None:
    """KF-38: each call has a defined end, in every state."""
    stage = Stage(pages=8)
    stage.parked("other", 3)
    assert stage.restore("other")
    stage.come_to_rest()
    assert stage.preempt("other")
    stage.come_to_rest()
    reach(stage)
    for kind in (events.CancelPreempt, events.CancelRestore, events.CancelPreempt, events.CancelRestore):
        assert stage.do(kind(A))
    for step in list(stage.forwards):
        stage.end_step(step)
    stage.come_to_rest()
    assert stage.state("a") not in (SequenceState.OFFLOADING, SequenceState.PREFETCHING)
    if "crowd" in stage.core.sequences:
        assert stage.finish("crowd")
    assert stage.restore("other")
    stage.come_to_rest()
    stage.reads("other")


@pytest.mark.parametrize("reach", STATES)
def test_finish_in_any_state_ends_once_and_changes_nobody_else(reach: Callable[[Stage], None]) -> None:
    """KF-38: before the first page, in every state, twice, and of what nobody knows."""
    stage = Stage(pages=8)
    stage.parked("other", 3)
    reach(stage)
    assert stage.finish("a")
    stage.finish("a")
    for step in list(stage.forwards):
        stage.end_step(step)
    stage.come_to_rest()
    assert sum(isinstance(news, commands.Gone) and news.sequence == A for news in stage.news) == 1
    assert not stage.finish("a")
    assert not stage.finish("nobody")
    if "crowd" in stage.core.sequences:
        assert stage.finish("crowd")
    assert stage.free == 8
    assert stage.restore("other")
    stage.come_to_rest()
    stage.reads("other")


class HeldOut(HostDevice):
    """Copies off the device wait for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = self.create_promise()

    def execute(self, operation: Operation) -> None:
        if operation.work is Work.GATHER:
            self.go.wait(60.0)
        super().execute(operation)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_finish_of_one_sequence_by_two_tasks_ends_for_both(anyio_backend: str) -> None:
    """KF-38: while its copies are under way; a third, later, is told that there is no such sequence."""
    device = HeldOut()
    async with open_pool(small_layout(), num_pages=8, host_bytes=1 << 14, device=device) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=16)
        await writer.append({"a": 9})

        async def preempt() -> None:
            with pytest.raises(ProtocolError, match="finished while"):
                await pool.preempt("a")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(preempt)
                await anyio.wait_all_tasks_blocked()
                for _ in range(2):
                    group.start_soon(pool.finish, "a")
                await anyio.wait_all_tasks_blocked()
                device.go.set()
        with pytest.raises(UnknownSequence):
            await pool.finish("a")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("moment", ["before", "as they come"])
async def test_forward_cancelled_as_its_pages_come_passes_them_to_the_next(moment: str, anyio_backend: str) -> None:
    """KF-39: three wait for pages, the first is cancelled in the turn in which they come; nobody is stranded."""
    device = HeldOut()
    async with open_pool(small_layout(), num_pages=4, host_bytes=1 << 14, device=device) as pool:
        writer = Writer(pool)
        for name in ("victim", "w1", "w2", "w3"):
            pool.register(name, max_tokens=16)
        await writer.append({"victim": 16})
        done: list[str] = []
        scope = anyio.CancelScope()

        async def wait_for_pages(name: str) -> None:
            async with pool.forward({name: 5}) as forward:
                await forward.run(lambda: writer.write(forward, {name: 5}))
            done.append(name)
            await pool.finish(name)

        async def first() -> None:
            with scope:
                await wait_for_pages("w1")

        granted = pool._driver.waiters.end

        def end_and_cancel(kind: str, *key: object, **how: object) -> None:
            granted(kind, *key, **how)  # type: ignore[arg-type]
            if kind == "step" and moment == "as they come":
                scope.cancel()

        pool._driver.waiters.end = end_and_cancel  # type: ignore[method-assign, assignment]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(pool.preempt, "victim")
                await anyio.wait_all_tasks_blocked()
                group.start_soon(first)
                await anyio.wait_all_tasks_blocked()
                assert pool._core.waiting_steps
                for name in ("w2", "w3"):
                    group.start_soon(insist, name, wait_for_pages)
                await anyio.wait_all_tasks_blocked()
                if moment == "before":
                    scope.cancel()
                device.go.set()
        assert {"w2", "w3"} <= set(done)
        counts = pool.statistics().pages[0]
        assert counts.free + counts.fenced == counts.total
        assert not pool._driver.waiters._by_place
        pool._core.check()


async def insist(name: str, call: Callable[[str], Awaitable[None]]) -> None:
    """Ask again if no pages are on their way: somebody gives some back."""
    while True:
        try:
            return await call(name)
        except PagesExhausted:
            await anyio.lowlevel.checkpoint()


def test_bucket_with_copies_given_back_at_any_time_conserves_its_bytes() -> None:
    """KF-39: nobody waits for a token, the core asks; what was taken and not sent comes back."""
    for seed in range(300):
        rng, now_ns, taken = Random(seed), 0, 0
        bucket = TokenBucket(rng.randint(1, 1000), rng.randint(1, 500))
        for _ in range(100):
            now_ns += rng.randint(0, SECOND_NS // 4)
            size = rng.randint(1, 800)
            if not bucket.take(size, now_ns):
                now_ns = bucket.ready_ns(size, now_ns)
                assert bucket.take(size, now_ns), "ready, and yet not"
            taken += size
            if rng.random() < 0.4:
                bucket.give_back(size)
                taken -= size
            assert bucket.sent_bytes == taken
            assert taken <= bucket.burst + bucket.rate * now_ns // SECOND_NS + 800  # type: ignore[operator]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_preempt_cancelled_with_a_bucket_in_its_way_gives_its_turn_to_the_next(anyio_backend: str) -> None:
    """KF-39: one waits for the bandwidth bucket and is cancelled; the next one's copies go."""
    config = SwapConfig(segment_bytes=1, offload_bytes_per_s=200_000, offload_burst_bytes=1)
    async with open_pool(small_layout(), num_pages=16, host_bytes=1 << 16, config=config) as pool:
        writer = Writer(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=16)
            await writer.append({name: 16})
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                scope = anyio.CancelScope()

                async def cancelled() -> None:
                    with scope:
                        await pool.preempt("a")

                group.start_soon(cancelled)
                await anyio.lowlevel.checkpoint()
                scope.cancel()
                assert await pool.preempt("b") is PreemptOutcome.OFFLOADED
        assert pool.state("a") is SequenceState.GPU_RESIDENT
        bucket = pool._core.buckets[Lane.OUT]
        assert bucket.sent_bytes == pool.statistics().out.bytes_copied
        await writer.check("a")
        await pool.resume("b")
        await writer.check("b")
        assert pool._core.ledger.owned(GROUP) == 8
