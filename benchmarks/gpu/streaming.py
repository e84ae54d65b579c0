"""Decode attention over KV that is partly in pinned host memory, through the ring of staging buffers, and its roofline.

What is streamed is `swapkv.attention` as it is: torch's kernels on the device, in float32, one launch at a time from
Python. Splits are large here, so that launches do not outweigh the link; `Strategy.IN_PLACE` and `HYBRID` compute on the
host and are not tried.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter

import attrs
import torch

from benchmarks.gpu.rows import MakeDevice, Row, on, wait_for_torch
from swapkv.attention import HostRun, LayerKV, Rules, Step, StepRow, Streamer, attend
from swapkv.config import Verify
from swapkv.ids import LayerId
from swapkv.layout import PageOrder
from swapkv.streams.base import Block, CopyEvent, Device, Event, Region, Stream

REPEATS = 5


@attrs.frozen(kw_only=True)
class Case:
    """One sequence of a model like Llama-3.1-8B, in a few of its layers; the oldest pages are in host memory."""

    context: int = 32768
    host_tokens: int = 24576
    layers: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    split_tokens: int = 4096
    depth: int = 4

    @property
    def rules(self) -> Rules:
        return Rules(order=PageOrder.NHD, page_size=self.page_size, split_tokens=self.split_tokens, unit_splits=1)

    @property
    def pages(self) -> int:
        return self.context // self.page_size

    @property
    def host_pages(self) -> int:
        return self.host_tokens // self.page_size

    @property
    def page_bytes(self) -> int:
        """Of one plane."""
        return self.page_size * self.kv_heads * self.head_dim * 2

    @property
    def host_bytes(self) -> int:
        return 2 * self.layers * self.host_pages * self.page_bytes


class _Here:
    """The calling thread as the stream that attends, where torch computes on it: waits take place at once."""

    name = "here"

    def __init__(self, device: Device) -> None:
        self._reached = device.create_promise()
        self._reached.set()

    def wait(self, event: Event) -> None:
        event.wait()

    def record(self) -> Event:
        return self._reached


class _Layers:
    """The KV of every layer on the device, and the oldest pages in pinned memory too; the queries of a decode step."""

    def __init__(self, case: Case, device: Device) -> None:
        self.case = case
        shape = (case.pages, case.page_size, case.kv_heads, case.head_dim)
        plane_bytes, host_bytes = case.pages * case.page_bytes, case.host_pages * case.page_bytes
        memory = device.allocate(2 * case.layers * plane_bytes).view(case.layers, 2, plane_bytes)
        self.host = device.allocate_pinned(2 * case.layers * host_bytes).view(case.layers, 2, -1, case.page_bytes)
        self.planes = [[plane.view(torch.bfloat16).view(shape) for plane in planes] for planes in memory]
        for planes in self.planes:
            for plane in planes:
                plane.normal_()
        self.queries = torch.randn(case.layers, 1, case.heads, case.head_dim, dtype=torch.bfloat16).to(memory.device)
        self.table = torch.arange(case.pages)
        self._partly = self.table.clone()
        self._partly[: case.host_pages] = -1
        wait_for_torch()

    def blocks(self) -> list[Block]:
        """All host pages of each layer, and where they belong on the device."""
        return [
            Block(
                regions=[
                    Region(layer=LayerId(layer), name=name, pages=plane.view(torch.uint8).view(len(plane), -1))
                    for name, plane in zip("kv", planes, strict=True)
                ],
                pages=self.table[: self.case.host_pages],
                host=list(self.host[layer]),
            )
            for layer, planes in enumerate(self.planes)
        ]

    def forget_on_device(self) -> None:
        """What is in host memory is nowhere else."""
        for planes in self.planes:
            for plane in planes:
                plane[: self.case.host_pages] = torch.nan
        wait_for_torch()

    def row(self) -> StepRow:
        return StepRow(start=self.case.context - 1, num_tokens=1, kv=self._kv)

    def _kv(self, layer: int) -> LayerKV:
        run = HostRun(first=0, planes=tuple(self.host[layer]))
        planes = tuple(self.planes[layer])
        return LayerKV(name="a", layer=layer, version=0, planes=planes, page_table=self._partly, runs=(run,))

    def attend_resident(self) -> list[torch.Tensor]:
        return [
            attend(
                query,
                keys,
                values,
                self.table,
                self.case.context - 1,
                order=PageOrder.NHD,
                split_tokens=self.case.split_tokens,
            )
            for query, (keys, values) in zip(self.queries, self.planes, strict=True)
        ]


def streamed_attention(make: MakeDevice, case: Case | None = None) -> Iterator[Row]:
    """A decode step with all KV on the device, with its host pages copied first, and streamed; the bits are compared."""
    case = case or Case()
    device = make()
    try:
        yield from _compare(case, device)
    finally:
        device.close(10.0)


def _compare(case: Case, device: Device) -> Iterator[Row]:
    layers = _Layers(case, device)
    compute = device.create_stream("attend")
    out, into = device.create_stream("bench-out"), device.create_stream("bench-in")
    blocks = layers.blocks()
    out.gather(blocks, Verify.NONE).wait()
    streamer = Streamer(device, layers.planes[0], case.rules, depth=case.depth)
    with on(compute):
        resident_s, expected = _median_s(layers.attend_resident)
        layers.forget_on_device()
        streamed_s, streamed = _streamed(layers, streamer, compute if torch.cuda.is_available() else _Here(device))
        link_s, _ = _median_s(lambda: _arrived(into.scatter(blocks, Verify.NONE)))
        layers.forget_on_device()
        first_s, first = _median_s(lambda: _copy_first(layers, into, blocks))
    label = f"{case.layers} layers, {case.context} tokens, {case.host_bytes >> 20} MiB of KV on the host"
    ideal_s = max(resident_s, link_s)
    yield Row("streaming", f"decode, {label}: all KV on the device", resident_s * 1e3, "ms")
    yield Row("streaming", f"decode, {label}: copied, then attended to", first_s * 1e3, "ms")
    yield Row("streaming", f"decode, {label}: streamed", streamed_s * 1e3, "ms")
    yield Row("streaming", "the link alone", case.host_bytes / link_s / 1e9, "GB/s")
    yield Row("streaming", "streamed over the roofline, max(device, link)", streamed_s / ideal_s, "")
    for name, outs in (("streamed", streamed), ("copied first", first)):
        good = all(map(torch.equal, outs, expected))
        yield Row("streaming", f"{name}: the bits of resident KV", "equal" if good else "DIFFERENT", ok=good)


def _streamed(layers: _Layers, streamer: Streamer, stream: object) -> tuple[float, list[torch.Tensor]]:
    """Seconds a step of several in a row, each of which finds the ring full; the last one's outputs."""

    def step() -> list[torch.Tensor]:
        made = Step(streamer, [layers.row()], layers.case.layers, lambda _: layers.case.rules)
        made.prefetch_again()
        return [
            made.attend(layer, 0, query, stream)  # type: ignore[arg-type]
            for layer, query in enumerate(layers.queries)
        ]

    step()
    wait_for_torch()
    begin_s = perf_counter()
    for _ in range(REPEATS):
        outs = step()
    wait_for_torch()
    taken_s = (perf_counter() - begin_s) / REPEATS
    streamer.reset()
    return taken_s, outs


def _copy_first(layers: _Layers, stream: Stream, blocks: Sequence[Block]) -> list[torch.Tensor]:
    stream.scatter(blocks, Verify.NONE).wait()
    return layers.attend_resident()


def _arrived(event: CopyEvent) -> list[torch.Tensor]:
    event.wait()
    return []


def _median_s(call: Callable[[], list[torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    """Seconds, after one call that does not count, and what the last one returned."""
    taken_s = []
    for _ in range(1 + REPEATS):
        wait_for_torch()
        begin_s = perf_counter()
        outs = call()
        wait_for_torch()
        taken_s.append(perf_counter() - begin_s)
    return median(taken_s[1:]), outs
