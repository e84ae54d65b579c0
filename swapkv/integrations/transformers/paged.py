"""Attention of one sequence over its pages, plugged into a model by transformers' own interface.

It is one stateless function, registered under `ATTENTION_NAME`. What it needs to know about a sequence travels as the
keyword `swapkv_pages` of `model(...)`, which transformers hands down to every attention layer; so nothing is global,
and two models, or two threads with a model each, do not see each other.
"""

from collections.abc import Callable, Sequence

import attrs
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swapkv.attention import attend, write_pages
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder
from swapkv.streams.memory import PagedMemory

ATTENTION_NAME = "swapkv_paged"
"""What transformers knows `paged_attention` by, as in `model.set_attn_implementation(ATTENTION_NAME)`."""

PIECE_TOKENS = 256
"""Attention takes keys in runs that end at absolute multiples of this many tokens (rounded up to whole pages)."""


def piece_tokens(page_size: int) -> int:
    """`PIECE_TOKENS`, rounded up to whole pages."""
    return -(-PIECE_TOKENS // page_size) * page_size


@attrs.frozen(kw_only=True, eq=False)
class PagedKV:
    """Where the KV of one forward pass of one sequence lives.

    `memory`, `page_tables`, `wait_layer` as in `Row`; the pass runs the tokens at `start`, `start + 1`, ….
    `split_tokens`: how attention splits the keys, see `attend`.
    """

    memory: PagedMemory
    page_tables: Sequence[torch.Tensor]
    start: int
    split_tokens: int
    wait_layer: Callable[[int], None] | None = None

    def window(self, layer: int) -> int | None:
        """How many tokens back `layer` sees, itself included; None for all."""
        layout = self.memory.layout
        return layout.groups[layout.group_of_layer[layer]].window

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store the new tokens' KV in `layer` and attend. Shapes, numbers and errors as in `write_pages`, `attend`."""
        self.write(layer, key, value)
        return attend(
            query,
            self.memory.plane(layer, "k"),
            self.memory.plane(layer, "v"),
            self.page_tables[self.memory.layout.group_of_layer[layer]],
            self.start,
            order=PageOrder.NHD,
            window=self.window(layer),
            scale=scale,
            softcap=softcap,
            split_tokens=self.split_tokens,
        )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens' KV in `layer`, `[T, Hkv, D]` each."""
        if self.wait_layer is not None:
            self.wait_layer(layer)
        table = self.page_tables[self.memory.layout.group_of_layer[layer]]
        write_pages(self.memory.plane(layer, "k"), key, table, self.start, PageOrder.NHD)
        write_pages(self.memory.plane(layer, "v"), value, table, self.start, PageOrder.NHD)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    swapkv_pages: PagedKV | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """Write the new KV to its pages, then attend over all of the sequence's pages.

    The signature is that of transformers' `AttentionInterface`; `_others` is what models add to it (dropout, position
    ids, …) and paged attention has no use for. `query`: `[1, Hq, T, D]`. `key`, `value`: `[1, Hkv, T, D]`, rotated.
    A query at position p sees positions above p - `sliding_window`. Returns `[1, T, Hq, Dv]` and no weights.
    Raises `ProtocolError` if the call came without pages, or asks for what pages cannot do: a mask (padding,
    bidirectional), attention sinks, a batch, a window that the layout does not have.
    """
    if swapkv_pages is None:
        raise ProtocolError(
            f"{type(module).__name__} was called without swapkv_pages=: run the model through PagedTransformer, or "
            "give it back its own attention with model.set_attn_implementation('sdpa')"
        )
    caller = type(module).__name__
    if query.shape[0] != 1:
        raise ProtocolError(f"{caller} got a batch of {query.shape[0]} rows: pass 1 row at a time")
    if attention_mask is not None:
        raise ProtocolError(f"{caller} got a mask, paged attention is causal and takes none: pass no attention_mask")
    refuse_other_attention(module, s_aux)
    layer = _layer_index(module)
    refuse_other_window(layer, sliding_window, swapkv_pages.window(layer))
    new = (part[0].transpose(0, 1) for part in (query, key, value))
    return swapkv_pages.attend(layer, *new, scale=scaling, softcap=softcap).unsqueeze(0), None


def _layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ProtocolError(f"{type(module).__name__}.layer_idx is {layer!r}: paged attention must know its layer")
    return layer


def refuse_other_attention(module: torch.nn.Module, sinks: torch.Tensor | None) -> None:
    """Raise `ProtocolError` for what would silently compute something else than the model means."""
    caller = type(module).__name__
    if not getattr(module, "is_causal", True):
        raise ProtocolError(f"{caller} is not causal, paged attention is: use another model")
    if sinks is not None:
        raise ProtocolError(f"{caller} has attention sinks (s_aux), paged attention has none: use another model")


def refuse_other_window(layer: int, sliding_window: int | None, window: int | None) -> None:
    """Raise `ProtocolError` if `layer` attends with another window than its pages are laid out for."""
    if sliding_window != window:
        raise ProtocolError(
            f"layer {layer} attends with sliding_window={sliding_window}, its pages are laid out for window={window}: "
            "allocate the memory with the model's own layout (layout_of), and check config.layer_types"
        )


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
