"""Scattered pages, moved by the driver: planned with numpy, and submitted in one of several ways.

Which way is best depends on the size of the runs, the driver and the card, so `cuda_probe` measures them at the start.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.errors import ProtocolError
from swapkv.ids import PhysicalPages
from swapkv.streams.base import Block, Region
from swapkv.streams.cuda_driver import BatchCopy, CudaContext, DeviceMemory, cu

Addresses: TypeAlias = NDArray[np.uint64]

STAGING_BYTES = 4 << 20


class Way(Enum):
    """How the runs of a submission are handed to the driver."""

    BATCH = "batch"
    """All of them in one call, `cuMemcpyBatchAsync`: CUDA 12.8 and later."""
    SINGLE = "single"
    """One call a run, `cuMemcpyAsync`: any driver."""
    STAGED = "staged"
    """Through contiguous device memory: scattered within the device, in few pieces over the link."""


class Direction(Enum):
    """Which way the bytes go, seen from the device."""

    OUT = "out"
    IN = "in"


@attrs.frozen(eq=False)
class Runs:
    """Runs of bytes that are consecutive on both sides: addresses and sizes, each `[n]`. `near` is on the device."""

    near: Addresses
    far: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def part(self, begin: int, end: int) -> "Runs":
        """Runs `[begin, end)`."""
        return Runs(self.near[begin:end], self.far[begin:end], self.sizes[begin:end])


def plan(blocks: Sequence[Block]) -> Runs:
    """What a gather or scatter of `blocks` moves. `near`: the pages; `far`: the host memory."""
    parts = [
        _page_runs(region, block.pages.numpy(), host.data_ptr())
        for block in blocks
        for region, host in zip(block.regions, block.host, strict=True)
    ]
    return _joined(parts)


def plan_clone(regions: Sequence[Region], source: PhysicalPages, target: PhysicalPages) -> Runs:
    """What a clone moves: one run for each page and region. `near`: the targets; `far`: the sources."""
    parts = []
    for region in regions:
        base, stride = np.uint64(region.pages.data_ptr()), np.uint64(region.pages.stride(0))
        sizes = np.full(len(source), region.page_bytes, dtype=np.uint64)
        parts.append(Runs(base + target.astype(np.uint64) * stride, base + source.astype(np.uint64) * stride, sizes))
    return _joined(parts)


def _page_runs(region: Region, pages: PhysicalPages, host: int) -> Runs:
    """Pages that follow each other without a gap are one run: host rows do so anyway."""
    stride, page_bytes = region.pages.stride(0), region.page_bytes
    if stride == page_bytes:
        heads = np.flatnonzero(np.diff(pages, prepend=pages[:1] - 2) != 1)
    else:
        heads = np.arange(len(pages))
    counts = np.diff(heads, append=len(pages))
    near = region.pages.data_ptr() + pages[heads] * stride
    far = host + heads * page_bytes
    return Runs(near.astype(np.uint64), far.astype(np.uint64), (counts * page_bytes).astype(np.uint64))


def _joined(parts: Sequence[Runs]) -> Runs:
    if not parts:
        nothing = np.zeros(0, dtype=np.uint64)
        return Runs(nothing, nothing, nothing)
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("near", "far", "sizes")]
    moved = joined[2] > 0  # the driver refuses copies of nothing
    return Runs(*joined) if moved.all() else Runs(*(array[moved] for array in joined))


class Copies:
    """Submits runs to streams of one device. `batch`: None if the driver has no batches."""

    def __init__(self, context: CudaContext, batch: BatchCopy | None) -> None:
        self._context = context
        self._batch = batch

    @property
    def ways(self) -> tuple[Way, ...]:
        """What this driver can do, the likely best one first."""
        return tuple(way for way in Way if way is not Way.BATCH or self._batch is not None)

    def require(self, way: Way) -> Way:
        """`way` itself. Raises `ProtocolError` if the driver cannot do it."""
        if way not in self.ways:
            raise ProtocolError(
                f"way={way.value!r}: this driver has no cuMemcpyBatchAsync: update it to CUDA 12.8, or take another way "
                f"of {[way.value for way in self.ways]}"
            )
        return way

    def move(self, direction: Direction, way: Way, runs: Runs, stream: int, staging: "Staging | None" = None) -> None:
        """Give all runs to `stream`. On a thread on which the context is current. `staging`: the stream's own.

        Raises `CudaError` if the driver refuses some; those before it may be under way.
        """
        if way is Way.STAGED:
            assert staging is not None
            self._move_staged(direction, runs, stream, staging.memory)
        elif direction is Direction.OUT:
            self.copy(way, runs.far, runs.near, runs.sizes, stream)
        else:
            self.copy(way, runs.near, runs.far, runs.sizes, stream)

    def copy(self, way: Way, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        """Give the copies to `stream`, in no order among them. A batch cannot go to the default streams."""
        if not len(sizes):
            return
        if way is not Way.SINGLE and self._batch is not None and stream > _DEFAULT_STREAMS:
            self._batch(targets, sources, sizes, stream)
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._context.call(cu.cuMemcpyAsync, target, source, size, stream)

    def _move_staged(self, direction: Direction, runs: Runs, stream: int, memory: DeviceMemory) -> None:
        """As many runs at a time as fit the staging memory; the order of the stream keeps them apart."""
        ends = np.cumsum(runs.sizes)
        begin, done = 0, 0
        while begin < len(runs):
            end = int(np.searchsorted(ends, np.uint64(done + memory.num_bytes), side="right"))
            part = runs.part(begin, max(end, begin + 1))
            if end <= begin:
                self.move(direction, Way.SINGLE, part, stream)
            else:
                self._stage(direction, part, stream, memory.address)
            begin += len(part)
            done += part.num_bytes

    def _stage(self, direction: Direction, runs: Runs, stream: int, address: int) -> None:
        places = np.uint64(address) + np.cumsum(runs.sizes) - runs.sizes
        whole = _merged(Runs(places, runs.far, runs.sizes))
        if direction is Direction.OUT:
            self.copy(Way.BATCH, places, runs.near, runs.sizes, stream)
            self.copy(Way.BATCH, whole.far, whole.near, whole.sizes, stream)
        else:
            self.copy(Way.BATCH, whole.near, whole.far, whole.sizes, stream)
            self.copy(Way.BATCH, runs.near, places, runs.sizes, stream)


_DEFAULT_STREAMS = 2
"""The handles of the legacy and the per-thread default stream are 0, 1 and 2."""


class Staging:
    """Device memory of one stream, taken when a copy is first staged."""

    def __init__(self, context: CudaContext, num_bytes: int = STAGING_BYTES) -> None:
        self.memory = DeviceMemory(context, num_bytes)


def _merged(runs: Runs) -> Runs:
    """Runs that follow each other on both sides become one."""
    ends_near, ends_far = runs.near + runs.sizes, runs.far + runs.sizes
    follows = (runs.near[1:] == ends_near[:-1]) & (runs.far[1:] == ends_far[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Runs(runs.near[heads], runs.far[heads], np.add.reduceat(runs.sizes, heads))
