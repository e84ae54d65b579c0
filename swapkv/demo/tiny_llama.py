"""A small Llama with random weights: a real decoder that needs no download, for demos and tests.

It writes nonsense, but nonsense that depends on every byte of its KV: one wrong bit soon changes the tokens.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import TypeAlias

import attrs
import torch
import torch.nn.functional as F  # noqa: N812

from swapkv.attention import attend, write_pages
from swapkv.demo.decoder import Row
from swapkv.errors import ProtocolError
from swapkv.layout import KVDtype, KVLayout, PageOrder
from swapkv.streams.memory import PagedMemory

BOS = 256
"""The token that begins every prompt; tokens below it are bytes."""

_Rotation: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of RoPE by position, float32 `[T, 1, head_dim / 2]` each."""

_PIECE_TOKENS = 256
_ROPE_BASE = 10_000.0
_NORM_EPS = 1e-5

_SHARPNESS = 4.0
"""Scale of queries: attention that looks at a few tokens keeps greedy decoding from running into a loop."""


@attrs.frozen(kw_only=True, eq=False)
class _Piece:
    """Tokens that run together: positions `[start, stop)`. `rotation`: their `_Rotation`."""

    start: int
    stop: int
    rotation: _Rotation


@attrs.frozen(kw_only=True, eq=False)
class _Layer:
    """Weights `[in, out]`, float32: with one row on the left, this order multiplies several times faster."""

    qkv: torch.Tensor
    attention_out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class TinyLlama:
    """RMSNorm, RoPE, grouped-query attention and SwiGLU (Llama; Touvron et al., 2023), over bytes. A `Decoder`.

    `seed` fixes the weights. `windows`: each layer's sliding window in tokens, None for full attention. KV is float32
    in planes "k" and "v", pages `[page_size, num_kv_heads, head_dim]`, and is read and written through pages only.

    Every row is computed by itself: a GEMM with more rows may take another kernel and round differently, so a batched
    step would make a row's bits depend on its neighbours. Prompts run in pieces that end at absolute multiples of 256
    tokens for the same reason: a caller that cuts a prompt at such multiples gets the bits of the uncut prompt. Cuts
    elsewhere, and decoding what could be prefilled, are as accurate but may round differently; so may another number
    of threads.
    Raises `ProtocolError` for sizes that do not fit together.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        num_layers: int = 4,
        hidden: int = 256,
        num_heads: int = 8,
        num_kv_heads: int = 4,
        head_dim: int = 32,
        vocab: int = BOS + 1,
        page_size: int = 16,
        chunk_tokens: int = 256,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        if vocab <= BOS:
            raise ProtocolError(f"vocab={vocab} must be at least {BOS + 1}: 256 bytes and the token that begins a text")
        self.name = f"tiny-llama-{seed}"
        self.layout = KVLayout.dense(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=KVDtype.FLOAT32,
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            windows=windows,
        )
        if num_heads % num_kv_heads or head_dim % 2:
            raise ProtocolError(
                f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}, head_dim={head_dim} even"
            )
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        random = _Random(seed)
        self._embedding = random.matrix(hidden, vocab).t().contiguous() * sqrt(hidden)
        self._layers = [self._random_layer(random, hidden) for _ in range(num_layers)]
        self._head = random.matrix(hidden, vocab)
        self._head[:, : ord(" ")] = self._head[:, ord("~") + 1 :] = 0.0  # only printable ASCII ever wins
        self._frequencies = _ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def encode(self, text: str) -> list[int]:
        """`BOS` and the UTF-8 bytes of the text."""
        return [BOS, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        """The bytes among the tokens as UTF-8; what is not valid or would steer a terminal shows as U+FFFD."""
        text = bytes(token for token in tokens if token < BOS).decode(errors="replace")
        return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], memory: PagedMemory) -> list[int]:
        """Run one step and return the most likely next token of every row.

        Each row writes the KV of its tokens into `memory` at the pages of its tables, layer by layer, and calls its
        `wait_layer(i)` once, before it first touches layer i. Raises `ProtocolError` for a row without tokens, or if a
        page that it needs is not in its table.
        """
        pieces = [self._pieces(row) for row in rows]
        states = [self._embed(row, its) for row, its in zip(rows, pieces, strict=True)]
        for index in range(len(self._layers)):
            for at, row in enumerate(rows):
                if row.wait_layer is not None:
                    row.wait_layer(index)
                pairs = zip(states[at], pieces[at], strict=True)
                states[at] = [self._run_layer(index, state, piece, row, memory) for state, piece in pairs]
        return [int((_norm(last[-1][-1:]) @ self._head).argmax()) for last in states]

    def _embed(self, row: Row, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        return [self._embedding[torch.tensor(row.tokens[p.start - row.start : p.stop - row.start])] for p in pieces]

    def _pieces(self, row: Row) -> list[_Piece]:
        if not row.tokens:
            raise ProtocolError("a row of 0 tokens has no next token: leave it out of the step")
        start, stop = row.start, row.start + len(row.tokens)
        first_end = (start // _PIECE_TOKENS + 1) * _PIECE_TOKENS
        bounds = pairwise([start, *range(first_end, stop, _PIECE_TOKENS), stop])
        pieces = [_Piece(start=lo, stop=hi, rotation=self._rotation(lo, hi)) for lo, hi in bounds]
        if row.attend is not None and len(pieces) > 1:
            raise ProtocolError(
                f"a row with attention of its own has positions {start} to {stop - 1}: let it end at a multiple of "
                f"{_PIECE_TOKENS}"
            )
        return pieces

    def _run_layer(self, index: int, state: torch.Tensor, piece: _Piece, row: Row, memory: PagedMemory) -> torch.Tensor:
        """One layer over the tokens of a piece: `[T, hidden]` to `[T, hidden]`."""
        layer, num_tokens = self._layers[index], len(state)
        num_rotated = self._num_heads + self._num_kv_heads
        projected = (_norm(state) @ layer.qkv).view(num_tokens, -1, self._head_dim)
        rotated = _rotate(projected[:, :num_rotated], piece.rotation)
        query, key, value = rotated[:, : self._num_heads], rotated[:, self._num_heads :], projected[:, num_rotated:]
        keys, values = memory.plane(index, "k"), memory.plane(index, "v")
        table = row.page_tables[self.layout.group_of_layer[index]]
        write_pages(keys, key, table, piece.start, PageOrder.NHD)
        write_pages(values, value, table, piece.start, PageOrder.NHD)
        window = self.layout.groups[self.layout.group_of_layer[index]].window
        if row.attend is None:
            mixed = attend(query, keys, values, table, piece.start, order=PageOrder.NHD, window=window)
        else:
            mixed = row.attend(index, query)
        state = state + mixed.reshape(num_tokens, -1) @ layer.attention_out
        gate, up = (_norm(state) @ layer.gate_up).chunk(2, -1)
        return state + (F.silu(gate) * up) @ layer.down

    def _rotation(self, start: int, stop: int) -> _Rotation:
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None, None] * self._frequencies
        return angles.cos().float(), angles.sin().float()

    def _random_layer(self, random: "_Random", hidden: int) -> _Layer:
        inner = self._num_heads * self._head_dim
        kv = self._num_kv_heads * self._head_dim
        mlp = 2 * hidden
        return _Layer(
            qkv=torch.cat([random.matrix(hidden, inner) * _SHARPNESS, random.matrix(hidden, 2 * kv)], -1),
            attention_out=random.matrix(inner, hidden),
            gate_up=random.matrix(hidden, 2 * mlp),
            down=random.matrix(mlp, hidden),
        )


class _Random:
    """Weights from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, inputs: int, outputs: int) -> torch.Tensor:
        """Normal, float32 `[inputs, outputs]`, scaled so that products keep the variance of what they multiply."""
        return torch.randn(inputs, outputs, generator=self._generator) / sqrt(inputs)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich, 2019) with a scale of 1."""
    return x * x.square().mean(-1, keepdim=True).add_(_NORM_EPS).rsqrt_()


def _rotate(x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
    """RoPE (Su et al., 2021) in its split-half form: pairs are (x[i], x[i + head_dim / 2]). `x`: `[T, heads, D]`."""
    cos, sin = rotation
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
