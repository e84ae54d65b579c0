"""Attention over KV that is partly in host memory, exact and layer by layer, while its pages are still coming.

A step knows in advance which host pages it will need, layer by layer and sequence by sequence. They come through a
*ring* of staging buffers, one unit (some splits of the keys, see `Rules`) in each: while one unit is attended
to, the next ones are on the link, those of the next layers and of the next step included. What has come is
attended to at once, so that its buffer fills again; resident pages whenever nothing has come yet. The bits are those of
resident KV, in whatever order: see `pieces`.

Nothing here moves or frees a page. A copy that fails raises in `Step.attend`, and the step can be tried again.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

import attrs
import torch

from swapkv.attention.paged import Gatherer
from swapkv.attention.pieces import Attention, Rules, Seen, head_axis, units_of
from swapkv.attention.residency import LayerKV, as_kv, completed_pages, resident_pages
from swapkv.attention.ring import Fetch, Streamer
from swapkv.errors import ProtocolError
from swapkv.streams.base import ComputeStream, Launched, Stream

_FLOAT_BYTES = 4


class Strategy(Enum):
    """How pages that lie in host memory are attended to."""

    STREAM = "stream"
    """They come through the ring, while others are attended to."""
    IN_PLACE = "in place"
    """The device reads them where they are (unified addressing): no staging, at the speed of such reads."""
    HYBRID = "hybrid"
    """The host attends to them at the same time; queries and partial results alone cross the link."""


@attrs.frozen(kw_only=True, eq=False)
class StepRow:
    """One sequence's part of a step: `num_tokens` queries from position `start` on. `kv(layer)`: where its KV lies."""

    start: int
    num_tokens: int
    kv: Callable[[int], LayerKV]


@attrs.frozen(kw_only=True)
class LayerWork:
    """What a step has to attend to in one layer, all rows together. `exchanged_bytes`: queries, and partial results of
    the host pages."""

    layer: int
    resident_bytes: int
    host_bytes: int
    exchanged_bytes: int


