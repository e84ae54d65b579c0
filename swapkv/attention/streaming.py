"""Attention over KV that is partly in host memory, exact and layer by layer, while its pages are still coming.

A step knows in advance which host pages it will need, layer by layer and sequence by sequence. They come through a
*ring* of staging buffers, one unit (a split of the keys, or a page if that is larger) in each: while one unit is
attended to, the next ones are on the link, those of the next layers and of the next step included. Resident pages are
attended to first, so that the link has a head start. The bits are those of resident KV: see `pieces`.

Nothing here moves or frees a page. A copy that fails raises in `Step.attend`, and the step can be tried again.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from functools import partial

import attrs
import torch

from swapkv.attention.paged import check_pages
from swapkv.attention.pieces import Attention, Rules, Seen, units_of
from swapkv.config import Verify
from swapkv.errors import ProtocolError, SwapError
from swapkv.ids import LayerId
from swapkv.layout import PageOrder
from swapkv.streams.base import Block, ComputeStream, CopyEvent, Device, Launched, Region, Stream


class Strategy(Enum):
    """How pages that lie in host memory are attended to."""

    STREAM = "stream"
    """They come through the ring, while others are attended to."""
    IN_PLACE = "in place"
    """The device reads them where they are (unified addressing): no staging, at the speed of such reads."""
    HYBRID = "hybrid"
    """The host attends to them at the same time; queries and partial results alone cross the link."""


@attrs.frozen(kw_only=True, eq=False)
class HostRun:
    """Consecutive logical pages in host memory, the first one's number `first`; `planes`: uint8 `[n, page_bytes]` each."""

    first: int
    planes: tuple[torch.Tensor, ...]

    @property
    def stop(self) -> int:
        return self.first + self.planes[0].shape[0]


@attrs.frozen(kw_only=True, eq=False)
class LayerKV:
    """The KV of one layer of one sequence.

    `name`: of the sequence. `version`: another one whenever what `runs` hold has changed. `planes`: on the device,
    keys and values (or one latent plane, whose first `value_dim` numbers are the values). `page_table`: int64 `[pages]`,
    rows of the planes; -1 for a page that is in none, or in one of `runs`, which are in order.
    """

    name: Hashable
    layer: int
    version: int
    planes: tuple[torch.Tensor, ...]
    page_table: torch.Tensor
    runs: tuple[HostRun, ...] = ()
    value_dim: int | None = None


@attrs.frozen(kw_only=True, eq=False)
class Fetch:
    """One unit of one layer of one sequence that has to come from the host. `key` tells whether two are the same."""

    key: tuple[Hashable, ...]
    pieces: tuple[tuple[int, tuple[torch.Tensor, ...]], ...]
    """Where in the buffer a piece begins (in pages), and its host bytes by plane."""

    @property
    def pages(self) -> list[range]:
        """Which pages of the unit come, counted from its first."""
        return [range(at, at + planes[0].shape[0]) for at, planes in self.pieces]

    @property
    def num_bytes(self) -> int:
        return sum(plane.numel() for _, planes in self.pieces for plane in planes)


@attrs.define
class StreamCounts:
    """`bytes_streamed`: what crossed the link. `stalled_ns`: how long attention waited for it. `wasted_fetches`: units
    that were fetched and not asked for."""

    bytes_streamed: int = 0
    stalled_ns: int = 0
    wasted_fetches: int = 0


