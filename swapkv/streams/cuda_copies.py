"""Scattered pages on their way: planned with numpy, and submitted to the driver in one of several ways.

Which way is best depends on the size of the runs, the driver and the card, so `cuda_probe` measures them at the start.
"""

from collections.abc import Sequence
from enum import Enum

import attrs
import numpy as np

from swapkv.errors import ProtocolError
from swapkv.ids import PhysicalPages
from swapkv.streams.base import Block, Region
from swapkv.streams.cuda_driver import BatchCopy, CudaContext, DeviceMemory, cu
from swapkv.streams.cuda_grids import Addresses, GridCopy, Grids, grids_of
from swapkv.streams.cuda_kernel import CopyKernel, Tables

STAGING_BYTES = 4 << 20


class Way(Enum):
    """How the runs of a submission are handed to the driver."""

    BATCH = "batch"
    """All of them in one call, `cuMemcpyBatchAsync`: CUDA 12.8 and later."""
    SINGLE = "single"
    """One call a run, `cuMemcpyAsync`: any driver."""
    STAGED = "staged"
    """Through contiguous device memory: scattered within the device, in few pieces over the link."""
    KERNEL = "kernel"
    """By threads of the device, which touch pinned host memory in place. Memory that is not pinned for this device goes
    as by `BATCH`."""
    GRID = "grid"
    """All of them in one call, `cuMemcpy3DBatchAsync`, adjacent pages of a plane with gaps as one operand: CUDA 12.8 and
    later. Not chosen for other pages, which it has no advantage for."""


class Direction(Enum):
    """Which way the bytes go, seen from the device."""

    OUT = "out"
    IN = "in"


@attrs.frozen(eq=False)
class Runs:
    """Runs of bytes that are consecutive on both sides: addresses and sizes, each `[n]`. `near` is on the device.

    `pitches`: how far apart the pages of a run's plane are if they have gaps, else 0.
    """

    near: Addresses
    far: Addresses
    sizes: Addresses
    pitches: Addresses = attrs.field(default=attrs.Factory(lambda runs: np.zeros_like(runs.sizes), takes_self=True))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def part(self, begin: int, end: int) -> "Runs":
        """Runs `[begin, end)`."""
        return Runs(self.near[begin:end], self.far[begin:end], self.sizes[begin:end], self.pitches[begin:end])

    def grids(self) -> Grids:
        """The same as grids, adjacent pages of planes with gaps as one."""
        return grids_of(self.near, self.far, self.sizes, self.pitches)


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
    pitches = np.full(len(heads), 0 if stride == page_bytes else stride, dtype=np.uint64)
    return Runs(near.astype(np.uint64), far.astype(np.uint64), (counts * page_bytes).astype(np.uint64), pitches)


def _joined(parts: Sequence[Runs]) -> Runs:
    if not parts:
        nothing = np.zeros(0, dtype=np.uint64)
        return Runs(nothing, nothing, nothing)
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("near", "far", "sizes", "pitches")]
    moved = joined[2] > 0  # the driver refuses copies of nothing
    return Runs(*joined) if moved.all() else Runs(*(array[moved] for array in joined))


class Copies:
    """Submits runs to streams of one device. `batch` and `grid`: None if the driver has no batches, of either kind."""

    def __init__(self, context: CudaContext, batch: BatchCopy | None, grid: GridCopy | None) -> None:
        self._context = context
        self._batch = batch
        self._grid = grid
        self._kernel: CopyKernel | None = None
        self.missing = {Way.KERNEL: "its kernel was not asked for"}
        if batch is None:
            self.missing[Way.BATCH] = "this driver has no cuMemcpyBatchAsync: update it to CUDA 12.8"
        if grid is None:
            self.missing[Way.GRID] = "this driver has no cuMemcpy3DBatchAsync: update it to CUDA 12.8"

    @property
    def ways(self) -> tuple[Way, ...]:
        """What this device can do, the likely best one first; `missing` says why not the others."""
        return tuple(way for way in Way if way not in self.missing)

    def require(self, way: Way) -> Way:
        """`way` itself. Raises `ProtocolError` if the device cannot do it."""
        if way in self.missing:
            others = [way.value for way in self.ways]
            raise ProtocolError(f"way={way.value!r}: {self.missing[way]}; or take another way of {others}")
        return way

    def offer(self, kernel: CopyKernel) -> None:
        """From now on there is a kernel, until `close`."""
        self._kernel = kernel
        del self.missing[Way.KERNEL]

    def withdraw(self, way: Way, reason: str) -> None:
        """A way that does not work here is not offered any more."""
        self.missing[way] = reason

    def close(self) -> None:
        """Unload the kernel, if there is one: no copy is under way."""
        if self._kernel is not None:
            self._kernel.close()

    def move(self, direction: Direction, way: Way, runs: Runs, stream: int, scratch: "Scratch | None" = None) -> None:
        """Give all runs to `stream`. On a thread on which the context is current. `scratch`: the stream's own.

        Raises `CudaError` if the driver refuses some; those before it may be under way.
        """
        if way is Way.STAGED:
            assert scratch is not None
            self._move_staged(direction, runs, stream, scratch.staging)
        elif way is Way.KERNEL:
            assert scratch is not None
            self._move_by_kernel(direction, runs, stream, scratch)
        elif way is Way.GRID and self._grid is not None and len(runs) and stream > _DEFAULT_STREAMS:
            (self._grid.out if direction is Direction.OUT else self._grid.into)(runs.grids(), stream)
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

    def _move_by_kernel(self, direction: Direction, runs: Runs, stream: int, scratch: "Scratch") -> None:
        kernel = self._kernel
        far = kernel.mapped.seen_by_device(runs.far, runs.sizes) if kernel is not None else None
        if kernel is None or far is None:
            self.move(direction, Way.BATCH, runs, stream)
        elif direction is Direction.OUT:
            kernel(far, runs.near, runs.sizes, stream, scratch.tables)
        else:
            kernel(runs.near, far, runs.sizes, stream, scratch.tables)

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


class Scratch:
    """What the copies of one stream need for themselves, each taken when it is first needed. On one thread at a time.

    Close it when the work of the stream is over; the context is current throughout.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._staging: DeviceMemory | None = None
        self._tables: Tables | None = None

    @property
    def staging(self) -> DeviceMemory:
        """Device memory that scattered pages pass through. Raises `BudgetExhausted` if the device has not as much."""
        if self._staging is None:
            self._staging = DeviceMemory(self._context, STAGING_BYTES)
        return self._staging

    @property
    def tables(self) -> Tables:
        """Where the kernel finds what to copy. Raises `CudaError` if the driver pins no memory for it."""
        if self._tables is None:
            self._tables = Tables(self._context)
        return self._tables

    def close(self) -> None:
        """Give it back."""
        self._staging = None
        if self._tables is not None:
            self._tables.close()
            self._tables = None


def _merged(runs: Runs) -> Runs:
    """Runs that follow each other on both sides become one."""
    ends_near, ends_far = runs.near + runs.sizes, runs.far + runs.sizes
    follows = (runs.near[1:] == ends_near[:-1]) & (runs.far[1:] == ends_far[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Runs(runs.near[heads], runs.far[heads], np.add.reduceat(runs.sizes, heads))
