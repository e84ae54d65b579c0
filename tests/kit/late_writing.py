"""Forwards that are launched and not awaited: they read and write when their stream comes to them."""

from collections.abc import Mapping
from itertools import count

import attrs
import torch

from swapkv import Forward, TransferError
from swapkv.basepool import BasePool
from swapkv.ids import LayerId
from swapkv.streams.base import Launched


@attrs.frozen(eq=False)
class _Part:
    """What one forward reads and writes of one sequence, as it was when the forward began."""

    name: str
    tables: tuple[torch.Tensor, ...]
    held: torch.Tensor
    new: torch.Tensor


class LateWriter:
    """Every token of every sequence has a number of its own, in all of its bytes. `tokens[name]`: what must be there."""

    def __init__(self, pool: BasePool) -> None:
        self.pool = pool
        self.tokens: dict[str, list[int]] = {}
        self._numbers = count(1)
        self._launched: list[tuple[Launched[None], bool]] = []

    def register(self, name: str, max_tokens: int) -> None:
        self.pool.register(name, max_tokens=max_tokens)
        self.tokens[name] = []

    def fork(self, parent: str, child: str, max_tokens: int) -> None:
        self.pool.fork(parent, child, max_tokens=max_tokens)
        self.tokens[child] = list(self.tokens[parent])

    def truncate(self, name: str, tokens: int) -> None:
        self.pool.truncate(name, tokens=tokens)
        del self.tokens[name][tokens:]

    def begin(self, forward: Forward, appends: Mapping[str, int]) -> list[_Part]:
        """What the forward will do. Its new tokens count at once: call `cut` if it is void."""
        parts = []
        for name, more in appends.items():
            new = [next(self._numbers) for _ in range(more)]
            held = torch.tensor(self.tokens[name], dtype=torch.int32)
            parts.append(_Part(name, forward.page_tables(name), held, torch.tensor(new, dtype=torch.int32)))
            self.tokens[name].extend(new)
        return parts

    def launch(self, forward: Forward, appends: Mapping[str, int]) -> Launched[None]:
        """The whole forward, in one piece."""
        parts = self.begin(forward, appends)
        layers = range(self.pool.layout.num_layers)
        return self._launch(forward, lambda: [self._run(part, layer) for part in parts for layer in layers], False)

    def launch_layer(self, forward: Forward, parts: list[_Part], layer: int) -> Launched[None]:
        """One layer of it, behind a gate."""
        return self._launch(forward, lambda: [self._run(part, layer) for part in parts], True)

    def cut(self, name: str) -> None:
        """Forget tokens that do not count after all; nothing to forget of a sequence that is finished."""
        if name in self.tokens:
            del self.tokens[name][self.pool.tokens(name) :]

    def verify(self) -> None:
        """Every forward that ran has read what was written."""
        for launched, gated in self._launched:
            try:
                launched.result()
            except TransferError:
                assert gated, "a forward without a gate was not run"

    def _launch(self, forward: Forward, run: object, gated: bool) -> Launched[None]:
        launched: Launched[None] = forward.launch(run)  # type: ignore[arg-type]
        self._launched.append((launched, gated))
        return launched

    def _run(self, part: _Part, layer: int) -> None:
        """Read every token that the layer still reads, then write the new ones."""
        layout, length = self.pool.layout, len(part.held)
        group = layout.group_of_layer[LayerId(layer)]
        window = layout.groups[group].window
        first = 0 if window is None else max(0, length - window + 1)
        positions = torch.arange(first, length + len(part.new))
        pages, offsets = part.tables[group][positions // layout.page_size], positions % layout.page_size
        assert bool((pages >= 0).all()), f"{part.name}: a position has no page"
        wanted = torch.cat((part.held[first:], part.new))
        old = length - first
        for at, plane in enumerate(layout.planes[layer]):
            memory = self.pool.memory.plane(layer, plane.name).view(torch.int32).flatten(2)
            read = memory[pages[:old], offsets[:old]]
            expected = _number(wanted[:old], layer, at)
            assert bool((read == expected).all()), (
                f"{part.name}: layer {layer} reads {read[:, 0]}, not {expected[:, 0]}"
            )
            memory[pages[old:], offsets[old:]] = _number(wanted[old:], layer, at)


def _number(tokens: torch.Tensor, layer: int, plane: int) -> torch.Tensor:
    """What fills a token's row: `[n, 1]`."""
    return (tokens * 64 + layer * 8 + plane)[:, None].to(torch.int32)
