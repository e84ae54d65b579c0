"""A forward pass as its caller sees it."""

from collections.abc import Callable
from typing import TypeVar

import torch

from swapkv.errors import ProtocolError
from swapkv.fsm.core import SwapCore
from swapkv.ids import GroupId, SeqId
from swapkv.streams.base import ComputeStream, Launched, Stream
from swapkv.transfers import Transfers

T = TypeVar("T")


class Forward:
    """A forward pass, between its grant and its end. `stream`: what its work has to be launched on."""

    def __init__(self, core: SwapCore, transfers: Transfers, stream: Stream) -> None:
        self.stream = stream
        self._core = core
        self._transfers = transfers

    def tokens(self, name: str) -> int:
        """How many tokens the sequence has before this forward."""
        return self._core.sequence(SeqId(name)).tokens

    def page_tables(self, name: str) -> tuple[torch.Tensor, ...]:
        """For each layer group the rows of the sequence's pages in the planes of the pool's `memory`, in order.

        int64 `[pages]`, the pages of the tokens to come included; -1 for a page behind the group's window. Copies.
        """
        tables = self._core.sequence(SeqId(name)).tables
        return tuple(self._transfers.rows(GroupId(g), table.pages) for g, table in enumerate(tables))

    def launch(self, function: Callable[[], T]) -> Launched[T]:
        """Run a callable on the stream's own thread, in its order, without waiting for it.

        For streams that run Python (the host device's). Raises `ProtocolError` for others: launch kernels on them.
        """
        if not isinstance(self.stream, ComputeStream):
            raise ProtocolError(f"stream {self.stream.name!r} runs no Python callables: launch kernels on it instead")
        return self.stream.launch(function)
