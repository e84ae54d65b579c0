"""The pool on the host device: what leaves comes back byte for byte, and every call keeps its promise."""

import threading

import anyio
import pytest
import torch

from swapkv import (
    ChunkState,
    HostFull,
    HostTierFull,
    KVDtype,
    KVLayout,
    PagesExhausted,
    PoolClosed,
    PreemptOutcome,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
    WouldBlock,
)
from swapkv.streams.host import Operation, Work
from tests.kit.small_pool import FaultyDevice, pool_of, small_layout
from tests.kit.writing import Writer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
            await forward.run(lambda: [writer._write_token(forward.page_tables("a"), "x", p) for p in range(6, 10)])
        writer.written["a"].extend(["x"] * 4)
        await pool.preempt("a")
        await pool.resume("a")
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
