"""The host tier: one arena, allocated once, in which every chunk that has a host copy has a slot.

Inside a slot the order is layer-major, then plane by plane, then page by page: what a layer needs is contiguous, and
so is a whole chunk. Which bytes belong to whom is the core's to decide; this is where they are.
"""

import torch

from swapkv.errors import ProtocolError
from swapkv.ids import HostOffset, LayerId
from swapkv.layout import KVLayout


class HostArena:
    """`memory`: host memory that the device copies from and to at full speed, uint8 `[num_bytes]`."""

    def __init__(self, layout: KVLayout, memory: torch.Tensor) -> None:
        if memory.dtype is not torch.uint8 or memory.dim() != 1:
            raise ProtocolError(f"host memory of {memory.dtype} {tuple(memory.shape)}: pass uint8 [num_bytes]")
        self._memory = memory
        self._chunk_pages = layout.chunk_pages
        self._planes: list[list[tuple[int, int]]] = [
            [(layout.plane_offset(layout.group_of_layer[plane.layer], plane), plane.page_bytes) for plane in planes]
            for planes in layout.planes
        ]

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def pages(self, slot: HostOffset, layer: LayerId, first: int, count: int) -> list[torch.Tensor]:
        """Pages `[first, first + count)` of `layer` in `slot`, a tensor for each plane: uint8 `[count, page_bytes]`."""
        views = []
        for offset, page_bytes in self._planes[layer]:
            begin = slot + offset + first * page_bytes
            views.append(self._memory[begin : begin + count * page_bytes].view(count, page_bytes))
        return views