class Streamer:
    """A ring of staging buffers on one device, filled in the order of a plan, emptied in the same order.

    `planes`: one layer's planes on the device (all layers must be alike). `depth`: buffers, at least 2: one is
    attended to while the others fill. `hosts`: a compute stream for `Strategy.HYBRID`, made if there is none.
    All calls belong on one thread at a time; `take` may run in a callable of the compute stream.
    Raises `ProtocolError` for numbers that do not fit.
    """

    def __init__(self, device: Device, planes: Sequence[torch.Tensor], rules: Rules, *, depth: int = 4) -> None:
        if depth < 2:
            raise ProtocolError(f"depth={depth} must be at least 2 buffers: one is read while another fills")
        self.rules = rules
        self.depth = depth
        self.counts = StreamCounts()
        self.host = device.create_stream("attend-host")
        self._unit_pages = rules.unit_tokens // rules.page_size
        self._link = device.create_stream("stream-in")
        rows = depth * self._unit_pages
        self.buffers = tuple(_staging(device, plane, rows) for plane in planes)
        self._regions = tuple(
            Region(layer=LayerId(0), name=f"staging {n}", pages=buffer.view(torch.uint8).view(rows, -1))
            for n, buffer in enumerate(self.buffers)
        )
        self._free = deque(range(depth))
        self._planned: deque[Fetch] = deque()
        self._coming: deque[tuple[Fetch, int, CopyEvent]] = deque()
        self._taken: int | None = None

    @property
    def staging_bytes(self) -> int:
        """Device memory of the ring."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def plan(self, fetches: Sequence[Fetch]) -> None:
        """What will be asked for next, after what is planned already. Fills the ring as far as it goes."""
        self._planned.extend(fetches)
        self._fill()

    def pending_keys(self) -> list[tuple[Hashable, ...]]:
        """What the ring will give, in order."""
        return [fetch.key for fetch, _, _ in self._coming] + [fetch.key for fetch in self._planned]

    def take(self, fetch: Fetch, stream: Stream) -> tuple[torch.Tensor, ...]:
        """The staged pages of the next fetch of the plan, a tensor a plane `[unit_pages, …]`, once `stream` may read them.

        They stay until `give_back`. Raises `ProtocolError` if it is not the next one, or the last one was not given
        back, and `TransferError` if its copy failed: nothing has changed, a new `Step` may try again.
        """
        if self._taken is not None or not self._coming or self._coming[0][0].key != fetch.key:
            raise ProtocolError(
                f"fetch {fetch.key} is not what the ring gives next, {self.pending_keys()[:1]}: ask in the order of the plan"
            )
        _, buffer, event = self._coming.popleft()
        begin_ns = time.perf_counter_ns()
        try:
            stream.wait(event)
        except SwapError:
            self._free.append(buffer)
            raise
        self._taken = buffer
        self.counts.stalled_ns += time.perf_counter_ns() - begin_ns
        self.counts.bytes_streamed += fetch.num_bytes
        low = buffer * self._unit_pages
        return tuple(staged[low : low + self._unit_pages] for staged in self.buffers)

    def give_back(self, stream: Stream) -> None:
        """`stream` has been given all that reads the buffer that was taken: it may be filled again after that."""
        assert self._taken is not None
        self._link.wait(stream.record())
        self._free.append(self._taken)
        self._taken = None
        self._fill()

    def reset(self) -> None:
        """Forget the plan, and wait until what is under way has ended, well or badly."""
        self._planned.clear()
        self.counts.wasted_fetches += len(self._coming)
        self._coming.clear()
        self._link.record().wait()
        self._free = deque(range(self.depth))
        self._taken = None

    def _fill(self) -> None:
        while self._free and self._planned:
            fetch, buffer = self._planned.popleft(), self._free.popleft()
            self._coming.append((fetch, buffer, self._link.scatter(self._blocks(fetch, buffer), Verify.NONE)))

    def _blocks(self, fetch: Fetch, buffer: int) -> list[Block]:
        low = buffer * self._unit_pages
        return [
            Block(regions=self._regions, pages=torch.arange(low + at, low + at + planes[0].shape[0]), host=planes)
            for at, planes in fetch.pieces
        ]


@attrs.frozen(kw_only=True, eq=False)
class StepRow:
    """One sequence's part of a step: `num_tokens` queries from position `start` on. `kv(layer)`: where its KV lies."""

    start: int
    num_tokens: int
    kv: Callable[[int], LayerKV]


