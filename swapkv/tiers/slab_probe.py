"""What a slab's file does, measured: a real write and read of extents that are given back afterwards."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

import attrs
import numpy as np

from swapkv.errors import ChecksumMismatch, DrainTimeout, ProtocolError
from swapkv.ids import SeqId
from swapkv.tiers.direct_io import IoPath, Scratch, aligned_buffer
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_header import ChunkKey, ExtentHeader, round_up


@attrs.frozen(kw_only=True)
class SlabProbe:
    """`io_path` was taken; `io_note`: why not O_DIRECT (empty if it was). Rates in bytes/s, over `num_bytes` in requests
    of `request_bytes`, `depth` at a time. Reads on `IoPath.BUFFERED` come from memory: that rate is not the device's.
    """

    io_path: IoPath
    io_note: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    num_bytes: int
    request_bytes: int
    depth: int


def probe(slab: Slab, *, request_bytes: int = 4 << 20, deadline_ns: int = 30_000_000_000) -> SlabProbe:
    """Write and read `depth` requests of `request_bytes`, compared byte for byte. Blocks, `deadline_ns` at most each way.

    Nothing is committed. Raises `DiskTierFull` without that much free room, `DiskFault`, `ChecksumMismatch` when other
    bytes come back, and `DrainTimeout`; then the extents are not used again until the slab is opened anew.
    """
    if request_bytes < 1:
        raise ProtocolError(f"request_bytes={request_bytes} must be at least 1")
    depth = slab.options.depth
    reserved: list[ExtentHeader] = []
    futures: list[Future[None]] = []
    try:
        for n in range(depth):
            key = ChunkKey(tenant="swapkv", sequence=SeqId("probe"), chunk=n)
            reserved.append(slab.reserve(key, 0, request_bytes))
        stamps = [_stamp(n, request_bytes) for n in range(depth)]
        backs = [aligned_buffer(round_up(request_bytes))[:request_bytes] for _ in range(depth)]

        for back in backs:
            back[:] = bytes(request_bytes)
        write_s = _seconds(_submit(slab, slab.file.write, reserved, stamps, futures), deadline_ns)
        read_s = _seconds(_submit(slab, partial(_read, slab), reserved, backs, futures), deadline_ns)
        if any(stamp != back for stamp, back in zip(stamps, backs, strict=True)):
            raise ChecksumMismatch(f"{slab.path}: the probe read other bytes than it wrote: do not use this device")
    finally:
        wait(futures, deadline_ns / 1e9)
        if all(future.done() for future in futures):
            for header in reserved:
                slab.abandon(header)
    total = depth * request_bytes
    return SlabProbe(
        io_path=slab.file.path_taken,
        io_note=slab.file.note,
        write_bytes_per_s=total / write_s,
        read_bytes_per_s=total / read_s,
        num_bytes=total,
        request_bytes=request_bytes,
        depth=depth,
    )


def _submit(
    slab: Slab,
    call: Callable[[memoryview, int, Scratch], None],
    reserved: Sequence[ExtentHeader],
    buffers: Sequence[memoryview],
    futures: "list[Future[None]]",
) -> "Sequence[Future[None]]":
    """One `call` for each extent, on the slab's threads; the new futures, which are put to `futures` one by one."""
    for header, buffer in zip(reserved, buffers, strict=True):
        run = partial(_call, call, buffer, header.payload_offset)
        futures.append(slab.threads.submit(run, lambda _: None))
    return futures[-len(reserved) :]


def _call(call: Callable[[memoryview, int, Scratch], None], buffer: memoryview, offset: int, scratch: Scratch) -> None:
    call(buffer, offset, scratch)


def _read(slab: Slab, buffer: memoryview, offset: int, scratch: Scratch) -> None:
    slab.file.read([buffer], offset, scratch)


def _stamp(number: int, num_bytes: int) -> memoryview:
    buffer = aligned_buffer(round_up(num_bytes))[:num_bytes]
    np.frombuffer(buffer, np.uint8)[:] = (np.arange(num_bytes, dtype=np.uint64) * 2654435761 + number) >> 8 & 0xFF
    return buffer


def _seconds(jobs: "Sequence[Future[None]]", deadline_ns: int) -> float:
    """How long `jobs`, just submitted, took."""
    begin = time.perf_counter()
    _, pending = wait(jobs, deadline_ns / 1e9)
    if pending:
        raise DrainTimeout(
            f"{len(pending)} requests of the probe are not done after {deadline_ns} ns: look at the device"
        )
    took = time.perf_counter() - begin
    for job in jobs:
        job.result()
    return max(took, 1e-9)
