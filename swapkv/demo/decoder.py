"""What the demo asks of a model: KV read and written through pages only."""

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch

from swapkv.layout import KVLayout
from swapkv.streams.memory import PagedMemory


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """One sequence's part of a step.

    `tokens`: the tokens to run now; they stand at positions `start`, `start + 1`, … and their KV is written.
    `page_tables`: for each layer group int64 `[pages of start + len(tokens) tokens]`, rows of the group's planes;
    -1 for a page behind the window. `wait_layer(i)` returns once the KV of layer `i` may be read and written.
    `attend(i, query)`: attention of `query`, `[T, Hq, D]`, in layer `i`, for KV that is not all on the device; None: all
    of it is. It is asked layer by layer, and within a layer row by row.
    """

    tokens: Sequence[int]
    start: int
    page_tables: Sequence[torch.Tensor]
    wait_layer: Callable[[int], None] | None = None
    attend: Callable[[int, torch.Tensor], torch.Tensor] | None = None


class Decoder(Protocol):
    """A language model that generates greedily.

    A row's result depends on that row alone: neither on the rows beside it nor on where its pages lie, bit for bit.
    """

    name: str
    layout: KVLayout

    def encode(self, text: str) -> list[int]:
        """Text to tokens; at least one token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text that a person can read."""

    def forward(self, rows: Sequence[Row], memory: PagedMemory) -> list[int]:
        """Run one step and return the next token of every row."""
