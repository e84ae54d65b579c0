"""The pool on the host device: what leaves comes back byte for byte, and every call keeps its promise."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

from swapkv import (
    ChecksumMismatch,
    ChunkState,
    HostDevice,
    HostFull,
    HostTierFull,
    KVDtype,
    KVEvicted,
    KVLayout,
    NeverFits,
    PagesExhausted,
    Pool,
    PoolBroken,
    PoolClosed,
    PreemptOutcome,
    ProtocolError,
    SequenceState,
    SwapConfig,
    TransferError,
    UnknownSequence,
    Verify,
    WouldBlock,
    open_pool,
)
from swapkv.streams.host import Operation, Work
from tests.kit.writing import Writer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def small_layout(page_size: int = 4, chunk_tokens: int = 8, windows: list[int | None] | None = None) -> KVLayout:
    return KVLayout.dense(
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        dtype=KVDtype.FLOAT32,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        windows=windows,
    )


class FaultyDevice(HostDevice):
    """A host device whose copies do what `fault` says before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[Operation], None] = lambda operation: None

    def execute(self, operation: Operation) -> None:
        self.fault(operation)
        super().execute(operation)


@asynccontextmanager
async def pool_of(
    layout: KVLayout | None = None,
    pages: int = 16,
    host_chunks: int = 16,
    config: SwapConfig | None = None,
    device: HostDevice | None = None,
) -> AsyncIterator[Pool]:
    layout = layout or small_layout()
    largest = max(layout.chunk_bytes(g) for g in range(len(layout.groups)))  # type: ignore[arg-type]
    async with open_pool(
        layout, num_pages=pages, host_bytes=host_chunks * largest, config=config, device=device
    ) as pool:
        yield pool
        pool._core.check()


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("verify", list(Verify))
async def test_pool_preempted_sequence_returns_byte_for_byte(page_size: int, verify: Verify) -> None:
    async with pool_of(small_layout(page_size), pages=64, config=SwapConfig(verify=verify)) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=64)
        await writer.append({"a": 21})
        assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
        assert pool.state("a") is SequenceState.OFFLOADED
        pool.register("b", max_tokens=64)
        await writer.append({"b": 40})
        await pool.resume("a")
        assert pool.state("a") is SequenceState.GPU_READY
        await writer.check("a")
        await writer.check("b")
        assert pool.state("a") is SequenceState.GPU_RESIDENT


async def test_pool_windowed_layers_return_what_is_in_the_window() -> None:
    async with pool_of(small_layout(windows=[5, None]), pages=32) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=64)
        await writer.append({"a": 30})
        await writer.append({"a": 1})
        owned = [counts.owned for counts in pool.statistics().pages]
        assert owned[0] < owned[1]
        await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")


async def test_pool_preempting_again_moves_only_what_is_new() -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=64)
        await writer.append({"a": 16})
        await pool.preempt("a")
        first = pool.statistics().out.bytes_copied
        await pool.resume("a")
        await writer.append({"a": 3})
        await pool.preempt("a")
        assert pool.statistics().out.bytes_copied - first == pool.layout.page_bytes(0)  # type: ignore[arg-type]
        await pool.resume("a")
        await writer.check("a")


async def test_pool_more_sequences_than_pages_all_keep_their_kv() -> None:
    async with pool_of(pages=6, host_chunks=40) as pool:
        writer = Writer(pool)
        names = [f"s{n}" for n in range(8)]
        for name in names:
            pool.register(name, max_tokens=24)
        for _ in range(3):
            for name in names:
                await pool.resume(name)
                await writer.append({name: 7})
                await writer.check(name)
                await pool.preempt(name)
        for name in names:
            await pool.resume(name)
            await writer.check(name)
            await pool.finish(name)
        counts = pool.statistics().pages[0]
        assert counts.free + counts.fenced == counts.total
        assert pool.statistics().host_bytes_used == 0


