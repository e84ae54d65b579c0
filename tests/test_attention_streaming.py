"""Attention over KV that is partly in host memory: equal to the bit, whatever lies where, and never beyond its ring."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import attrs
import pytest
import torch

from swapkv import HostDevice, ProtocolError, TransferError
from swapkv.attention import HostRun, LayerKV, Rules, Step, StepRow, Strategy, Streamer, attend
from swapkv.layout import PageOrder
from swapkv.streams.host import HostStream, Operation, Work

POISON = float("nan")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@attrs.frozen(kw_only=True, eq=False)
class Shape:
    page_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    order: PageOrder = PageOrder.NHD
    window: int | None = None
    sinks: int = 0
    split_tokens: int = 256
    unit_splits: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def rules(self) -> Rules:
        return Rules(
            order=self.order,
            page_size=self.page_size,
            window=self.window,
            sinks=self.sinks,
            split_tokens=self.split_tokens,
            unit_splits=self.unit_splits,
        )

    def plane(self, pages: int, dim: int) -> torch.Tensor:
        inner = (
            (self.page_size, self.num_kv_heads) if self.order is PageOrder.NHD else (self.num_kv_heads, self.page_size)
        )
        return torch.randn(pages, *inner, dim).to(self.dtype)


class Scattered:
    """One layer of one sequence: the same KV wholly on the device, and with the pages that `away` says in host memory.

    Device rows of pages that are away, and whatever lies behind the last token, are poisoned.
    """

    def __init__(self, shape: Shape, name: str, tokens: int, away: Callable[[int], bool], rng: Random) -> None:
        pages = -(-tokens // shape.page_size)
        rows = rng.sample(range(pages + 3), pages)
        self.shape, self.tokens, self.name = shape, tokens, name
        self.table = torch.tensor(rows)
        dims = [shape.head_dim] if shape.value_dim else [shape.head_dim, shape.head_dim]
        self.whole = tuple(shape.plane(pages + 3, dim) for dim in dims)
        for plane in self.whole:
            self._tokens(plane)[tokens % shape.page_size or shape.page_size :] = POISON
        gone = [page for page in range(pages) if away(page)]
        self.planes = tuple(plane.clone() for plane in self.whole)
        for plane in self.planes:
            plane[self.table[gone]] = POISON
        self.partly = self.table.clone()
        self.partly[gone] = -1
        self.runs = tuple(self._run(lo, hi) for lo, hi in _runs(gone))

    def _tokens(self, plane: torch.Tensor) -> torch.Tensor:
        last = plane[self.table[-1]]
        return last if self.shape.order is PageOrder.NHD else last.transpose(0, 1)

    def _run(self, lo: int, hi: int) -> HostRun:
        held = [plane[self.table[lo:hi]].contiguous() for plane in self.whole]
        return HostRun(first=lo, planes=tuple(part.view(torch.uint8).view(hi - lo, -1) for part in held))

    def kv(self, layer: int, version: int = 0) -> LayerKV:
        return LayerKV(
            name=self.name,
            layer=layer,
            version=version,
            planes=self.planes,
            page_table=self.partly,
            runs=self.runs,
            value_dim=self.shape.value_dim,
        )

    def expected(self, query: torch.Tensor) -> torch.Tensor:
        keys, values = (
            self.whole if len(self.whole) == 2 else (self.whole[0], self.whole[0][..., : self.shape.value_dim])
        )
        shape = self.shape
        return attend(
            query,
            keys,
            values,
            self.table,
            self.tokens - len(query),
            order=shape.order,
            window=shape.window,
            sinks=shape.sinks,
            split_tokens=shape.split_tokens,
        )


def _runs(pages: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs


class Bench:
    """A device with a compute stream and a streamer; steps run as callables of the stream."""

    def __init__(self, device: HostDevice, shape: Shape, example: Scattered, depth: int = 3) -> None:
        self.shape = shape
        self.compute = device.create_stream("compute")
        self.streamer = Streamer(device, example.planes, shape.rules, depth=depth)

    def step(self, layers: list[list[Scattered]], counts: list[int], **more: Any) -> Step:
        rows = [
            StepRow(start=row.tokens - count, num_tokens=count, kv=lambda layer, at=at: layers[layer][at].kv(layer))
            for at, (row, count) in enumerate(zip(layers[0], counts, strict=True))
        ]
        return Step(self.streamer, rows, len(layers), lambda layer: self.shape.rules, **more)

    def run(self, step: Step, queries: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        launched = self.compute.launch(
            lambda: [
                [step.attend(layer, row, query, self.compute) for row, query in enumerate(row_queries)]
                for layer, row_queries in enumerate(queries)
            ]
        )
        assert launched.wait(60)
        return launched.result()


@contextmanager
def bench_of(shape: Shape, example: Scattered, *, device: HostDevice | None = None, depth: int = 3) -> Iterator[Bench]:
    device = HostDevice() if device is None else device
    try:
        yield Bench(device, shape, example, depth)
    finally:
        assert device.close(10) == []


def queries_of(shape: Shape, layers: int, counts: list[int]) -> list[list[torch.Tensor]]:
    heads = shape.num_kv_heads * shape.group
    return [[torch.randn(count, heads, shape.head_dim) for count in counts] for _ in range(layers)]


def check_equal(
    shape: Shape, lengths: list[int], counts: list[int], share: float, seed: int, strategy: Strategy = Strategy.STREAM
) -> None:
    rng = Random(seed)
    torch.manual_seed(seed)
    layers = [
        [Scattered(shape, f"s{n}", tokens, lambda page: rng.random() < share, rng) for n, tokens in enumerate(lengths)]
        for _ in range(2)
    ]
    queries = queries_of(shape, len(layers), counts)
    with bench_of(shape, layers[0][0]) as bench:
        outs = bench.run(bench.step(layers, counts, strategy=lambda work: strategy), queries)
    for layer, rows in enumerate(layers):
        for row, kv in enumerate(rows):
            expected = kv.expected(queries[layer][row])
            assert not expected.isnan().any()
            assert torch.equal(outs[layer][row], expected), (layer, row)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_streamed_attention_of_any_residency_has_the_bits_of_resident_kv(share: float, strategy: Strategy) -> None:
    check_equal(Shape(), [700, 1, 256, 300], [1, 1, 1, 1], share, 1, strategy)


@pytest.mark.parametrize("page_size", [1, 4, 64, 256, 512])
@pytest.mark.parametrize("order", PageOrder)
def test_streamed_attention_of_any_page_size_has_the_bits_of_resident_kv(page_size: int, order: PageOrder) -> None:
    check_equal(Shape(page_size=page_size, order=order), [600, 33], [1, 1], 0.6, page_size)


@pytest.mark.parametrize(("heads", "group"), [(4, 1), (2, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_streamed_attention_of_any_heads_has_the_bits_of_resident_kv(heads: int, group: int, head_dim: int) -> None:
    check_equal(Shape(num_kv_heads=heads, group=group, head_dim=head_dim), [520], [1], 0.7, group)


@pytest.mark.parametrize("window", [1, 3, 40, 300])
@pytest.mark.parametrize("sinks", [0, 5])
def test_streamed_attention_behind_a_window_has_the_bits_of_resident_kv(window: int, sinks: int) -> None:
    check_equal(Shape(window=window, sinks=sinks, split_tokens=64), [500, 10], [1, 1], 0.5, window)


@pytest.mark.parametrize("counts", [[5, 1], [300, 20], [64, 64]])
def test_streamed_prefill_of_ragged_rows_has_the_bits_of_resident_kv(counts: list[int]) -> None:
    check_equal(Shape(split_tokens=64), [400, 64], counts, 0.5, counts[0])


@pytest.mark.parametrize("unit_splits", [1, 2, 3, 8])
def test_streamed_attention_in_units_of_any_size_has_the_bits_of_resident_kv(unit_splits: int) -> None:
    """What `expected` attends to comes in units of another size."""
    check_equal(Shape(split_tokens=32, unit_splits=unit_splits), [500, 40], [1, 7], 0.5, unit_splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streamed_attention_of_half_precision_has_the_bits_of_resident_kv(dtype: torch.dtype) -> None:
    check_equal(Shape(dtype=dtype), [300], [1], 0.5, 3)


@pytest.mark.parametrize("strategy", Strategy)
def test_streamed_attention_over_one_latent_plane_has_the_bits_of_resident_kv(strategy: Strategy) -> None:
    """MLA: the values are the first numbers of the keys."""
    check_equal(Shape(num_kv_heads=1, group=8, head_dim=72, value_dim=64), [500], [1], 0.5, 4, strategy)


class WatchedDevice(HostDevice):
    """Counts host-to-device copies, and fails the `fails`-th."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = -1
        self.copies = 0

    def execute(self, operation: Operation) -> None:
        if operation.work is Work.SCATTER:
            self.copies += 1
            if self.copies == self.fails:
                raise OSError("link down")
        super().execute(operation)


