"""What `swapkv bench attention` attends to: one sequence's KV in a few layers, and the queries of one decode step."""

from enum import Enum

import attrs
import torch

from swapkv.attention import HostRun, LayerKV, Rules, StepRow, attend
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder

_PASSAGE_TOKENS = 64
_SOUGHT_SHARE = 1 / 8
_SOUGHT_BY_A_HEAD = 2
_ALIKE = 0.8
_LEAN = 8.5


class Data(Enum):
    """What keys and queries are like. No way's bits or bytes depend on it, unless pages are selected."""

    RANDOM = "random"
    """Independent normal numbers. A head's weight is spread over most tokens: the worst case for selecting pages."""
    CONCENTRATED = "concentrated"
    """Made up, so that a head's weight lies in few tokens. Keys come in passages of 64 tokens on average that begin
    anywhere: √0.8 times the passage's random direction, and √0.2 times their own. The heads of a layer look for an eighth
    of the passages between them, each for two: its query is random plus 8.5 / √head_dim times the directions of those."""


@attrs.frozen(kw_only=True)
class Case:
    """What is measured. `fraction`: of the pages, in host memory. `link_mb_s`: MB/s of 10^6 bytes; None: balanced, so
    that the host pages take as long to come as all KV takes to be attended to. `selected`: shares of the pages that are
    seen when pages are selected. Raises `ProtocolError` for numbers that do not fit."""

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
    selected: tuple[float, ...] = (0.125, 0.25, 0.5)
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
        if self.host_pages < 1:
            raise ProtocolError(
                f"fraction={self.fraction} of {self.pages} pages leaves none in host memory: try more tokens"
            )
        if not all(0 < share <= 1 for share in self.selected):
            raise ProtocolError(f"selected={self.selected} must be above 0 and at most 1: shares of the pages")
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


class Layers:
    """KV on the device and, the oldest pages, in host memory too; and the queries of one decode step.

    `planes`: by layer, keys and values `[pages, page_size, Hkv, D]`. `queries`: `[layers, 1, Hq, D]`. `table`: the row of
    each logical page; `away`: those of the pages in host memory.
    """

    def __init__(self, case: Case, data: Data) -> None:
        generator = torch.Generator().manual_seed(case.seed)
        shape = (case.pages, case.page_size, case.kv_heads, case.head_dim)
        self.case, self.data = case, data
        self.table = torch.randperm(case.pages, generator=generator)
        self.planes = [[torch.randn(shape, generator=generator) for _ in range(2)] for _ in range(case.layers)]
        self.queries = torch.randn(case.layers, 1, case.heads, case.head_dim, generator=generator)
        if data is Data.CONCENTRATED:
            for (keys, _), query in zip(self.planes, self.queries, strict=True):
                _concentrate(keys, query[0], self.table, generator)
        self.away = self.table[: case.host_pages]
        self._partly = self.table.clone()
        self._partly[: case.host_pages] = -1
        self.host = [
            tuple(plane[self.away].view(torch.uint8).view(len(self.away), -1) for plane in planes)
            for planes in self.planes
        ]

    def row(self) -> StepRow:
        return StepRow(start=self.case.context - 1, num_tokens=1, kv=self.kv)

    def kv(self, layer: int) -> LayerKV:
        run = HostRun(first=0, planes=self.host[layer])
        planes = tuple(self.planes[layer])
        return LayerKV(name=self.data, layer=layer, version=0, planes=planes, page_table=self._partly, runs=(run,))

    def attend(self, planes: list[torch.Tensor], layer: int) -> torch.Tensor:
        """All KV, as if it were all on the device."""
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


def _concentrate(keys: torch.Tensor, query: torch.Tensor, table: torch.Tensor, generator: torch.Generator) -> None:
    """Make random keys and a random query, `[Hq, D]`, those that `Data.CONCENTRATED` describes."""
    pages, page_size, kv_heads, head_dim = keys.shape
    tokens, heads = pages * page_size, len(query)
    passages = max(1, tokens // _PASSAGE_TOKENS)
    directions = torch.randn(passages, kv_heads, head_dim, generator=generator)
    begins = torch.zeros(tokens, dtype=torch.int64)
    begins[1 + torch.randperm(tokens - 1, generator=generator)[: passages - 1]] = 1
    by_token = directions[begins.cumsum(0)].view(pages, page_size, kv_heads, head_dim)
    keys.mul_((1 - _ALIKE) ** 0.5)[table] += _ALIKE**0.5 * by_token
    sought = torch.randperm(passages, generator=generator)[: max(1, round(_SOUGHT_SHARE * passages))]
    chances = torch.rand(heads, len(sought), generator=generator)
    wanted = sought[chances.topk(min(_SOUGHT_BY_A_HEAD, len(sought))).indices]
    kv_head = torch.arange(heads) // (heads // kv_heads)
    query += _LEAN * head_dim**-0.5 * directions[wanted, kv_head[:, None]].sum(1)
