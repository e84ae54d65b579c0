"""Byte-exact or not: KV of every dtype there and back over scattered pages, reuse after cancels, every kind of call."""

from collections.abc import Iterator
from random import Random

import anyio
import torch

from benchmarks.gpu.rows import MakeDevice, Row, on, wait_for_torch
from swapkv.config import SwapConfig, Verify
from swapkv.ids import GroupId, LayerId
from swapkv.layout import KVDtype, KVLayout
from swapkv.pool import Pool, open_pool
from swapkv.streams.base import Block, Region, Stream
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_probe import Preference

TOKENS = 24 * 16
PAGES = 512
ODD_PAGES = ((1, 0), (96, 32), (1000, 0), (4097, 3), (16384, 0), (65537, 79))
"""Bytes of a page, and of the gap behind it."""


def round_trips(make: MakeDevice) -> Iterator[Row]:
    """A sequence whose pages lie scattered among those of others leaves and comes back, at every dtype."""
    for dtype in KVDtype:
        layout = KVLayout.dense(num_layers=4, num_kv_heads=2, head_dim=32, dtype=dtype, page_size=16, chunk_tokens=64)
        good = anyio.run(_round_trip, make, layout, SwapConfig(verify=Verify.CRC32))
        yield Row(
            "round trip", f"{dtype.name.lower()}, scattered pages, checked", "equal" if good else "DIFFERENT", ok=good
        )


