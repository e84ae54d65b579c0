"""The pool on the production CUDA device: byte for byte, whatever fails, whenever it is cancelled, in any timing."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
import pytest

from swapkv import Pool, PreemptOutcome, SequenceState, SwapConfig, Verify, open_pool
from swapkv.streams.cuda_copies import Way, plan
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.cuda_streams import CudaStream
from swapkv.streams.host import Work
from tests import test_contract
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, HeldDevice, KernelDevice, threads_of
from tests.faults.test_nth_failure import run as run_with_failure
from tests.kit.late_traffic import run_pool_traffic
from tests.kit.small_pool import small_layout
from tests.kit.sweep import Outcome
from tests.kit.writing import Writer
from tests.prove import cancelling
from tests.prove.cancelling import SWEEPS, When, cancel_everywhere
from tests.test_contract import SCENARIOS, on_anyio, on_stepped, on_virtual

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    assert control.held_open() == []
    assert control.live(control.TIMED_EVENTS) == 0


REFUSABLE = {Way.SINGLE: "cuMemcpyAsync", Way.KERNEL: "cuLaunchKernel", Way.GRID: "cuMemcpy3DBatchAsync_v2"}
"""What the driver refuses in order to refuse a copy; of the other ways a batch."""


class FailingOnce(KernelDevice):
    """Fails the next copy of a lane once, as the driver would."""

    way = Way.BATCH

    def __init__(self) -> None:
        super().__init__(way=self.way)
        self.failing: set[Work] = set()

    def execute(self, operation: CudaOperation) -> None:
        if operation.work in self.failing:
            self.failing.discard(operation.work)
            control.fail(REFUSABLE.get(self.way, "cuMemcpyBatchAsync_v2"), 1, control.INVALID_VALUE)
        super().execute(operation)

    def fail_next(self, lane: str) -> None:
        self.failing.add(Work.GATHER if lane == "OUT" else Work.SCATTER)


class RefusingDriver(KernelDevice):
    """The driver refuses the last piece of the `nth` gather or scatter, from 1 on. `failed`: it has."""

    def __init__(self, nth: int, way: Way) -> None:
        super().__init__(way=way)
        self._left, self._way = nth, way
        self.failed = False

    def disarm(self) -> None:
        """The driver refuses nothing any more."""
        self._left = 0

    def execute(self, operation: CudaOperation) -> None:
        if operation.work in (Work.GATHER, Work.SCATTER):
            self._left -= 1
            if self._left == 0:
                self.failed = True
                nth = len(plan(operation.blocks)) if self._way is Way.SINGLE else 1
                control.fail(REFUSABLE.get(self._way, "cuMemcpyBatchAsync_v2"), nth, control.OUT_OF_MEMORY)
        super().execute(operation)


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


@pytest.mark.parametrize("name", SCENARIOS)
def test_driver_on_cuda_decides_what_virtual_time_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_contract, "FailingDevice", FailingOnce)
    scenario = SCENARIOS[name]
    expected = on_virtual(scenario, monkeypatch)
    assert on_stepped(scenario, monkeypatch) == expected
    for backend in ("asyncio", "trio"):
        assert on_anyio(scenario, backend, monkeypatch) == expected


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("call", SWEEPS)
def test_call_cancelled_anywhere_is_done_or_undone(
    call: str, when: When, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "HeldDevice", HeldDevice)
    tried = SWEEPS[call]
    if call == "forward run":
        tried = attrs.evolve(tried, verify=ran)
    assert anyio.run(cancel_everywhere, tried, when, backend=anyio_backend) >= 1


def ran(pool: Pool, writer: Writer, outcome: Outcome) -> None:
    """A point on a CUDA stream is reached when the driver says so, not when it is recorded."""
    assert pool.tokens("a") == cancelling.TOKENS + (not outcome.cancelled)
    assert pool.compute.record().wait(LONG_S)
    del writer.written["a"][pool.tokens("a") :]


@pytest.mark.parametrize("seed", control.seeds())
@pytest.mark.parametrize("way", list(Way))
def test_traffic_in_any_timing_reads_what_was_written(way: Way, seed: int, anyio_backend: str) -> None:
    control.timing(seed, 60)
    anyio.run(run_pool_traffic, seed, 12, KernelDevice(way=way), backend=anyio_backend)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("verify", list(Verify))
def test_driver_that_refuses_the_nth_copy_loses_nothing_whichever_it_is(way: Way, verify: Verify) -> None:
    step = 2 if way is Way.BATCH and verify is Verify.NONE else 7
    for nth in range(1, 200, step):
        device = RefusingDriver(nth, way)
        anyio.run(run_with_failure, device, verify)
        if not device.failed:
            break
    assert nth > 20, "too few copies to show anything"
    assert not device.failed


async def test_layers_that_a_forward_is_gated_on_are_read_whole() -> None:
    control.timing(11, 400)
    device = KernelDevice()
    async with pool_on(device, segment_bytes=1) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=40)
        await writer.append({"a": 20})
        await pool.preempt("a")
        gates = control.calls("cuStreamWaitValue32_v2")
        async with pool.restoring("a") as coming, pool.forward({"a": 0}) as forward:
            for layer in range(pool.layout.num_layers):
                coming.gate(layer, forward.stream)
            await forward.run(lambda: writer.read(forward, "a"))
        assert control.calls("cuStreamWaitValue32_v2") > gates, "no gate was shut: the restore was over too early"


def test_traffic_without_the_waits_of_the_device_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of all `cuStreamWaitEvent`s; the gates have theirs in the suite of streams."""
    monkeypatch.setattr(CudaStream, "_wait_on_device", lambda self, event: None)
    assert any(reads_something_else(seed) for seed in range(60))


def reads_something_else(seed: int) -> bool:
    control.timing(seed, 300)
    try:
        anyio.run(run_pool_traffic, seed, 12, KernelDevice())
    except AssertionError as error:
        return " reads " in str(error)
    return False


async def test_statistics_tell_which_way_the_probe_found_the_fastest() -> None:
    device = KernelDevice(way=None)
    async with open_pool(small_layout(), num_pages=8, host_bytes=1 << 14, device=device) as pool:
        ways = pool.statistics().ways
    assert {way.direction for way in ways} == {"out", "in"}
    assert all(way.bytes_per_s > 0 and way.way in {w.value for w in Way} for way in ways)
    assert len({(way.direction, way.run_bytes) for way in ways}) == len(ways) >= 6
