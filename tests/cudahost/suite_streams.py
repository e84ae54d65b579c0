"""CUDA streams one by one: order across streams, gates, failures, and what happens without each wait."""

import threading
from collections.abc import Iterator

import pytest
import torch

from swapkv.config import Verify
from swapkv.errors import BudgetExhausted, ChecksumMismatch, PoolClosed, ProtocolError, TransferError
from swapkv.streams.base import Block, ComputeStream
from swapkv.streams.cuda_copies import Way
from swapkv.streams.cuda_driver import CudaError
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.cuda_streams import CudaStream
from swapkv.streams.host import HostDevice, Work
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, HeldDevice, KernelDevice, opened, threads_of
from tests.cudahost.pages import NEW, OLD, block_of, one_page, region_of

ways = pytest.mark.parametrize("way", list(Way))


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    control.collect()
    assert control.all_live() == []
    assert control.live(control.TIMED_EVENTS) == 0


def random_bytes(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill it, and return a copy."""
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return tensor.clone()


@ways
@pytest.mark.parametrize("page_bytes", [1, 96, 4097])
@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("pages", [[], [7], [3, 4, 5, 6], [9, 2, 11, 0, 5], [6, 5, 4], list(range(12))])
def test_pages_leave_and_return_byte_for_byte_and_nothing_else_is_written(
    way: Way, page_bytes: int, gap: int, pages: list[int]
) -> None:
    control.timing(page_bytes + gap, 30)
    with opened(KernelDevice(way=way)) as device:
        regions = [region_of(device, 12, page_bytes, gap, layer) for layer in range(2)]
        before = [random_bytes(region.pages, 3 + region.layer) for region in regions]
        block = block_of(device, regions, pages)
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        for region, host, old in zip(regions, block.host, before, strict=True):
            assert torch.equal(host, old[pages])
            assert torch.equal(region.pages, old)
            region.pages.fill_(0)
        assert device.create_stream("in").scatter([block], Verify.NONE).wait(LONG_S)
        for region, old in zip(regions, before, strict=True):
            kept = torch.zeros_like(old)
            kept[pages] = old[pages]
            assert torch.equal(region.pages, kept)


def test_runs_larger_than_the_staging_memory_pass_beside_it() -> None:
    with opened(KernelDevice(way=Way.STAGED)) as device:
        region = region_of(device, 4, 3 << 20)
        before = random_bytes(region.pages, 1)
        block = block_of(device, [region], [3, 0, 1, 2])
        assert device.create_stream("out").gather([block], Verify.NONE).wait(LONG_S)
        assert torch.equal(block.host[0], before[[3, 0, 1, 2]])
        region.pages.fill_(0)
        assert device.create_stream("in").scatter([block], Verify.NONE).wait(LONG_S)
        assert torch.equal(region.pages, before)


def test_scattered_pages_of_a_segment_are_one_submission() -> None:
    with opened(KernelDevice(way=Way.BATCH)) as device:
        block = block_of(device, [region_of(device, 12, 64)], [1, 3, 5, 7])
        assert device.create_stream("out").gather([block] * 5, Verify.NONE).wait(LONG_S)
        assert control.calls("cuMemcpyBatchAsync_v2") == 1
        assert control.calls("cuMemcpyAsync") == 0


def test_copy_that_the_driver_refuses_fails_its_own_event_and_no_other() -> None:
    with opened(KernelDevice()) as device:
        stream = device.create_stream("out")
        blocks = [one_page(device) for _ in range(3)]
        assert stream.gather([blocks[0]], Verify.NONE).wait(LONG_S)
        control.fail("cuMemcpyBatchAsync_v2", 1, control.OUT_OF_MEMORY)
        refused, following = (stream.gather([block], Verify.NONE) for block in blocks[1:])
        assert stream.record().wait(LONG_S)
        with pytest.raises(CudaError, match="cuMemcpyBatchAsync: CUDA_ERROR_OUT_OF_MEMORY: ask for less") as caught:
            refused.wait(LONG_S)
        assert caught.value.status == "CUDA_ERROR_OUT_OF_MEMORY"
        assert following.wait(LONG_S)
        assert [bool(block.host[0].any()) for block in blocks] == [True, False, True]


@ways
def test_copies_with_verify_carry_checksums_and_refuse_altered_bytes(way: Way) -> None:
    with opened(KernelDevice(way=way)) as device:
        out, into, block = device.create_stream("out"), device.create_stream("in"), one_page(device, NEW)
        copied = out.gather([block], Verify.CRC32)
        assert copied.wait(LONG_S)
        (_, checksum) = copied.checksums()
        stored = Block(
            regions=block.regions, pages=torch.tensor([0]), host=block.host, guarded=block.guarded, checksums=[checksum]
        )
        block.regions[0].pages.fill_(OLD)
        restored = into.scatter([stored], Verify.CRC32)
        assert restored.wait(LONG_S)
        assert restored.checksums() == ()
        assert block.regions[0].pages.tolist() == [[NEW] * 16, [OLD] * 16]
        block.regions[0].pages.fill_(OLD)
        block.host[0][0, 3] = 77
        with pytest.raises(ChecksumMismatch, match="layer 0"):
            into.scatter([stored], Verify.CRC32).wait(LONG_S)
        assert block.regions[0].pages.eq(OLD).all()


def test_failed_gate_fails_the_next_copy_and_only_that_one() -> None:
    with opened(KernelDevice()) as device:
        into, gate, cause = device.create_stream("in"), device.create_promise(), OSError("restore failed")
        block = one_page(device)
        block.host[0].fill_(NEW)
        into.scatter([block_of(device, block.regions, [0])], Verify.NONE)
        into.wait(gate)
        refused, following = into.scatter([block], Verify.NONE), into.record()
        gate.set(cause)
        with pytest.raises(TransferError, match="was not run: an event that it waits for failed"):
            refused.wait(LONG_S)
        assert following.wait(LONG_S)
        assert block.regions[0].pages[1].eq(OLD).all()
        assert into.scatter([block], Verify.NONE).wait(LONG_S)
        assert block.regions[0].pages[1].eq(NEW).all()


@pytest.mark.parametrize("own", ["own", "another stream's"])
def test_copy_that_waits_for_one_that_failed_is_not_run(own: str) -> None:
    with opened(KernelDevice()) as device:
        into, block = device.create_stream("in"), one_page(device)
        block.host[0].fill_(NEW)
        first = into if own == "own" else device.create_stream("out")
        control.fail("cuMemcpyBatchAsync_v2", 1, control.OUT_OF_MEMORY)
        failed = first.gather([block], Verify.NONE)
        into.wait(failed)
        refused, following = into.scatter([block], Verify.NONE), into.scatter([block], Verify.NONE)
        with pytest.raises(TransferError, match="was not run: an event that it waits for failed"):
            refused.wait(LONG_S)
        assert isinstance(refused.error.__cause__, CudaError)
        assert following.wait(LONG_S)


def test_kernel_behind_a_gate_that_fails_runs_and_its_output_is_dropped() -> None:
    with opened(KernelDevice()) as device:
        compute, gate, ran = device.create_stream("compute"), device.create_promise(), threading.Event()
        compute.wait(gate)
        launched = compute.launch(ran.set)
        assert not launched.wait(0.0)
        gate.set(OSError("restore failed"))
        with pytest.raises(TransferError, match="was not run"):
            launched.wait(LONG_S)
        assert ran.is_set()
        assert compute.launch(lambda: 7).wait(LONG_S)


def test_clone_copies_pages_of_every_region_behind_a_gate_that_fails() -> None:
    with opened(KernelDevice()) as device:
        stream, gate = device.create_stream("compute"), device.create_promise()
        regions = [region_of(device, 4, 2, layer=layer) for layer in range(2)]
        for region in regions:
            region.pages[3] = NEW
        stream.wait(gate)
        cloned = stream.clone(regions, torch.tensor([3]), torch.tensor([0]))
        gate.set(OSError("restore failed"))
        assert cloned.wait(LONG_S)
        for region in regions:
            assert region.pages[:, 0].tolist() == [NEW, 0, 0, NEW]
        with pytest.raises(ProtocolError, match=r"pages \[3\] are source and target"):
            stream.clone(regions, torch.tensor([3]), torch.tensor([3]))


def test_ill_formed_work_is_refused_before_it_is_queued() -> None:
    with opened(KernelDevice(queue_depth=1)) as device:
        stream, block = device.create_stream("out"), one_page(device)
        stray = Block(regions=block.regions, pages=torch.tensor([2]), host=block.host, guarded=block.guarded)
        for copy in (stream.gather, stream.scatter):
            with pytest.raises(ProtocolError, match="page 2"):
                copy([block, stray], Verify.NONE)
        with pytest.raises(ProtocolError, match="1 source pages for 2 target"):
            stream.clone(block.regions, torch.tensor([0]), torch.tensor([0, 1]))
        with pytest.raises(ProtocolError, match="cannot wait for a HostPromise"):
            stream.wait(HostDevice().create_promise())
        assert stream.gather([block], Verify.NONE).wait(LONG_S)


def test_full_queue_is_refused_and_takes_work_again_once_some_is_over() -> None:
    with opened(HeldDevice(queue_depth=3)) as device:
        stream, block, gate = device.create_stream("in"), one_page(device), device.create_promise()
        device.open.clear()
        stream.scatter([block], Verify.NONE)
        stream.wait(gate)
        last = stream.scatter([block], Verify.NONE)
        for give in (lambda: stream.scatter([block], Verify.NONE), lambda: stream.wait(gate)):
            with pytest.raises(BudgetExhausted, match=r"'in' holds 3 .*queue_depth=3: wait for some"):
                give()
        gate.set()
        device.open.set()
        assert last.wait(LONG_S)
        assert stream.scatter([block], Verify.NONE).wait(LONG_S)


def test_events_are_used_again_and_have_no_timing() -> None:
    with opened(KernelDevice()) as device:
        stream, block = device.create_stream("out"), one_page(device)
        for _ in range(50):
            assert stream.gather([block], Verify.NONE).wait(LONG_S)
        assert control.calls("cuEventCreate") == device.event_pool.made <= 2


def test_nobody_who_gives_work_waits_for_the_driver() -> None:
    """The driver holds a submission up; the calls of the stream return all the same."""
    with opened(HeldDevice()) as device:
        stream, other, block = device.create_stream("in"), device.create_stream("out"), one_page(device)
        device.open.clear()
        first = stream.scatter([block], Verify.NONE)
        other.wait(first)
        events = [first, other.gather([block], Verify.NONE), stream.record(), other.record()]
        assert not any(event.query() for event in events)
        assert control.calls("cuMemcpyBatchAsync_v2") == 0
        device.open.set()
        assert all(event.wait(LONG_S) for event in events)


def test_closed_device_takes_no_work_and_leaves_no_thread() -> None:
    device = KernelDevice(name="clean")
    stream, block = device.create_stream("out"), one_page(device)
    copied, promise = stream.gather([block], Verify.NONE), device.create_promise()
    assert device.close(LONG_S) == []
    assert copied.wait(0.0)
    assert threads_of(device) == []
    for give in (
        lambda: stream.wait(promise),
        device.create_promise,
        lambda: stream.record(),
        lambda: stream.gather([block], Verify.NONE),
        lambda: stream.clone(block.regions, block.pages, torch.tensor([0])),
        lambda: device.create_stream("late"),
        lambda: device.wrap_stream(stream.handle),
        lambda: device.allocate_pinned(16),
    ):
        with pytest.raises(PoolClosed):
            give()
    assert device.close(LONG_S) == []


def test_kernel_stream_of_the_tests_is_a_compute_stream_and_the_production_one_is_not() -> None:
    with opened(KernelDevice()) as device:
        stream = device.create_stream("compute")
        assert isinstance(stream, ComputeStream)
        assert not hasattr(CudaStream, "launch")


class SpyDevice(KernelDevice):
    """Notes the operations that it submits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Work, str, int]] = []

    def execute(self, operation: CudaOperation) -> None:
        self.seen.append((operation.work, operation.stream, len(operation.blocks)))
        super().execute(operation)


def test_work_hook_of_a_device_sees_every_operation_but_waits_and_points() -> None:
    with opened(SpyDevice()) as device:
        stream, block = device.create_stream("s"), one_page(device)
        device.create_stream("t").wait(stream.gather([block], Verify.NONE))
        stream.record()
        stream.scatter([block, block], Verify.NONE)
        assert stream.clone(block.regions, block.pages, torch.tensor([0])).wait(LONG_S)
        assert device.seen == [(Work.GATHER, "s", 1), (Work.SCATTER, "s", 2), (Work.CLONE, "s", 0)]
