"""The KV layout of a transformers model, from its configuration."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from swapkv.errors import ProtocolError
from swapkv.layout import KVDtype, KVLayout


def layout_of(
    config: PreTrainedConfig, dtype: torch.dtype, *, page_size: int, chunk_tokens: int, truncate_slack: int = 0
) -> KVLayout:
    """The KV layout of a model with multi-head or grouped-query attention, from its configuration.

    Layers of type "sliding_attention" get `config.sliding_window` as their window; without `layer_types` all do.
    `truncate_slack`: how many tokens may be taken back once a window has moved on (drafts of assisted decoding).
    Raises `ProtocolError` for models whose KV is of another kind: other layer types (chunked, linear, recurrent), layers
    that share KV, rotary embeddings that change with the length of the sequence, a dtype that pages do not know.
    """
    text: Any = config.get_text_config()
    _refuse_moving_rope(text)
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared:
        raise ProtocolError(f"{shared} layers share KV of others (num_kv_shared_layers): use a model without them")
    num_heads = text.num_attention_heads
    return KVLayout.dense(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        dtype=_kv_dtype(dtype),
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        windows=_windows(text),
        truncate_slack=truncate_slack,
    )


def _windows(text: Any) -> list[int | None]:
    """The window of each layer, None for full attention."""
    window: int | None = getattr(text, "sliding_window", None)
    types: Sequence[str] | None = getattr(text, "layer_types", None)
    if types is None:
        return [window] * text.num_hidden_layers
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ProtocolError(f"layer types {unknown} have no paged KV: only full and sliding attention do")
    return [window if kind == "sliding_attention" else None for kind in types]


def _refuse_moving_rope(text: Any) -> None:
    """Keys in pages stay as they were rotated, so frequencies must not depend on how long a sequence is by now."""
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (parameters, *parameters.values()) if isinstance(part, dict)]
    moving = sorted({"dynamic", "longrope"}.intersection(kinds))
    if moving:
        raise ProtocolError(f"rope_type {moving} changes with the sequence's length: use 'default', 'yarn' or 'llama3'")


def _kv_dtype(dtype: torch.dtype) -> KVDtype:
    name = str(dtype).removeprefix("torch.")
    if name not in {kind.torch_name for kind in KVDtype}:
        raise ProtocolError(f"no KV dtype is called {name}: load the model in float32, float16 or bfloat16")
    return next(kind for kind in KVDtype if kind.torch_name == name)
