"""The pool on the production CUDA device: byte for byte, whatever fails, whenever it is cancelled, in any timing."""

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swapkv import Pool, PreemptOutcome, SequenceState, SwapConfig, Verify, open_pool
from swapkv.streams.cuda_copies import Way
from tests.cudahost import control
from tests.cudahost.kernels import KernelDevice, threads_of
from tests.kit.writing import Writer
from tests.test_pool import small_layout

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    gc.collect()
    kinds = (control.MEMORY, control.PINNED, control.REGISTERED, control.STREAMS, control.EVENTS, control.CONTEXTS)
    assert [control.live(kind) for kind in kinds] == [0] * len(kinds)


@asynccontextmanager
async def pool_on(device: KernelDevice, pages: int = 64, **config: Any) -> AsyncIterator[Pool]:
    """A pool whose host tier holds about 30 chunks."""
    layout = small_layout(windows=[None, 7])
    async with open_pool(
        layout, num_pages=pages, host_bytes=1 << 15, device=device, config=SwapConfig(**config)
    ) as pool:
        yield pool
        pool._core.check()
    assert not threads_of(device)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("seed", control.seeds())
async def test_pool_preempted_sequence_returns_byte_for_byte(way: Way, verify: Verify, seed: int) -> None:
    control.timing(seed, 100)
    async with pool_on(KernelDevice(way=way), verify=verify, segment_bytes=1) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=64)
        await writer.append({"a": 21})
        writer.fork("a", "c", 64)
        await writer.append({"c": 2})
        assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
        pool.register("b", max_tokens=64)
        await writer.append({"b": 40})
        await pool.preempt("c")
        await pool.resume("a")
        await pool.resume("c")
        assert pool.state("a") is SequenceState.GPU_READY
        for name in ("a", "b", "c"):
            await writer.check(name)
