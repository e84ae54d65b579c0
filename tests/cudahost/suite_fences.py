"""Order across CUDA streams: every kind of wait, and what happens without it."""

import threading
from collections.abc import Iterator
from zlib import crc32

import pytest
import torch

from swapkv.config import Verify
from swapkv.streams.base import Block
from swapkv.streams.cuda_driver import cu
from swapkv.streams.cuda_events import CudaTimeline, Gates
from swapkv.streams.cuda_reaper import CudaOperation, CudaReaper
from swapkv.streams.cuda_streams import CudaStream
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, HeldDevice, KernelDevice, KernelStream, opened
from tests.cudahost.pages import NEW, OLD, one_page


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does, and nothing left behind."""
    with control.fresh():
        yield
    control.collect()
    assert control.all_live() == []


def gate_and_write(device: KernelDevice, block: Block) -> tuple[CudaStream, object, object]:
    """A kernel that writes NEW to the page, held back until the promise is set."""
    compute, gate = device.create_stream("compute"), device.create_promise()
    assert isinstance(compute, KernelStream)
    compute.wait(gate)
    written = compute.launch(lambda: block.regions[0].pages.fill_(NEW))
    return compute, gate, written


def copy_of_gated_write(*, waits: bool) -> int:
    """What a gather finds in a page whose writer is held back until the gather is over, if it can be."""
    with opened(KernelDevice()) as device:
        block = one_page(device, OLD)
        _, gate, written = gate_and_write(device, block)
        out = device.create_stream("out")
        if waits:
            out.wait(written)
        copied = out.gather([block], Verify.NONE)
        if not waits:
            assert copied.wait(LONG_S)
        gate.set()
        assert copied.wait(LONG_S)
        assert written.wait(LONG_S)
        return int(block.host[0][0, 0])


def restored_page_as_a_kernel_reads_it(*, waits: bool) -> int:
    """What a kernel reads of a page whose bytes are held back until the kernel is over, if it can be."""
    with opened(HeldDevice()) as device:
        block, seen = one_page(device, OLD), []
        block.host[0].fill_(NEW)
        into, compute = device.create_stream("in"), device.create_stream("compute")
        device.open.clear()
        restored = into.scatter([block], Verify.NONE)
        if waits:
            compute.wait(restored)
        read = compute.launch(lambda: seen.append(int(block.regions[0].pages[1, 0])))
        if not waits:
            assert read.wait(LONG_S)
        device.open.set()
        assert read.wait(LONG_S)
        assert restored.wait(LONG_S)
        return seen[0]


def page_restored_while_it_is_read(*, waits: bool) -> int:
    """What a kernel that is held back reads of a page that is then restored over, as soon as it can be."""
    with opened(KernelDevice()) as device:
        block, seen = one_page(device, OLD), []
        block.host[0].fill_(NEW)
        compute, into, gate = device.create_stream("compute"), device.create_stream("in"), device.create_promise()
        compute.wait(gate)
        read = compute.launch(lambda: seen.append(int(block.regions[0].pages[1, 0])))
        if waits:
            into.wait(read)
        restored = into.scatter([block], Verify.NONE)
        if not waits:
            assert restored.wait(LONG_S)
        gate.set()
        assert read.wait(LONG_S)
        assert restored.wait(LONG_S)
        return seen[0]


def test_gather_that_waits_for_its_writer_copies_what_was_written() -> None:
    assert copy_of_gated_write(waits=True) == NEW


def test_gather_without_the_wait_for_its_writer_copies_stale_bytes() -> None:
    assert copy_of_gated_write(waits=False) == OLD


def test_kernel_that_waits_for_a_copy_that_is_not_submitted_yet_reads_its_bytes() -> None:
    assert restored_page_as_a_kernel_reads_it(waits=True) == NEW


def test_kernel_without_the_wait_for_the_copy_reads_the_page_as_it_was() -> None:
    assert restored_page_as_a_kernel_reads_it(waits=False) == OLD


def test_scatter_that_waits_for_the_reader_leaves_it_the_old_bytes() -> None:
    assert page_restored_while_it_is_read(waits=True) == OLD


def test_scatter_without_the_wait_for_the_reader_overwrites_what_is_read() -> None:
    assert page_restored_while_it_is_read(waits=False) == NEW


def test_gather_whose_device_wait_is_taken_out_copies_stale_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of `cuStreamWaitEvent`: the stream is told to wait, and the driver is not."""
    monkeypatch.setattr(CudaStream, "_wait_on_device", lambda self, event: None)
    with opened(KernelDevice()) as device:
        block = one_page(device, OLD)
        _, gate, written = gate_and_write(device, block)
        out = device.create_stream("out")
        out.wait(written)
        assert out.gather([block], Verify.NONE).wait(LONG_S)
        gate.set()
        assert written.wait(LONG_S)
        assert int(block.host[0][0, 0]) == OLD


