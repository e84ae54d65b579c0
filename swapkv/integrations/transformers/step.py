"""One forward pass of a model whose cache is a `SwapKVCache`: a forward of the pool, layer by layer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import attrs
import torch

from swapkv.errors import DrainTimeout, ProtocolError
from swapkv.forward import Forward
from swapkv.integrations.transformers.attention import Call
from swapkv.integrations.transformers.paged import PagedKV, piece_tokens
from swapkv.integrations.transformers.streaming import Span, Streaming
from swapkv.streams.memory import PagedMemory


class Void(Exception):  # noqa: N818
    """Thrown into a pool's forward to give it up; whoever throws it catches it."""


@attrs.frozen(eq=False)
class Row:
    """A row of the batch that has new tokens: in which `columns` of the call, and where its KV lives."""

    index: int
    columns: slice | torch.Tensor
    pages: PagedKV


class Step:
    """A forward of the pool between its grant and its end. Its layers attend in order, each once.

    `fresh`: bool `[B, T]`, the columns of the call that hold tokens. `streaming`: reads what is in host memory; None:
    nothing is.
    """

    def __init__(
        self,
        context: AbstractContextManager[Forward],
        memory: PagedMemory,
        names: Sequence[str],
        fresh: torch.Tensor,
        timeout_s: float,
        streaming: Streaming | None = None,
    ) -> None:
        """Enter `context`, and wait until its stream has come to it: what follows runs on the calling thread.

        Raises what the pool's forward raises, `DrainTimeout` if the stream takes longer; the forward is void then.
        """
        self.fresh = fresh
        self.next_layer = 0
        self._context = context
        self._memory = memory
        forward = context.__enter__()
        try:
            _catch_up(forward, timeout_s)
            self._rows = [self._row(forward, name, index) for index, name in enumerate(names) if fresh[index].any()]
            spans = [Span(name=names[row.index], num_tokens=int(fresh[row.index].sum())) for row in self._rows]
            self._streamed = None if streaming is None else streaming.step(forward, spans)
        except BaseException:
            self.void()
            raise

    def attend(self, layer: int, call: Call) -> torch.Tensor:
        """Store the KV of the call's tokens and attend, row by row. Returns `[B, T, Hq, Dv]`, 0 at padding.

        Raises `ProtocolError` if it is not the turn of `layer`, or for shapes that do not fit the pool's layout.
        """
        if layer != self.next_layer:
            raise ProtocolError(
                f"layer {layer} attends where layer {self.next_layer} is due: a SwapKVCache takes models that run all their "
                "layers once, in order, in every forward"
            )
        self.next_layer += 1
        batch, heads, columns, _ = call.query.shape
        out = call.query.new_zeros(batch, columns, heads, call.value.shape[-1])
        for at, row in enumerate(self._rows):
            parts = (part[row.index][:, row.columns].transpose(0, 1) for part in (call.query, call.key, call.value))
            query, key, value = parts
            how = {"scale": call.scale, "softcap": call.softcap}
            if self._streamed is None:
                mixed = row.pages.attend(layer, query, key, value, **how)
            else:
                row.pages.write(layer, key, value)
                mixed = self._streamed.attend(layer, at, query, **how)
            out[row.index][row.columns] = mixed
        return out

    def end(self) -> None:
        """All layers have attended: the tokens count."""
        if self._streamed is not None:
            self._streamed.end()
        self._context.__exit__(None, None, None)

    def void(self) -> None:
        """Give the forward up: its tokens do not count."""
        why = Void()
        self._context.__exit__(Void, why, None)

    def _row(self, forward: Forward, name: str, index: int) -> Row:
        columns = self.fresh[index].nonzero().flatten()
        first, last = int(columns[0]), int(columns[-1])
        pages = PagedKV(
            memory=self._memory,
            page_tables=forward.page_tables(name),
            start=forward.tokens(name),
            split_tokens=piece_tokens(self._memory.layout.page_size),
        )
        return Row(index, slice(first, last + 1) if last - first + 1 == len(columns) else columns, pages)


def _catch_up(forward: Forward, timeout_s: float) -> None:
    """Wait for what the pool ordered before the forward: copies into its pages, clones of a shared chunk."""
    reached = forward.launch(_nothing)
    if not reached.wait(timeout_s):
        raise DrainTimeout(f"copies that a forward waits for did not end within {timeout_s} s: find out what hangs")
    reached.result()


def _nothing() -> None:
    """Work that only holds a place in a stream's order."""
