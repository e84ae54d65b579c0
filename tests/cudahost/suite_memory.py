"""Devices, memory, foreign streams, arrays of engines, and drivers that lack something."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swapkv import BudgetExhausted, KVDtype, KVLayout, ProtocolError, Verify
from swapkv.layout import LayerGroup, Plane
from swapkv.streams import cuda_probe
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_copies import Direction, Runs, Way, plan
from swapkv.streams.cuda_driver import BatchCopy, CudaError
from swapkv.streams.cuda_probe import CopyRate, Preference, describe
from swapkv.tiers.pinned import PinnedOptions
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, KernelDevice, opened, view_on_host
from tests.cudahost.pages import NEW, OLD, block_of, one_page, region_of


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    control.collect()
    assert control.all_live() == []


def test_memory_of_any_size_is_zeroed() -> None:
    with opened(KernelDevice()) as device:
        for allocate in (device.allocate, device.allocate_pinned):
            for num_bytes in (0, 1, 5000):
                memory = allocate(num_bytes)
                assert memory.dtype == torch.uint8
                assert tuple(memory.shape) == (num_bytes,)
                assert not memory.any()
            with pytest.raises(ProtocolError, match="num_bytes=-1 must be 0 or more"):
                allocate(-1)
        del memory


def test_device_memory_that_is_not_there_is_refused_with_what_is_left() -> None:
    with opened(KernelDevice()) as device, pytest.raises(BudgetExhausted, match=f"has {1 << 30} bytes left, asked for"):
        device.allocate((1 << 30) + 1)


def test_device_memory_is_freed_with_the_last_tensor_on_it() -> None:
    with opened(KernelDevice()) as device:
        memory = device.allocate(4096)
        part = memory[8:16].view(torch.int32)
        del memory
        assert "1 device memory" in control.all_live()
        del part
        control.collect()
        assert "1 device memory" not in control.all_live()


def test_host_memory_that_the_driver_does_not_pin_is_refused() -> None:
    with opened(KernelDevice()) as device:
        control.fail("cuMemHostRegister_v2", 1, control.OUT_OF_MEMORY)
        with pytest.raises(
            BudgetExhausted, match=r"the driver pins no 8192 bytes .*CUDA_ERROR_OUT_OF_MEMORY"
        ) as caught:
            device.allocate_pinned(8192)
        assert isinstance(caught.value.__cause__, CudaError)
        assert device.arenas == ()


def test_arena_is_one_registration_of_its_size_and_ends_with_the_device() -> None:
    device = KernelDevice(pinned=PinnedOptions())
    memory = device.allocate_pinned(3 * 4096)
    (arena,) = device.arenas
    assert arena.is_pinned
    assert arena.mapped_bytes == 3 * 4096
    assert control.calls("cuMemHostRegister_v2") == 1
    assert device.close(LONG_S) == []
    assert not arena.is_pinned
    memory.fill_(NEW)
    assert memory.eq(NEW).all()


def test_driver_of_the_tests_finds_copies_of_memory_that_is_freed_or_not_pinned() -> None:
    """What the suites rely on: each of these would go unnoticed otherwise."""
    with opened(KernelDevice()) as device:
        out, block = device.create_stream("out"), one_page(device)
        stray = block_of(device, block.regions, [0])
        object.__setattr__(stray, "host", [torch.zeros(1, 16, dtype=torch.uint8)])
        with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_VALUE.*freed, or not pinned"):
            out.gather([stray], Verify.NONE).wait(LONG_S)
        assert "not pinned" in control.violations()
        control.forget()
        region = region_of(device, 2, 16)
        address = region.pages.data_ptr()
        del region
        control.collect()
        freed = Runs(*(torch.tensor([n]).numpy().astype("uint64") for n in (address, block.host[0].data_ptr(), 16)))
        with device.context, pytest.raises(CudaError):
            device.copies.move(Direction.OUT, Way.BATCH, freed, out.handle)
        assert "freed memory" in control.violations()
        control.forget()
        freed = Runs(plan([block]).near, plan([block]).far, plan([block]).sizes * 1000)
        with device.context, pytest.raises(CudaError):
            device.copies.move(Direction.OUT, Way.BATCH, freed, out.handle)
        assert "out of bounds" in control.violations()
        control.forget()


def test_several_devices_have_memory_and_streams_of_their_own() -> None:
    with opened(KernelDevice(0)) as first, opened(KernelDevice(1)) as second:
        blocks = [one_page(device, value) for device, value in ((first, OLD), (second, NEW))]
        streams = [device.create_stream("out") for device in (first, second)]
        streams[1].wait(streams[0].gather([blocks[0]], Verify.NONE))
        assert streams[1].gather([blocks[1]], Verify.NONE).wait(LONG_S)
        assert [int(block.host[0][0, 0]) for block in blocks] == [OLD, NEW]
        with pytest.raises(ProtocolError, match="is not of device 'cuda:0'"):
            first.wrap_stream(streams[1])
    with pytest.raises(ProtocolError, match="this process sees 2 devices"):
        KernelDevice(2)


def test_event_of_another_context_is_found_out_by_the_driver_of_the_tests() -> None:
    with opened(KernelDevice(0)) as first, opened(KernelDevice(1)) as second:
        stream = second.create_stream("out")
        with first.context:
            event = first.event_pool.take()
        with pytest.raises(CudaError):
            second.context.call(cuda_probe.cu.cuEventRecord, event, stream.handle)
        assert "an event of device 0 is recorded on a stream of device 1" in control.violations()
        control.forget()
        first.event_pool.give_back(event)


class TorchStream:
    """As `torch.cuda.Stream` shows its handle."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_foreign_stream_is_wrapped_once_and_not_destroyed() -> None:
    with opened(KernelDevice()) as owner:
        theirs = owner.create_stream("theirs")
        with opened(KernelDevice(name="guest")) as guest:
            wrapped = guest.wrap_stream(theirs)
            assert wrapped is guest.wrap_stream(theirs.handle) is guest.wrap_stream(TorchStream(theirs.handle))
            assert wrapped.__cuda_stream__() == (0, theirs.handle)
            gate, order = guest.create_promise(), []
            wrapped.wait(gate)
            wrapped.launch(lambda: order.append("guest"))
            last = theirs.launch(lambda: order.append("owner"))
            gate.set()
            assert last.wait(LONG_S)
            assert order == ["guest", "owner"]
            with pytest.raises(ProtocolError, match="a str is no CUDA stream"):
                guest.wrap_stream("0x1")
        assert theirs.launch(lambda: 7).wait(LONG_S)