async def test_pool_empty_sequence_is_preempted_and_resumed_as_a_no_op() -> None:
    async with pool_of() as pool:
        pool.register("a", max_tokens=8)
        assert pool.state("a") is SequenceState.REGISTERED
        assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
        await pool.resume("a")
        assert pool.tokens("a") == 0
        assert pool.statistics().out.bytes_copied == 0


async def test_pool_forked_sequences_share_chunks_and_part_when_one_appends() -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 10})
        writer.fork("a", "b", max_tokens=32)
        assert pool.statistics().pages[0].owned == 3
        await writer.append({"b": 1})
        await writer.append({"a": 1})
        await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")
        await writer.check("b")


async def test_pool_truncated_and_rewritten_tokens_are_not_taken_for_clean() -> None:
    async with pool_of() as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 10})
        await pool.preempt("a")
        await pool.resume("a")
        writer.truncate("a", 6)
        async with pool.forward({"a": 4}) as forward:
            await forward.run(
                lambda: [writer._each_token(forward.page_tables("a"), "x", p, write=True) for p in range(6, 10)]
            )
        writer.written["a"].extend(["x"] * 4)
        await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")


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


async def test_pool_gated_forward_reads_layers_as_they_arrive() -> None:
    device = FaultyDevice()
    let_go = threading.Event()
    seen: list[int] = []

    def fault(operation: Operation) -> None:
        if operation.work is Work.SCATTER and operation.blocks[0].regions[0].layer == 1:
            let_go.wait(10)

    async with pool_of(config=SwapConfig(segment_bytes=1), device=device) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 7})
        await pool.preempt("a")
        device.fault = fault
        async with pool.restoring("a") as coming:
            await coming.wait_layer(0)
            gates = [coming.layer_event(layer) for layer in range(2)]

            def compute() -> None:
                for layer, gate in enumerate(gates):
                    if layer == 1:
                        let_go.set()
                    gate.wait()
                    seen.append(layer)

            async with pool.forward({"a": 1}) as forward:
                await forward.run(compute)
                await forward.run(lambda: writer.write(forward, {"a": 1}))
            writer.written["a"].append("a")
        assert seen == [0, 1]
        assert pool.tokens("a") == 8
        await writer.check("a")


async def test_pool_gated_forward_of_a_failing_restore_is_void() -> None:
    device = FaultyDevice()
    async with pool_of(config=SwapConfig(segment_bytes=1), device=device) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 7})
        await pool.preempt("a")

        entered = threading.Event()

        def fail_layer_1(operation: Operation) -> None:
            if operation.work is Work.SCATTER and operation.blocks[0].regions[0].layer == 1:
                entered.wait(10)
                raise OSError("link down")

        device.fault = fail_layer_1
        with pytest.raises(TransferError, match="failed"):  # noqa: PT012
            async with pool.restoring("a") as coming, pool.forward({"a": 1}) as forward:
                coming.gate(1, forward.stream)
                entered.set()
                await forward.run(lambda: writer.write(forward, {"a": 1}))
        assert pool.tokens("a") == 7
        assert pool.state("a") is SequenceState.OFFLOADED
        device.fault = lambda operation: None
        await pool.resume("a")
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


async def test_pool_host_tier_full_recomputes_or_refuses_as_configured() -> None:
    for host_full in HostFull:
        async with pool_of(host_chunks=2, config=SwapConfig(host_full=host_full)) as pool:
            writer = Writer(pool)
            for name in ("a", "b"):
                pool.register(name, max_tokens=16)
                await writer.append({name: 16})
            await pool.preempt("a")
            if host_full is HostFull.REFUSE:
                with pytest.raises(HostTierFull, match="raise host_bytes"):
                    await pool.preempt("b")
                assert pool.state("b") is SequenceState.GPU_RESIDENT
                await writer.check("b")
            else:
                assert await pool.preempt("b") is PreemptOutcome.RECOMPUTE
                assert pool.state("b") is SequenceState.EVICTED
            await pool.resume("a")
            await writer.check("a")


