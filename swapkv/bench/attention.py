"""`swapkv bench attention`: decode attention over KV that is partly in host memory, on the host device.

One sequence, a few layers, random KV. The pages that `fraction` says are in host memory, the oldest first; the link is
as fast as it is told to be. Every way computes the same, and is compared bit by bit with KV that is all on the device.
Steps that see only some pages are timed among them, over random KV and over concentrated, and their error is measured.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from statistics import median

import attrs
import torch

from swapkv.attention import Choice, LayerWork, Rates, Step, Strategy, Streamer, choose
from swapkv.bench.attention_data import Case, Data, Layers
from swapkv.bench.attention_selected import Selected, Selection, Selector
from swapkv.config import Verify
from swapkv.ids import LayerId
from swapkv.streams.base import Block, Region
from swapkv.streams.host import HostDevice, HostStream

__all__ = ["Case", "Measured", "Way", "measure"]

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
class Measured:
    """Seconds a decode step, medians. `bitwise_equal`: each way's output is that of resident KV. `stalled_s`: how long a
    streamed step waited for its link, on average. `choices`: by layer. `selected`: steps that see some pages only.
    `most_in`: the share of the tokens that holds 90% of a head's weight."""

    case: Case
    link_bytes_per_s: float
    step_s: dict[Way, float]
    bitwise_equal: dict[Way, bool]
    bytes_over_link: dict[Way, int]
    stalled_s: float
    rates: Rates
    choices: tuple[Choice, ...]
    selected: tuple[Selected, ...]
    most_in: dict[Data, float]

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
            "selected": [{**selected.as_json(), "over_stream": selected.step_s / stream} for selected in self.selected],
            "tokens_with_90_percent_of_weight": {data.value: share for data, share in self.most_in.items()},
        }


Maker = Callable[[], list[torch.Tensor]]
"""Makes one step of many, and gives its outputs by layer."""


@attrs.frozen(kw_only=True)
class _Timing:
    """Of several steps in a row: seconds a step, the last one's outputs, and what the ring did, the first step included."""

    step_s: float
    outs: list[torch.Tensor]
    bytes_streamed: int
    stalled_ns: int


class _Bench:
    """One device with a limited link, and every way to make a step on it."""

    def __init__(self, layers: Layers, link_bytes_per_s: float) -> None:
        self.layers = layers
        self.case = layers.case
        self.device = HostDevice(link_bytes_per_s=round(link_bytes_per_s))
        self.compute = self.device.create_stream("compute")
        self.copies = self.device.create_stream("copy-in")
        self.streamer = Streamer(self.device, layers.planes[0], self.case.rules, depth=self.case.depth)
        self.choices: list[Choice] = []
        self.rates = Rates(link=link_bytes_per_s, device=1.0)
        self._landing = [[plane.clone() for plane in planes] for planes in layers.planes]

    def time(self, make: Maker) -> _Timing:
        """Make some steps in a row, on the compute stream."""
        launched = self.compute.launch(lambda: self._steps(make))
        launched.wait()
        return launched.result()

    def measure_rates(self) -> None:
        """Each alone: the link, the device over resident KV, the host over its own."""
        case = self.case
        whole_bytes = case.layers * case.pages * case.page_bytes
        device_s = median(self.time(self.maker(Way.RESIDENT)).step_s for _ in range(PROBES))
        host_s = median(self.time(self.maker(Way.IN_PLACE)).step_s for _ in range(PROBES))
        event = self.copies.scatter(self._blocks(0), Verify.NONE)
        begin_s = time.perf_counter()
        event.wait()
        link = case.host_bytes / case.layers / (time.perf_counter() - begin_s)
        self.rates = Rates(link=link, device=whole_bytes / device_s, host=whole_bytes / host_s)

    def maker(self, way: Way) -> Maker:
        """What makes one step of many: each one finds the ring full, and leaves it full for the next."""
        if way is Way.RESIDENT:
            return lambda: [self.layers.attend(p, layer) for layer, p in enumerate(self.layers.planes)]
        if way is Way.COPY_FIRST:
            return self._copy_first
        if way is Way.BESIDE:
            return self._beside
        strategy = {Way.STREAM: Strategy.STREAM, Way.HYBRID: Strategy.HYBRID, Way.IN_PLACE: Strategy.IN_PLACE}.get(way)
        return lambda: self._step(self._choose if strategy is None else (lambda work: strategy))

    def _steps(self, make: Maker) -> _Timing:
        before = attrs.evolve(self.streamer.counts)
        outs = make()
        begin_s = time.perf_counter()
        for _ in range(self.case.steps):
            outs = make()
        step_s = (time.perf_counter() - begin_s) / self.case.steps
        self.streamer.reset()
        self.copies.record().wait()
        after = self.streamer.counts
        return _Timing(
            step_s=step_s,
            outs=outs,
            bytes_streamed=after.bytes_streamed - before.bytes_streamed,
            stalled_ns=after.stalled_ns - before.stalled_ns,
        )

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
            self.copies.scatter(self._blocks(layer), Verify.NONE)
        return [self.layers.attend(planes, layer) for layer, planes in enumerate(self.layers.planes)]

    def _copy_first(self) -> list[torch.Tensor]:
        for layer in range(self.case.layers):
            event = self.copies.scatter(self._blocks(layer), Verify.NONE)
        self.compute.wait(event)
        return [self.layers.attend(planes, layer) for layer, planes in enumerate(self._landing)]

    def _blocks(self, layer: int) -> list[Block]:
        """All host pages of a layer, on their way to where copy-then-attend wants them."""
        regions = tuple(
            Region(layer=LayerId(layer), name=name, pages=plane.view(torch.uint8).view(len(plane), -1))
            for name, plane in zip("kv", self._landing[layer], strict=True)
        )
        return [Block(regions=regions, pages=self.layers.away, host=self.layers.host[layer])]


