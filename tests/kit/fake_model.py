"""A model whose next token depends on every byte of KV that it reads, and what it must say without any pool."""

from collections.abc import Callable, Sequence

import torch

from swapkv import Forward, KVDtype, KVLayout, Pool
from swapkv.schedulers import BatchRow

VOCAB = 9973
LAYERS = 2


def fake_layout(page_size: int = 4, chunk_tokens: int = 8) -> KVLayout:
    return KVLayout.dense(
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=2,
        dtype=KVDtype.FLOAT32,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
    )


def fake_generate(prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What `FakeModel` must generate."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        kv = (_kv(token, at, layer) * (at + 1) for layer in range(LAYERS) for at, token in enumerate(tokens))
        tokens.append(sum(kv) % VOCAB)
    return tokens[len(prompt) :]


class FakeModel:
    """A `schedulers.Model` for pools of `fake_layout`. `before_step` is called on the loop before each step."""

    def __init__(self, pool: Pool, before_step: Callable[[], None] = lambda: None) -> None:
        self.pool = pool
        self.before_step = before_step
        self.batches: list[list[str]] = []

    def __call__(self, forward: Forward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
        self.before_step()
        self.batches.append([row.name for row in rows])
        tables = [forward.page_tables(row.name)[0] for row in rows]
        return lambda: [self._next(row, table) for row, table in zip(rows, tables, strict=True)]

    def _next(self, row: BatchRow, table: torch.Tensor) -> int:
        """Write the KV of the row's tokens, then read all of it."""
        end, total = row.start + len(row.tokens), 0
        positions = torch.arange(end)
        pages, offsets = table[positions // self.pool.layout.page_size], positions % self.pool.layout.page_size
        for layer in range(LAYERS):
            new = [_kv(token, row.start + n, layer) for n, token in enumerate(row.tokens)]
            for name in ("k", "v"):
                plane = self.pool.memory.plane(layer, name).view(torch.int32)
                plane[pages[row.start :], offsets[row.start :]] = torch.tensor(new, dtype=torch.int32)[:, None, None]
                read = plane[pages, offsets].flatten(1).to(torch.int64)
                assert bool((read == read[:, :1]).all()), f"{row.name}: the KV of layer {layer} is torn"
            total += int((read[:, 0] * (positions + 1)).sum())
        return total % VOCAB


def _kv(token: int, position: int, layer: int) -> int:
    return token * 31 + position * 7 + layer * 3 + 1