async def test_pool_host_tier_full_takes_the_spare_copies_of_resident_chunks_first() -> None:
    async with pool_of(host_chunks=2) as pool:
        writer = Writer(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=16)
            await writer.append({name: 16})
        await pool.preempt("a")
        await pool.resume("a")
        assert await pool.preempt("b") is PreemptOutcome.OFFLOADED
        assert pool.statistics().counters["reclaimed_copies"] == 2
        await pool.resume("b")
        await writer.check("a")
        await writer.check("b")


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


async def test_pool_forward_waits_for_pages_that_are_on_their_way() -> None:
    device = FaultyDevice()
    started, let_go = threading.Event(), threading.Event()
    async with pool_of(pages=4, device=device) as pool:
        writer = Writer(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=16)
        await writer.append({"a": 12})
        with pytest.raises(PagesExhausted, match="preempt or finish"):
            await writer.append({"b": 8})

        def hold(operation: Operation) -> None:
            if operation.work is Work.GATHER:
                started.set()
                let_go.wait(10)

        device.fault = hold
        async with anyio.create_task_group() as group:
            group.start_soon(pool.preempt, "a")
            await anyio.to_thread.run_sync(started.wait)
            with pytest.raises(WouldBlock):
                pool.forward_nowait({"b": 8})
            group.start_soon(writer.append, {"b": 8})
            await anyio.lowlevel.checkpoint()
            assert pool.tokens("b") == 0
            let_go.set()
        await writer.check("b")
        assert pool.state("a") is SequenceState.OFFLOADED


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


async def test_pool_closed_under_a_waiting_call_ends_it() -> None:
    device = FaultyDevice()
    started, let_go = threading.Event(), threading.Event()

    def hold(operation: Operation) -> None:
        if operation.work is Work.GATHER:
            started.set()
            let_go.wait(10)

    async with pool_of(device=device) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=8)
        await writer.append({"a": 8})
        device.fault = hold

        async def preempt() -> None:
            with pytest.raises(PoolClosed):
                await pool.preempt("a")

        async with anyio.create_task_group() as group:
            group.start_soon(preempt)
            await anyio.to_thread.run_sync(started.wait)
            threading.Timer(0.05, let_go.set).start()
            await pool.close()


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


async def test_pool_hung_copy_is_given_up_and_its_pages_are_quarantined() -> None:
    device = FaultyDevice()
    let_go = threading.Event()
    config = SwapConfig(copy_deadline_ns=50_000_000)
    async with pool_of(device=device, config=config) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=8)
        await writer.append({"a": 8})
        await pool.preempt("a")
        device.fault = lambda operation: let_go.wait(10) and None if operation.work is Work.SCATTER else None
        with pytest.raises(TransferError, match="quarantined"):
            await pool.resume("a")
        assert pool.statistics().pages[0].quarantined == 2
        assert pool.state("a") is SequenceState.OFFLOADED
        let_go.set()
        await pool.resume("a")
        await writer.check("a")
        assert pool.statistics().pages[0].quarantined == 0


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


async def test_pool_windows_of_a_layout_with_other_planes_round_trip() -> None:
    layout = KVLayout.mla(num_layers=2, latent_dim=12, rope_dim=4, dtype=KVDtype.BFLOAT16, page_size=4, chunk_tokens=8)
    async with pool_of(layout, pages=8) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=20)
        await writer.append({"a": 13})
        await pool.preempt("a")
        pool.memory.plane(0, "latent").view(torch.uint8).fill_(255)
        await pool.resume("a")
        await writer.check("a")
        assert all(state is ChunkState.GPU_RESIDENT for state in pool.chunk_states("a"))


async def test_pool_window_that_passes_what_was_truncated_takes_no_good_copy_for_a_bad_one() -> None:
    """A copy that starts over where the old checksums happened to end guards its own pages only."""
    async with pool_of(small_layout(windows=[3, None]), pages=32, config=SwapConfig(verify=Verify.CRC32)) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=32)
        await writer.append({"a": 4})
        await pool.preempt("a")
        await pool.resume("a")
        writer.truncate("a", 3)
        await writer.append({"a": 5})
        await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")
