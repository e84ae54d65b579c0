"""Layouts, configurations and first actions that worlds share."""

from swapkv.config import SwapConfig
from swapkv.layout import KVLayout
from tests.prove.scenario import Action


def dense(layers: int, page_size: int, chunk_tokens: int, **more: object) -> KVLayout:
    return KVLayout.dense(
        num_layers=layers,
        num_kv_heads=1,
        head_dim=1,
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        **more,  # type: ignore[arg-type]
    )


ONE_PAGE_CHUNKS = dense(1, 2, 2)
TWO_PAGE_CHUNKS = dense(1, 2, 4)
TWO_LAYERS = dense(2, 2, 2)
ONE_TOKEN_PAGES = dense(1, 1, 2)
LAYER_BY_LAYER = SwapConfig(segment_bytes=1)
TWO_AT_A_TIME = SwapConfig(segment_bytes=16)
"""Of two-layer chunks: a chunk leaves with one copy, a layer of two chunks comes with one."""


def registered(*names: str) -> tuple[Action, ...]:
    return tuple(("register", name) for name in names)


def grown(step: int, name: str) -> tuple[Action, ...]:
    """The sequence takes its next step, the `step`-th of the world."""
    return ("step", name), ("end", step), ("settle",)


def parked(name: str) -> tuple[Action, ...]:
    return ("preempt", name), ("settle",)