def test_default_stream_is_wrapped_and_clones_without_a_batch() -> None:
    with opened(KernelDevice()) as device:
        region = region_of(device, 2, 16)
        region.pages[1] = NEW
        assert device.wrap_stream(0).clone([region], torch.tensor([1]), torch.tensor([0])).wait(LONG_S)
        assert region.pages.eq(NEW).all()
        assert control.calls("cuMemcpyBatchAsync_v2") == 0


def test_priorities_are_brought_within_what_the_device_has() -> None:
    with opened(KernelDevice()) as device:
        assert device.context.priorities == (0, -5)
        assert [device.create_stream(str(n), priority=n).priority for n in (-9, -2, 0, 3)] == [-5, -2, 0, 0]


@pytest.mark.parametrize("version", [13000, 12080, 0])
def test_older_driver_is_used_as_far_as_it_goes(version: int) -> None:
    """13: batches; 12.8: batches that name what failed; before: one call a run."""
    if version < 13000:
        control.hide("cuMemcpyBatchAsync_v2")
    if version < 12080:
        control.hide("cuMemcpyBatchAsync")
    batch = BatchCopy.find()
    assert (batch.version if batch else 0) == version
    with opened(KernelDevice(way=Way.BATCH if batch else None)) as device:
        block = block_of(device, [region_of(device, 6, 32)], [1, 3, 5])
        block.regions[0].pages.fill_(NEW)
        before = control.calls("cuMemcpyAsync")
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        assert block.host[0].eq(NEW).all()
        assert (control.calls("cuMemcpyAsync") > before) == (batch is None)
        assert (Way.BATCH in device.copies.ways) == (batch is not None)
    if batch is None:
        with pytest.raises(ProtocolError, match="no cuMemcpyBatchAsync: update it"):
            KernelDevice(way=Way.BATCH)


def test_probe_measures_every_way_and_leaves_nothing() -> None:
    with opened(KernelDevice(way=None)) as device:
        measured = {(rate.way, rate.direction, rate.run_bytes) for rate in device.rates}
        assert measured == {(way, to, size) for way in Way for to in Direction for size in cuda_probe.RUN_BYTES}
        assert all(rate.bytes_per_s > 0 for rate in device.rates)
        assert len(describe(device.rates).splitlines()) == len(measured)
        assert control.all_live() == ["1 pinned memory", "1 contexts", "1 modules"]


def test_way_is_the_one_that_was_the_fastest_for_runs_of_this_size() -> None:
    rates = [
        CopyRate(way, direction, size, speed)
        for direction in Direction
        for way, size, speed in (
            (Way.BATCH, 4096, 2e9),
            (Way.STAGED, 4096, 3e9),
            (Way.BATCH, 262144, 9e9),
            (Way.STAGED, 262144, 4e9),
        )
    ]
    preference = Preference(tuple(rates), Way.BATCH)
    for size, way in ((1, Way.STAGED), (8000, Way.STAGED), (100_000, Way.BATCH), (1 << 24, Way.BATCH)):
        assert preference.best(Direction.OUT, size).way is way


def test_device_without_memory_for_the_probe_takes_the_likely_best_way() -> None:
    control.fail("cuMemHostAlloc", 1, control.OUT_OF_MEMORY)
    with opened(KernelDevice(way=None)) as device:
        assert device.rates == ()
        assert device.preference.fixed is Way.BATCH