def two_layers(shape: Shape, tokens: int = 700) -> list[list[Scattered]]:
    rng = Random(0)
    torch.manual_seed(0)
    return [[Scattered(shape, "s", tokens, lambda page: page < 40, rng)] for _ in range(2)]


@pytest.mark.parametrize("nth", range(1, 7))
def test_copy_that_fails_in_a_step_raises_and_the_step_can_be_tried_again(nth: int) -> None:
    shape, device = Shape(), WatchedDevice()
    layers = two_layers(shape)
    queries = queries_of(shape, 2, [1])
    with bench_of(shape, layers[0][0], device=device) as bench:
        device.fails = nth
        with pytest.raises(TransferError):
            bench.run(bench.step(layers, [1]), queries)
        outs = bench.run(bench.step(layers, [1]), queries)
    assert device.copies >= 6
    for layer in range(2):
        assert torch.equal(outs[layer][0], layers[layer][0].expected(queries[layer][0]))


def test_staging_never_grows_beyond_its_ring() -> None:
    shape, device = Shape(), HostDevice()
    layers = two_layers(shape, tokens=3000)
    under_way = [0, 0]
    scatter = HostStream.scatter
    with bench_of(shape, layers[0][0], device=device, depth=2) as bench, pytest.MonkeyPatch.context() as patch:

        def counted(stream: HostStream, blocks: Any, verify: Any) -> Any:
            under_way[0] = len(bench.streamer._coming) + 1 + (bench.streamer._taken is not None)
            under_way[1] = max(under_way)
            return scatter(stream, blocks, verify)

        patch.setattr(HostStream, "scatter", counted)
        before = bench.streamer.staging_bytes
        bench.run(bench.step(layers, [1]), queries_of(shape, 2, [1]))
        assert bench.streamer.staging_bytes == before == 2 * 2 * 256 * 2 * 64 * 4
        assert under_way[1] == 2


