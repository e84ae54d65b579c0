"""Contexts that fail for good and work that never ends: the pool says why, nobody waits for ever."""

import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from swapkv import DrainTimeout, Pool, PoolBroken, SwapConfig, TransferError, open_pool
from swapkv.config import Verify
from swapkv.streams.cuda_driver import CudaLost
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, HeldDevice, KernelDevice, threads_of
from tests.cudahost.pages import one_page
from tests.kit.small_pool import small_layout
from tests.kit.writing import Writer

STUCK: list[KernelDevice] = []
"""Devices whose memory must stay: their work may go on."""


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does; contexts are then made anew."""
    with control.fresh():
        yield
        control.collect()
    control.revive()


@asynccontextmanager
async def pool_of_one() -> AsyncIterator[tuple[Pool, Writer]]:
    device = KernelDevice()
    async with open_pool(
        small_layout(), num_pages=16, host_bytes=1 << 14, device=device, config=SwapConfig(segment_bytes=1)
    ) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=40)
        await writer.append({"a": 20})
        yield pool, writer
    assert not threads_of(device)


async def come_and_go(pool: Pool, function: str) -> None:
    """The forward takes until the driver's function is called once more, or for good."""
    before = control.calls(function)

    def busy() -> None:
        for _ in range(100_000):
            if control.calls(function) > before:
                return
            time.sleep(1e-4)

    for _ in range(3):
        async with pool.forward({"a": 1}) as forward:
            forward.launch(busy)
        await pool.preempt("a")
        await pool.resume("a")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_context_lost_in_a_copy_breaks_the_pool_with_its_cuda_name(nth: int, backend: str) -> None:
    async def preempt() -> None:
        async with pool_of_one() as (pool, _):
            control.fail("copy", nth, control.ILLEGAL_ADDRESS)
            with pytest.raises(PoolBroken, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
                await pool.preempt("a")
            assert isinstance(caught.value.__cause__, CudaLost)
            assert caught.value.__cause__.status == "CUDA_ERROR_ILLEGAL_ADDRESS"
            with pytest.raises(PoolBroken, match="open a new one"):
                await pool.preempt("a")

    anyio.run(preempt, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_context_lost_under_a_gated_restore_breaks_the_pool(backend: str) -> None:
    async def restore() -> None:
        async with pool_of_one() as (pool, _):
            await pool.preempt("a")
            control.fail("copy", 2, control.ILLEGAL_ADDRESS)
            with pytest.raises(PoolBroken, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                async with pool.restoring("a") as coming:
                    coming.gate(1, pool.compute)

    anyio.run(restore, backend=backend)


@pytest.mark.parametrize("function", ["cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize"])
def test_context_lost_in_any_call_breaks_the_pool(function: str) -> None:
    async def swap() -> None:
        async with pool_of_one() as (pool, _):
            control.fail(function, 1, control.ILLEGAL_ADDRESS)
            with pytest.raises(PoolBroken, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                await come_and_go(pool, function)

    anyio.run(swap)


def test_event_that_cannot_be_recorded_is_the_end_of_the_stream() -> None:
    """Nobody could tell when the copy is over, so nobody may use its pages again."""
    device = KernelDevice()
    stream, block = device.create_stream("out"), one_page(device)
    assert stream.gather([block], Verify.NONE).wait(LONG_S)
    control.fail("cuEventRecord", 1, control.OUT_OF_MEMORY)
    with pytest.raises(CudaLost, match=r"end of work cannot be followed.*OUT_OF_MEMORY"):
        stream.gather([block], Verify.NONE).wait(LONG_S)
    assert device.close(LONG_S) == []
    del device, stream, block
    control.collect()
    given_back = control.calls("cuMemFree_v2") + control.calls("cuDevicePrimaryCtxRelease_v2")
    assert given_back == 0, "memory that a copy may still touch was given back"


def test_lost_device_refuses_work_and_closes() -> None:
    device = KernelDevice()
    out, idle, block = device.create_stream("out"), device.create_stream("idle"), one_page(device)
    promise = device.create_promise()
    control.fail("copy", 1, control.ILLEGAL_ADDRESS)
    lost = out.gather([block], Verify.NONE)
    for event in (lost, out.record()):
        with pytest.raises(CudaLost, match="end the process"):
            event.wait(LONG_S)
    with pytest.raises(TransferError):
        promise.wait(LONG_S)
    calls: list[Callable[[], object]] = [
        lambda: idle.record().wait(LONG_S),
        lambda: out.gather([block], Verify.NONE).wait(LONG_S),
        lambda: device.create_stream("late"),
        lambda: device.allocate(16),
    ]
    for call in calls:
        with pytest.raises(CudaLost):
            call()
    assert device.close(LONG_S) == []
    assert not threads_of(device)


def test_another_device_is_not_touched_by_the_loss() -> None:
    lost, well = KernelDevice(0), KernelDevice(1)
    control.fail("copy", 1, control.ILLEGAL_ADDRESS)
    with pytest.raises(CudaLost):
        lost.create_stream("out").gather([one_page(lost)], Verify.NONE).wait(LONG_S)
    block = one_page(well)
    assert well.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
    assert block.host[0].any()
    for device in (lost, well):
        assert device.close(LONG_S) == []


def test_lost_device_keeps_no_memory_of_the_process() -> None:
    """What is kept of the failure must not keep, by its frames, what leads to the device's memory."""
    device = KernelDevice()
    tensor = weakref.ref(device.allocate(16))
    block = one_page(device)
    memory = weakref.ref(block.regions[0].pages)
    control.fail("copy", 1, control.ILLEGAL_ADDRESS)
    with suppress(CudaLost):
        device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
    assert device.context.lost is not None
    context = weakref.ref(device.context)
    assert device.close(LONG_S) == []
    del device, block
    for _ in range(3):
        gc.collect()
    assert tensor() is memory() is context() is None


def test_close_with_a_copy_that_is_held_names_its_stream_and_submits_no_more() -> None:
    device = HeldDevice(name="stuck")
    STUCK.append(device)
    out, idle = device.create_stream("out"), device.create_stream("idle")
    promise, block = device.create_promise(), one_page(device)
    device.open.clear()
    running, queued, point = out.gather([block], Verify.NONE), out.gather([block], Verify.NONE), idle.record()
    assert point.wait(LONG_S)
    assert device.close(0.0) == ["out"]
    for event in (running, queued, promise):
        assert event.query()
        with pytest.raises(DrainTimeout):
            event.wait(LONG_S)
    assert point.wait(0.0)
    device.open.set()
    for thread in threads_of(device):
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert control.calls("cuMemcpyBatchAsync_v2") <= 1
    assert [arena.is_pinned for arena in device.arenas] == [True], "a copy may still come"
    assert device.close(LONG_S) == ["out"]


def test_close_with_a_kernel_behind_a_gate_that_never_opens_names_its_stream() -> None:
    device = KernelDevice(name="gated")
    STUCK.append(device)
    compute, promise = device.create_stream("compute"), device.create_promise()
    compute.wait(promise)
    launched = compute.launch(lambda: 7)
    assert device.close(0.0) == ["compute"]
    with pytest.raises(DrainTimeout):
        launched.wait(LONG_S)
    for thread in threads_of(device):
        thread.join(LONG_S)
        assert not thread.is_alive()
