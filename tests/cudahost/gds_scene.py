"""The GDS tier on the driver and the cuFile of the tests: opening it on each way, and traffic."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from tests.cudahost import gds_driver  # before kvikio is loaded

# isort: split
from swapkv.tiers.gds import GdsSlab
from swapkv.tiers.gds_kvikio import KvikioFile
from swapkv.tiers.gds_types import DeviceRead, DeviceWrite, GdsOptions, GdsOrder, GdsPath, Transfer
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import BLOCK_BYTES, payload_checksum
from tests.cudahost import control
from tests.cudahost.kernels import LONG_S, KernelDevice
from tests.kit.slab import FINGERPRINT, key_of, options_of, stamped

BLOCKS = 2048
SOON_NS = 1_000_000_000
NUM_BYTES = 3 * BLOCK_BYTES + 100
Way = tuple[GdsPath, GdsOrder]
WAYS: list[Way] = [
    (GdsPath.DIRECT, GdsOrder.STREAM),
    (GdsPath.DIRECT, GdsOrder.HOST),
    (GdsPath.BOUNCED, GdsOrder.HOST),
]
DIRECT = WAYS[:2]


def name_of(way: Way) -> str:
    return f"{way[0].value}-{way[1].value}"


@contextmanager
def clean() -> Iterator[None]:
    """Nothing of a test before, and nothing that a correct program never does."""
    with control.fresh():
        gds_driver.reset()
        try:
            yield
        finally:
            gds_driver.reset()


@contextmanager
def kernel_device(ordinal: int = 0) -> Iterator[KernelDevice]:
    """All its work is over in the end, and nobody has memory of it any more."""
    before = control.live(0)
    device = KernelDevice(ordinal)
    yield device
    assert device.close(LONG_S) == []
    control.collect()
    assert control.live(0) == before


def small(**options: Any) -> GdsOptions:
    return GdsOptions(**{"depth": 2, "stage_bytes": 1 << 16, "probe_bytes": 8192, **options})


@contextmanager
def opened(
    path: Path, device: KernelDevice, way: Way, options: GdsOptions | None = None, **slab: Any
) -> Iterator[GdsSlab]:
    """The tier on one way; closed with all work over, unless the test failed."""
    files = [lambda: KvikioFile(path, device, *way)]
    inner = Slab(path, fingerprint=FINGERPRINT, options=options_of(BLOCKS, **slab))
    tier = GdsSlab(inner, device, options=options or small(), files=files)
    try:
        yield tier
    except BaseException:
        gds_driver.reset()
        raise
    tier.close()


def memory_of(device: KernelDevice, payload: bytes, offset: int = 0) -> torch.Tensor:
    """Device memory with these bytes, `offset` bytes within an allocation."""
    memory: torch.Tensor = device.allocate(offset + len(payload))[offset:]
    memory.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    return memory


def begin_write(
    tier: GdsSlab, device: KernelDevice, number: int, generation: int, num_bytes: int, **more: Any
) -> Transfer:
    memory = memory_of(device, stamped(number, generation, num_bytes))
    return tier.begin_write(DeviceWrite(key=key_of(number), generation=generation, memory=memory, **more))


def read_back(tier: GdsSlab, device: KernelDevice, number: int, num_bytes: int, offset: int = 0) -> bytes:
    memory = device.allocate(offset + num_bytes)[offset:]
    tier.begin_read(DeviceRead(key=key_of(number), into=memory)).result(20)
    return memory.numpy().tobytes()


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once it holds, which it does as soon as another thread gets on."""
    end_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < end_s, "it never held"
        time.sleep(1e-3)


def checksum_of(number: int, generation: int) -> bytes:
    """Of the `NUM_BYTES` bytes of a chunk."""
    return payload_checksum(memoryview(stamped(number, generation, NUM_BYTES)))


@contextmanager
def soon(tier: GdsSlab) -> Iterator[None]:
    """Deadlines of what is begun or closed within are near; of all else they are far, however slow the machine is."""
    slab, options, threads = tier.slab, tier.options, tier._threads
    slab_options, far_ns = slab.options, threads._deadline_ns
    threads._deadline_ns = SOON_NS
    tier.options, slab.options = (
        attrs.evolve(options, deadline_ns=SOON_NS),
        attrs.evolve(slab.options, deadline_ns=SOON_NS),
    )
    yield
    tier.options, slab.options, threads._deadline_ns = options, slab_options, far_ns
