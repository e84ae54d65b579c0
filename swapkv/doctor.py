"""What this machine offers swapkv, and what is missing: each with the reason and the remedy."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Iterator, Sequence
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import attrs
import torch

from swapkv.config import Verify
from swapkv.errors import SwapError
from swapkv.ids import LayerId
from swapkv.streams.base import Block, Device, Region
from swapkv.streams.host import HostDevice
from swapkv.tiers.direct_io import IoPath
from swapkv.tiers.gds import GdsSlab
from swapkv.tiers.gds_types import NVIDIA_FS, GdsOptions, GdsPath
from swapkv.tiers.pinned import MemoryLimits
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import Fingerprint
from swapkv.tiers.slab_types import SlabOptions

if TYPE_CHECKING:
    from swapkv.streams.cuda import CudaDevice

COPY_BYTES = 64 << 20
COPY_TRIES = 3
REACH_TIMEOUT_S = 3.0
GDS_PROBE_BYTES = 16 << 20
GDS_DEADLINE_NS = 20_000_000_000


class Subject(Enum):
    """What can be asked for. The value is its name."""

    HOST = "host"
    MEMORY = "memory"
    CUDA = "cuda"
    GDS = "gds"
    MOONCAKE = "mooncake"


@attrs.frozen
class Finding:
    """One thing that was looked at. `missing`: it cannot be used, and `words` say why and what helps."""

    subject: Subject
    words: str
    missing: bool = False


def examine(*, mooncake: str | None = None, gds: Path | None = None) -> list[Finding]:
    """Look at everything. Takes a second or two; with a GPU, the probe of its copies is part of it.

    `mooncake`: address of a Mooncake master, `host:port`; None: only whether its client is installed.
    `gds`: a folder whose disk is written from the memory of device 0 and read back, 16 MiB in a file that is deleted
    afterwards; None: only whether GPUDirect Storage is installed.
    """
    looks = (_host, _memory, _cuda, lambda: _gds(gds), lambda: _mooncake(mooncake))
    return [finding for look in looks for finding in look()]


def lacking(findings: Sequence[Finding], required: Sequence[Subject]) -> list[Finding]:
    """What is missing of what was asked for."""
    return [finding for finding in findings if finding.missing and finding.subject in required]


def _host() -> Iterator[Finding]:
    yield Finding(Subject.HOST, f"swapkv {_version('swapkv')}, torch {torch.__version__}")
    device = HostDevice(name="doctor")
    try:
        rates = " and ".join(f"{rate / 1e9:.1f} GB/s {way}" for way, rate in _host_rates(device))
    finally:
        device.close(REACH_TIMEOUT_S)
    yield Finding(Subject.HOST, f"the host device copies {rates} (pages of 64 KiB, scattered; one thread each way)")


def _host_rates(device: Device) -> Iterator[tuple[str, float]]:
    """Bytes a second of the host device's copies, the best of a few tries."""
    page_bytes = 64 << 10
    count = COPY_BYTES // page_bytes
    region = Region(layer=LayerId(0), name="doctor", pages=device.allocate(2 * COPY_BYTES).view(2 * count, page_bytes))
    host = device.allocate_pinned(COPY_BYTES).view(count, page_bytes)
    block = Block(regions=[region], pages=torch.arange(count) * 2, host=[host])
    stream = device.create_stream("doctor")
    for way, copy in (("out", stream.gather), ("in", stream.scatter)):
        taken_s = []
        for _ in range(COPY_TRIES):
            begin_s = time.perf_counter()
            copy([block], Verify.NONE).wait()
            taken_s.append(time.perf_counter() - begin_s)
        yield way, COPY_BYTES / min(taken_s)


def _memory() -> Iterator[Finding]:
    limits = MemoryLimits.read()
    locked = "no limit" if limits.locked_bytes is None else f"{limits.locked_bytes:,} bytes"
    left = "no limit" if limits.container_bytes is None else f"{limits.container_bytes:,} bytes left"
    yield Finding(Subject.MEMORY, f"RLIMIT_MEMLOCK: {locked}; container's memory: {left}")
    if limits.locked_bytes is not None:
        words = "if the GPU's driver refuses to pin more than that: ulimit -l unlimited, docker run --ulimit memlock=-1"
        yield Finding(Subject.MEMORY, words)


