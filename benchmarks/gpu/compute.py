"""What only a GPU can show: kernels beside copies, gates before kernels, the decode kernel."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter, sleep

import anyio
import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.gpu.rows import MakeDevice, Row, on, wait_for_torch
from swapkv.config import SwapConfig, Verify
from swapkv.ids import GroupId, LayerId
from swapkv.layout import KVLayout, PageOrder
from swapkv.pool import open_pool
from swapkv.streams.base import Block, Region, Stream
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_copies import Way
from swapkv.streams.cuda_probe import Preference
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.host import Work

OVERLAP_PAGE_BYTES = (16 << 10, 128 << 10)
COPIES = 6
SLOWED_MAX = 0.03
REPEATS = 7
ERROR_MAX = 0.04


def overlap(make: MakeDevice) -> Iterator[Row]:
    """Matrix products, alone and while scattered pages cross the link both ways, in every way: how much slower they get,
    and how fast the pages come meanwhile. What is asked is asked of the way that the probe chose for large pages."""
    device = make()
    try:
        left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        memory, host = device.allocate(512 << 20), device.allocate_pinned(256 << 20)
        streams = device.create_stream("out"), device.create_stream("in")
        chosen = device.preference
        for page_bytes in OVERLAP_PAGE_BYTES:
            count = (256 << 20) // page_bytes
            region = Region(layer=LayerId(0), name="pages", pages=memory.view(-1, page_bytes))
            block = Block(regions=[region], pages=torch.arange(count) * 2, host=[host.view(count, page_bytes)])
            what = f"products beside copies of {page_bytes >> 10} KiB pages"
            for way in (None, *(way for way in device.copies.ways if way is not Way.GRID)):
                device.preference = chosen if way is None else Preference.of(way)
                slowed, rate = _beside(left, right, streams, block)
                asked = way is None and page_bytes == OVERLAP_PAGE_BYTES[-1]
                name = "the probe's choice" if way is None else way.value
                yield Row("overlap", f"{what}, {name}: slowed by", slowed, "", slowed < SLOWED_MAX if asked else None)
                yield Row("overlap", f"{what}, {name}: both ways", rate / 1e9, "GB/s")
    finally:
        device.close(10.0)


def _beside(
    left: torch.Tensor, right: torch.Tensor, streams: tuple[Stream, Stream], block: Block
) -> tuple[float, float]:
    """How much slower products get while copies go on, and the bytes a second of these, both ways together."""
    out, into = streams
    alone, beside, rates = [], [], []
    for _ in range(REPEATS):
        alone.append(_products(left, right))
        begin_s = perf_counter()
        copies = [out.gather([block], Verify.NONE) for _ in range(COPIES)]
        copies += [into.scatter([block], Verify.NONE) for _ in range(COPIES)]
        beside.append(_products(left, right))
        for copy in copies:
            copy.wait()
        rates.append(2 * COPIES * block.num_bytes / (perf_counter() - begin_s))
    return median(beside) / median(alone) - 1, median(rates)


def _products(left: torch.Tensor, right: torch.Tensor) -> float:
    """Milliseconds on torch's stream. Waits for that stream alone: copies of others go on."""
    torch.cuda.current_stream().synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(10):
        left @ right
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class _SlowDevice(CudaDevice):
    """Every copy towards the device is submitted late."""

    def execute(self, operation: CudaOperation) -> None:
        if operation.work is Work.SCATTER:
            sleep(0.02)
        super().execute(operation)


def gates(make: MakeDevice) -> Iterator[Row]:
    """Kernels behind a layer's gate read what a deliberately slow restore brings, never what was there before; in every
    way to copy, for a copy that is a kernel itself must not queue behind the gate that it is to open."""
    probing = make()
    ways = probing.copies.ways
    probing.close(10.0)
    for way in ways:
        good = anyio.run(_gated, way)
        yield Row("gates", f"kernels behind the gates of a slow restore, {way.value}", _EQUAL[good], ok=good)


_EQUAL = {True: "equal", False: "DIFFERENT"}


async def _gated(way: Way) -> bool:
    layout = KVLayout.dense(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, chunk_tokens=64)
    config = SwapConfig(segment_bytes=1)
    host_bytes = 8 * layout.chunk_bytes(GroupId(0))
    async with open_pool(
        layout, num_pages=32, host_bytes=host_bytes, device=_SlowDevice(way=way), config=config
    ) as pool:
        pool.register("a", max_tokens=256)
        with pool.forward_nowait({"a": 256}) as forward, on(forward.stream):
            for layer in range(4):
                for plane in "kv":
                    pool.memory.plane(layer, plane).normal_()
        wait_for_torch()
        with pool.forward_nowait({"a": 0}) as forward:
            rows = forward.page_tables("a")[0].cuda()
        before = [pool.memory.plane(layer, plane)[rows].clone() for layer in range(4) for plane in "kv"]
        wait_for_torch()
        await pool.preempt("a")
        for layer in range(4):
            for plane in "kv":
                pool.memory.plane(layer, plane).fill_(torch.nan)
        wait_for_torch()
        seen = []
        async with pool.restoring("a") as coming, pool.forward({"a": 0}) as forward:
            rows = forward.page_tables("a")[0].cuda()
            for layer in range(4):
                coming.gate(layer, forward.stream)
                with on(forward.stream):
                    seen += [pool.memory.plane(layer, plane)[rows].clone() for plane in "kv"]
        wait_for_torch()
        return all(torch.equal(a, b) for a, b in zip(before, seen, strict=True))


def decode_kernel(make: MakeDevice) -> Iterator[Row]:
    """The Triton kernel over pages, against torch's attention over the same KV in one piece."""
    from swapkv.attention.triton_decode import decode

    batch, heads, kv_heads, dim, length, page = 8, 32, 8, 128, 8192, 16
    pages = batch * length // page
    query = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(pages, page, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tables = torch.randperm(pages).view(batch, -1)
    lengths = torch.full((batch,), length)
    key, value = (
        plane[tables.cuda()].reshape(batch, length, kv_heads, dim).transpose(1, 2) for plane in (keys, values)
    )

    def paged() -> torch.Tensor:
        return decode(query, keys, values, tables, lengths, order=PageOrder.NHD).out

    def whole() -> torch.Tensor:
        return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]

    error = float((paged() - whole().float()).abs().max())
    yield Row("kernel", "Triton decode over pages: largest difference from SDPA", error, "", error < ERROR_MAX)
    times = {name: _kernel_ms(call) for name, call in (("paged", paged), ("whole", whole))}
    num_bytes = 2 * keys.numel() * keys.element_size()
    yield Row("kernel", "Triton decode over scattered pages", num_bytes / times["paged"] / 1e6, "GB/s")
    yield Row("kernel", "SDPA over KV in one piece", num_bytes / times["whole"] / 1e6, "GB/s")


def _kernel_ms(call: object) -> float:
    assert callable(call)
    taken = []
    for _ in range(3 + REPEATS):
        wait_for_torch()
        begin_s = perf_counter()
        call()
        wait_for_torch()
        taken.append((perf_counter() - begin_s) * 1e3)
    return median(taken[3:])
