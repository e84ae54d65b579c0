"""Steps that see only some pages, those of the highest key bounds: what they take, and how far their results are off.

Approximate, so these are rows of their own. A layer selects when it has its query, so its pages cannot come ahead of it
as those of exact streaming do.
"""

import attrs
import torch

from swapkv.attention import KeyBounds, Step, StepRow, Streamer, only_pages, relative_error, select_pages
from swapkv.bench.attention_data import Data, Layers
from swapkv.layout import PageOrder
from swapkv.streams.base import Stream

MOST = 0.9
"""The share of a head's weight that `Selector.most` looks for."""


@attrs.frozen(kw_only=True)
class Selection:
    """`share`: of the pages, which are seen."""

    data: Data
    share: float


@attrs.frozen(kw_only=True)
class Selected:
    """What was measured of a selection. `step_s`: a decode step, median, its selecting included. `relative_error`: of all
    layers' outputs against exact attention to the same data. `weight_seen`: of a head's exact weight, how much lies in
    the pages seen, on average."""

    selection: Selection
    pages: int
    step_s: float
    bytes_over_link: int
    relative_error: float
    weight_seen: float

    def as_json(self) -> dict[str, object]:
        numbers = attrs.asdict(self, filter=lambda field, _: field.name != "selection")
        return {"data": self.selection.data.value, "share": self.selection.share, **numbers}


class Selector:
    """One decode step over some KV, page by page. The bounds are taken beforehand, as an engine does when it fills a page."""

    def __init__(self, layers: Layers, streamer: Streamer) -> None:
        self._layers = layers
        self._streamer = streamer
        context = layers.case.context
        self._bounds = [KeyBounds.of(keys[layers.table], PageOrder.NHD, context) for keys, _ in layers.planes]

    def pages(self, share: float) -> int:
        """How many are seen. The first one and the newest always are."""
        return max(2, round(share * self._layers.case.pages))

    def step(self, share: float, stream: Stream) -> list[torch.Tensor]:
        """All layers, host pages streamed; runs where it is called, in a callable of `stream`."""
        return [self._attend(layer, share, stream) for layer in range(self._layers.case.layers)]

    def measured(self, selection: Selection, step_s: float, bytes_over_link: int, outs: list[torch.Tensor]) -> Selected:
        """With what `outs`, a step's results, are off by."""
        layers = self._layers
        exact = [layers.attend(planes, layer) for layer, planes in enumerate(layers.planes)]
        return Selected(
            selection=selection,
            pages=min(self.pages(selection.share), layers.case.pages),
            step_s=step_s,
            bytes_over_link=bytes_over_link,
            relative_error=relative_error(torch.stack(outs), torch.stack(exact)),
            weight_seen=self._weight_seen(selection.share),
        )

    def most(self) -> float:
        """The share of the tokens that holds `MOST` of a head's weight, on average over heads and layers."""
        context = self._layers.case.context
        held = [self._weights(layer).sort(-1, descending=True).values.cumsum(-1) for layer in range(len(self._bounds))]
        needed = [((weights < MOST).sum(-1) + 1).clamp(max=context) for weights in held]
        return float(torch.stack(needed).float().mean()) / context

    def _select(self, layer: int, share: float) -> torch.Tensor:
        return select_pages(self._layers.queries[layer], self._bounds[layer], self.pages(share))

    def _attend(self, layer: int, share: float, stream: Stream) -> torch.Tensor:
        layers, case = self._layers, self._layers.case
        selected = self._select(layer, share)
        kv = only_pages(layers.kv(layer), selected)
        start = (len(selected) - 1) * case.page_size + (case.context - 1) % case.page_size
        row = StepRow(start=start, num_tokens=1, kv=lambda _: kv)
        step = Step(self._streamer, [row], 1, lambda _: case.rules)
        return step.attend(0, 0, layers.queries[layer], stream)

    def _weight_seen(self, share: float) -> float:
        size = self._layers.case.page_size
        seen = []
        for layer in range(len(self._bounds)):
            weights = self._weights(layer)
            page = torch.arange(weights.shape[-1]) // size
            seen.append(weights[:, torch.isin(page, self._select(layer, share))].sum(-1).mean())
        return float(torch.stack(seen).mean())

    def _weights(self, layer: int) -> torch.Tensor:
        """The exact ones, `[Hq, tokens]`."""
        layers, case = self._layers, self._layers.case
        keys = layers.planes[layer][0][layers.table].flatten(0, 1)[: case.context]
        grouped = layers.queries[layer].view(case.kv_heads, -1, case.head_dim)
        scores = torch.einsum("hgd,thd->hgt", grouped, keys) * case.head_dim**-0.5
        return torch.softmax(scores, -1).flatten(0, 1)
