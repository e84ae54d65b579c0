"""A forward pass as its caller sees it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from swapkv.attention.residency import HostRun, LayerKV
from swapkv.errors import ProtocolError
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import HostPages, host_pages
from swapkv.ids import GroupId, LayerId, SeqId
from swapkv.streams.base import ComputeStream, Launched, Stream
from swapkv.transfers import Transfers

T = TypeVar("T")


class Forward:
    """A forward pass, between its grant and its end. `stream`: what its work has to be launched on."""

    def __init__(self, core: SwapCore, transfers: Transfers, stream: Stream) -> None:
        self.stream = stream
        self._core = core
        self._transfers = transfers
        self._places: dict[tuple[str, GroupId], tuple[torch.Tensor, list[HostPages]]] = {}

    def tokens(self, name: str) -> int:
        """How many tokens the sequence has before this forward."""
        return self._core.sequence(SeqId(name)).tokens

    def page_tables(self, name: str) -> tuple[torch.Tensor, ...]:
        """For each layer group the rows of the sequence's pages in the planes of the pool's `memory`, in order.

        int64 `[pages]`, the pages of the tokens to come included; -1 for a page behind the group's window, and for one
        of a spilled sequence that stands in the host tier (see `layer_kv`). Copies.
        """
        tables = self._core.sequence(SeqId(name)).tables
        return tuple(self._transfers.rows(GroupId(g), table.pages) for g, table in enumerate(tables))

    def layer_kv(
        self, name: str, layer: int, planes: Sequence[torch.Tensor], *, value_dim: int | None = None
    ) -> LayerKV:
        """Where the KV of one layer of a sequence lies, for `swapkv.attention`: on the device and in the host tier.

        `planes`: that layer's of the pool's `memory`, as keys and values `[pages, …]` (or one latent plane, see
        `LayerKV`). Valid until the end of the forward: until then nobody writes to those pages or host copies.
        """
        core, group = self._core, GroupId(self._core.layout.group_of_layer[layer])
        if (name, group) not in self._places:  # the same for all layers of a group, and pinned until the forward's end
            rows = self._transfers.rows(group, core.sequence(SeqId(name)).tables[group].pages)
            self._places[name, group] = rows, host_pages(core, SeqId(name), group)
        rows, found = self._places[name, group]
        runs = [
            HostRun(first=at.first, planes=tuple(self._transfers.host_pages(at.slot, LayerId(layer), at.count)))
            for at in found
        ]
        return LayerKV(
            name=name,
            layer=layer,
            version=tuple(at.version for at in found),
            planes=tuple(planes),
            page_table=rows,
            runs=tuple(runs),
            value_dim=value_dim,
        )

    def launch(self, function: Callable[[], T]) -> Launched[T]:
        """Run a callable on the stream's own thread, in its order, without waiting for it.

        For streams that run Python (the host device's). Raises `ProtocolError` for others: launch kernels on them.
        """
        if not isinstance(self.stream, ComputeStream):
            raise ProtocolError(f"stream {self.stream.name!r} runs no Python callables: launch kernels on it instead")
        return self.stream.launch(function)
