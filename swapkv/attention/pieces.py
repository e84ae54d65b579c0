"""Attention over KV that comes in pieces, in any order, with bits that know of positions only.

Keys are taken in *splits*: runs of `split_tokens` positions that begin at its absolute multiples. Each split gives a
softmax over its own keys with a log-sum-exp, and splits merge from the newest to the oldest (FlashAttention, Dao et
al., 2022; split-KV decoding as in Flash-Decoding, 2023). Neither boundaries nor order know of physical pages, nor of
when a piece came. Bits do depend on how many queries a call holds (GEMM kernels differ by shape) and on the number of
threads.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import attrs
import torch

from swapkv.attention.partial import blend
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder

_MERGED_ROWS = 32
"""Splits merge in batches while their number times the queries' stays within this: fewer, larger operations."""

_NOTHING = torch.finfo(torch.float32).min
"""The log-sum-exp of no keys. Finite, so that two of them subtract to 0; its exponential is 0 beside any real one."""


@attrs.frozen(kw_only=True)
class Rules:
    """How queries weigh KV.

    `order`, `page_size`: of the pages. `window`: a query at p sees positions p - window + 1 … p (None: all); and, in
    spite of a window, the first `sinks` positions (StreamingLLM, Xiao et al., 2023). `scale`: factor of the scores.
    `softcap`: scores become softcap · tanh(scores / softcap) (Gemma 2, 2024). `split_tokens`: a multiple of the page
    size, or a divisor of it. `unit_splits`: how many splits are fed, and come from the host, at a time; no bit depends
    on it.
    Raises `ProtocolError` for numbers that do not fit.
    """

    order: PageOrder
    page_size: int
    window: int | None = None
    sinks: int = 0
    scale: float | None = None
    softcap: float | None = None
    split_tokens: int = 256
    unit_splits: int = 4

    def __attrs_post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ProtocolError(f"window={self.window} must be at least 1 token, or None for full attention")
        if self.unit_splits < 1:
            raise ProtocolError(f"unit_splits={self.unit_splits} must be at least 1")
        if self.sinks < 0:
            raise ProtocolError(f"sinks={self.sinks} must be 0 or more positions")
        if self.softcap is not None and self.softcap <= 0:
            raise ProtocolError(f"softcap={self.softcap} must be above 0, or None for no cap")
        size, page_size = self.split_tokens, self.page_size
        if size < 1 or (size % page_size and page_size % size):
            raise ProtocolError(
                f"split_tokens={size} must be a multiple or a divisor of page_size={page_size}; "
                f"try {-(-max(size, 1) // page_size) * page_size}"
            )

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit: `unit_splits` splits, rounded up to whole pages."""
        return -(-self.split_tokens * self.unit_splits // self.page_size) * self.page_size

    def first_seen(self, position: int) -> int:
        """The oldest position within the window of the query at `position`."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The positions `[lo, hi)` that queries at `[start, stop)` see, split by split, the oldest first."""
        size, first = self.split_tokens, self.first_seen(start)
        sinks = min(self.sinks, first)
        seen = [(0, sinks), (first, stop)] if sinks else [(first, stop)]
        spans: list[tuple[int, int]] = []
        for low, high in seen:
            for begin in range(low // size * size, high, size):
                lo, hi = max(begin, low), min(begin + size, high)
                if spans and spans[-1][0] // size == lo // size:
                    spans[-1] = (spans[-1][0], hi)
                else:
                    spans.append((lo, hi))
        return spans

    def hidden(self, start: int, stop: int, lo: int, hi: int) -> torch.Tensor | None:
        """Where queries at `[start, stop)` do not see keys at `[lo, hi)`, bool `[T, hi - lo]`; None if they see all."""
        causal = hi <= start + 1
        if causal and (self.window is None or lo >= stop - self.window or hi <= self.sinks):
            return None
        query, key = torch.arange(start, stop)[:, None], torch.arange(lo, hi)
        hidden = key > query
        if self.window is not None:
            hidden |= (key <= query - self.window) & (key >= self.sinks)
        return hidden


class Attention:
    """Causal attention of new tokens over the KV of their sequence, their own included, fed unit by unit.

    `query`: `[T, Hq, D]`; query t stands at position `start + t`. `num_kv_heads`: query head h reads KV head
    h // (Hq / Hkv). `units`: what has to be fed, in any order, as ranges of logical pages; the newest first.
    Not differentiable; the arithmetic is float32. Until a unit's neighbours have come its result waits:
    `[Hkv, Hq / Hkv · T, Dv]` floats a split.
    """

    def __init__(self, query: torch.Tensor, start: int, num_kv_heads: int, rules: Rules) -> None:
        num_tokens, num_heads, head_dim = query.shape
        if start < 0:
            raise ProtocolError(f"start={start} must be 0 or more: the position of the first query")
        if num_heads % num_kv_heads:
            raise ProtocolError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
        self._rules = rules
        self._dtype = query.dtype
        stop = start + num_tokens
        scaled = query.detach().float() * (head_dim**-0.5 if rules.scale is None else rules.scale)
        bounds = _tiles(start, stop, rules.split_tokens)
        self._tiles = [_Tile(scaled[lo - start : hi - start], lo, num_kv_heads, rules) for lo, hi in bounds]
        self.units = _units([span for tile in self._tiles for span in tile.spans.values()], rules)
        self._missing = set(self.units)

    def feed(self, unit: range, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The pages of one of `units`: `[pages, page_size, Hkv, D]` (NHD) or `[pages, Hkv, page_size, D]` (HND).

        `values` may have another last axis. They are not needed after the call. Only positions that some query sees
        are read, so stale bytes elsewhere in a page do not matter.
        """
        self.put(unit, self.look(unit, keys, values))

    def look(self, unit: range, keys: torch.Tensor, values: torch.Tensor) -> "Seen":
        """What the queries see in a unit; see `feed`. Changes nothing, so several threads may look at once."""
        seen: Seen = []
        size, page_size = self._rules.split_tokens, self._rules.page_size
        low, high = unit.start * page_size, unit.stop * page_size
        for split in range(low // size, -(-high // size)):
            for tile in self._tiles:
                span = tile.spans.get(split)
                if span is not None:
                    pieces = [_gather(pages, low, *span, self._rules) for pages in (keys, values)]
                    seen.append((tile, split, tile.look(split, *pieces)))
        return seen

    def put(self, unit: range, seen: "Seen") -> None:
        """Take in what `look` saw in a unit."""
        self._missing.remove(unit)
        for tile, split, part in seen:
            tile.put(split, part)

    def result(self) -> torch.Tensor:
        """`[T, Hq, Dv]` in the query's dtype. Raises `ProtocolError` while a unit is missing."""
        if self._missing:
            raise ProtocolError(f"pages {sorted(map(str, self._missing))} were not fed: feed every unit first")
        outs = [tile.result() for tile in self._tiles]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(self._dtype)


def units_of(start: int, stop: int, rules: Rules) -> list[range]:
    """The units that queries at `[start, stop)` see, as ranges of logical pages; the newest first."""
    return _units([span for tile in _tiles(start, stop, rules.split_tokens) for span in rules.spans(*tile)], rules)


def head_axis(order: PageOrder) -> int:
    """The axis of a plane that counts its KV heads."""
    return 2 if order is PageOrder.NHD else 1


def runs_of(units: Sequence[range]) -> list[range]:
    """The same pages with adjoining units joined, the oldest first."""
    runs: list[range] = []
    for unit in sorted(units, key=lambda unit: unit.start):
        if runs and runs[-1].stop >= unit.start:
            runs[-1] = range(runs[-1].start, unit.stop)
        else:
            runs.append(unit)
    return runs


class _Tile:
    """Queries that all lie in one split, and what they have seen so far.

    That split is merged into first: every query sees at least itself in it, so it is never empty.
    """

    def __init__(self, query: torch.Tensor, start: int, num_kv_heads: int, rules: Rules) -> None:
        num_tokens, num_heads, head_dim = query.shape
        self.spans = {lo // rules.split_tokens: (lo, hi) for lo, hi in rules.spans(start, start + num_tokens)}
        # GQA: a group's heads are rows of one product
        self._rows = query.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        self._start, self._stop, self._heads, self._rules = start, start + num_tokens, num_heads, rules
        newest_first, batch = sorted(self.spans)[::-1], max(1, _MERGED_ROWS // num_tokens)
        self._batches = [newest_first[at : at + batch] for at in range(0, len(newest_first), batch)]
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._merged: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, split: int, part: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Take in what was seen in a split, and merge what is complete from the newest on."""
        self._parts[split] = part
        while self._batches and self._parts.keys() >= set(self._batches[0]):
            part = _join([self._parts.pop(split) for split in self._batches.pop(0)])
            self._merged = part if self._merged is None else blend(*self._merged, *part)

    def result(self) -> torch.Tensor:
        """Float32 `[T, Hq, Dv]`."""
        assert self._merged is not None
        return self._merged[0].view(self._heads, self._stop - self._start, -1).transpose(0, 1)

    def look(self, split: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the KV at the positions of `spans[split]`, float32 `[Hkv, n, D]` and `[Hkv, n, Dv]`.

        Out `[Hkv, G·T, Dv]` and natural lse `[Hkv, G·T, 1]` (of a single split, anything: it merges with none); a row
        that sees none of the keys is 0 and `_NOTHING`.
        """
        lo, hi = self.spans[split]
        scores = torch.bmm(self._rows, keys.mT)
        if self._rules.softcap is not None:
            scores = scores.div_(self._rules.softcap).tanh_().mul_(self._rules.softcap)
        by_token = (scores.shape[0], -1, self._stop - self._start)
        hidden = self._rules.hidden(self._start, self._stop, lo, hi)
        if hidden is not None:
            scores.view(*by_token, hi - lo).masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        if len(self.spans) == 1:  # nothing to merge with
            return torch.bmm(weights, values), weights
        lse = _log_sum(scores, weights, -1)
        if hidden is not None and self._rules.window is not None:
            blind = hidden.all(-1, keepdim=True)
            weights.view(*by_token, hi - lo).masked_fill_(blind, 0.0)
            lse.view(*by_token, 1).masked_fill_(blind, _NOTHING)
        return torch.bmm(weights, values), lse


Seen: TypeAlias = list[tuple[_Tile, int, tuple[torch.Tensor, torch.Tensor]]]
"""Results by tile and split."""


def _units(spans: Sequence[tuple[int, int]], rules: Rules) -> list[range]:
    seen: dict[int, list[int]] = {}
    for span in spans:
        seen.setdefault(span[0] // rules.unit_tokens, []).extend(span)
    size = rules.page_size
    return [range(min(ends) // size, -(-max(ends) // size)) for _, ends in sorted(seen.items())[::-1]]


def _tiles(start: int, stop: int, split_tokens: int) -> list[tuple[int, int]]:
    """Positions `[start, stop)` cut at the boundaries of splits."""
    bounds = [start, *range((start // split_tokens + 1) * split_tokens, stop, split_tokens), stop]
    return [(lo, hi) for lo, hi in pairwise(bounds) if lo < hi]


def _join(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the results of several splits at once, in the order given."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts])
    shares = torch.softmax(lse, 0)
    return torch.stack([part[0] for part in parts]).mul_(shares).sum(0), _log_sum(lse, shares, 0)


def _log_sum(scores: torch.Tensor, weights: torch.Tensor, dim: int) -> torch.Tensor:
    """log Σ exp(scores) along `dim`, kept as an axis of 1, where `weights` is their softmax.

    The largest weight is 1 / Σ exp(scores - max), so that its logarithm stands in for another pass of exp.
    """
    return scores.amax(dim, keepdim=True).sub_(weights.amax(dim, keepdim=True).log_())


def _gather(pages: torch.Tensor, begin: int, lo: int, hi: int, rules: Rules) -> torch.Tensor:
    """Positions `[lo, hi)` of pages that begin at position `begin`, float32 `[Hkv, hi - lo, D]`."""
    first = (lo - begin) // rules.page_size
    rows = pages[first : -(-(hi - begin) // rules.page_size)]
    skip, size = lo - begin - first * rules.page_size, hi - lo
    if rules.order is PageOrder.HND:
        return rows.transpose(0, 1).flatten(1, 2).narrow(1, skip, size).float()
    return rows.flatten(0, 1).narrow(0, skip, size).transpose(0, 1).float()
