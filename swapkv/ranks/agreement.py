"""What ranks agree on before the first command: one layout, and no more pages and host bytes than each of them has."""

from collections.abc import Mapping, Sequence

import torch

from swapkv.config import Verify
from swapkv.errors import ProtocolError
from swapkv.ids import GroupId, LayerId
from swapkv.layout import KVLayout
from swapkv.ranks.messages import Agreed, Hello
from swapkv.ranks.peer import RankGroup
from swapkv.streams.base import Device
from swapkv.streams.memory import PagedMemory


def hello(
    layout: KVLayout, ranks: RankGroup, num_pages: int | Sequence[int], host_bytes: int, memory: PagedMemory | None
) -> Hello:
    """What a rank has. `memory`, if given, counts for the pages. Raises `ProtocolError` for sizes that do not fit."""
    pages = [num_pages] * len(layout.groups) if isinstance(num_pages, int) else list(num_pages)
    if memory is not None:
        pages = [memory.num_pages(GroupId(g)) for g in range(len(layout.groups))]
    if len(pages) != len(layout.groups) or min(pages) < 1 or host_bytes < 0:
        raise ProtocolError(
            f"num_pages={pages} must be at least 1 for each of {len(layout.groups)} layer groups, host_bytes="
            f"{host_bytes} at least 0"
        )
    return Hello(ranks.rank, ranks.size, tuple(pages), host_bytes, layout_fields(layout))


def layout_fields(layout: KVLayout) -> dict[str, str]:
    """The layout field by field: equal if and only if pages, chunks and host slots are the same bytes."""
    fields = {name: str(getattr(layout, name)) for name in ("page_size", "chunk_tokens", "truncate_slack")}
    fields["groups"] = str(len(layout.groups))
    for at, group in enumerate(layout.groups):
        fields[f"groups[{at}].layers"] = str(list(map(int, group.layers)))
        fields[f"groups[{at}].window"] = str(group.window)
    for layer, planes in enumerate(layout.planes):
        fields[f"planes[{layer}]"] = str([plane.name for plane in planes])
        for plane in planes:
            fields[f"planes[{layer}].{plane.name}.page_shape"] = str(plane.page_shape)
            fields[f"planes[{layer}].{plane.name}.dtype"] = plane.dtype.torch_name
    return fields


def agree(hellos: Mapping[int, Hello], verify: Verify) -> Agreed:
    """The least of everything. Raises `ProtocolError` naming the first field that differs, its values and their ranks.

    `hellos[r]`: of rank `r`, as seen by the leader, its own included.
    """
    for rank, said in hellos.items():
        if (said.rank, said.size) != (rank, len(hellos)):
            raise ProtocolError(
                f"rank {rank} of {len(hellos)} calls itself {said.rank} of {said.size}: start every rank with its own "
                "number and the same size"
            )
    for field in dict.fromkeys(name for said in hellos.values() for name in said.fields):
        values: dict[str, list[int]] = {}
        for rank, said in hellos.items():
            values.setdefault(said.fields.get(field, "absent"), []).append(rank)
        if len(values) > 1:
            found = ", ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            raise ProtocolError(f"the ranks' layouts differ in {field}: {found}; open every rank with the same layout")
    pages = tuple(map(min, zip(*(said.pages for said in hellos.values()), strict=True)))
    return Agreed(pages, min(said.host_bytes for said in hellos.values()), verify)


def take_memory(
    layout: KVLayout, agreed: Agreed, device: Device, memory: PagedMemory | None
) -> tuple[PagedMemory, torch.Tensor]:
    """Device pages and host memory as agreed: of memory that exists already, its first pages."""
    if memory is None:
        memory = PagedMemory.allocate(layout, agreed.pages, device)
    else:
        memory = _first_pages(memory, agreed.pages)
    return memory, device.allocate_pinned(agreed.host_bytes)


def _first_pages(memory: PagedMemory, pages: Sequence[int]) -> PagedMemory:
    layout = memory.layout
    tensors: dict[tuple[LayerId, str], torch.Tensor] = {}
    for planes in layout.planes:
        for plane in planes:
            count = pages[layout.group_of_layer[plane.layer]]
            tensors[plane.layer, plane.name] = memory.plane(plane.layer, plane.name)[:count]
    return PagedMemory(layout, tensors)
