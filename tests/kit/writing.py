"""Forwards for tests of the pool: every token of every sequence has bytes of its own, and they are read back."""

import hashlib
from collections.abc import Mapping

import torch

from swapkv import Forward, Pool


def token_bytes(name: str, position: int, layer: int, plane: str, count: int) -> torch.Tensor:
    """What the KV of one token must be: uint8 `[count]`, different for every name, position, layer and plane."""
    seed = hashlib.sha256(f"{name}/{position}/{layer}/{plane}".encode()).digest()
    return torch.frombuffer(bytearray((seed * (count // len(seed) + 1))[:count]), dtype=torch.uint8)


class Writer:
    """Runs forwards that write each token's bytes, and reads whole sequences back. `names`: whose bytes they are."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.written: dict[str, list[str]] = {}

    async def append(self, appends: Mapping[str, int]) -> None:
        """One forward that appends to each sequence."""
        async with self.pool.forward(appends) as forward:
            await forward.run(lambda: self.write(forward, appends))
        for name, count in appends.items():
            self.written.setdefault(name, []).extend([name] * count)

    def write(self, forward: Forward, appends: Mapping[str, int]) -> None:
        """Write the bytes of the tokens to come."""
        for name, count in appends.items():
            tables = forward.page_tables(name)
            start = forward.tokens(name)
            for position in range(start, start + count):
                self._each_token(tables, name, position, write=True)

    async def check(self, name: str) -> None:
        """A forward without new tokens reads every token (of the windows, for windowed layers) and compares."""
        async with self.pool.forward({name: 0}) as forward:
            await forward.run(lambda: self.read(forward, name))

    def read(self, forward: Forward, name: str) -> None:
        """Compare every token's bytes with what was written."""
        tables = forward.page_tables(name)
        for position, owner in enumerate(self.written.get(name, [])):
            self._each_token(tables, owner, position, write=False, length=forward.tokens(name))

    def fork(self, parent: str, child: str, max_tokens: int) -> None:
        self.pool.fork(parent, child, max_tokens=max_tokens)
        self.written[child] = list(self.written.get(parent, []))

    def truncate(self, name: str, tokens: int) -> None:
        self.pool.truncate(name, tokens=tokens)
        del self.written[name][tokens:]

    def _each_token(
        self, tables: tuple[torch.Tensor, ...], owner: str, position: int, *, write: bool, length: int = 0
    ) -> None:
        layout = self.pool.layout
        for layer in range(layout.num_layers):
            group = layout.group_of_layer[layer]
            window = layout.groups[group].window
            if not write and window is not None and position < length - window:
                continue
            page = int(tables[group][position // layout.page_size])
            assert page >= 0, f"{owner} has no page for position {position}"
            for plane in layout.planes[layer]:
                place = self.pool.memory.plane(layer, plane.name)[page, position % layout.page_size]
                bytes_of_token = place.view(torch.uint8).view(-1)
                wanted = token_bytes(owner, position, layer, plane.name, bytes_of_token.numel())
                if write:
                    bytes_of_token.copy_(wanted)
                else:
                    assert torch.equal(bytes_of_token, wanted), f"{owner}: token {position} of layer {layer} is wrong"