def test_kernel_whose_gate_is_taken_out_reads_the_page_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of `cuStreamWaitValue32`."""
    monkeypatch.setattr(Gates, "shut", lambda self, stream: lambda: None)
    with opened(HeldDevice()) as device:
        block, seen = one_page(device, OLD), []
        block.host[0].fill_(NEW)
        into, compute = device.create_stream("in"), device.create_stream("compute")
        device.open.clear()
        restored = into.scatter([block], Verify.NONE)
        compute.wait(restored)
        read = threading.Event()
        compute.launch(lambda: (seen.append(int(block.regions[0].pages[1, 0])), read.set()))
        assert read.wait(LONG_S)
        device.open.set()
        assert restored.wait(LONG_S)
        assert seen == [OLD]


def test_wait_for_a_copy_before_it_is_recorded_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of waiting for submission: told too early, the driver waits for nobody."""
    order = CudaTimeline.order

    def too_early(self: CudaTimeline, number: int, wait_on_device: object) -> bool:
        if self.submitted < number and not self.settled(number):
            event = device.event_pool.take()
            wait_on_device(event)  # type: ignore[operator]
            device.event_pool.give_back(event)
            return True
        return order(self, number, wait_on_device)  # type: ignore[arg-type]

    with opened(HeldDevice()) as device:
        monkeypatch.setattr(CudaTimeline, "order", too_early)
        block, into, compute = one_page(device), device.create_stream("in"), device.create_stream("compute")
        device.open.clear()
        restored = into.scatter([block], Verify.NONE)
        compute.wait(restored)
        device.open.set()
        assert restored.wait(LONG_S)
        assert "never recorded" in control.violations()
        control.forget()


def test_verified_scatter_waits_for_the_gather_that_brings_its_bytes() -> None:
    """Its bytes are hashed by the host: what the device would wait for has to be awaited by the host."""
    with opened(KernelDevice()) as device:
        block = one_page(device, OLD)
        _, gate, written = gate_and_write(device, block)
        out, into = device.create_stream("out"), device.create_stream("in")
        expected = torch.full((16,), NEW, dtype=torch.uint8)
        stored = Block(
            regions=block.regions,
            pages=torch.tensor([0]),
            host=block.host,
            guarded=block.guarded,
            checksums=[crc32(expected.numpy().data)],
        )
        out.wait(written)
        copied = out.gather([block], Verify.NONE)
        into.scatter([], Verify.NONE)
        into.wait(copied)
        restored = into.scatter([stored], Verify.CRC32)
        gate.set()
        assert restored.wait(LONG_S)


def test_streams_that_waited_for_each_other_are_told_of_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of work each, the second of each after the first of the other, and all over before a reaper looks."""
    wait_for_first, look = CudaReaper._wait_for_first, threading.Event()

    def late(self: CudaReaper) -> list[CudaOperation]:
        assert look.wait(LONG_S)
        return wait_for_first(self)

    monkeypatch.setattr(CudaReaper, "_wait_for_first", late)
    with opened(KernelDevice()) as device:
        streams = [device.create_stream(name) for name in ("compute", "compute-2")]
        firsts = [stream.launch(lambda: None) for stream in streams]
        for stream, first in zip(streams, reversed(firsts), strict=True):
            stream.wait(first)
        seconds = [stream.launch(lambda: None) for stream in streams]
        with device.context:
            for stream in streams:
                device.context.call(cu.cuStreamSynchronize, stream.handle)
        look.set()
        assert all(event.wait(LONG_S / 6) for event in (*firsts, *seconds))