class Step:
    """One forward over several sequences. `rules(layer)`: of that layer, the same pages and splits as the streamer's.

    Ask for the layers in their order, and within a layer for the rows in theirs.
    """

    def __init__(
        self,
        streamer: Streamer,
        rows: Sequence[StepRow],
        num_layers: int,
        rules: Callable[[int], Rules],
        *,
        strategy: Callable[[int], Strategy] = lambda layer: Strategy.STREAM,
    ) -> None:
        self._streamer = streamer
        self._rows = rows
        self._rules = rules
        self._strategies = [strategy(layer) for layer in range(num_layers)]
        self._kv = [[row.kv(layer) for row in rows] for layer in range(num_layers)]
        self._fetches = [
            [self._fetches_of(row, kv, rules(layer)) for row, kv in zip(rows, kvs, strict=True)]
            for layer, kvs in enumerate(self._kv)
        ]
        self._plan()

    def prefetch_again(self) -> None:
        """Plan the same host pages once more, for a next step over the same sequences: their copies begin at once.

        If the next step needs others, they are dropped and counted as wasted.
        """
        self._streamer.plan(self._all_fetches())

    def attend(self, layer: int, row: int, query: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Causal attention of `query`, `[T, Hq, D]`, over all KV of the row's sequence, its new tokens included.

        Runs where it is called: in a callable of `stream`. Returns `[T, Hq, Dv]`. Raises `TransferError` if a copy
        failed, `ProtocolError` for a page that is neither on the device nor in host memory.
        """
        kv, rules = self._kv[layer][row], self._rules(layer)
        heads = kv.planes[0].shape[_head_axis(rules)]
        attention = Attention(query, self._rows[row].start, heads, rules)
        fetches = self._fetches[layer][row]
        looks = self._begin_on_host(attention, kv, fetches, self._strategies[layer])
        for unit in attention.units:
            if unit not in fetches:
                attention.feed(unit, *_as_kv(kv, _resident(kv, unit, rules.page_size)))
        if self._strategies[layer] is Strategy.STREAM:
            for unit, fetch in fetches.items():
                staged = self._streamer.take(fetch, stream)
                attention.feed(unit, *_as_kv(kv, _completed(kv, unit, staged, fetch.pages)))
                self._streamer.give_back(stream)
        for unit, look in looks:
            attention.put(unit, look())
        return attention.result()

    def _begin_on_host(
        self, attention: Attention, kv: LayerKV, fetches: dict[range, Fetch], strategy: Strategy
    ) -> list[tuple[range, Callable[[], Seen]]]:
        """What looks at the host pages where they are, begun if it can run beside the rest."""
        if strategy is Strategy.STREAM:
            return []
        looks = [(unit, partial(_look_in_place, attention, kv, unit)) for unit in fetches]
        if strategy is Strategy.IN_PLACE:
            return list(looks)
        host = self._streamer.host
        if not isinstance(host, ComputeStream):
            raise ProtocolError(
                f"stream {host.name!r} runs no callables, so nothing attends on the host: choose STREAM"
            )
        return [(unit, partial(_end_of, host.launch(look))) for unit, look in looks]

    def _plan(self) -> None:
        """Plan what the rows need, unless a step before has planned exactly that."""
        wanted = self._all_fetches()
        if self._streamer.pending_keys() != [fetch.key for fetch in wanted]:
            self._streamer.reset()
            self._streamer.plan(wanted)

    def _all_fetches(self) -> list[Fetch]:
        streamed = (rows for rows, way in zip(self._fetches, self._strategies, strict=True) if way is Strategy.STREAM)
        return [fetch for rows in streamed for fetches in rows for fetch in fetches.values()]

    def _fetches_of(self, row: StepRow, kv: LayerKV, rules: Rules) -> dict[range, Fetch]:
        """The units that have a page in host memory, the newest first."""
        if not kv.runs:
            return {}
        found = {}
        for unit in units_of(row.start, row.start + row.num_tokens, rules):
            pieces = [(max(run.first, unit.start), min(run.stop, unit.stop), run) for run in kv.runs]
            held = [(lo, hi, run) for lo, hi, run in pieces if lo < hi]
            if held:
                key = (kv.name, kv.layer, kv.version, unit.start, unit.stop)
                found[unit] = Fetch(
                    key=key,
                    pieces=tuple(
                        (lo - unit.start, tuple(plane[lo - run.first : hi - run.first] for plane in run.planes))
                        for lo, hi, run in held
                    ),
                )
        return found


def _resident(kv: LayerKV, unit: range, page_size: int) -> tuple[torch.Tensor, ...]:
    """The pages of a unit that all lie on the device, by plane."""
    rows = kv.page_table[unit.start : unit.stop]
    check_pages(kv.page_table, unit, page_size, kv.planes[0].shape[0])
    return tuple(plane.index_select(0, rows) for plane in kv.planes)


def _completed(
    kv: LayerKV, unit: range, staged: Sequence[torch.Tensor], pieces: Sequence[range]
) -> tuple[torch.Tensor, ...]:
    """Staged pages, to which those are added that lie on the device."""
    here = torch.ones(len(unit), dtype=torch.bool)
    for piece in pieces:
        here[piece.start : piece.stop] = False
    pages = tuple(plane[: len(unit)] for plane in staged)
    if here.any():
        rows = kv.page_table[unit.start : unit.stop][here]
        if int(rows.min()) < 0:
            raise ProtocolError(f"sequence {kv.name!r}: pages {unit} are neither all on the device nor in host memory")
        for page, plane in zip(pages, kv.planes, strict=True):
            page[here] = plane.index_select(0, rows)
    return pages


def _look_in_place(attention: Attention, kv: LayerKV, unit: range) -> Seen:
    """Look at a unit whose pages are read where they are, on the host or on the device."""
    pages = []
    for number, plane in enumerate(kv.planes):
        parts = []
        at = unit.start
        while at < unit.stop:
            run = next((run for run in kv.runs if run.first <= at < run.stop), None)
            if run is not None:
                end = min(run.stop, unit.stop)
                held = run.planes[number][at - run.first : end - run.first]
                parts.append(held.view(plane.dtype).view(-1, *plane.shape[1:]))
            else:
                end = min((run.first for run in kv.runs if run.first > at), default=unit.stop)
                end = min(end, unit.stop)
                parts.append(plane.index_select(0, kv.page_table[at:end]))
            at = end
        pages.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return attention.look(unit, *_as_kv(kv, pages))


def _end_of(launched: Launched[Seen]) -> Seen:
    launched.wait()
    return launched.result()


def _as_kv(kv: LayerKV, pages: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; of a latent plane the values are its first numbers."""
    if len(pages) == 1:
        return pages[0], pages[0][..., : kv.value_dim]
    keys, values = pages
    return keys, values


def _staging(device: Device, plane: torch.Tensor, rows: int) -> torch.Tensor:
    page_numbers = plane[0].numel()
    memory = device.allocate(rows * page_numbers * plane.element_size())
    return memory.view(plane.dtype).view(rows, *plane.shape[1:])


def _head_axis(rules: Rules) -> int:
    return 2 if rules.order is PageOrder.NHD else 1
