"""Small regions and blocks in a device's memory."""

from collections.abc import Sequence

import torch

from swapkv.ids import LayerId
from swapkv.streams.base import Block, Device, Region

OLD, NEW = 1, 2


def region_of(device: Device, num_pages: int, page_bytes: int, gap: int = 0, layer: int = 0) -> Region:
    """Pages of zeros, `gap` bytes apart."""
    memory = device.allocate(num_pages * (page_bytes + gap)).view(num_pages, page_bytes + gap)
    return Region(layer=LayerId(layer), name="k", pages=memory[:, :page_bytes])


def block_of(device: Device, regions: Sequence[Region], pages: Sequence[int]) -> Block:
    """Pages of every region and pinned memory for them."""
    host = []
    for region in regions:
        host.append(device.allocate_pinned(max(1, len(pages) * region.page_bytes)))
    views = [
        memory[: len(pages) * region.page_bytes].view(len(pages), region.page_bytes)
        for memory, region in zip(host, regions, strict=True)
    ]
    index = torch.tensor(pages, dtype=torch.int64)
    return Block(regions=regions, pages=index, host=views, guarded=views, checksums=[0] * len(regions))


def one_page(device: Device, value: int = OLD) -> Block:
    """Page 1 of two pages of 16 bytes, all of them `value`, and a host buffer of zeros."""
    region = region_of(device, 2, 16)
    region.pages.fill_(value)
    return block_of(device, [region], [1])