def _cuda() -> Iterator[Finding]:
    if importlib.util.find_spec("cuda") is None:
        yield Finding(Subject.CUDA, "cuda-python is not installed: pip install 'swapkv[cuda]'", missing=True)
        return
    from swapkv.streams.cuda import CudaDevice
    from swapkv.streams.cuda_driver import start_driver

    try:
        count = start_driver()
        yield Finding(Subject.CUDA, f"{count} devices, cuda-python {_version('cuda-python')}", missing=not count)
        for ordinal in range(count):
            device = CudaDevice(ordinal)
            try:
                yield Finding(Subject.CUDA, _describe(device))
            finally:
                device.close(REACH_TIMEOUT_S)
    except SwapError as error:
        yield Finding(Subject.CUDA, str(error), missing=True)


def _describe(device: CudaDevice) -> str:
    """A device, and by run size which way of copying its probe prefers."""
    node = "" if device.numa_node is None else f", NUMA node {device.numa_node}"
    ways = device.chosen_ways()
    if not ways:
        return f"{device.name}: copies are not measured (no memory for the probe), {device.preference.fixed.value} is taken"
    best = (f"{w.direction} {w.run_bytes >> 10} KiB {w.way} {w.bytes_per_s / 1e9:.1f} GB/s" for w in ways)
    return f"{device.name}{node}: fastest for scattered runs: {'; '.join(best)}"


def _gds(folder: Path | None) -> Iterator[Finding]:
    """GPUDirect Storage needs kvikio, and NVIDIA's kernel module for the direct way."""
    if importlib.util.find_spec("kvikio") is None:
        yield Finding(Subject.GDS, "kvikio is not installed: pip install 'swapkv[gds]'", missing=True)
    elif folder is not None:
        yield _probe_gds(folder)
    else:
        module = NVIDIA_FS.exists()
        why = (
            "nvidia-fs is loaded: --gds FOLDER tries its disk"
            if module
            else f"{NVIDIA_FS} is missing: load the kernel module nvidia-fs, else kvikio bounces"
        )
        yield Finding(Subject.GDS, f"kvikio is installed; {why}", missing=not module)


def _probe_gds(folder: Path) -> Finding:
    """What a real write and read of a slab in `folder` found."""
    from swapkv.streams.cuda import CudaDevice

    try:
        with TemporaryDirectory(prefix="swapkv-doctor-", dir=folder, ignore_cleanup_errors=True) as inner:
            device = CudaDevice(0)
            try:
                return _report_gds(device, Path(inner) / "slab")
            finally:
                device.close(REACH_TIMEOUT_S)
    except (SwapError, ImportError, OSError) as error:
        return Finding(Subject.GDS, f"device 0 and {folder}: {error}", missing=True)


def _report_gds(device: CudaDevice, path: Path) -> Finding:
    options = SlabOptions(slab_bytes=2 * GDS_PROBE_BYTES, depth=1, deadline_ns=GDS_DEADLINE_NS)
    slab = Slab(path, fingerprint=Fingerprint([("made by", "swapkv doctor")]), options=options)
    limits = GdsOptions(depth=1, probe_bytes=GDS_PROBE_BYTES, deadline_ns=GDS_DEADLINE_NS)
    try:
        tier = GdsSlab(slab, device, options=limits)
    except BaseException:
        slab.close()
        raise
    tier.close()
    headers = "" if slab.file.path_taken is IoPath.DIRECT else f"; headers are buffered: {slab.file.note}"
    words = f"device 0 and {path.parent.parent}: {tier.report.describe()}{headers}"
    return Finding(Subject.GDS, words, missing=tier.report.path is not GdsPath.DIRECT)


def _mooncake(address: str | None) -> Iterator[Finding]:
    installed = importlib.util.find_spec("mooncake") is not None
    words = "its client is installed" if installed else "its client is not installed: pip install 'swapkv[mooncake]'"
    yield Finding(Subject.MOONCAKE, words, missing=not installed)
    if address is not None:
        yield _reach(address)


def _reach(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return Finding(Subject.MOONCAKE, f"{address!r} is not host:port, such as 127.0.0.1:50051", missing=True)
    try:
        with socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S):
            return Finding(Subject.MOONCAKE, f"something listens at {address}")
    except (OSError, OverflowError) as error:
        words = f"nothing answers at {address} ({error}): start mooncake_master there, or name another --mooncake"
        return Finding(Subject.MOONCAKE, words, missing=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of a source tree"
