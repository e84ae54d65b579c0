"""transformers models over swapkv pages: a cache for `generate`, and a decoder that runs row by row.

`SwapKVCache` with the attention `"swapkv"`: `model.generate()` as it is, over a pool, preempted and restored.
`PagedTransformer`: a model whose KV lives in pages that its caller names, one row at a time, bit for bit (the demo).
Importing this package tells transformers of both attentions, which are functions without state.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("transformers models need an extra: pip install 'swapkv[transformers]'") from error

from swapkv.integrations.transformers.attention import CACHE_ATTENTION_NAME
from swapkv.integrations.transformers.cache import SwapKVCache
from swapkv.integrations.transformers.checkpoint import convert_gguf
from swapkv.integrations.transformers.decoder import PagedTransformer
from swapkv.integrations.transformers.layout import layout_of
from swapkv.integrations.transformers.paged import ATTENTION_NAME, PagedKV, paged_attention

__all__ = [
    "ATTENTION_NAME",
    "CACHE_ATTENTION_NAME",
    "PagedKV",
    "PagedTransformer",
    "SwapKVCache",
    "convert_gguf",
    "layout_of",
    "paged_attention",
]
