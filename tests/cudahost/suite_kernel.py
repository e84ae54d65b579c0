"""The copy kernel: byte for byte at every size and alignment, its tables, and what happens where it is not to be had."""

import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from swapkv.config import Verify
from swapkv.errors import ProtocolError
from swapkv.streams import cuda_kernel, cuda_kernel_nvrtc
from swapkv.streams.base import Block
from swapkv.streams.cuda_copies import Direction, Runs, Scratch, Way
from swapkv.streams.cuda_driver import CudaError, cu
from swapkv.streams.cuda_kernel import Tables
from swapkv.streams.cuda_probe import RUN_BYTES, probe
from tests import test_contract
from tests.cudahost import control, suite_pool
from tests.cudahost.held import HeldStream, submitted
from tests.cudahost.kernels import LONG_S, HeldDevice, KernelDevice, opened
from tests.cudahost.pages import NEW, block_of, one_page, region_of
from tests.prove import cancelling
from tests.prove.cancelling import SWEEPS, When, cancel_everywhere
from tests.test_contract import SCENARIOS, on_anyio, on_stepped, on_virtual

LOADING = 1
"""Launches with which the kernel is loaded."""

SIZES = (1, 2, 15, 16, 17, 31, 48, 127, 511, 4095, 4096, 4113, 16383, 16384, 16385, 40000)


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    control.collect()
    assert control.held_open() == []


def uint64(numbers: Any) -> Any:
    return np.array(numbers, dtype=np.uint64)


def noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Random bytes, and a copy of them."""
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor.clone()


class Both:
    """Device and pinned memory of some bytes, a stream, and copies between them by the kernel."""

    def __init__(self, device: KernelDevice, num_bytes: int) -> None:
        self.near, self.far = device.allocate(num_bytes), device.allocate_pinned(num_bytes)
        self.before = noise(self.near, 1), noise(self.far, 2)
        self._device, self._stream = device, device.create_stream("both")
        self._scratch = Scratch(device.context)

    def move(self, direction: Direction, near: Any, far: Any, sizes: Any) -> None:
        base = self.near.data_ptr(), self.far.data_ptr()
        runs = Runs(uint64(near) + uint64(base[0]), uint64(far) + uint64(base[1]), uint64(sizes))
        with self._device.context:
            self._device.copies.move(direction, Way.KERNEL, runs, self._stream.handle, self._scratch)
            self._device.context.call(cu.cuStreamSynchronize, self._stream.handle)

    def require(self, direction: Direction, near: Any, far: Any, sizes: Any) -> None:
        """The runs have come, and nothing else has changed."""
        expected = [tensor.clone() for tensor in self.before]
        target, source = expected if direction is Direction.IN else reversed(expected)
        places = (near, far) if direction is Direction.IN else (far, near)
        for put, taken, size in zip(*places, sizes, strict=True):
            target[put : put + size] = source[taken : taken + size]
        assert torch.equal(self.near, expected[0])
        assert torch.equal(self.far, expected[1])

    def close(self) -> None:
        with self._device.context:
            self._scratch.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_every_size_at_every_alignment_arrives_and_nothing_beside_it_is_touched(direction: Direction) -> None:
    cases = list(product(range(16), range(16), SIZES))
    pitch = [size + 48 - size % 16 for *_, size in cases]
    starts = (np.cumsum(pitch) - pitch).tolist()
    near = [start + offset for start, (offset, _, _) in zip(starts, cases, strict=True)]
    far = [start + offset for start, (_, offset, _) in zip(starts, cases, strict=True)]
    sizes = [size for *_, size in cases]
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        both, stored = Both(device, sum(pitch)), control.stored_bytes()
        both.move(direction, near, far, sizes)
        assert control.stored_bytes() - stored == sum(sizes), "a byte is written by two, or not at all"
        both.require(direction, near, far, sizes)
        both.close()
        assert (
            1 < control.calls("cuLaunchKernel") - LOADING == -(-sum(-(-size // (16 << 10)) for size in sizes) // 2048)
        )
        assert control.calls("cuMemcpyAsync") + control.calls("cuMemcpyBatchAsync_v2") == 0
        del both


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_arrive_in_any_timing_from_memory_that_the_device_sees_elsewhere(seed: int) -> None:
    random = np.random.default_rng(seed)
    control.timing(seed, 50)
    control.show_pinned_memory_elsewhere(by_bytes=(seed % 2) << 50)
    try:
        with opened(KernelDevice(way=Way.KERNEL)) as device:
            sizes = random.integers(1, 3000, size=random.integers(1, 60)).tolist()
            gaps = random.integers(0, 40, size=len(sizes))
            near = (np.cumsum(sizes) - sizes + np.cumsum(gaps)).tolist()
            far = (np.cumsum(sizes) - sizes + np.cumsum(gaps[::-1])).tolist()
            direction = list(Direction)[seed // 2 % 2]
            both = Both(device, sum(sizes) + 40 * len(sizes))
            both.move(direction, near, far, sizes)
            both.require(direction, near, far, sizes)
            both.close()
            assert control.calls("cuLaunchKernel") == LOADING + 1
            del both
    finally:
        control.show_pinned_memory_elsewhere(by_bytes=0)


def test_scattered_pages_of_a_segment_are_one_launch_of_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = cu.cuLaunchKernel
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        spy = type("Spy", (), {"__getattr__": lambda self, name: getattr(cu, name)})()
        spy.cuLaunchKernel = lambda *args: (launched.append(args[1:7]), launch(*args))[1]
        monkeypatch.setattr(cuda_kernel, "cu", spy)
        block = block_of(device, [region_of(device, 400, 64)], range(1, 400, 2))
        assert device.create_stream("out").gather([block] * 5, Verify.NONE).wait(LONG_S)
        assert device.create_stream("in").scatter([one_page(device)], Verify.NONE).wait(LONG_S)
    assert launched == [(8, 1, 1, 512, 1, 1), (1, 1, 1, 512, 1, 1)]


def test_host_memory_that_is_not_pinned_for_this_device_goes_by_a_batch() -> None:
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        block = one_page(device, NEW)
        with device.context:
            foreign = int(device.context.call(cu.cuMemHostAlloc, 4096, 0))
        host = control.view_on_host(None, foreign, 16).view(1, 16)
        elsewhere = Block(regions=block.regions, pages=block.pages, host=[host])
        assert device.create_stream("out").gather([elsewhere], Verify.NONE).wait(LONG_S)
        assert host.eq(NEW).all()
        assert control.calls("cuLaunchKernel") == LOADING
        assert control.calls("cuMemcpyBatchAsync_v2") == 1
        with device.context:
            device.context.call(cu.cuMemFreeHost, foreign)


def test_memory_is_mapped_from_its_first_byte_to_its_last_until_it_is_removed() -> None:
    with opened(KernelDevice()) as device, device.context:
        for begin in (4096, 12288):
            device.mapped.add(begin, 4096)

        def is_mapped(address: int, num_bytes: int) -> bool:
            """Beside another run, which is."""
            addresses, sizes = uint64([4096, address]), uint64([16, num_bytes])
            seen = device.mapped.seen_by_device(addresses, sizes)
            assert seen is None or seen.tolist() == addresses.tolist()
            return seen is not None

        assert is_mapped(4096, 4096)
        assert is_mapped(12288 + 4095, 1)
        for address, num_bytes in ((4095, 1), (4096, 4097), (8191, 2), (8192, 1), (12287, 2), (16384, 1)):
            assert not is_mapped(address, num_bytes)
        device.mapped.remove(12288)
        assert not is_mapped(12288, 1)
        device.mapped.remove(4096)
        assert not is_mapped(4096, 1)


class FailingLaunches(suite_pool.FailingOnce):
    """Fails the next copy of a lane once: the driver does not take its launch."""

    way = Way.KERNEL


@pytest.mark.parametrize("name", SCENARIOS)
def test_driver_on_kernels_decides_what_virtual_time_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_contract, "FailingDevice", FailingLaunches)
    scenario = SCENARIOS[name]
    expected = on_virtual(scenario, monkeypatch)
    assert on_stepped(scenario, monkeypatch) == expected
    assert on_anyio(scenario, "asyncio", monkeypatch) == expected
    assert control.calls("cuMemcpyBatchAsync_v2") == 0 or "fork" in name, "something went by a batch"


class HeldLaunches(HeldDevice):
    """Launches are submitted while `open` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(way=Way.KERNEL, **options)


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("call", SWEEPS)
def test_call_cancelled_anywhere_is_done_or_undone(call: str, when: When, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelling, "HeldDevice", HeldLaunches)
    tried = SWEEPS[call]
    if call == "forward run":
        tried = suite_pool.attrs.evolve(tried, verify=suite_pool.ran)
    assert anyio.run(cancel_everywhere, tried, when, backend="asyncio") >= 1


def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scratch, "tables", property(tables_of_one_row))


def tables_of_one_row(scratch: Scratch) -> Tables:
    if scratch._tables is None:
        scratch._tables = Tables(scratch._context, section_rows=1)
    return scratch._tables


def test_table_is_not_written_again_before_its_launch_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tables(monkeypatch)
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        held = HeldStream(device)
        blocks, events = held.gather(device, 12)
        while control.calls("cuLaunchKernel") < LOADING + 4:
            time.sleep(1e-3)
        assert submitted(held.stream) <= 4, "a fifth launch has a table, and none is free"
        held.go.set()
        assert all(event.wait(LONG_S) for event in events)
        assert [int(block.host[0][0, 0]) for block in blocks] == list(range(1, 13))


def test_table_that_is_written_again_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of the wait for the section's last launch."""
    small_tables(monkeypatch)

    def turn_at_once(tables: Tables, stream: int) -> None:
        tables._section, tables._used = (tables._section + 1) % 4, 0

    monkeypatch.setattr(Tables, "_turn", turn_at_once)
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        held = HeldStream(device)
        blocks, events = held.gather(device, 12)
        while control.calls("cuLaunchKernel") < LOADING + 12:
            time.sleep(1e-3)
        held.go.set()
        assert all(event.wait(LONG_S) for event in events)
        assert [int(block.host[0][0, 0]) for block in blocks] != list(range(1, 13))


