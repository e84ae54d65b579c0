"""Exact attention over paged KV on the device, with bits that do not depend on where the pages lie: see `pieces`."""

from collections.abc import Sequence

import torch

from swapkv.attention.pieces import Attention, Rules, head_axis, runs_of
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder


def write_pages(plane: torch.Tensor, new: torch.Tensor, page_table: torch.Tensor, start: int, order: PageOrder) -> None:
    """Store the KV of tokens at positions `start`, `start + 1`, … in their pages.

    `plane`: `[num_pages, page_size, Hkv, D]` (NHD) or `[num_pages, Hkv, page_size, D]` (HND), written in place.
    `new`: `[T, Hkv, D]`, converted to the plane's dtype. `page_table`: int64 `[pages]`, the row of `plane` that holds
    each logical page; -1 for a page that is not there.
    Raises `ProtocolError`, with nothing written, if a position has no page or shapes do not fit.
    """
    if plane.ndim != 4 or new.ndim != 3 or new.shape[1:] != (plane.shape[head_axis(order)], plane.shape[3]):
        raise ProtocolError(f"new {tuple(new.shape)} does not fit a plane {tuple(plane.shape)} ({order.name})")
    page_size = _page_size(plane, order)
    stop = start + new.shape[0]
    if start == stop:
        return
    if start < 0:
        raise ProtocolError(f"start={start} must be 0 or more: the position of the first token")
    check_pages(page_table, range(start // page_size, -(-stop // page_size)), page_size, plane.shape[0])
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
    sinks: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    split_tokens: int = 256,
) -> torch.Tensor:
    """Causal attention of new tokens over the KV of their sequence, which must hold their own KV already.

    `query`: `[T, Hq, D]`; query t stands at position p = `start + t` and sees positions max(0, p - window + 1) … p.
    `keys`, `values`: planes `[num_pages, page_size, Hkv, D]` (NHD) or `[num_pages, Hkv, page_size, D]` (HND), the last
    axis of `values` may differ (Dv). `page_table`: int64 `[pages]`, rows of the planes; -1 only for pages that no query
    sees. Query head h reads KV head h // (Hq / Hkv).
    The other numbers are those of `Rules`.
    Returns `[T, Hq, Dv]` in the query's dtype, not differentiable; the arithmetic is float32. Scratch memory is one unit
    of KV and Hq · split_tokens · split_tokens scores, whatever T is.
    Raises `ProtocolError` if shapes or numbers do not fit, or if a query sees a page that is not there.
    """
    num_tokens, num_heads = _check_shapes(query, keys, values, order)
    rules = Rules(
        order=order,
        page_size=_page_size(keys, order),
        window=window,
        sinks=sinks,
        scale=scale,
        softcap=softcap,
        split_tokens=split_tokens,
    )
    if not num_tokens:
        return query.new_empty(0, num_heads, values.shape[3])
    attention = Attention(query, start, keys.shape[head_axis(order)], rules)
    for pages in runs_of(attention.units):
        check_pages(page_table, pages, rules.page_size, keys.shape[0])
    gather = Gatherer((keys, values))
    for unit in attention.units:
        attention.feed(unit, *gather(page_table[unit.start : unit.stop]))
    return attention.result()


class Gatherer:
    """Pages of several planes, one after the other, in scratch memory that each call uses again."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = planes
        self._scratch: list[torch.Tensor] = []

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`rows` (int64 `[n]`, n > 0) of each plane, valid until the next call. Rows in sequence are not copied."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
            return tuple(plane[first : last + 1] for plane in self._planes)
        if not self._scratch or len(self._scratch[0]) < len(rows):
            self._scratch = [plane.new_empty(len(rows), *plane.shape[1:]) for plane in self._planes]
        taken = [scratch[: len(rows)] for scratch in self._scratch]
        for plane, out in zip(self._planes, taken, strict=True):
            torch.index_select(plane, 0, rows, out=out)
        return tuple(taken)


def _page_size(plane: torch.Tensor, order: PageOrder) -> int:
    return plane.shape[1] if order is PageOrder.NHD else plane.shape[2]


def _check_shapes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, order: PageOrder) -> tuple[int, int]:
    """How many tokens and heads the query has."""
    if keys.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ProtocolError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must have 4 axes and agree in all but the last"
        )
    if query.ndim != 3 or query.shape[2] != keys.shape[3] or query.shape[1] % keys.shape[head_axis(order)]:
        raise ProtocolError(
            f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)} ({order.name}): it must be [T, Hq, D] "
            "with D that of the keys and Hq a multiple of their heads"
        )
    return query.shape[0], query.shape[1]


def check_pages(page_table: torch.Tensor, pages: range, page_size: int, num_pages: int) -> None:
    """Raise `ProtocolError` unless the logical `pages` are in the table, and on the device."""
    if page_table.ndim != 1 or page_table.dtype != torch.int64:
        raise ProtocolError(f"page_table is {page_table.dtype} {tuple(page_table.shape)}: give int64 [pages]")
    if len(page_table) < pages.stop:
        raise ProtocolError(
            f"page_table has {len(page_table)} pages, tokens up to {pages.stop * page_size} of {page_size} a page need "
            f"{pages.stop}"
        )
    lowest, highest = torch.aminmax(page_table[pages.start : pages.stop])
    if int(lowest) < 0 or int(highest) >= num_pages:
        used = page_table[pages.start : pages.stop].tolist()
        logical = next(n for n, page in zip(pages, used, strict=True) if not 0 <= page < num_pages)
        raise ProtocolError(
            f"logical page {logical} (tokens {logical * page_size} to {(logical + 1) * page_size - 1}) is needed but "
            f"maps to {used[logical - pages.start]}, not to one of the {num_pages} pages of the plane: restore it first"
        )
