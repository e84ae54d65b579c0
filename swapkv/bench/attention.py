"""`swapkv bench attention`: decode attention over KV that is partly in host memory, on the host device.

One sequence, a few layers, random KV. The pages that `fraction` says are in host memory, the oldest first; the link is
as fast as it is told to be. Every way computes the same, and is compared bit by bit with KV that is all on the device.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from statistics import median

import attrs
import torch

from swapkv.attention import (
    Choice,
    HostRun,
    LayerKV,
    LayerWork,
    Rates,
    Rules,
    Step,
    StepRow,
    Strategy,
    Streamer,
    attend,
    choose,
)
from swapkv.config import Verify
from swapkv.errors import ProtocolError
from swapkv.ids import LayerId
from swapkv.layout import PageOrder
from swapkv.streams.base import Block, Region
from swapkv.streams.host import HostDevice, HostStream

CLOSE_S = 10.0
PROBES = 3


class Way(Enum):
    """What is timed."""

    RESIDENT = "resident"
    """All KV on the device: the computation alone."""
    BESIDE = "resident, link busy"
    """The same while as many bytes come over the link, which nobody waits for: what the copies' share of the host's memory
    costs. A host device's link is one of its cores; a GPU's copy engine takes less."""
    COPY_FIRST = "copy, then attend"
    """All host pages come, then all layers are attended to."""
    STREAM = "stream"
    HYBRID = "hybrid"
    IN_PLACE = "in place"
    CHOSEN = "chosen"
    """What the roofline chooses for each layer, from rates measured just before."""


@attrs.frozen(kw_only=True)
class Case:
    """What is measured. `fraction`: of the pages, in host memory. `link_mb_s`: MB/s of 10^6 bytes; None: balanced, so
    that the host pages take as long to come as all KV takes to be attended to. Raises `ProtocolError` for numbers that
    do not fit."""

    context: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 4
    page_size: int = 16
    split_tokens: int = 256
    unit_splits: int = 4
    fraction: float = 0.75
    depth: int = 4
    link_mb_s: float | None = None
    steps: int = 4
    repeats: int = 5
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("context", "heads", "kv_heads", "head_dim", "layers", "page_size", "steps", "repeats"):
            if getattr(self, name) < 1:
                raise ProtocolError(f"{name}={getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ProtocolError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if not 0 < self.fraction <= 1:
            raise ProtocolError(f"fraction={self.fraction} must be above 0 and at most 1: it is the share on the host")
        if self.link_mb_s is not None and self.link_mb_s <= 0:
            raise ProtocolError(f"link_mb_s={self.link_mb_s} must be above 0")

    @property
    def rules(self) -> Rules:
        return Rules(
            order=PageOrder.NHD, page_size=self.page_size, split_tokens=self.split_tokens, unit_splits=self.unit_splits
        )

    @property
    def pages(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def host_pages(self) -> int:
        """All but the last one, at most: that holds the newest token."""
        return min(self.pages - 1, round(self.fraction * self.pages))

    @property
    def page_bytes(self) -> int:
        return 2 * 4 * self.page_size * self.kv_heads * self.head_dim

    @property
    def host_bytes(self) -> int:
        return self.layers * self.host_pages * self.page_bytes


@attrs.frozen(kw_only=True)
class Measured:
    """Seconds a decode step, medians. `bitwise_equal`: each way's output is that of resident KV. `stalled_s`: how long a
    streamed step waited for its link, on average. `choices`: by layer."""

    case: Case
    link_bytes_per_s: float
    step_s: dict[Way, float]
    bitwise_equal: dict[Way, bool]
    bytes_over_link: dict[Way, int]
    stalled_s: float
    rates: Rates
    choices: tuple[Choice, ...]

    @property
    def compute_s(self) -> float:
        return self.step_s[Way.RESIDENT]

    @property
    def copy_s(self) -> float:
        """What the link needs for the host pages."""
        return self.case.host_bytes / self.link_bytes_per_s

    @property
    def ideal_s(self) -> float:
        return max(self.compute_s, self.copy_s)

    def overlap(self, way: Way) -> float:
        """1 - step / (compute + copy): 0 when nothing overlaps, up to a half when both are equal."""
        return 1 - self.step_s[way] / (self.compute_s + self.copy_s)

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        stream = self.step_s[Way.STREAM]
        return {
            "headline": {
                "step_over_ideal": stream / self.ideal_s,
                "step_over_ideal_link_busy": stream / max(self.step_s[Way.BESIDE], self.copy_s),
                "stalled_share": self.stalled_s / stream,
                "speedup_over_copy_then_attend": self.step_s[Way.COPY_FIRST] / stream,
                "bitwise_equal": all(self.bitwise_equal.values()),
            },
            "case": attrs.asdict(self.case),
            "link_bytes_per_s": self.link_bytes_per_s,
            "compute_s": self.compute_s,
            "copy_s": self.copy_s,
            "ways": {
                way.value: {
                    "step_s": seconds,
                    "over_ideal": seconds / self.ideal_s,
                    "overlap": self.overlap(way),
                    "bytes_over_link": self.bytes_over_link[way],
                    "bitwise_equal": self.bitwise_equal[way],
                }
                for way, seconds in self.step_s.items()
            },
            "rates_bytes_per_s": attrs.asdict(self.rates),
            "choices": [choice.why for choice in self.choices],
        }


class _Layers:
    """Random KV, on the device and in host memory, and the queries of one decode step."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        shape = (case.pages, case.page_size, case.kv_heads, case.head_dim)
        self.case = case
        self.table = torch.randperm(case.pages, generator=generator)
        self.planes = [[torch.randn(shape, generator=generator) for _ in range(2)] for _ in range(case.layers)]
        self.queries = torch.randn(case.layers, 1, case.heads, case.head_dim, generator=generator)
        self.away = self.table[: case.host_pages]
        self.partly = self.table.clone()
        self.partly[: case.host_pages] = -1
        self.host = [
            tuple(plane[self.away].view(torch.uint8).view(len(self.away), -1) for plane in planes)
            for planes in self.planes
        ]
        self.landing = [[plane.clone() for plane in planes] for planes in self.planes]

    def row(self) -> StepRow:
        return StepRow(start=self.case.context - 1, num_tokens=1, kv=self._kv)

    def _kv(self, layer: int) -> LayerKV:
        run = HostRun(first=0, planes=self.host[layer])
        planes = tuple(self.planes[layer])
        return LayerKV(name="s", layer=layer, version=0, planes=planes, page_table=self.partly, runs=(run,))

    def attend(self, planes: list[torch.Tensor], layer: int) -> torch.Tensor:
        case, (keys, values) = self.case, planes
        return attend(
            self.queries[layer],
            keys,
            values,
            self.table,
            case.context - 1,
            order=PageOrder.NHD,
            split_tokens=case.split_tokens,
        )

    def blocks(self, layer: int) -> list[Block]:
        """All host pages of a layer, on their way to where copy-then-attend wants them."""
        regions = tuple(
            Region(layer=LayerId(layer), name=name, pages=plane.view(torch.uint8).view(len(plane), -1))
            for name, plane in zip("kv", self.landing[layer], strict=True)
        )
        return [Block(regions=regions, pages=self.away, host=self.host[layer])]


