"""Which way of copying scattered pages is the fastest: measured on the device at the start, for runs of several sizes."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import product

import attrs
import numpy as np

from swapkv.errors import BudgetExhausted, TransferError
from swapkv.streams.cuda_copies import Copies, Direction, Runs, Scratch, Way
from swapkv.streams.cuda_driver import CudaContext, DeviceMemory, cu
from swapkv.streams.cuda_kernel import MappedMemory

RUN_BYTES = (4 << 10, 32 << 10, 256 << 10)
"""Sizes of the runs that are measured."""

PROBE_BYTES = 8 << 20
"""What one measurement moves."""

REPEATS = 3
_PORTABLE_AND_MAPPED = 0x01 | 0x02


@attrs.frozen
class CopyRate:
    """What one way reached for scattered runs of `run_bytes`, the best of a few tries."""

    way: Way
    direction: Direction
    run_bytes: int
    bytes_per_s: float


@attrs.frozen
class Preference:
    """Which way to take. `rates`: what was measured; `fixed`: the way if it was named."""

    rates: tuple[CopyRate, ...] = ()
    fixed: Way = Way.SINGLE

    @classmethod
    def of(cls, way: Way) -> "Preference":
        """The same way always."""
        return cls(fixed=way)

    def choose(self, direction: Direction, runs: Runs) -> Way:
        """The way that was the fastest for runs of about the size that these have on average."""
        if not self.rates or not len(runs):
            return self.fixed
        gridded = any(rate.way is Way.GRID for rate in self.rates) and _are_in_grids(runs)
        return self.best(direction, runs.num_bytes // len(runs), without=None if gridded else Way.GRID).way

    def best(self, direction: Direction, run_bytes: int, *, without: Way | None = Way.GRID) -> CopyRate:
        """The best rate that was measured with runs of the size nearest to `run_bytes`, by ratio.

        `without`: a way that does not count; the rate of grids is that of pages which are adjacent, not scattered.
        """
        mine = [rate for rate in self.rates if rate.direction is direction and rate.way is not without]
        nearest = min({rate.run_bytes for rate in mine}, key=lambda size: abs(np.log(size / max(1, run_bytes))))
        return max((rate for rate in mine if rate.run_bytes == nearest), key=lambda rate: rate.bytes_per_s)


def _are_in_grids(runs: Runs) -> bool:
    """Whether grids of two pages and more are what most runs belong to."""
    return bool(runs.pitches.any()) and 2 * len(runs.grids()) <= len(runs)


def probe(
    context: CudaContext, copies: Copies, mapped: MappedMemory, *, clock: Callable[[], int] = time.perf_counter_ns
) -> Preference:
    """Measure every way in both directions; a device without the memory for it gets the likely best way.

    Every second run of device memory is moved, to and from consecutive host memory, as scattered pages are. A way that
    fails is not offered any more, unless it is the last one.
    """
    rates: list[CopyRate] = []
    try:
        with context, _Bench(context, copies, mapped, clock) as bench:
            for way in copies.ways:
                try:
                    rates += bench.rates(way)
                except (BudgetExhausted, TransferError) as error:
                    if len(copies.ways) > 1:
                        copies.withdraw(way, f"it failed when it was measured: {error}")
    except (BudgetExhausted, TransferError):
        return Preference.of(copies.ways[0])
    return Preference(tuple(rates), copies.ways[0])


class _Bench:
    """Memory on both sides and a stream, for the time of a probe. The context is current."""

    def __init__(self, context: CudaContext, copies: Copies, mapped: MappedMemory, clock: Callable[[], int]) -> None:
        self._context = context
        self._copies = copies
        self._mapped = mapped
        self._clock = clock
        self._held = ExitStack()

    def __enter__(self) -> "_Bench":
        with ExitStack() as held:
            self._near = DeviceMemory(self._context, 2 * PROBE_BYTES)
            self._far = self._context.call(cu.cuMemHostAlloc, PROBE_BYTES, _PORTABLE_AND_MAPPED)
            held.callback(self._context.call, cu.cuMemFreeHost, self._far)
            self._mapped.add(int(self._far), PROBE_BYTES)
            held.callback(self._mapped.remove, int(self._far))
            self._scratch = Scratch(self._context)
            held.callback(self._scratch.close)
            self._stream = int(self._context.call(cu.cuStreamCreate, 1))
            held.callback(self._context.call, cu.cuStreamDestroy, self._stream)
            held.callback(self._context.call, cu.cuStreamSynchronize, self._stream)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TransferError):
            self._held.close()

    def rates(self, way: Way) -> list[CopyRate]:
        """What one way reaches, in both directions with runs of every size."""
        return [
            CopyRate(way, direction, size, self.bytes_per_s(way, direction, size))
            for direction, size in product(Direction, RUN_BYTES)
        ]

    def bytes_per_s(self, way: Way, direction: Direction, run_bytes: int) -> float:
        """The best of a few tries, after one that does not count."""
        runs = self._runs(run_bytes)
        taken_ns = [self._take(way, direction, runs) for _ in range(1 + REPEATS)][1:]
        return runs.num_bytes * 1e9 / max(1, min(taken_ns))

    def _take(self, way: Way, direction: Direction, runs: Runs) -> int:
        begin_ns = self._clock()
        self._copies.move(direction, way, runs, self._stream, self._scratch)
        self._context.call(cu.cuStreamSynchronize, self._stream)
        return self._clock() - begin_ns

    def _runs(self, run_bytes: int) -> Runs:
        at = np.arange(PROBE_BYTES // run_bytes, dtype=np.uint64) * np.uint64(run_bytes)
        sizes = np.full(len(at), run_bytes, dtype=np.uint64)
        near, far = np.uint64(self._near.address) + np.uint64(2) * at, np.uint64(int(self._far)) + at
        return Runs(near, far, sizes, np.uint64(2) * sizes)


def describe(rates: Sequence[CopyRate]) -> str:
    """A line for each measurement, such as `batch in 32768 B: 41.0 GB/s`."""
    return "\n".join(
        f"{rate.way.value} {rate.direction.value} {rate.run_bytes} B: {rate.bytes_per_s / 1e9:.1f} GB/s"
        for rate in rates
    )
