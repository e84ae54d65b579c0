"""Steps of the demo's model over KV that is partly in host memory."""

from collections.abc import Callable, Sequence

import torch

from swapkv.attention.pieces import Rules
from swapkv.attention.ring import Streamer
from swapkv.attention.streaming import Step, StepRow
from swapkv.demo.decoder import Decoder, Row
from swapkv.forward import Forward
from swapkv.layout import KVLayout, PageOrder
from swapkv.pool import Pool
from swapkv.schedulers import BatchRow
from swapkv.streams.base import Device

RING_DEPTH = 2


def rules_of(layout: KVLayout) -> Rules:
    """How every layer attends; one split at a time comes from the host, so that the ring is small."""
    return Rules(order=PageOrder.NHD, page_size=layout.page_size, unit_splits=1)


def ring_bytes(layout: KVLayout) -> int:
    """Device memory of the ring: part of what the requests may use."""
    page_bytes = sum(plane.page_bytes for plane in layout.planes[0])
    return RING_DEPTH * rules_of(layout).unit_tokens // layout.page_size * page_bytes


class StreamingModel:
    """A `Model` for a runner: a decoder that reads host pages through a ring, one step's plan ahead."""

    def __init__(self, decoder: Decoder, pool: Pool, device: Device) -> None:
        self._decoder = decoder
        self._pool = pool
        self._rules = rules_of(pool.layout)
        self._planes = [
            [pool.memory.plane(layer, plane.name) for plane in planes]
            for layer, planes in enumerate(pool.layout.planes)
        ]
        self.streamer = Streamer(device, self._planes[0], self._rules, depth=RING_DEPTH)

    def __call__(self, forward: Forward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
        """Prepare a step, on the event loop; the answer runs it on the compute stream."""
        layers = range(self._pool.layout.num_layers)
        kvs = [[forward.layer_kv(row.name, layer, self._planes[layer]) for layer in layers] for row in rows]
        tables = [forward.page_tables(row.name) for row in rows]

        def run() -> list[int]:
            step = Step(
                self.streamer,
                [
                    StepRow(start=row.start, num_tokens=len(row.tokens), kv=kv.__getitem__)
                    for row, kv in zip(rows, kvs, strict=True)
                ],
                len(layers),
                lambda layer: self._rules,
            )
            inputs = [
                Row(tokens=row.tokens, start=row.start, page_tables=table, attend=_attend(step, at, forward))
                for at, (row, table) in enumerate(zip(rows, tables, strict=True))
            ]
            answer = self._decoder.forward(inputs, self._pool.memory)
            step.prefetch_again()
            return answer

        return run


def _attend(step: Step, row: int, forward: Forward) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda layer, query: step.attend(layer, row, query, forward.stream)