async def _round_trip(make: MakeDevice, layout: KVLayout, config: SwapConfig) -> bool:
    names = [f"s{n}" for n in range(8)]
    pages = len(names) * layout.pages_for(TOKENS)
    host_bytes = len(names) * -(-TOKENS // layout.chunk_tokens) * layout.chunk_bytes(GroupId(0))
    async with open_pool(layout, num_pages=pages, host_bytes=host_bytes, device=make(), config=config) as pool:
        for name in names:
            pool.register(name, max_tokens=TOKENS)
        for _ in range(TOKENS // 16):  # page by page in turn, so that no sequence has two neighbours
            for name in names:
                with pool.forward_nowait({name: 16}):
                    pass
        _fill(pool, seed=1)
        before = [_pages_of(pool, name) for name in names]
        for name in names:
            await pool.preempt(name)
        _fill(pool, seed=2)
        for name in reversed(names):
            await pool.resume(name)
        return all(_same(was, _pages_of(pool, name)) for was, name in zip(before, names, strict=True))


def every_way(make: MakeDevice) -> Iterator[Row]:
    """Scattered pages of odd sizes, with and without gaps, there and back in every way that this device offers."""
    device = make()
    try:
        yield from (Row("ways", f"{way}: {reason}", "missing") for way, reason in device.missing_ways.items())
        streams = device.create_stream("ways-out"), device.create_stream("ways-in")
        for way in device.copies.ways:
            device.preference = Preference.of(way)
            good = all(_there_and_back(device, streams, page_bytes, gap) for page_bytes, gap in ODD_PAGES)
            what = f"{way.value}: pages of {', '.join(str(page_bytes) for page_bytes, _ in ODD_PAGES)} bytes"
            yield Row("ways", what, "equal" if good else "DIFFERENT", ok=good)
    finally:
        device.close(10.0)


def _there_and_back(device: CudaDevice, streams: tuple[Stream, Stream], page_bytes: int, gap: int) -> bool:
    """Pages leave, everything is overwritten, and they return: host memory, pages and what lies between are right."""
    generator = torch.Generator().manual_seed(page_bytes)
    shape = (PAGES, page_bytes + gap)
    before = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    memory = device.allocate(before.numel()).view(shape)
    memory.copy_(before)
    wait_for_torch()
    pages = torch.cat([torch.randperm(PAGES // 2, generator=generator)[: PAGES // 4], torch.arange(PAGES // 2, PAGES)])
    host = device.allocate_pinned(len(pages) * page_bytes).view(len(pages), page_bytes)
    region = Region(layer=LayerId(0), name="pages", pages=memory[:, :page_bytes])
    block = Block(regions=[region], pages=pages, host=[host])
    streams[0].gather([block], Verify.NONE).wait()
    left_well = torch.equal(host, before[pages, :page_bytes])
    memory.zero_()
    wait_for_torch()
    streams[1].scatter([block], Verify.NONE).wait()
    expected = torch.zeros_like(before)
    expected[pages, :page_bytes] = before[pages, :page_bytes]
    return left_well and torch.equal(memory.cpu(), expected)


def reuse_after_cancel(make: MakeDevice) -> Iterator[Row]:
    """Preempts and restores that are cancelled at any time, their pages taken by others: nobody's bytes change."""
    good = anyio.run(_cancelled, make)
    yield Row("reuse after cancel", "60 cancelled swaps among 6 sequences", "equal" if good else "DIFFERENT", ok=good)


async def _cancelled(make: MakeDevice) -> bool:
    random = Random(7)
    layout = KVLayout.dense(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, chunk_tokens=64)
    config = SwapConfig(segment_bytes=1 << 14)
    names = [f"s{n}" for n in range(6)]
    host_bytes = 64 * layout.chunk_bytes(GroupId(0))
    async with open_pool(layout, num_pages=4 * 12, host_bytes=host_bytes, device=make(), config=config) as pool:
        written = {}
        for at, name in enumerate(names):
            pool.register(name, max_tokens=192)
            with pool.forward_nowait({name: 192}) as forward, on(forward.stream):
                _fill_own(pool, forward.page_tables(name)[0], seed=at)
            written[name] = _pages_of(pool, name)
            if at >= 3:
                await pool.preempt(name)
            if at == 2:
                await pool.preempt(names[0])
        good = True
        for _ in range(60):
            name = random.choice(names)
            call = pool.resume if pool.state(name).value == "OFFLOADED" else pool.preempt
            with anyio.move_on_after(random.choice([0, 1e-4, 1e-3])):
                await call(name)
            if pool.state(name).value in ("GPU_READY", "GPU_RESIDENT"):
                good &= _same(written[name], _pages_of(pool, name))
        for name in names:
            await pool.preempt(name)
        _fill(pool, seed=99)
        for name in names:
            await pool.resume(name)
            good &= _same(written[name], _pages_of(pool, name))
            await pool.preempt(name)
        return good


def every_call(make: MakeDevice) -> Iterator[Row]:
    """Every kind of call, with forks, windows and spills, on a core that checks itself after each."""
    anyio.run(_scenario, make)
    yield Row("every call", "a life of sequences, the core checked after each step", "holds", ok=True)


async def _scenario(make: MakeDevice) -> None:
    layout = KVLayout.dense(
        num_layers=3,
        num_kv_heads=1,
        head_dim=8,
        page_size=4,
        chunk_tokens=8,
        windows=[None, 6, None],
        truncate_slack=16,
    )
    async with open_pool(layout, num_pages=14, host_bytes=1 << 14, device=make()) as pool:
        pool.register("a", max_tokens=40)
        with pool.forward_nowait({"a": 20}):
            pass
        pool.fork("a", "b", max_tokens=40)
        for step in (pool.preempt("a"), pool.preempt("b"), pool.resume("a"), pool.spill("a"), pool.resume("a")):
            await step
            pool._core.check()
        pool.truncate("a", tokens=9)
        with pool.forward_nowait({"a": 4}):
            pass
        await pool.preempt("a")
        await pool.resume("b")
        for name in "ab":
            await pool.finish(name)
        await pool._driver.reached(pool.compute.record())
        pool._core.check()
        assert pool.statistics().pages[0].owned == 0


def _fill(pool: Pool, seed: int) -> None:
    """Random bytes in every page."""
    generator = torch.Generator().manual_seed(seed)
    for region in _regions(pool):
        noise = torch.randint(0, 256, tuple(region.pages.shape), dtype=torch.uint8, generator=generator)
        region.pages.copy_(noise)
    wait_for_torch()


def _fill_own(pool: Pool, rows: torch.Tensor, seed: int) -> None:
    """Random bytes in the pages of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    for region in _regions(pool):
        noise = torch.randint(0, 256, (len(rows), region.page_bytes), dtype=torch.uint8, generator=generator)
        region.pages[rows.to(region.pages.device)] = noise.to(region.pages.device)


def _regions(pool: Pool) -> list[Region]:
    return [region for regions in pool.memory.regions for region in regions]


def _pages_of(pool: Pool, name: str) -> list[torch.Tensor]:
    """The bytes of a sequence that is on the device, by layer and plane, on the CPU."""
    wait_for_torch()
    with pool.forward_nowait({name: 0}) as forward:
        rows = forward.page_tables(name)[0]
    return [region.pages[rows.to(region.pages.device)].cpu() for region in _regions(pool)]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
