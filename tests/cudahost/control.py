"""What tests steer and ask of the driver that they run on."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TEXT_BYTES = 16384
INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED, ILLEGAL_ADDRESS = 1, 2, 801, 700
NVRTC_INVALID_OPTION, INVALID_IMAGE, LAUNCH_OUT_OF_RESOURCES = 5, 200, 701
KINDS = ("device memory", "pinned memory", "registered memory", "streams", "events", "contexts", "modules")
TIMED_EVENTS = len(KINDS)

SEEDS = "CUDAHOST_SEEDS"
"""Names the timing seeds of a run: the first one, and the one after the last."""

gc.freeze()  # what is imported by now stays: the collections of the tests need not look at it

driver = ctypes.CDLL("libcuda.so.1")
driver.cudahost_calls.restype = ctypes.c_long
driver.cudahost_stored_bytes.restype = ctypes.c_long
driver.cudahost_configure.argtypes = [ctypes.c_int, ctypes.c_size_t]
driver.cudahost_timing.argtypes = [ctypes.c_uint64, ctypes.c_uint]
driver.cudahost_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
driver.cudahost_bias.argtypes = [ctypes.c_size_t]
driver.cudahost_violations.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def seeds() -> range:
    """The timing seeds of this run."""
    begin, end = os.environ.get(SEEDS, "0-2").split("-")
    return range(int(begin), int(end))


def configure(devices: int = 2, num_bytes: int = 1 << 30) -> None:
    """How many devices there are, of how many bytes each."""
    driver.cudahost_configure(devices, num_bytes)


def timing(seed: int, longest_us: int = 0) -> None:
    """Streams that are made from now on dawdle, up to eight times `longest_us` now and then. 0: they do not."""
    driver.cudahost_timing(seed, longest_us)


def fail(function: str, nth: int, status: int) -> None:
    """The `nth` call of a driver function from now fails; "copy": one that was taken, while it runs, for good."""
    assert driver.cudahost_fail(function.encode(), nth, status)


def revive() -> None:
    """Contexts that were lost are as new, as in another process."""
    driver.cudahost_revive()


def forget() -> None:
    """No rules, counts or violations from before."""
    driver.cudahost_reset()


def forget_failures() -> None:
    """Nothing fails any more."""
    driver.cudahost_forget()


def hide(function: str) -> None:
    """An older driver, which does not have this function."""
    driver.cudahost_hide(function.encode())


def show_pinned_memory_elsewhere(*, by_bytes: int) -> None:
    """Devices see pinned memory at other addresses than the host does, from now on. 0: at the same ones."""
    driver.cudahost_bias(by_bytes)


def take_unified_addresses(*, away: bool) -> None:
    """Devices do not share addresses with the host, from now on."""
    driver.cudahost_lack_unified(int(away))


def calls(function: str) -> int:
    return int(driver.cudahost_calls(function.encode()))


def stored_bytes() -> int:
    """What all kernels have written so far."""
    return int(driver.cudahost_stored_bytes())


def violations() -> str:
    """What a correct program never does, line by line."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    driver.cudahost_violations(text, _TEXT_BYTES)
    return text.value.decode()


def live(what: int) -> int:
    """How many of a kind exist: an index of `KINDS`, or `TIMED_EVENTS`: how many were ever made with timing."""
    return int(driver.cudahost_live(what))


def all_live() -> list[str]:
    """What there is of each kind, as text."""
    return [f"{live(at)} {kind}" for at, kind in enumerate(KINDS) if live(at)]


def held_open() -> list[str]:
    """What there is of the kinds that the close of a device has to give back. Memory goes with the last reference."""
    return [what for what in all_live() if not what.endswith(("device memory", "contexts"))]


def collect() -> None:
    """Free what nobody refers to: the finalizers of one pass let go of what the next one finds."""
    for _ in range(3):
        if all_live():
            gc.collect()


@contextmanager
def fresh() -> Iterator[None]:
    """No rules, counts or violations from before; unless the test failed, none of the latter afterwards."""
    forget()
    timing(0)
    yield
    assert not violations(), violations()
    timing(0)


def view_on_host(owner: object, address: int, num_bytes: int) -> torch.Tensor:
    """The driver's device memory as a tensor: it is the host's."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    array = (ctypes.c_uint8 * num_bytes).from_address(address)
    array.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
