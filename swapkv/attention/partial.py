"""Partial attention results and how they merge: softmax over a part of the keys, with its log-sum-exp.

A softmax over many keys can be computed part by part and joined exactly (up to rounding): the online softmax of
Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018), as FlashAttention uses it (Dao et al., 2022).
"""

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from math import log

import attrs
import torch

from swapkv.errors import ProtocolError


class LogBase(Enum):
    """The base of the logarithm in a log-sum-exp."""

    NATURAL = "e"
    TWO = "2"


def _float32(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.float32)


@attrs.frozen(kw_only=True, eq=False)
class Partial:
    """Attention of `T` queries over a part of their keys.

    `out`: `[T, Hq, Dv]`, the softmax-weighted values of that part (normalised within it).
    `lse`: `[T, Hq]`, the logarithm of the sum of exponentials of that part's scaled scores, finite where `count` > 0.
    `count`: int64 `[T]`, how many keys each query saw. It alone decides whether a row is empty: kernels disagree on
    `out` and `lse` of an empty row (0, -inf, +inf), so neither is ever read there.
    `base`: of the logarithm in `lse`; must be declared, and natural. `from_base2` takes the other kind.
    `out` and `lse` are stored as float32 whatever dtype they come in.
    Raises `ProtocolError` for shapes that do not fit together and for a base that is missing or not natural.
    """

    out: torch.Tensor = attrs.field(converter=_float32)
    lse: torch.Tensor = attrs.field(converter=_float32)
    count: torch.Tensor
    base: LogBase | None = None

    def __attrs_post_init__(self) -> None:
        if self.base is None:
            raise ProtocolError("the base of lse is not declared: pass base=LogBase.NATURAL or use Partial.from_base2")
        if self.base is not LogBase.NATURAL:
            raise ProtocolError(f"base={self.base} is not natural: use Partial.from_base2, which converts")
        shape = self.out.shape
        if self.out.ndim != 3 or self.lse.shape != shape[:2] or self.count.shape != shape[:1]:
            raise ProtocolError(
                f"out {tuple(shape)}, lse {tuple(self.lse.shape)} and count {tuple(self.count.shape)} do not fit "
                "together: give [T, Hq, Dv], [T, Hq] and [T]"
            )
        if self.count.dtype != torch.int64:
            raise ProtocolError(f"count is {self.count.dtype}: give int64 numbers of keys")

    @classmethod
    def from_base2(cls, *, out: torch.Tensor, lse: torch.Tensor, count: torch.Tensor) -> "Partial":
        """A partial whose `lse` is a logarithm to the base 2, as FlashInfer returns it. Shapes as in `Partial`."""
        return cls(out=out, lse=_float32(lse) * log(2.0), count=count, base=LogBase.NATURAL)


def empty(num_tokens: int, num_heads: int, value_dim: int, *, device: torch.device | None = None) -> Partial:
    """The neutral element of `merge` for `[num_tokens, num_heads, value_dim]`: out 0, lse -inf, count 0."""
    return Partial(
        out=torch.zeros(num_tokens, num_heads, value_dim, device=device),
        lse=torch.full((num_tokens, num_heads), -torch.inf, device=device),
        count=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        base=LogBase.NATURAL,
    )


def merge(partials: Sequence[Partial]) -> Partial:
    """Join partials over disjoint parts of the keys, from the first to the last.

    Returns out float32 `[T, Hq, Dv]`, lse float32 `[T, Hq]` (natural) and count int64 `[T]`. The order is part of the
    result: float addition does not commute with regrouping, so callers that want equal bits keep a fixed order.
    A row that only one part has seen passes through bit for bit; a row that none has seen is out 0, lse -inf, count 0.
    Raises `ProtocolError` if there is nothing to merge (use `empty`) or shapes differ.
    """
    if not partials:
        raise ProtocolError("merge got 0 partials and cannot know their shape: pass at least one, such as empty(...)")
    for partial in partials:
        if partial.out.shape != partials[0].out.shape:
            raise ProtocolError(
                f"partials of shapes {tuple(partials[0].out.shape)} and {tuple(partial.out.shape)} cannot merge: "
                "all must hold the same queries, heads and value_dim"
            )
    return reduce(_merge_pair, map(_normalise, partials))


def blend(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge of two parts, the first of which has seen at least one key in every row.

    `out`, `other_out`: float32 `[..., Dv]`; `lse`, `other_lse`: float32 `[..., 1]`, natural. An empty row of the
    other is out 0, lse -inf or the lowest float32. With a = exp(lse) and b = exp(other_lse) the results are
    (a·out + b·other_out) / (a + b) and log(a + b), where b / (a + b) = sigmoid(other_lse - lse): nothing overflows.
    """
    weight = torch.sigmoid(other_lse - lse)
    return torch.lerp(out, other_out, weight), torch.logaddexp(lse, other_lse)


def _normalise(partial: Partial) -> Partial:
    """The same partial with its empty rows at out 0, lse -inf, whatever stood there."""
    seen = (partial.count > 0).unsqueeze(-1)
    return attrs.evolve(
        partial,
        out=torch.where(seen.unsqueeze(-1), partial.out, 0.0),
        lse=torch.where(seen, partial.lse, -torch.inf),
    )


def _merge_pair(left: Partial, right: Partial) -> Partial:
    """Both normalised. Rows empty on one side are copied, not computed, so that even a -0.0 survives."""
    left_seen, right_seen = (left.count > 0).view(-1, 1, 1), (right.count > 0).view(-1, 1, 1)
    left_lse, right_lse = left.lse.unsqueeze(-1), right.lse.unsqueeze(-1)
    both = left_seen & right_seen
    out, lse = blend(left.out, left_lse, right.out, right_lse)
    return Partial(
        out=torch.where(both, out, torch.where(right_seen, right.out, left.out)),
        lse=torch.where(both, lse, torch.where(right_seen, right_lse, left_lse)).squeeze(-1),
        count=left.count + right.count,
        base=LogBase.NATURAL,
    )
