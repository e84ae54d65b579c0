"""Exact attention over paged KV, with bits that do not depend on where the pages lie.

Keys are taken in *splits*: runs of `split_tokens` positions that begin at its absolute multiples. Each split gives a
softmax over its own keys with a log-sum-exp, and splits merge from the newest to the oldest (FlashAttention, Dao et
al., 2022; split-KV decoding as in Flash-Decoding, 2023). Since neither boundaries nor order know of physical pages,
moving KV elsewhere and back changes no bit. Bits do depend on how many queries a call holds (GEMM kernels differ by
shape) and on the number of threads.
"""

from itertools import pairwise
from math import ceil

import attrs
import torch
import torch.nn.functional as F  # noqa: N812

from swapkv.attention.partial import blend
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder

_BATCH_ROWS = 32
"""Splits are taken together while their number times the queries' stays within this: fewer, larger operations."""

_NOTHING = torch.finfo(torch.float32).min
"""The log-sum-exp of no keys. Finite, so that two of them subtract to 0; its exponential is 0 beside any real one."""


def write_pages(plane: torch.Tensor, new: torch.Tensor, page_table: torch.Tensor, start: int, order: PageOrder) -> None:
    """Store the KV of tokens at positions `start`, `start + 1`, … in their pages.

    `plane`: `[num_pages, page_size, Hkv, D]` (NHD) or `[num_pages, Hkv, page_size, D]` (HND), written in place.
    `new`: `[T, Hkv, D]`, converted to the plane's dtype. `page_table`: int64 `[pages]`, the row of `plane` that holds
    each logical page; -1 for a page that is not there.
    Raises `ProtocolError`, with nothing written, if a position has no page or shapes do not fit.
    """
    if plane.ndim != 4 or new.ndim != 3 or new.shape[1:] != (plane.shape[_head_axis(order)], plane.shape[3]):
        raise ProtocolError(f"new {tuple(new.shape)} does not fit a plane {tuple(plane.shape)} ({order.name})")
    page_size = _page_size(plane, order)
    stop = start + new.shape[0]
    if start == stop:
        return
    _check_pages(page_table, start, stop, page_size, plane.shape[0])
    first = start // page_size
    if (stop - 1) // page_size == first:  # a plain copy is several times cheaper than indexing, and decode ends here
        page = plane[int(page_table[first])]
        slots = (page if order is PageOrder.NHD else page.transpose(0, 1))[start - first * page_size :][: new.shape[0]]
        slots.copy_(new)
        return
    positions = torch.arange(start, stop)
    tokens = plane if order is PageOrder.NHD else plane.transpose(1, 2)
    tokens[page_table[positions // page_size], positions % page_size] = new.to(plane.dtype)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: int,
    *,
    order: PageOrder,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    split_tokens: int = 256,
) -> torch.Tensor:
    """Causal attention of new tokens over the KV of their sequence, which must hold their own KV already.

    `query`: `[T, Hq, D]`; query t stands at position p = `start + t` and sees positions max(0, p - window + 1) … p.
    `keys`, `values`: planes `[num_pages, page_size, Hkv, D]` (NHD) or `[num_pages, Hkv, page_size, D]` (HND), the last
    axis of `values` may differ (Dv). `page_table`: int64 `[pages]`, rows of the planes; -1 only for pages that no query
    sees. Query head h reads KV head h // (Hq / Hkv).
    `window`: tokens, None for all. `scale`: factor of the scores, D ** -0.5 by default. `softcap`: scores become
    softcap · tanh(scores / softcap) (Gemma 2, 2024). `split_tokens`: a multiple of the page size, or a divisor of it.
    Returns `[T, Hq, Dv]` in the query's dtype, not differentiable; the arithmetic is float32. Scratch memory is one
    split of KV and Hq · split_tokens · max(split_tokens, 32) scores and weights, whatever T is.
    Raises `ProtocolError` if shapes or numbers do not fit, or if a query sees a page that is not there.
    """
    num_tokens, num_heads, head_dim = _check_shapes(query, keys, values, order)
    view = _View(
        keys=keys,
        values=values,
        page_table=page_table,
        order=order,
        page_size=_page_size(keys, order),
        window=window,
        softcap=softcap,
        split_tokens=split_tokens,
    )
    _check_numbers(start, view)
    if not num_tokens:
        return query.new_empty(0, num_heads, values.shape[3])
    stop = start + num_tokens
    _check_pages(page_table, _first_seen(start, window), stop, view.page_size, keys.shape[0])
    scaled = query.detach().float() * (head_dim**-0.5 if scale is None else scale)
    bounds = [start, *range((start // split_tokens + 1) * split_tokens, stop, split_tokens), stop]
    tiles = [_attend_tile(scaled[lo - start : hi - start], lo, view) for lo, hi in pairwise(bounds)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles)).to(query.dtype)


@attrs.frozen(kw_only=True, eq=False)
class _View:
    """The KV of one layer of one sequence, read by position, and how queries weigh it."""

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    order: PageOrder
    page_size: int
    window: int | None
    softcap: float | None
    split_tokens: int

    def gather(self, plane: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """The plane at positions `[lo, hi)`, float32 `[Hkv, hi - lo, D]`; a copy even where pages adjoin.

        Nothing outside these positions is returned, so stale bytes elsewhere in a page never enter the arithmetic.
        """
        first, last = lo // self.page_size, -(-hi // self.page_size)
        rows = plane.index_select(0, self.page_table[first:last])
        skip, size = lo - first * self.page_size, hi - lo
        if self.order is PageOrder.HND:
            return rows.transpose(0, 1).flatten(1, 2).narrow(1, skip, size).float()
        heads, dim = rows.shape[2:]  # one strided view is cheaper than flatten, narrow and transpose
        return rows.as_strided((heads, size, dim), (dim, heads * dim, 1), skip * heads * dim).float()


def _attend_tile(query: torch.Tensor, start: int, view: _View) -> torch.Tensor:
    """Attention of scaled queries `[T, Hq, D]` that all lie in one split. Returns float32 `[T, Hq, Dv]`.

    That split comes first: every query sees at least itself in it, so what is merged into is never empty.
    """
    num_tokens, num_heads, head_dim = query.shape
    size, stop = view.split_tokens, start + num_tokens
    first = _first_seen(start, view.window)
    begins = range(first // size * size, start + 1, size)
    spans = [(max(lo, first), min(lo + size, stop)) for lo in begins]
    num_kv_heads = view.keys.shape[_head_axis(view.order)]
    rows = query.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # GQA: a group's heads are rows of one product
    if len(spans) == 1:
        out = _attend_alone(rows, start, stop, spans[0], view)
    else:
        batch = max(1, _BATCH_ROWS // num_tokens)
        out, lse = _attend_splits(rows, start, stop, spans[-batch:], view)
        for end in range(len(spans) - batch, 0, -batch):
            out, lse = blend(out, lse, *_attend_splits(rows, start, stop, spans[max(0, end - batch) : end], view))
    return out.view(num_heads, num_tokens, -1).transpose(0, 1)


def _attend_alone(rows: torch.Tensor, start: int, stop: int, span: tuple[int, int], view: _View) -> torch.Tensor:
    """Attention of the queries at `[start, stop)`, `rows` `[Hkv, G·T, D]`, whose keys are all at `span`.

    Returns `[Hkv, G·T, Dv]`.
    """
    scores = _score(rows, *span, view)
    hidden = _hidden(start, stop, *span, view.window)
    if hidden is not None:
        scores.view(scores.shape[0], -1, stop - start, scores.shape[2]).masked_fill_(hidden, -torch.inf)
    return torch.bmm(torch.softmax(scores, -1), view.gather(view.values, *span))


def _attend_splits(
    rows: torch.Tensor, start: int, stop: int, spans: list[tuple[int, int]], view: _View
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries at `[start, stop)`, `rows` `[Hkv, G·T, D]`, over adjoining splits, oldest first.

    `spans`: the positions `[lo, hi)` of each split that any of the queries sees.
    Returns out `[Hkv, G·T, Dv]` and natural lse `[Hkv, G·T, 1]`; a row that sees none of the keys is 0 and `_NOTHING`.
    """
    size = view.split_tokens
    scores = torch.stack([_pad(_score(rows, lo, hi, view), lo % size, size) for lo, hi in spans])
    by_token = (len(spans), rows.shape[0], -1, stop - start)
    oldest = spans[0][0] // size * size
    hidden = _hidden(start, stop, oldest, oldest + len(spans) * size, view.window)
    if hidden is not None:
        hidden = hidden.view(stop - start, len(spans), size).transpose(0, 1)[:, None, None]
        scores.view(*by_token, size).masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, -1)
    lse = _log_sum(scores, weights, -1)
    if hidden is not None and view.window is not None:
        blind = hidden.all(-1, keepdim=True)
        weights.view(*by_token, size).masked_fill_(blind, 0.0)
        lse.view(*by_token, 1).masked_fill_(blind, _NOTHING)
    parts = [
        torch.bmm(weight[:, :, lo % size : lo % size + hi - lo], view.gather(view.values, lo, hi))
        for weight, (lo, hi) in zip(weights.unbind(), spans, strict=True)
    ]
    if len(parts) == 1:
        return parts[0], lse[0]
    shares = torch.softmax(lse, 0)
    return torch.stack(parts).mul_(shares).sum(0), _log_sum(lse, shares, 0)


def _score(rows: torch.Tensor, lo: int, hi: int, view: _View) -> torch.Tensor:
    """Scores of the keys at `[lo, hi)`, `[Hkv, G·T, hi - lo]`, hidden ones too."""
    scores = torch.bmm(rows, view.gather(view.keys, lo, hi).mT)
    if view.softcap is not None:
        scores = scores.div_(view.softcap).tanh_().mul_(view.softcap)
    return scores


def _pad(scores: torch.Tensor, column: int, size: int) -> torch.Tensor:
    """Scores that begin at `column` of a split, widened to all `size` columns of it by -inf."""
    missing = size - column - scores.shape[2]
    return F.pad(scores, (column, missing), value=-torch.inf) if column or missing else scores


def _log_sum(scores: torch.Tensor, weights: torch.Tensor, dim: int) -> torch.Tensor:
    """log Σ exp(scores) along `dim`, kept as an axis of 1, where `weights` is their softmax.

    The largest weight is 1 / Σ exp(scores - max), so that its logarithm stands in for another pass of exp.
    """
    return scores.amax(dim, keepdim=True).sub_(weights.amax(dim, keepdim=True).log_())


def _hidden(start: int, stop: int, lo: int, hi: int, window: int | None) -> torch.Tensor | None:
    """Where queries at `[start, stop)` do not see keys at `[lo, hi)`, bool `[T, hi - lo]`; None if they see all."""
    if stop == start + 1 or (hi <= start + 1 and (window is None or lo >= stop - window)):
        return None
    query, key = torch.arange(start, stop)[:, None], torch.arange(lo, hi)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)


def _head_axis(order: PageOrder) -> int:
    return 2 if order is PageOrder.NHD else 1


def _page_size(plane: torch.Tensor, order: PageOrder) -> int:
    return plane.shape[1] if order is PageOrder.NHD else plane.shape[2]


def _first_seen(position: int, window: int | None) -> int:
    """The oldest position that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _check_shapes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, order: PageOrder
) -> tuple[int, int, int]:
    """The shape of the query."""
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ProtocolError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must have 4 axes and agree in all but the last"
        )
    if query.ndim != 3 or query.shape[2] != keys.shape[3] or query.shape[1] % keys.shape[_head_axis(order)]:
        raise ProtocolError(
            f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)} ({order.name}): it must be [T, Hq, D] "
            "with D that of the keys and Hq a multiple of their heads"
        )
    return query.shape[0], query.shape[1], query.shape[2]


def _check_numbers(start: int, view: _View) -> None:
    if start < 0:
        raise ProtocolError(f"start={start} must be 0 or more: the position of the first query")
    if view.window is not None and view.window < 1:
        raise ProtocolError(f"window={view.window} must be at least 1 token, or None for full attention")
    if view.softcap is not None and view.softcap <= 0:
        raise ProtocolError(f"softcap={view.softcap} must be above 0, or None for no cap")
    size, page_size = view.split_tokens, view.page_size
    if size < 1 or (size % page_size and page_size % size):
        raise ProtocolError(
            f"split_tokens={size} must be a multiple or a divisor of page_size={page_size}; "
            f"try {ceil(max(size, 1) / page_size) * page_size}"
        )


def _check_pages(page_table: torch.Tensor, lo: int, hi: int, page_size: int, num_pages: int) -> None:
    """Every page of positions `[lo, hi)` must be in the table and in the plane."""
    if lo < 0:
        raise ProtocolError(f"start={lo} must be 0 or more: the position of the first token")
    if page_table.ndim != 1 or page_table.dtype != torch.int64:
        raise ProtocolError(f"page_table is {page_table.dtype} {tuple(page_table.shape)}: give int64 [pages]")
    first, last = lo // page_size, -(-hi // page_size)
    if len(page_table) < last:
        raise ProtocolError(f"page_table has {len(page_table)} pages, {hi} tokens of {page_size} a page need {last}")
    lowest, highest = torch.aminmax(page_table[first:last])
    if int(lowest) < 0 or int(highest) >= num_pages:
        used = page_table[first:last].tolist()
        logical = next(n for n, page in enumerate(used, first) if not 0 <= page < num_pages)
        raise ProtocolError(
            f"logical page {logical} (tokens {logical * page_size} to {(logical + 1) * page_size - 1}) is needed but "
            f"maps to {used[logical - first]}, not to one of the {num_pages} pages of the plane: restore it first"
        )