@pytest.mark.parametrize(
    "function", ["cuLaunchKernel", "cuMemHostAlloc", "cuMemHostGetDevicePointer_v2", "cuEventCreate"]
)
def test_launch_that_the_driver_refuses_fails_its_own_event_and_no_other(function: str) -> None:
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        stream, blocks = device.create_stream("out"), [one_page(device) for _ in range(3)]
        control.fail(function, 1, control.LAUNCH_OUT_OF_RESOURCES)
        refused, following = (stream.gather([block], Verify.NONE) for block in blocks[:2])
        with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
            refused.wait(LONG_S)
        assert following.wait(LONG_S)
        assert [bool(block.host[0].any()) for block in blocks] == [False, True, False]


@pytest.mark.parametrize("function", ["cuEventRecord", "cuEventSynchronize"])
def test_table_that_cannot_be_waited_for_is_not_written_again(function: str) -> None:
    with opened(KernelDevice(way=Way.KERNEL)) as device:
        stream = device.create_stream("s")
        with device.context:
            tables = Tables(device.context, section_rows=1)
            first = tables.place(uint64([[1, 2, 3]]), stream.handle)
            control.fail(function, 1, control.OUT_OF_MEMORY)
            with pytest.raises(CudaError):
                tables.place(uint64([[4, 5, 6]]), stream.handle)
            assert tables.place(uint64([[4, 5, 6]]), stream.handle) == first + 24
            tables.close()


FAILURES = {
    "nvrtcCreateProgram": control.NVRTC_INVALID_OPTION,
    "nvrtcCompileProgram": control.NVRTC_INVALID_OPTION,
    "nvrtcGetCUBIN": control.NVRTC_INVALID_OPTION,
    "cuModuleLoadData": control.INVALID_IMAGE,
    "cuModuleGetFunction": control.INVALID_IMAGE,
    "cuLaunchKernel": control.LAUNCH_OUT_OF_RESOURCES,
}


@pytest.mark.parametrize("function", FAILURES)
def test_kernel_that_cannot_be_loaded_is_not_offered_and_the_reason_is_told(function: str) -> None:
    control.fail(function, 1, FAILURES[function])
    with opened(KernelDevice(way=None)) as device:
        assert Way.KERNEL not in device.copies.ways
        assert function in device.missing_ways["kernel"]
        assert {rate.way for rate in device.rates} == set(Way) - {Way.KERNEL}
        assert control.live(control.KINDS.index("modules")) == 0
        with pytest.raises(ProtocolError, match=f"way='kernel': {function}.*another way of .'batch'"):
            device.copies.require(Way.KERNEL)


def test_device_without_unified_addresses_has_no_kernel() -> None:
    control.take_unified_addresses(away=True)
    try:
        with pytest.raises(ProtocolError, match="way='kernel': the device has no unified addresses"):
            KernelDevice(way=Way.KERNEL)
    finally:
        control.take_unified_addresses(away=False)


def test_machine_without_a_compiler_names_the_package_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_: object) -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13")

    spy = type("Spy", (), {"__getattr__": lambda self, name: getattr(cuda_kernel_nvrtc._nvrtc, name)})()
    spy.nvrtcCreateProgram = not_found
    monkeypatch.setattr(cuda_kernel_nvrtc, "nvrtc", spy)
    with opened(KernelDevice(way=None)) as device:
        assert "pip install nvidia-cuda-nvrtc" in device.missing_ways["kernel"]


def test_compiler_that_does_not_know_the_card_says_so() -> None:
    with pytest.raises(CudaError, match="for sm_999: invalid value for --gpu-architecture"):
        cuda_kernel_nvrtc.compile_kernel("sm_999")


def test_probe_takes_the_kernel_where_it_is_the_fastest() -> None:
    def clock() -> int:
        """A launch takes less than a batch, and either less than single copies."""
        calls = {name: control.calls(name) for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyAsync", "cuLaunchKernel")}
        return sum(calls.values()) + 99 * calls["cuMemcpyBatchAsync_v2"]

    with opened(KernelDevice(way=None)) as device:
        device.preference = probe(device.context, device.copies, device.mapped, clock=clock)
        assert {way.way for way in device.chosen_ways()} == {"kernel"}
        assert len(device.chosen_ways()) == 2 * len(RUN_BYTES)
        before = control.calls("cuLaunchKernel")
        block = one_page(device, NEW)
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        assert block.host[0].eq(NEW).all()
        assert control.calls("cuLaunchKernel") == before + 1


@pytest.mark.parametrize("nth", [2, 3, 9, 24])
def test_probe_goes_on_without_a_kernel_that_fails(nth: int) -> None:
    control.fail("cuLaunchKernel", nth, control.LAUNCH_OUT_OF_RESOURCES)
    with opened(KernelDevice(way=None)) as device:
        assert {rate.way for rate in device.rates} == set(Way) - {Way.KERNEL}
        assert "failed when it was measured: cuLaunchKernel: CUDA_ERROR_LAUNCH_OUT" in device.missing_ways["kernel"]
        block = one_page(device, NEW)
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
