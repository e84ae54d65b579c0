"""The attention of models whose cache is a `SwapKVCache`, plugged in by transformers' own interface.

transformers hands an attention the keys that the cache's `update` returned, and nothing else of the cache. So `update`
returns keys with a `Ticket` attached, which says where to attend. The mask that goes with this attention is the plain
2D padding mask: causality and windows are the attention's own business.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swapkv.errors import ProtocolError
from swapkv.integrations.transformers.paged import refuse_other_attention, refuse_other_window

CACHE_ATTENTION_NAME = "swapkv"
"""What transformers knows `cached_attention` by, as in `model.set_attn_implementation("swapkv")`."""

_TICKET = "_swapkv_ticket"


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """What one layer is to attend to: new tokens of all rows, padding included.

    `query`: `[B, Hq, T, D]`. `key`, `value`: `[B, Hkv, T, D]`, rotated. `mask`: bool `[B, columns]`, True where there
    is a token, from the first column that the cache has seen; None: everywhere. `positions`: int64 `[B or 1, T]`, for
    rotary embeddings, where the model tells them.
    `scale`, `softcap`: as in `swapkv.attention.attend`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    scale: float | None
    softcap: float | None


@attrs.frozen(kw_only=True, eq=False)
class Ticket:
    """Where the keys that it is attached to belong. `attend`: does the work, `[B, T, Hq, Dv]`. `refuse`: gives it up."""

    layer: int
    window: int | None
    attend: Callable[[Call], torch.Tensor]
    refuse: Callable[[], None]

    def attach(self, key: torch.Tensor) -> torch.Tensor:
        """The same keys as a tensor object of its own that carries the ticket."""
        carrier = key.view(key.shape)
        setattr(carrier, _TICKET, self)
        return carrier


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """Store the new KV in the cache's pages, then attend over all pages of each row.

    The signature is that of transformers' `AttentionInterface`; `_others` is what models add to it and
    paged attention has no use for. `query`: `[B, Hq, T, D]`. `key`, `value`: `[B, Hkv, T, D]`, rotated.
    `attention_mask`: see `padding_mask`. Returns `[B, T, Hq, Dv]`, 0 at padding, and no weights.
    Raises `ProtocolError` if the keys do not come from a `SwapKVCache`, or for what pages cannot do: a mask of another
    kind, gradients, dropout, attention sinks, a window that the layout does not have. The forward is void then.
    """
    ticket: Ticket | None = getattr(key, _TICKET, None)
    if ticket is None:
        raise ProtocolError(
            f"{type(module).__name__} got keys that are not of a SwapKVCache: pass past_key_values=SwapKVCache(...) and "
            "use_cache=True, or give the model back its own attention with model.set_attn_implementation('sdpa')"
        )
    try:
        refuse_other_attention(module, s_aux)
        refuse_other_window(ticket.layer, sliding_window, ticket.window)
        _refuse_training(query, dropout)
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ProtocolError(
                f"attention_mask {tuple(attention_mask.shape)} is not [batch, columns]: pass the 2D one"
            )
    except ProtocolError:
        ticket.refuse()
        raise
    call = Call(
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        positions=position_ids if position_ids is not None and position_ids.ndim == 2 else None,
        scale=scaling,
        softcap=softcap,
    )
    return ticket.attend(call), None


def padding_mask(
    *_sizes: Any,
    attention_mask: torch.Tensor | None = None,
    use_vmap: object = False,
    allow_is_causal_skip: object = True,
    **_others: object,
) -> torch.Tensor | None:
    """The mask of `cached_attention`, as transformers' `AttentionMaskInterface` asks for it.

    Returns the 2D mask as it came, bool `[B, columns]`, or None. Raises `ProtocolError` if the model wants more than
    causality, a window and padding: overlays of its own, bidirectional or packed tokens.
    """
    if use_vmap or not allow_is_causal_skip:
        raise ProtocolError("the model overlays its causal mask with one of its own: paged attention is causal only")
    return attention_mask


def _refuse_training(query: torch.Tensor, dropout: float) -> None:
    if dropout:
        raise ProtocolError(f"dropout={dropout}, paged attention has none: call model.eval() first")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ProtocolError("paged attention has no gradients: call the model under torch.no_grad()")


ALL_ATTENTION_FUNCTIONS.register(CACHE_ATTENTION_NAME, cached_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(CACHE_ATTENTION_NAME, padding_mask)