def engine_layout(dtype: KVDtype, page_shape: tuple[int, ...]) -> KVLayout:
    planes = tuple((Plane(name="kv", layer=layer, page_shape=page_shape, dtype=dtype),) for layer in (0, 1))  # type: ignore[arg-type]
    return KVLayout(page_size=2, chunk_tokens=4, groups=(LayerGroup(layers=(0, 1)),), planes=planes)  # type: ignore[arg-type]


class WithInterface:
    """An array of some library, of 2-byte elements that no other library knows."""

    def __init__(self, memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<V2", "data": (memory.data_ptr(), False), "strides": strides, "version": 3,
        }  # fmt: skip


class WithDLPack:
    """An array of some library that speaks DLPack only."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("gap", [0, 16])
def test_engine_tensors_of_any_dtype_are_pages_without_a_copy(dtype: KVDtype, gap: int) -> None:
    layout = engine_layout(dtype, (2, 4, 8))
    page_bytes = 64 * dtype.bits // 8
    with opened(KernelDevice()) as device:
        raw = [device.allocate(6 * (page_bytes + gap)).view(6, -1) for _ in range(2)]
        for layer, memory in enumerate(raw):
            memory.copy_(torch.arange(memory.numel(), dtype=torch.int64).view(6, -1).mul_(layer + 3).to(torch.uint8))
        tensors = [
            memory[:, :page_bytes].view(getattr(torch, dtype.torch_name)).unflatten(1, (2, 4, 8)) for memory in raw
        ]
        pages = device.adopt(layout, {(layer, "kv"): tensor for layer, tensor in enumerate(tensors)})
        for layer in range(2):
            region = pages.regions[layer][0]
            assert region.pages.data_ptr() == raw[layer].data_ptr()
            block, before = block_of(device, [region], [5, 0, 3]), raw[layer].clone()
            assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
            assert torch.equal(block.host[0], before[[5, 0, 3], :page_bytes])
            region.pages.zero_()
            assert device.create_stream("in").scatter([block], Verify.NONE).wait(LONG_S)
            assert torch.equal(raw[layer][[5, 0, 3]], before[[5, 0, 3]])
            assert torch.equal(raw[layer][:, page_bytes:], before[:, page_bytes:])
        del pages, region, block, tensors, raw, memory


@pytest.mark.parametrize("kind", ["interface", "interface with strides", "dlpack"])
def test_arrays_of_other_libraries_are_pages_without_a_copy(kind: str) -> None:
    layout = engine_layout(KVDtype.BFLOAT16, (2, 2, 8))
    with opened(KernelDevice()) as device:
        raw = [device.allocate(6 * 64) for _ in range(2)]
        arrays: dict[tuple[int, str], object] = {}
        for layer, memory in enumerate(raw):
            if kind == "dlpack":
                arrays[layer, "kv"] = WithDLPack(memory.view(torch.int16).view(6, 2, 16))
            else:
                strides = (64, 16, 2) if "strides" in kind else None
                arrays[layer, "kv"] = WithInterface(memory, (6, 4, 8), strides)
        pages = device.adopt(layout, arrays)
        pages.plane(1, "kv")[4] = 1.5
        assert raw[1].view(torch.bfloat16).view(6, -1)[4].eq(1.5).all()
        del arrays, memory
        raw.clear()
        control.collect()
        assert pages.plane(1, "kv")[4].eq(1.5).all(), "the pages keep the arrays alive"
        del pages


def test_arrays_that_do_not_match_are_refused_by_name() -> None:
    layout = engine_layout(KVDtype.FLOAT16, (2, 2, 8))
    with opened(KernelDevice()) as device, opened(KernelDevice(1)) as other:
        here = device.allocate(6 * 128).view(torch.float16)
        cases: list[tuple[object, str]] = [
            (here[:192].view(6, 32)[:, :16], "pages of 32 bytes, the layout's have 64"),
            (here.view(6, 32, 2)[:, :, 0], "scatters a page over memory"),
            (torch.zeros(6, 2, 2, 8, dtype=torch.float16), "not memory of a device"),
            (device.allocate_pinned(6 * 64).view(torch.float16).view(6, 32), "not in the memory of device 0"),
            (other.allocate(6 * 64).view(torch.float16).view(6, 32), "not in the memory of device 0"),
            (here[:160].as_strided((6, 32), (16, 1)), "its pages overlap"),
            (here[0], "has no pages"),
            ([1, 2], "a list is no array on a device"),
        ]
        for array, match in cases:
            with pytest.raises(ProtocolError, match=match):
                device.adopt(layout, {(0, "kv"): array})
        with pytest.raises(ProtocolError, match="no plane 'k' in layer 0"):
            device.adopt(layout, {(0, "k"): here})
        del here, cases, array


def test_memory_of_a_device_needs_a_torch_for_cuda_unless_a_view_is_given() -> None:
    device = CudaDevice(way=Way.BATCH)
    with pytest.raises(ProtocolError, match="this torch is not built for CUDA"):
        device.allocate(16)
    assert device.close(LONG_S) == []
    with opened(CudaDevice(way=Way.BATCH, view=view_on_host)) as device:
        assert device.allocate(16).numel() == 16