class _Bench:
    """One device with a limited link, and every way to make a step on it."""

    def __init__(self, layers: _Layers, link_bytes_per_s: float) -> None:
        self.layers = layers
        self.case = layers.case
        self.device = HostDevice(link_bytes_per_s=round(link_bytes_per_s))
        self.compute = self.device.create_stream("compute")
        self.copies = self.device.create_stream("copy-in")
        self.streamer = Streamer(self.device, layers.planes[0], self.case.rules, depth=self.case.depth)
        self.choices: list[Choice] = []
        self.rates = Rates(link=link_bytes_per_s, device=1.0)

    def time(self, way: Way) -> tuple[float, list[torch.Tensor]]:
        """Seconds a step, over several steps in a row, and the last step's outputs."""
        launched = self.compute.launch(lambda: self._steps(way))
        launched.wait()
        return launched.result()

    def measure_rates(self) -> None:
        """Each alone: the link, the device over resident KV, the host over its own."""
        layers, case = self.layers, self.case
        whole_bytes = case.layers * case.pages * case.page_bytes
        device_s = median(self.time(Way.RESIDENT)[0] for _ in range(PROBES))
        host_s = median(self.time(Way.IN_PLACE)[0] for _ in range(PROBES))
        event = self.copies.scatter(layers.blocks(0), Verify.NONE)
        begin_s = time.perf_counter()
        event.wait()
        link = case.host_bytes / case.layers / (time.perf_counter() - begin_s)
        self.rates = Rates(link=link, device=whole_bytes / device_s, host=whole_bytes / host_s)

    def _steps(self, way: Way) -> tuple[float, list[torch.Tensor]]:
        make = self._maker(way)
        outs = make()
        begin_s = time.perf_counter()
        for _ in range(self.case.steps):
            outs = make()
        seconds = (time.perf_counter() - begin_s) / self.case.steps
        self.streamer.reset()
        self.copies.record().wait()
        return seconds, outs

    def _maker(self, way: Way) -> Callable[[], list[torch.Tensor]]:
        """What makes one step of many: each one finds the ring full, and leaves it full for the next."""
        if way is Way.RESIDENT:
            return lambda: [self.layers.attend(p, layer) for layer, p in enumerate(self.layers.planes)]
        if way is Way.COPY_FIRST:
            return self._copy_first
        if way is Way.BESIDE:
            return self._beside
        strategy = {Way.STREAM: Strategy.STREAM, Way.HYBRID: Strategy.HYBRID, Way.IN_PLACE: Strategy.IN_PLACE}.get(way)
        self.choices = []
        return lambda: self._step(self._choose if strategy is None else (lambda work: strategy))

    def _step(self, strategy: Callable[[LayerWork], Strategy]) -> list[torch.Tensor]:
        layers = self.layers
        step = Step(self.streamer, [layers.row()], self.case.layers, lambda _: self.case.rules, strategy=strategy)
        step.prefetch_again()
        return [step.attend(layer, 0, layers.queries[layer], self.compute) for layer in range(self.case.layers)]

    def _choose(self, work: LayerWork) -> Strategy:
        choice = choose(work, self.rates, (Strategy.STREAM, Strategy.HYBRID))
        self.choices = [*self.choices[-self.case.layers + 1 :], choice] if self.case.layers > 1 else [choice]
        return choice.strategy

    def _beside(self) -> list[torch.Tensor]:
        for layer in range(self.case.layers):
            self.copies.scatter(self.layers.blocks(layer), Verify.NONE)
        return [self.layers.attend(planes, layer) for layer, planes in enumerate(self.layers.planes)]

    def _copy_first(self) -> list[torch.Tensor]:
        for layer in range(self.case.layers):
            event = self.copies.scatter(self.layers.blocks(layer), Verify.NONE)
        self.compute.wait(event)
        return [self.layers.attend(planes, layer) for layer, planes in enumerate(self.layers.landing)]


