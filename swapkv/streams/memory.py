"""A pool's device memory: one allocation, seen as tensors by a model and as regions by the data path."""

from collections.abc import Mapping, Sequence

import torch

from swapkv.errors import ProtocolError
from swapkv.ids import GroupId, LayerId
from swapkv.layout import KVLayout, Plane
from swapkv.streams.base import Device, Region


class PagedMemory:
    """The KV of all pages, by layer and plane.

    Rows are counted from 0 within a layer group: row `i` of a group's planes is that group's page `i`.
    """

    def __init__(self, layout: KVLayout, tensors: Mapping[tuple[LayerId, str], torch.Tensor]) -> None:
        self.layout = layout
        self._tensors = dict(tensors)
        self.regions: tuple[tuple[Region, ...], ...] = tuple(
            tuple(self._region(plane) for plane in planes) for planes in layout.planes
        )
        _refuse_shared(self.regions)

    @classmethod
    def allocate(cls, layout: KVLayout, pages_per_group: Sequence[int], device: Device) -> "PagedMemory":
        """One allocation for `pages_per_group[g]` pages of every group `g`."""
        sizes = [
            (plane, pages_per_group[layout.group_of_layer[plane.layer]]) for planes in layout.planes for plane in planes
        ]
        memory = device.allocate(sum(plane.page_bytes * pages for plane, pages in sizes))
        tensors, offset = {}, 0
        for plane, pages in sizes:
            num_bytes = plane.page_bytes * pages
            raw = memory[offset : offset + num_bytes]
            tensors[plane.layer, plane.name] = raw.view(torch_dtype(plane)).view(pages, *plane.page_shape)
            offset += num_bytes
        return cls(layout, tensors)

    def plane(self, layer: int, name: str) -> torch.Tensor:
        """The plane as a tensor of its dtype, shape `[num_pages, *page_shape]`."""
        return self._tensors[LayerId(layer), name]

    def num_pages(self, group: GroupId) -> int:
        """Pages of `group`."""
        return self.regions[self.layout.groups[group].layers[0]][0].pages.shape[0]

    def _region(self, plane: Plane) -> Region:
        tensor = self._tensors.get((plane.layer, plane.name))
        if tensor is None:
            raise ProtocolError(f"no tensor for plane {plane.name!r} of layer {plane.layer}: pass one for every plane")
        if tuple(tensor.shape[1:]) != plane.page_shape or tensor.dtype != torch_dtype(plane):
            raise ProtocolError(
                f"plane {plane.name!r} of layer {plane.layer}: tensor {tuple(tensor.shape)} {tensor.dtype} with strides "
                f"{tensor.stride()} does not match pages of {plane.page_shape} {torch_dtype(plane)}"
            )
        if tensor.shape[0] and not tensor[0].is_contiguous():
            raise ProtocolError(
                f"plane {plane.name!r} of layer {plane.layer}: strides {tensor.stride()} scatter a page over memory; "
                "declare it as several planes whose pages are contiguous"
            )
        stride = tensor.stride(0) * tensor.element_size()
        if tensor.shape[0] > 1 and stride < plane.page_bytes:
            raise ProtocolError(
                f"plane {plane.name!r} of layer {plane.layer}: tensor {tuple(tensor.shape)} with strides {tensor.stride()} "
                f"puts a page every {stride} bytes, a page takes {plane.page_bytes}: its pages overlap, pass memory of "
                "their own"
            )
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size()
        pages = storage.as_strided((tensor.shape[0], plane.page_bytes), (stride, 1), start)
        return Region(layer=plane.layer, name=plane.name, pages=pages)


def _refuse_shared(regions: Sequence[Sequence[Region]]) -> None:
    """Raise `ProtocolError` if two planes begin at the same byte."""
    named: dict[int, Region] = {}
    for region in (region for planes in regions for region in planes if region.pages.numel()):
        other = named.setdefault(region.pages.data_ptr(), region)
        if other is not region:
            raise ProtocolError(
                f"plane {region.name!r} of layer {region.layer} is the memory of plane {other.name!r} of layer "
                f"{other.layer}: pass a tensor of its own for each"
            )


def torch_dtype(plane: Plane) -> torch.dtype:
    """The torch dtype of a plane."""
    dtype = getattr(torch, plane.dtype.torch_name)
    assert isinstance(dtype, torch.dtype)
    return dtype
