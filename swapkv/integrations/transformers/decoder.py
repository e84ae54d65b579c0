"""transformers models over swapkv pages: an attention that plugs in by transformers' own interface, and a decoder.

The attention is one stateless function, registered under `ATTENTION_NAME`. What it needs to know about a sequence
travels as the keyword `swapkv_pages` of `model(...)`, which transformers hands down to every attention layer; so
nothing is global, and two models, or two threads with a model each, do not see each other.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch

from swapkv.attention import attend, write_pages
from swapkv.demo.decoder import Row
from swapkv.errors import ProtocolError
from swapkv.layout import KVDtype, KVLayout, PageOrder
from swapkv.streams.memory import PagedMemory

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
except ImportError as error:
    raise ImportError("transformers models need an extra: pip install 'swapkv[transformers]'") from error

ATTENTION_NAME = "swapkv_paged"
"""What transformers knows `paged_attention` by, as in `model.set_attn_implementation(ATTENTION_NAME)`."""

PIECE_TOKENS = 256
"""Prompts run in pieces that end at absolute multiples of this many tokens (rounded up to whole pages)."""


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
        if self.wait_layer is not None:
            self.wait_layer(layer)
        table = self.page_tables[self.memory.layout.group_of_layer[layer]]
        keys, values = self.memory.plane(layer, "k"), self.memory.plane(layer, "v")
        write_pages(keys, key, table, self.start, PageOrder.NHD)
        write_pages(values, value, table, self.start, PageOrder.NHD)
        return attend(
            query,
            keys,
            values,
            table,
            self.start,
            order=PageOrder.NHD,
            window=self.window(layer),
            scale=scale,
            softcap=softcap,
            split_tokens=self.split_tokens,
        )


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
    _refuse(module, query, attention_mask, s_aux)
    layer = _layer_index(module)
    window = swapkv_pages.window(layer)
    if sliding_window != window:
        raise ProtocolError(
            f"layer {layer} attends with sliding_window={sliding_window}, its pages are laid out for window={window}: "
            "allocate the memory with the decoder's own layout, and check config.layer_types"
        )
    new = (part[0].transpose(0, 1) for part in (query, key, value))
    return swapkv_pages.attend(layer, *new, scale=scaling, softcap=softcap).unsqueeze(0), None


def layout_of(config: PreTrainedConfig, dtype: torch.dtype, *, page_size: int, chunk_tokens: int) -> KVLayout:
    """The KV layout of a model with multi-head or grouped-query attention, from its configuration.

    Layers of type "sliding_attention" get `config.sliding_window` as their window; without `layer_types` all do.
    Raises `ProtocolError` for models whose KV is of another kind: other layer types (chunked, linear, recurrent),
    rotary embeddings that change with the length of the sequence, a dtype that pages do not know.
    """
    text: Any = config.get_text_config()
    _refuse_moving_rope(text)
    num_heads = text.num_attention_heads
    return KVLayout.dense(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        dtype=_kv_dtype(dtype),
        page_size=page_size,
        chunk_tokens=chunk_tokens,
        windows=_windows(text),
    )


class PagedTransformer:
    """A causal language model of transformers whose KV lives in swapkv pages and nowhere else. A `Decoder`.

    For models with Llama's kind of attention (Llama, Mistral, Qwen, Gemma, Phi, OLMo, …). Rows run one at a time:
    matrix products round differently for different batch sizes, so only a batch of its own makes a row's tokens and KV
    bit for bit independent of the rows beside it. For the same reason prompts run in fixed pieces.
    One `forward` at a time; it may run on any thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        page_size: int,
        chunk_tokens: int,
        name: str | None = None,
    ) -> None:
        """Take over `model`: it is put into eval mode, and its attention becomes `paged_attention`.

        `name`: for people to read, by default the model's own.
        Raises `ProtocolError` if the model's KV cannot be paged (see `layout_of`) or its attention cannot be replaced.
        """
        self.layout = layout_of(model.config, model.dtype, page_size=page_size, chunk_tokens=chunk_tokens)
        self.name: str = name or model.config.name_or_path or model.config.model_type
        self.model = model
        model.train(mode=False)
        self.tokenizer = tokenizer
        self._piece_tokens = -(-PIECE_TOKENS // page_size) * page_size
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config._attn_implementation != ATTENTION_NAME:
            raise ProtocolError(
                f"{type(model).__name__} does not take its attention from transformers' AttentionInterface: "
                "use a model class that does"
            )

    @classmethod
    def load(cls, directory: Path, *, page_size: int, chunk_tokens: int, name: str | None = None) -> "PagedTransformer":
        """Load what `save_pretrained` wrote of a model and its tokenizer; in the dtype in which it was saved.

        Raises OSError if the directory does not hold them; nothing is ever downloaded.
        """
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return cls(model, tokenizer, page_size=page_size, chunk_tokens=chunk_tokens, name=name)

    def encode(self, text: str) -> list[int]:
        """Text to tokens, with those that the model expects in front (BOS).

        Raises `ProtocolError` if nothing comes of it: an empty text for a model without BOS.
        """
        tokens: list[int] = self.tokenizer.encode(text)
        if not tokens:
            raise ProtocolError(f"text {text!r} is 0 tokens long and a model needs at least 1: pass some text")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens to text, special ones (BOS, EOS) left out."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    def forward(self, rows: Sequence[Row], memory: PagedMemory) -> list[int]:
        """Run one step and return the likeliest next token of every row. Raises as `logits` does."""
        return [int(self.logits(row, memory).argmax()) for row in rows]

    @torch.inference_mode()
    def logits(self, row: Row, memory: PagedMemory) -> torch.Tensor:
        """Run a row's tokens, write their KV, and return what the last one predicts: `[vocab_size]`.

        Raises `ProtocolError` if the row has no tokens, or a page that it reads or writes is missing (pages written
        until then keep what was written), or if the memory is laid out for another model.
        """
        if memory.layout.planes != self.layout.planes:
            raise ProtocolError(f"the memory has other planes than {self.name}: allocate it with this decoder's layout")
        if not row.tokens:
            raise ProtocolError(f"a row at position {row.start} has 0 tokens to run: leave it out of the step")
        stop, size = row.start + len(row.tokens), self._piece_tokens
        bounds = [row.start, *range((row.start // size + 1) * size, stop, size), stop]
        *earlier, last = pairwise(bounds)
        for begin, end in earlier:
            self.model.base_model(**self._inputs(row, begin, end, memory))
        output = self.model(**self._inputs(row, *last, memory), logits_to_keep=1)
        logits = output.logits[0, -1]
        assert isinstance(logits, torch.Tensor)
        return logits

    def _inputs(self, row: Row, begin: int, end: int, memory: PagedMemory) -> dict[str, Any]:
        """What the model is called with to run the row's tokens at positions `[begin, end)`."""
        device = self.model.device
        pages = PagedKV(
            memory=memory,
            page_tables=row.page_tables,
            start=begin,
            split_tokens=self._piece_tokens,
            wait_layer=row.wait_layer,
        )
        return {
            "input_ids": torch.tensor([row.tokens[begin - row.start : end - row.start]], device=device),
            "position_ids": torch.arange(begin, end, device=device).unsqueeze(0),
            "use_cache": False,
            "swapkv_pages": pages,
        }


def convert_gguf(source: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a plain checkpoint: float32 safetensors, no pickle.

    `directory` exists and gets what `PagedTransformer.load` reads. A model of 270M parameters takes about a minute,
    most of it for reading the vocabulary.
    Raises ImportError if the packages gguf or accelerate are missing, OSError if the disk is full.
    """
    where, file = str(source.parent), source.name
    try:
        packed = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32, local_files_only=True)
    except ImportError as error:
        raise ImportError("GGUF files need an extra: pip install 'swapkv[transformers]'") from error
    config = packed.config
    tokenizer = AutoTokenizer.from_pretrained(
        where, gguf_file=file, tokenizer_type=config.model_type, local_files_only=True
    )
    tokenizer.save_pretrained(directory)
    del config.quantization_config  # with it transformers refuses to save, though nothing is quantized any more
    with torch.device("meta"):
        plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict(), assign=True)
    plain.save_pretrained(directory)


def _layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ProtocolError(f"{type(module).__name__}.layer_idx is {layer!r}: paged attention must know its layer")
    return layer


def _refuse(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise for what would silently compute something else than the model means."""
    caller = type(module).__name__
    if query.shape[0] != 1:
        raise ProtocolError(f"{caller} got a batch of {query.shape[0]} rows: pass 1 row at a time")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ProtocolError(f"{caller} got a mask or is not causal, paged attention is: pass no attention_mask")
    if sinks is not None:
        raise ProtocolError(f"{caller} has attention sinks (s_aux), paged attention has none: use another model")


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