def test_buffer_is_not_filled_again_before_a_stream_that_is_behind_has_read_it() -> None:
    """The calls are made ahead of the stream, as they are where work is launched and not waited for."""
    shape, device = Shape(), HostDevice()
    kv = two_layers(shape)[0][0]
    with bench_of(shape, kv, device=device, depth=2) as bench:
        gate, read = device.create_promise(), []
        bench.compute.wait(gate)
        row = StepRow(start=kv.tokens - 1, num_tokens=1, kv=lambda layer: kv.kv(layer))
        step = Step(bench.streamer, [row], 1, lambda layer: shape.rules)
        for fetch in step._wanted:
            keys, _ = bench.streamer.take(fetch, bench.compute)
            last = bench.compute.launch(lambda keys=keys: read.append(keys.clone()))
            bench.streamer.give_back(bench.compute)
        bench.streamer._link.record().wait(0.05)
        gate.set()
        assert last.wait(10)
        for fetch, keys in zip(step._wanted, read, strict=True):
            (place,), ((_, (wanted, _)),) = fetch.pages, fetch.pieces
            assert torch.equal(keys[place.start : place.stop].view(torch.uint8).view(len(place), -1), wanted)


def test_next_step_over_the_same_pages_finds_them_coming_already() -> None:
    shape, device = Shape(), WatchedDevice()
    layers = two_layers(shape)
    queries = queries_of(shape, 2, [1])
    with bench_of(shape, layers[0][0], device=device) as bench:
        first = bench.step(layers, [1])
        first.prefetch_again()
        bench.run(first, queries)
        second = bench.step(layers, [1])
        assert bench.streamer.counts.wasted_fetches == 0
        outs = bench.run(second, queries)
        assert device.copies == 12
    for layer in range(2):
        assert torch.equal(outs[layer][0], layers[layer][0].expected(queries[layer][0]))


