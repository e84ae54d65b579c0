"""Forwards for tests of the pool: every token of every sequence has bytes of its own, and they are read back."""

import hashlib
from collections.abc import Mapping

import torch

from swapkv import Forward, Pool
from swapkv.attention.residency import LayerKV


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
                self._write_token(tables, name, position)

    async def check(self, name: str) -> None:
        """A forward without new tokens reads every token (of the windows, for windowed layers) and compares."""
        async with self.pool.forward({name: 0}) as forward:
            await forward.run(lambda: self.read(forward, name))

    def read(self, forward: Forward, name: str) -> None:
        """Compare every token's bytes, on the device or in the host tier, with what was written."""
        layout = self.pool.layout
        for layer in range(layout.num_layers):
            names = [plane.name for plane in layout.planes[layer]]
            kv = forward.layer_kv(name, layer, [self.pool.memory.plane(layer, plane) for plane in names])
            window = layout.groups[layout.group_of_layer[layer]].window
            for position, owner in enumerate(self.written.get(name, [])):
                if window is None or position >= forward.tokens(name) - window:
                    self._compare(kv, names, owner, position)

    def _compare(self, kv: LayerKV, names: list[str], owner: str, position: int) -> None:
        """One token of one layer, wherever it lies."""
        page, at = divmod(position, self.pool.layout.page_size)
        row = int(kv.page_table[page])
        run = next((run for run in kv.runs if run.first <= page < run.stop), None)
        assert (row >= 0) != (run is not None), (
            f"{owner}: page {page} is on the device and in the host tier, or nowhere"
        )
        for number, plane in enumerate(names):
            if run is None:
                found = kv.planes[number][row, at].contiguous().view(torch.uint8).view(-1)
            else:
                found = run.planes[number][page - run.first].view(self.pool.layout.page_size, -1)[at]
            wanted = token_bytes(owner, position, kv.layer, plane, found.numel())
            assert torch.equal(found, wanted), f"{owner}: token {position} of layer {kv.layer} is wrong"

    def fork(self, parent: str, child: str, max_tokens: int) -> None:
        self.pool.fork(parent, child, max_tokens=max_tokens)
        self.written[child] = list(self.written.get(parent, []))

    def truncate(self, name: str, tokens: int) -> None:
        self.pool.truncate(name, tokens=tokens)
        del self.written[name][tokens:]

    def _write_token(self, tables: tuple[torch.Tensor, ...], owner: str, position: int) -> None:
        layout = self.pool.layout
        for layer in range(layout.num_layers):
            page = int(tables[layout.group_of_layer[layer]][position // layout.page_size])
            assert page >= 0, f"{owner} has no page for position {position}"
            for plane in layout.planes[layer]:
                place = self.pool.memory.plane(layer, plane.name)[page, position % layout.page_size]
                bytes_of_token = place.view(torch.uint8).view(-1)
                bytes_of_token.copy_(token_bytes(owner, position, layer, plane.name, bytes_of_token.numel()))
