"""Kernels that fail for good, and what the driver of the tests finds them touch: canaries of what suites rely on."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from swapkv.config import Verify
from swapkv.streams.base import Event
from swapkv.streams.cuda_copies import Way
from swapkv.streams.cuda_driver import CudaLost
from swapkv.streams.cuda_kernel import Tables
from tests.cudahost import control
from tests.cudahost.held import HeldStream, submitted
from tests.cudahost.kernels import LONG_S, KernelDevice
from tests.cudahost.pages import one_page


@pytest.fixture(autouse=True)
def clean_driver() -> Iterator[None]:
    """Nothing that a correct program never does; contexts are then made anew."""
    with control.fresh():
        yield
        control.collect()
    control.revive()


def as_uint64(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([number], dtype=np.uint64)


def lost_with(violation: str, device: KernelDevice, event: Event) -> None:
    with pytest.raises(CudaLost, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        event.wait(LONG_S)
    assert violation in control.violations()
    control.forget()
    assert device.close(LONG_S) == []


def test_table_that_is_freed_too_early_is_found_by_the_driver() -> None:
    device = KernelDevice(way=Way.KERNEL)
    held = HeldStream(device)
    _, (event,) = held.gather(device, 1)
    while submitted(held.stream) < 1:
        time.sleep(1e-3)
    with device.context:
        held.stream._scratch.close()
    held.go.set()
    lost_with("a kernel touches freed memory", device, event)


def test_module_that_is_unloaded_too_early_is_found_by_the_driver() -> None:
    device = KernelDevice(way=Way.KERNEL)
    held = HeldStream(device)
    _, (event,) = held.gather(device, 1)
    while submitted(held.stream) < 1:
        time.sleep(1e-3)
    device.copies.close()
    held.go.set()
    lost_with("a kernel runs whose module is unloaded", device, event)


@pytest.mark.parametrize("what", ["a kernel touches", "freed memory", "not pinned", "another device"])
def test_driver_of_the_tests_finds_what_a_kernel_must_not_touch(what: str) -> None:
    """The first one is more bytes than there are."""
    device, other = KernelDevice(way=Way.KERNEL), KernelDevice(1)
    block, plain, theirs = one_page(device), torch.zeros(16, dtype=torch.uint8), other.allocate(16)
    gone = device.allocate(16)
    near = {"freed memory": gone, "not pinned": plain, "another device": theirs}.get(what, block.regions[0].pages)
    address, size = near.data_ptr(), 4096 if what == "a kernel touches" else 16
    del gone, near
    control.collect()
    stream, kernel = device.create_stream("out"), device.copies._kernel
    assert kernel is not None
    with device.context:
        kernel(
            as_uint64(block.host[0].data_ptr()),
            as_uint64(address),
            as_uint64(size),
            stream.handle,
            Tables(device.context),
        )
    lost_with(what, device, stream.record())
    assert other.close(LONG_S) == []


def test_kernel_that_fails_while_it_runs_loses_the_context_by_name() -> None:
    device = KernelDevice(way=Way.KERNEL)
    stream, block = device.create_stream("out"), one_page(device)
    control.fail("kernel", 2, control.ILLEGAL_ADDRESS)
    assert stream.gather([block], Verify.NONE).wait(LONG_S)
    lost = stream.gather([block], Verify.NONE)
    with pytest.raises(CudaLost, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*lost for good"):
        lost.wait(LONG_S)
    assert device.close(LONG_S) == []


def test_probe_whose_kernel_loses_the_context_says_so() -> None:
    control.fail("kernel", 3, control.ILLEGAL_ADDRESS)
    with pytest.raises(CudaLost):
        KernelDevice(way=None)