def test_next_step_over_other_pages_drops_what_was_coming() -> None:
    shape, device = Shape(), WatchedDevice()
    layers, others = two_layers(shape), two_layers(shape, tokens=900)
    queries = queries_of(shape, 2, [1])
    with bench_of(shape, layers[0][0], device=device) as bench:
        first = bench.step(layers, [1])
        first.prefetch_again()
        bench.run(first, queries)
        outs = bench.run(bench.step(others, [1]), queries)
        assert bench.streamer.counts.wasted_fetches == 3
    for layer in range(2):
        assert torch.equal(outs[layer][0], others[layer][0].expected(queries[layer][0]))


def test_pages_of_another_version_are_not_taken_for_the_same() -> None:
    """The twin of prefetching: were the version not looked at, stale pages would be attended to."""
    shape = Shape()
    layers = two_layers(shape)
    kv = layers[0][0]
    queries = queries_of(shape, 1, [1])

    def row(version: int) -> StepRow:
        return StepRow(start=kv.tokens - 1, num_tokens=1, kv=lambda layer: kv.kv(layer, version))

    with bench_of(shape, kv) as bench:
        first = Step(bench.streamer, [row(0)], 1, lambda layer: shape.rules)
        first.prefetch_again()
        stale = bench.run(first, queries)[0][0]
        for run in kv.runs:
            for plane in run.planes:
                plane.view(torch.float32).mul_(2)
        fresh = bench.run(Step(bench.streamer, [row(1)], 1, lambda layer: shape.rules), queries)[0][0]
        assert not torch.equal(fresh, stale)
        assert bench.streamer.counts.wasted_fetches == 3
        again = bench.run(Step(bench.streamer, [row(1)], 1, lambda layer: shape.rules), queries)[0][0]
        assert torch.equal(again, fresh)


@pytest.mark.parametrize("strategy", Strategy)
def test_page_that_is_nowhere_is_refused_by_name(strategy: Strategy) -> None:
    shape = Shape()
    kv = two_layers(shape)[0][0]
    lost = attrs.evolve(kv.kv(0), runs=kv.runs[:0])
    half = attrs.evolve(kv.kv(0), runs=(HostRun(first=0, planes=tuple(p[:35] for p in kv.runs[0].planes)),))
    with bench_of(shape, kv) as bench:
        for broken, message in ((lost, "logical page"), (half, "neither all on the device nor in host memory")):
            row = StepRow(start=kv.tokens - 1, num_tokens=1, kv=lambda layer, broken=broken: broken)
            step = Step(bench.streamer, [row], 1, lambda layer: shape.rules, strategy=lambda work: strategy)
            with pytest.raises(ProtocolError, match=message):
                bench.run(step, queries_of(shape, 1, [1]))
            bench.streamer.reset()


def test_ring_of_one_buffer_is_refused() -> None:
    device = HostDevice()
    with pytest.raises(ProtocolError, match="depth=1 must be at least 2"):
        Streamer(device, two_layers(Shape())[0][0].planes, Shape().rules, depth=1)
    device.close(1)


def test_rows_asked_out_of_order_are_refused() -> None:
    shape = Shape()
    layers = two_layers(shape)
    with bench_of(shape, layers[0][0]) as bench:
        step = bench.step(layers, [1])
        query = queries_of(shape, 1, [1])[0][0]
        launched = bench.compute.launch(lambda: step.attend(1, 0, query, bench.compute))
        launched.wait(10)
        with pytest.raises(ProtocolError, match="ask in the order of the plan"):
            launched.result()
