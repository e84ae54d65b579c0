"""How fast scattered pages cross the link, by page size and way, against contiguous memory in the same run."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import attrs
import torch

from benchmarks.gpu.rows import MakeDevice, Row, wait_for_torch
from swapkv.config import Verify
from swapkv.ids import LayerId
from swapkv.streams.base import Block, Event, Region
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_copies import Direction, Way, plan
from swapkv.streams.cuda_probe import Preference

PAGE_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20)
GAP_PAGE_BYTES = (8 << 10, 64 << 10)
MOVED_BYTES = 256 << 20
REPEATS = 5
ASKED = {32 << 10: 0.95, 128 << 10: 0.95, 2 << 20: 0.95, 8 << 10: 0.85}
"""Share of the contiguous ceiling that the best way has to reach, by page size."""


@attrs.frozen(eq=False)
class _Field:
    """Device pages of which every second one is moved, the host memory that they go to, and the two streams."""

    device: CudaDevice
    memory: torch.Tensor
    host: torch.Tensor
    moved_bytes: int

    def beside_each_other(self, page_bytes: int) -> Block:
        """Adjacent pages of a plane with gaps, as K is where K and V of a page lie side by side."""
        count = self.moved_bytes // page_bytes
        pages = self.memory.view(-1, 2 * page_bytes)[:, :page_bytes]
        region = Region(layer=LayerId(0), name="k", pages=pages)
        host = self.host[: count * page_bytes].view(count, page_bytes)
        return Block(regions=[region], pages=torch.arange(count), host=[host])

    def block(self, page_bytes: int, *, scattered: bool) -> Block:
        count = self.moved_bytes // page_bytes
        region = Region(layer=LayerId(0), name="pages", pages=self.memory.view(-1, page_bytes))
        pages = torch.arange(count) * 2 if scattered else torch.arange(count)
        return Block(regions=[region], pages=pages, host=[self.host[: count * page_bytes].view(count, page_bytes)])


def bandwidth(make: MakeDevice, moved_bytes: int = MOVED_BYTES) -> Iterator[Row]:
    """Both directions, one at a time and at once: every way at every page size, over the contiguous copy."""
    device = make()
    try:
        yield from (Row("copies", f"{way}: {reason}", "missing") for way, reason in device.missing_ways.items())
        field = _Field(device, device.allocate(2 * moved_bytes), device.allocate_pinned(moved_bytes), moved_bytes)
        out, into = device.create_stream("bench-out"), device.create_stream("bench-in")
        copies: dict[str, Callable[[Block], list[Event]]] = {
            "out": lambda block: [out.gather([block], Verify.NONE)],
            "in": lambda block: [into.scatter([block], Verify.NONE)],
        }
        ceilings = {}
        for direction, copy in copies.items():
            ceilings[direction] = _rate(copy, field.block(page_bytes=2 << 20, scattered=False), field.moved_bytes)
            yield Row("copies", f"{direction}, contiguous, pinned: the ceiling", ceilings[direction] / 1e9, "GB/s")
        for page_bytes in PAGE_BYTES:
            for direction, copy in copies.items():
                yield from _ways(field, page_bytes, direction, copy, ceilings[direction])
        for page_bytes in GAP_PAGE_BYTES:
            for direction, copy in copies.items():
                yield from _gaps(field, page_bytes, direction, copy, ceilings[direction])
        yield from _duplex(field, copies, sum(ceilings.values()))
    finally:
        device.close(10.0)


def _ways(
    field: _Field, page_bytes: int, direction: str, copy: Callable[[Block], list[Event]], ceiling: float
) -> Iterator[Row]:
    """Scattered pages. Grids have no advantage for these, so they are not tried."""
    what = f"{direction}, pages of {page_bytes >> 10} KiB"
    block = field.block(page_bytes, scattered=True)
    ways = [way for way in field.device.copies.ways if way is not Way.GRID]
    shares = _shares(field, ways, block, copy, ceiling)
    yield from (Row("copies", f"{what}, {way.value}", share, "of the ceiling") for way, share in shares.items())
    best = max(shares, key=lambda way: shares[way])
    asked = ASKED.get(page_bytes)
    ok = None if asked is None else shares[best] >= asked
    yield Row("copies", f"{what}, best: {best.value}", shares[best], "of the ceiling", ok)
    chosen = field.device.way_for(Direction(direction), plan([block]))
    yield Row("copies", f"{what}, what the probe chose, over the best", shares[chosen] / shares[best], "")


def _gaps(
    field: _Field, page_bytes: int, direction: str, copy: Callable[[Block], list[Event]], ceiling: float
) -> Iterator[Row]:
    """Adjacent pages with gaps, every way."""
    shares = _shares(field, field.device.copies.ways, field.beside_each_other(page_bytes), copy, ceiling)
    for way, share in shares.items():
        yield Row("copies", f"{direction}, every other {page_bytes >> 10} KiB, {way.value}", share, "of the ceiling")


def _shares(
    field: _Field, ways: Sequence[Way], block: Block, copy: Callable[[Block], list[Event]], ceiling: float
) -> dict[Way, float]:
    """What each way reaches, as shares of the ceiling."""
    chosen = field.device.preference
    try:
        shares = {}
        for way in ways:
            field.device.preference = Preference.of(way)
            shares[way] = _rate(copy, block, field.moved_bytes) / ceiling
        return shares
    finally:
        field.device.preference = chosen


def _duplex(field: _Field, copies: dict[str, Callable[[Block], list[Event]]], ceiling: float) -> Iterator[Row]:
    """Both directions at once, from and to halves of the same memory."""
    block = field.block(128 << 10, scattered=True)
    half = len(block.pages) // 2
    parts = [
        attrs.evolve(block, pages=block.pages[where], host=[block.host[0][where]])
        for where in (slice(half), slice(half, None))
    ]

    def both(_: Block) -> list[Event]:
        return copies["out"](parts[0]) + copies["in"](parts[1])

    share = _rate(both, block, field.moved_bytes) / ceiling
    yield Row("copies", "both ways at once, pages of 128 KiB", share, "of both ceilings")


def _rate(copy: Callable[[Block], list[Event]], block: Block, num_bytes: int) -> float:
    """Bytes a second: the median of some tries, after one that does not count."""
    taken_s = []
    for _ in range(1 + REPEATS):
        wait_for_torch()
        begin_s = perf_counter()
        for event in copy(block):
            event.wait()
        taken_s.append(perf_counter() - begin_s)
    return num_bytes / median(taken_s[1:])
