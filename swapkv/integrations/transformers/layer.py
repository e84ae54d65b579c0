"""One layer of a `SwapKVCache`, in the shape in which transformers asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from swapkv.integrations.transformers.cache import SwapKVCache


class CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `SwapKVCache`, as transformers wants to see it. It holds nothing itself."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: SwapKVCache, index: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = window is not None
        self._cache = cache
        self._index = index

    @property
    def batch_size(self) -> int:
        return len(self._cache.names)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Pages are there from the beginning."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new KV alone, for `cached_attention` to store. `[B, Hkv, T, D]` each."""
        return self._cache.offer(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._cache.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns + query_length, 0

    def get_max_length(self) -> int:
        """-1: rows have a limit, but not columns, which may be padding."""
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions
