"""Small random models of several families, with a stock cache and over a pool."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

import swapkv
from swapkv.integrations.transformers import CACHE_ATTENTION_NAME, SwapKVCache, layout_of
from swapkv.stepped import SteppedPool, open_stepped_pool

WINDOW = 12

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=16
    ),
}

BOUND = 3e-5
"""Absolute, where logits reach about 4 and sums of float32 are taken in another order."""

ROWS = [[(7 * i * i + 3 * i + row) % 95 + 2 for i in range(size)] for row, size in enumerate((30, 17, 4))]


def stock_model(kind: str, attention: str = "eager", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def swapped_model(kind: str, **changes: Any) -> Any:
    model = stock_model(kind, **changes)
    model.set_attn_implementation(CACHE_ATTENTION_NAME)
    return model


@contextmanager
def pool_of(
    model: Any, num_pages: int = 64, host_bytes: int = 8 << 20, slack: int = 0, **config: Any
) -> Iterator[SteppedPool]:
    layout = layout_of(model.config, torch.float32, page_size=4, chunk_tokens=16, truncate_slack=slack)
    with open_stepped_pool(
        layout, num_pages=num_pages, host_bytes=host_bytes, config=swapkv.SwapConfig(**config)
    ) as pool:
        yield pool


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, T]`."""
    size = max(map(len, rows))
    ids = torch.tensor([[0] * (size - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (size - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def generate(model: Any, ids: torch.Tensor, new: int, cache: SwapKVCache | None = None, **options: Any) -> Any:
    """Greedy: `sequences` and the `logits` of each new token."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    if cache is not None:
        options["past_key_values"] = cache
    return model.generate(
        ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


def longer(mask: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.cat([mask, torch.ones(len(mask), columns, dtype=mask.dtype)], 1)


def kv(pool: SteppedPool, name: str) -> list[torch.Tensor]:
    """The pages of each plane that the sequence still has, in order; slots beyond its last token are 0."""
    with pool.forward({name: 0}) as forward:
        tables = forward.page_tables(name)
    found = []
    for layer, planes in enumerate(pool.layout.planes):
        table = tables[pool.layout.group_of_layer[layer]]
        for plane in planes:
            pages = pool.memory.plane(layer, plane.name)[table.clamp(min=0)].clone()
            pages[table < 0] = 0
            pages.flatten(0, 1)[pool.tokens(name) :] = 0
            found.append(pages)
    return found


def poison(pool: SteppedPool) -> None:
    """Nothing that is on the device now may be read again."""
    for layer, planes in enumerate(pool.layout.planes):
        for plane in planes:
            pool.memory.plane(layer, plane.name).fill_(torch.nan)


def free_pages(pool: SteppedPool) -> list[int]:
    pool.drain(10.0)
    return [pages.free for pages in pool.statistics().pages]