def measure(case: Case, *, note: Callable[[str], None] = lambda text: None) -> Measured:
    """Time every way, in turn, `repeats` times. torch computes on one thread meanwhile. `note`: told what goes on."""
    with _one_thread():
        layers = {data: Layers(case, data) for data in Data}
        link = case.link_mb_s * 1e6 if case.link_mb_s is not None else _balanced(layers[Data.RANDOM])
        note(f"{case.host_bytes / 1e6:,.0f} MB on the host, a link of {link / 1e6:,.0f} MB/s")
        bench = _Bench(layers[Data.RANDOM], link)
        try:
            bench.measure_rates()
            selectors = {data: Selector(layers[data], bench.streamer) for data in Data}
            return _measure(bench, link, selectors, note)
        finally:
            bench.device.close(CLOSE_S)


def _measure(bench: _Bench, link: float, selectors: Mapping[Data, Selector], note: Callable[[str], None]) -> Measured:
    case = bench.case
    selections = [Selection(data=data, share=share) for data in Data for share in case.selected]
    makers: dict[Way | Selection, Maker] = {way: bench.maker(way) for way in Way}
    for chosen in selections:
        makers[chosen] = partial(selectors[chosen.data].step, chosen.share, bench.compute)
    timings = _rounds(bench, makers, note)
    step_s = {timed: median(timing.step_s for timing in found) for timed, found in timings.items()}
    over_link = {timed: found[-1].bytes_streamed // (case.steps + 1) for timed, found in timings.items()}
    over_link[Way.COPY_FIRST] = over_link[Way.BESIDE] = case.host_bytes
    outs = {timed: found[-1].outs for timed, found in timings.items()}
    stalled_ns = sum(timing.stalled_ns for timing in timings[Way.STREAM])
    return Measured(
        case=case,
        link_bytes_per_s=link,
        step_s={way: step_s[way] for way in Way},
        bitwise_equal={way: all(map(torch.equal, outs[way], outs[Way.RESIDENT])) for way in Way},
        bytes_over_link={way: over_link[way] for way in Way},
        stalled_s=stalled_ns / 1e9 / (case.repeats * (case.steps + 1)),
        rates=bench.rates,
        choices=tuple(bench.choices),
        selected=tuple(
            selectors[chosen.data].measured(chosen, step_s[chosen], over_link[chosen], outs[chosen])
            for chosen in selections
        ),
        most_in={data: selector.most() for data, selector in selectors.items()},
    )


def _rounds(
    bench: _Bench, makers: Mapping[Way | Selection, Maker], note: Callable[[str], None]
) -> dict[Way | Selection, list[_Timing]]:
    """Time each maker in turn, `repeats` times."""
    timings: dict[Way | Selection, list[_Timing]] = {timed: [] for timed in makers}
    for repeat in range(bench.case.repeats):
        note(f"round {repeat + 1} of {bench.case.repeats}")
        for timed, make in makers.items():
            timings[timed].append(bench.time(make))
    return timings


def _balanced(layers: Layers) -> float:
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
