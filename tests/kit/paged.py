"""KV in pages beside the same KV dense, and attention by its definition to compare with."""

from math import ceil

import torch

from swapkv.attention import attend, write_pages
from swapkv.layout import PageOrder

ERROR_MAX = 3e-6
"""Bound on |out - float64 reference| with keys, values and queries drawn from N(0, 1), in float32."""


class Paged:
    """KV of one sequence, dense and in pages. All that belongs to no token is NaN."""

    def __init__(
        self,
        tokens,
        *,
        num_kv_heads=2,
        head_dim=64,
        value_dim=None,
        page_size=16,
        order=PageOrder.NHD,
        dtype=torch.float32,
        seed=0,
        placement=0,
        spare=3,
    ):
        torch.manual_seed(seed)
        self.order, self.tokens = order, tokens
        self.dense_keys = torch.randn(tokens, num_kv_heads, head_dim).to(dtype)
        self.dense_values = torch.randn(tokens, num_kv_heads, value_dim or head_dim).to(dtype)
        pages = ceil(tokens / page_size)
        torch.manual_seed(1000 + placement)
        self.table = torch.randperm(pages + spare)[:pages]

        def plane(dense):
            heads, dim = dense.shape[1:]
            shape = (page_size, heads, dim) if order is PageOrder.NHD else (heads, page_size, dim)
            return torch.full((pages + spare, *shape), torch.nan, dtype=dtype)

        self.keys, self.values = plane(self.dense_keys), plane(self.dense_values)

    def write(self, start=0, stop=None):
        stop = self.tokens if stop is None else stop
        write_pages(self.keys, self.dense_keys[start:stop], self.table, start, self.order)
        write_pages(self.values, self.dense_values[start:stop], self.table, start, self.order)
        return self

    def attend(self, query, start, **options):
        return attend(query, self.keys, self.values, self.table, start, order=self.order, **options)

    def reference(self, query, start, **options):
        return dense_attention(query, self.dense_keys, self.dense_values, start, **options)


def dense_attention(query, keys, values, start, *, window=None, scale=None, softcap=None):
    """Attention in float64 over dense `[tokens, Hkv, D]`, by the definition."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", query, keys) * (query.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = start + torch.arange(len(query))[:, None]
    key = torch.arange(len(keys))
    hidden = key > position
    if window is not None:
        hidden |= key < position - window + 1
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def random_query(num_tokens, num_heads=4, head_dim=64, dtype=torch.float32, seed=7):
    torch.manual_seed(seed)
    return torch.randn(num_tokens, num_heads, head_dim).to(dtype)


def error(out, reference):
    assert torch.isfinite(out).all()
    return (out.double() - reference).abs().max().item()
