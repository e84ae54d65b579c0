"""Copy commands become copies: the one place where chunks, pages and slots turn into memory."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from swapkv.config import Verify
from swapkv.executor import Submitted
from swapkv.fsm.commands import ClonePages, Copy, CopyItem
from swapkv.ids import GroupId, HostOffset, Lane, LayerId, PhysicalPages
from swapkv.layout import KVLayout
from swapkv.streams.base import Block, Device, Event, Region, Stream
from swapkv.streams.memory import PagedMemory
from swapkv.tiers.host import HostArena


class Transfers:
    """The two copy streams of a pool. `page_bases[g]`: the number of the first page of layer group `g`."""

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        arena: HostArena,
        device: Device,
        verify: Verify,
        page_bases: Sequence[int],
    ) -> None:
        self._layout = layout
        self._memory = memory
        self._arena = arena
        self._verify = verify
        self._bases = tuple(page_bases)
        self._streams = {Lane.OUT: device.create_stream("copy-out"), Lane.IN: device.create_stream("copy-in")}

    def submit(self, copy: Copy, after: Sequence[Event]) -> Submitted:
        """Queue a copy behind the events `after`. Raises what the stream raises if it does not take it."""
        stream = self._streams[copy.lane]
        for event in after:
            stream.wait(event)
        blocks = [block for item in copy.items for block in self._blocks(copy, item)]
        move = stream.gather if copy.lane is Lane.OUT else stream.scatter
        return Submitted(move(blocks, self._verify), stream.record())

    def clone(self, clone: ClonePages, stream: Stream, after: Sequence[Event]) -> Event:
        """Queue a copy of device pages on `stream`; the event is reached when it is done, and fails if it fails."""
        for event in after:
            stream.wait(event)
        regions: list[Region] = []
        for layer in self._layout.groups[clone.group].layers:
            regions.extend(self._memory.regions[layer])
        return stream.clone(regions, self.rows(clone.group, clone.source), self.rows(clone.group, clone.target))

    def rows(self, group: GroupId, pages: PhysicalPages) -> torch.Tensor:
        """Page numbers as rows of the group's planes, int64 `[n]`; -1 stays -1."""
        base = self._bases[group]
        rows = torch.from_numpy(pages.copy() if base == 0 else pages - base)
        return rows if base == 0 else rows.clamp_(min=-1)

    def host_pages(self, slot: HostOffset, layer: LayerId, count: int) -> list[torch.Tensor]:
        """The first `count` pages of `layer` in a host slot, by plane: uint8 `[count, page_bytes]`. Views."""
        return self._arena.pages(slot, layer, 0, count)

    def _blocks(self, copy: Copy, item: CopyItem) -> Iterator[Block]:
        """One block a layer; the item's checksums are by plane, in the same order."""
        checksums = iter(item.checksums)
        for layer in copy.layers:
            guarded: list[torch.Tensor] = []
            if self._verify is not Verify.NONE and copy.lane is Lane.IN:
                guarded = self._arena.pages(item.host, layer, item.guard_first, item.guard_pages)
            regions = self._memory.regions[layer]
            yield Block(
                regions=regions,
                pages=self.rows(copy.group, item.pages),
                host=self._arena.pages(item.host, layer, item.first, len(item.pages)),
                guarded=guarded,
                checksums=tuple(islice(checksums, len(regions))),
                sealed=item.sealed,
            )
