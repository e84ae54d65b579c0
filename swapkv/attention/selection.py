"""Which pages to attend to when not all are worth their bytes: the k with the highest bound on any score. Approximate.

For each page the smallest and largest key component bounds every score that a query can have in it (Quest, Tang et al.,
2024). The bounds are small and stay on the device; the pages that are not chosen stay where they are.
"""

from itertools import pairwise

import attrs
import torch

from swapkv.attention.residency import HostRun, LayerKV
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder


@attrs.define(kw_only=True, eq=False)
class KeyBounds:
    """Per page and KV head the bounds of every key component. `lowest`, `highest`: float32 `[pages, Hkv, D]`."""

    lowest: torch.Tensor
    highest: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, order: PageOrder, tokens: int) -> "KeyBounds":
        """Of the pages `[pages, page_size, Hkv, D]` (NHD) or `[pages, Hkv, page_size, D]` (HND) of `tokens` tokens.

        What lies behind the last token is not looked at. Raises `ProtocolError` if the pages do not hold as many tokens.
        """
        by_token = keys if order is PageOrder.NHD else keys.transpose(1, 2)
        page_size = by_token.shape[1]
        if not 0 < tokens <= len(keys) * page_size or -(-tokens // page_size) != len(keys):
            raise ProtocolError(f"{tokens} tokens do not end in the last of {len(keys)} pages of {page_size}")
        stale = torch.arange(len(keys) * page_size).view(len(keys), page_size, 1, 1) >= tokens
        numbers = by_token.float()
        return cls(
            lowest=numbers.masked_fill(stale, torch.inf).amin(1), highest=numbers.masked_fill(stale, -torch.inf).amax(1)
        )

    def extend(self, keys: torch.Tensor, order: PageOrder, tokens: int) -> None:
        """Take in pages that come after those known; `tokens`: of these alone. See `of`."""
        added = KeyBounds.of(keys, order, tokens)
        self.lowest = torch.cat((self.lowest, added.lowest))
        self.highest = torch.cat((self.highest, added.highest))

    def drop_last(self) -> None:
        """Forget the last page, which has got more tokens: `extend` with it anew."""
        self.lowest, self.highest = self.lowest[:-1], self.highest[:-1]

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """The highest score that each query head could have in each page, `[Hq, pages]`; `query`: `[Hq, D]`, unscaled."""
        kv_heads = self.lowest.shape[1]
        grouped = query.float().view(kv_heads, -1, query.shape[-1])
        positive, negative = grouped.clamp(min=0), grouped.clamp(max=0)
        upper = torch.einsum("hgd,phd->hgp", positive, self.highest) + torch.einsum(
            "hgd,phd->hgp", negative, self.lowest
        )
        return upper.flatten(0, 1)


def select_pages(query: torch.Tensor, bounds: KeyBounds, k: int, *, first: int = 1, newest: int = 1) -> torch.Tensor:
    """The `k` pages that a decode query should see, int64, in order.

    `query`: `[1, Hq, D]`. The `first` and `newest` pages are always among them. A page ranks by how near its bound comes
    to the best one of a head, for the head where that is nearest: so each head has its best page.
    Raises `ProtocolError` if `k` leaves no room for those that are always seen.
    """
    pages = bounds.lowest.shape[0]
    if query.ndim != 3 or query.shape[0] != 1:
        raise ProtocolError(f"query {tuple(query.shape)}: pages are selected for one token, [1, Hq, D]")
    if k >= pages:
        return torch.arange(pages)
    if k < first + newest or newest < 1:
        raise ProtocolError(f"k={k} pages must hold the first {first} and the newest {newest}, which is at least 1")
    scores = bounds.scores(query[0])
    rank = (scores - scores.amax(1, keepdim=True)).amax(0)
    rank[:first] = torch.inf
    rank[pages - newest :] = torch.inf
    return rank.topk(k).indices.sort().values


def only_pages(kv: LayerKV, selected: torch.Tensor) -> LayerKV:
    """The same KV as if it had the `selected` pages alone, one after the other.

    The last page has to be among them. A decode query stands at the end of what is left: at position
    `(len(selected) - 1) * page_size` plus its place in the last page.
    """
    if len(selected) == 0 or int(selected[-1]) != len(kv.page_table) - 1:
        raise ProtocolError(
            f"the newest page {len(kv.page_table) - 1} must be selected: it holds the query's own token"
        )
    runs: list[HostRun] = []
    for run in kv.runs:
        inside = (selected >= run.first) & (selected < run.stop)
        places = inside.nonzero().flatten()
        if len(places):
            rows = selected[places] - run.first
            runs += _cut(places, rows, run)
    version = (kv.version, tuple(selected.tolist()))
    return attrs.evolve(kv, page_table=kv.page_table[selected], runs=tuple(runs), version=version)


def relative_error(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    """‖approximate - exact‖ / ‖exact‖ over everything, in float64."""
    difference = (approximate.double() - exact.double()).norm()
    return float(difference / exact.double().norm())


def _cut(places: torch.Tensor, rows: torch.Tensor, run: HostRun) -> list[HostRun]:
    """Runs of pages that follow each other both in the selection and in host memory: no byte is copied."""
    breaks = ((places[1:] - places[:-1] != 1) | (rows[1:] - rows[:-1] != 1)).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), len(places)]
    return [
        HostRun(
            first=int(places[lo]), planes=tuple(plane[int(rows[lo]) : int(rows[hi - 1]) + 1] for plane in run.planes)
        )
        for lo, hi in pairwise(bounds)
    ]