def measure(case: Case, *, note: Callable[[str], None] = lambda text: None) -> Measured:
    """Time every way, in turn, `repeats` times. torch computes on one thread meanwhile. `note`: told what goes on."""
    with _one_thread():
        layers = _Layers(case)
        link = case.link_mb_s * 1e6 if case.link_mb_s is not None else _balanced(layers)
        note(f"{case.host_bytes / 1e6:,.0f} MB on the host, a link of {link / 1e6:,.0f} MB/s")
        bench = _Bench(layers, link)
        try:
            bench.measure_rates()
            times: dict[Way, list[float]] = {way: [] for way in Way}
            outs: dict[Way, list[torch.Tensor]] = {}
            over_link = dict.fromkeys(Way, 0)
            over_link[Way.COPY_FIRST] = over_link[Way.BESIDE] = case.host_bytes
            stalled_ns = 0
            for repeat in range(case.repeats):
                note(f"round {repeat + 1} of {case.repeats}")
                for way in Way:
                    before = attrs.evolve(bench.streamer.counts)
                    seconds, outs[way] = bench.time(way)
                    times[way].append(seconds)
                    if way not in (Way.COPY_FIRST, Way.BESIDE):
                        streamed = bench.streamer.counts.bytes_streamed - before.bytes_streamed
                        over_link[way] = streamed // (case.steps + 1)
                    if way is Way.STREAM:
                        stalled_ns += bench.streamer.counts.stalled_ns - before.stalled_ns
            choices = tuple(bench.choices)
        finally:
            bench.device.close(CLOSE_S)
    wanted = outs[Way.RESIDENT]
    return Measured(
        case=case,
        link_bytes_per_s=link,
        step_s={way: median(seconds) for way, seconds in times.items()},
        bitwise_equal={way: all(map(torch.equal, outs[way], wanted)) for way in Way},
        bytes_over_link=over_link,
        stalled_s=stalled_ns / 1e9 / (case.repeats * (case.steps + 1)),
        rates=bench.rates,
        choices=choices,
    )


def _balanced(layers: _Layers) -> float:
    """The link at which the host pages come in the time that all KV takes to be attended to."""
    device = HostDevice()
    stream: HostStream = device.create_stream("compute")

    def once() -> float:
        begin_s = time.perf_counter()
        for layer, planes in enumerate(layers.planes):
            layers.attend(planes, layer)
        return time.perf_counter() - begin_s

    launched = stream.launch(lambda: median([once() for _ in range(2 * PROBES + 1)][1:]))
    launched.wait()
    device.close(CLOSE_S)
    return layers.case.host_bytes / launched.result()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
