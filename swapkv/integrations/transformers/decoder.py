"""A causal language model of transformers as a decoder over pages, one row at a time."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from swapkv.demo.decoder import Row
from swapkv.errors import ProtocolError
from swapkv.integrations.transformers.layout import layout_of
from swapkv.integrations.transformers.paged import ATTENTION_NAME, PagedKV, piece_tokens
from swapkv.streams.memory import PagedMemory


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
        self._piece_tokens = piece_tokens(page_size)
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
