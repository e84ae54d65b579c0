"""Attention of a cache's rows over KV that is partly in host memory."""

from collections.abc import Sequence

import attrs
import torch

from swapkv.attention.pieces import Rules
from swapkv.attention.residency import LayerKV
from swapkv.attention.ring import Streamer
from swapkv.attention.streaming import Step, StepRow
from swapkv.errors import ProtocolError
from swapkv.forward import Forward
from swapkv.integrations.transformers.paged import piece_tokens
from swapkv.layout import PageOrder
from swapkv.streams.base import Block, CopyEvent, Device, Event, Region
from swapkv.streams.memory import PagedMemory


class CallersThread:
    """The thread that calls, as a `Stream` of the ring: what it waits for, it waits for here and now."""

    name = "calling thread"

    def __init__(self, device: Device) -> None:
        self._here = device.create_promise()
        self._here.set()

    def wait(self, event: Event) -> None:
        """Block until `event` is reached. Raises `TransferError` if it failed."""
        event.wait()

    def record(self) -> Event:
        """An event that is reached already."""
        return self._here

    def gather(self, blocks: Sequence[Block], verify: object) -> CopyEvent:
        raise ProtocolError("the calling thread copies nothing: gather on a stream of the device")

    def scatter(self, blocks: Sequence[Block], verify: object) -> CopyEvent:
        raise ProtocolError("the calling thread copies nothing: scatter on a stream of the device")

    def clone(self, regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> Event:
        raise ProtocolError("the calling thread copies nothing: clone on a stream of the device")


@attrs.frozen(kw_only=True)
class Span:
    """The new tokens of one row: `num_tokens` of sequence `name`."""

    name: str
    num_tokens: int


class Streaming:
    """Makes the steps of one cache, all through one ring of staging buffers: `ring_bytes` of device memory."""

    def __init__(self, device: Device, memory: PagedMemory, depth: int) -> None:
        self.memory = memory
        self.thread = CallersThread(device)
        layout = memory.layout
        self._rules = [
            Rules(
                order=PageOrder.NHD,
                page_size=layout.page_size,
                window=layout.groups[group].window,
                split_tokens=piece_tokens(layout.page_size),
                unit_splits=1,
            )
            for group in layout.group_of_layer
        ]
        self.streamer = Streamer(device, self.planes(0), self._rules[0], depth=depth)

    @property
    def ring_bytes(self) -> int:
        return self.streamer.staging_bytes

    def planes(self, layer: int) -> list[torch.Tensor]:
        """Keys and values of a layer on the device."""
        return [self.memory.plane(layer, name) for name in ("k", "v")]

    def step(self, forward: Forward, rows: Sequence[Span]) -> "StreamedStep | None":
        """What attends in this forward; None if all that its rows read is on the device."""
        layers = range(self.memory.layout.num_layers)
        kvs = [[forward.layer_kv(row.name, layer, self.planes(layer)) for layer in layers] for row in rows]
        if not any(kv.runs for row in kvs for kv in row):
            return None
        starts = [forward.tokens(row.name) for row in rows]
        return StreamedStep(self, [row.num_tokens for row in rows], starts, kvs, list(self._rules))


class StreamedStep:
    """One forward of a model. Asked layer by layer, and within a layer row by row."""

    def __init__(
        self,
        streaming: Streaming,
        num_tokens: Sequence[int],
        starts: Sequence[int],
        kvs: Sequence[Sequence[LayerKV]],
        rules: list[Rules],
    ) -> None:
        self._thread = streaming.thread
        self._rules = rules
        rows = [
            StepRow(start=start, num_tokens=count, kv=kv.__getitem__)
            for start, count, kv in zip(starts, num_tokens, kvs, strict=True)
        ]
        self._step = Step(streaming.streamer, rows, len(rules), self._rules.__getitem__)

    def attend(
        self, layer: int, row: int, query: torch.Tensor, *, scale: float | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention of `query`, `[T, Hq, D]`, whose own KV is in its pages already. Returns `[T, Hq, Dv]`.

        Raises `TransferError` if a copy failed: nothing has changed, and a new forward may try again.
        """
        self._rules[layer] = attrs.evolve(self._rules[layer], scale=scale, softcap=softcap)
        return self._step.attend(layer, row, query, self._thread)

    def end(self) -> None:
        """The next forward will most likely read the same: its first copies begin now."""
        self._step.prefetch_again()