class Step:
    """One forward over several sequences. `rules(layer)`: of that layer, the same pages and splits as the streamer's.
    `strategy`: chosen for each layer, by what it has to attend to; see `roofline.choose`. None: stream all.

    Ask for the layers in their order, and within a layer for the rows in theirs.
    """

    def __init__(
        self,
        streamer: Streamer,
        rows: Sequence[StepRow],
        num_layers: int,
        rules: Callable[[int], Rules],
        *,
        strategy: Callable[[LayerWork], Strategy] | None = None,
    ) -> None:
        self._streamer = streamer
        self._rows = rows
        self._rules = rules
        self._kv = [[row.kv(layer) for row in rows] for layer in range(num_layers)]
        self._fetches = [
            [self._fetches_of(row, kv, rules(layer)) for row, kv in zip(rows, kvs, strict=True)]
            for layer, kvs in enumerate(self._kv)
        ]
        self._strategies = [
            Strategy.STREAM if strategy is None else strategy(self._work(layer)) for layer in range(num_layers)
        ]
        streamed = (rows for rows, way in zip(self._fetches, self._strategies, strict=True) if way is Strategy.STREAM)
        self._wanted = [fetch for rows in streamed for fetches in rows for fetch in fetches.values()]
        self._plan()

    def prefetch_again(self) -> None:
        """Plan the same host pages once more, for a next step over the same sequences: their copies begin at once.

        If the next step needs others, they are dropped and counted as wasted.
        """
        self._streamer.plan(self._wanted)

    def attend(self, layer: int, row: int, query: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Causal attention of `query`, `[T, Hq, D]`, over all KV of the row's sequence, its new tokens included.

        Runs where it is called: in a callable of `stream`. Returns `[T, Hq, Dv]`. Raises `TransferError` if a copy
        failed, `ProtocolError` for a page that is neither on the device nor in host memory.
        """
        kv, rules = self._kv[layer][row], self._rules(layer)
        heads = kv.planes[0].shape[head_axis(rules.order)]
        attention = Attention(query, self._rows[row].start, heads, rules)
        fetches = self._fetches[layer][row]
        looks = self._begin_on_host(attention, kv, fetches, self._strategies[layer])
        gather = Gatherer(kv.planes)
        resident = deque(unit for unit in attention.units if unit not in fetches)
        streamed = deque(fetches.items() if self._strategies[layer] is Strategy.STREAM else ())
        while resident or streamed:
            if streamed and (not resident or self._streamer.is_there()):
                unit, fetch = streamed.popleft()
                staged = self._streamer.take(fetch, stream)
                attention.feed(unit, *as_kv(kv, completed_pages(kv, unit, staged, fetch.pages)))
                self._streamer.give_back(stream)
            else:
                unit = resident.popleft()
                attention.feed(unit, *as_kv(kv, resident_pages(kv, unit, rules.page_size, gather)))
        for unit, look in looks:
            attention.put(unit, look())
        return attention.result()

    def _begin_on_host(
        self, attention: Attention, kv: LayerKV, fetches: dict[range, Fetch], strategy: Strategy
    ) -> list[tuple[range, Callable[[], Seen]]]:
        """What looks at the host pages where they are, begun if it can run beside the rest."""
        if strategy is Strategy.STREAM:
            return []
        looks = [(unit, partial(_look_in_place, attention, kv, unit, fetch)) for unit, fetch in fetches.items()]
        if strategy is Strategy.IN_PLACE:
            return list(looks)
        host = self._streamer.host
        if not isinstance(host, ComputeStream):
            raise ProtocolError(
                f"stream {host.name!r} runs no callables, so nothing attends on the host: choose STREAM"
            )
        return [(unit, partial(_end_of, host.launch(look))) for unit, look in looks]

    def _work(self, layer: int) -> LayerWork:
        resident = host = exchanged = 0
        for row, kv, fetches in zip(self._rows, self._kv[layer], self._fetches[layer], strict=True):
            rules = self._rules(layer)
            page_bytes = sum(plane[0].numel() * plane.element_size() for plane in kv.planes)
            away = sum(fetch.num_bytes for fetch in fetches.values())
            pages = sum(len(unit) for unit in units_of(row.start, row.start + row.num_tokens, rules))
            host += away
            resident += max(0, pages * page_bytes - away)
            exchanged += len(fetches) * row.num_tokens * _FLOAT_BYTES * sum(plane.shape[-1] for plane in kv.planes)
        return LayerWork(layer=layer, resident_bytes=resident, host_bytes=host, exchanged_bytes=exchanged)

    def _plan(self) -> None:
        """Plan what the rows need, unless a step before has planned exactly that."""
        if self._streamer.pending_keys() != [fetch.key for fetch in self._wanted]:
            self._streamer.reset()
            self._streamer.plan(self._wanted)

    def _fetches_of(self, row: StepRow, kv: LayerKV, rules: Rules) -> dict[range, Fetch]:
        """The units that have a page in host memory, the newest first."""
        if not kv.runs:
            return {}
        found = {}
        firsts, stops = [run.first for run in kv.runs], [run.stop for run in kv.runs]
        for unit in units_of(row.start, row.start + row.num_tokens, rules):
            within = kv.runs[bisect_right(stops, unit.start) : bisect_left(firsts, unit.stop)]
            held = [(max(run.first, unit.start), min(run.stop, unit.stop), run) for run in within]
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


def _look_in_place(attention: Attention, kv: LayerKV, unit: range, fetch: Fetch) -> Seen:
    """Look at a unit whose host pages are read where they are; without a copy if all of it lies there in one piece."""
    pieces = [
        [held.view(plane.dtype).view(-1, *plane.shape[1:]) for held, plane in zip(planes, kv.planes, strict=True)]
        for _, planes in fetch.pieces
    ]
    if len(pieces) == 1 and len(fetch.pages[0]) == len(unit):
        return attention.look(unit, *as_kv(kv, pieces[0]))
    pages = [plane.new_empty(len(unit), *plane.shape[1:]) for plane in kv.planes]
    for place, piece in zip(fetch.pages, pieces, strict=True):
        for page, held in zip(pages, piece, strict=True):
            page[place.start : place.stop] = held
    return attention.look(unit, *as_kv(kv, completed_pages(kv, unit, pages, fetch.pages)))


def _end_of(launched: Launched[Seen]) -> Seen:
    launched.wait()
    return launched.result()
