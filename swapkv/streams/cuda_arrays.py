"""KV that exists already, of an engine: arrays of any library and dtype, seen as pages without a copy."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from swapkv.errors import ProtocolError
from swapkv.layout import Plane
from swapkv.streams.cuda_driver import CudaError, call, cu
from swapkv.streams.memory import torch_dtype

_BITS_OF_BYTE = 8


@attrs.frozen(eq=False)
class _Array:
    """Where an array is. `strides_bytes`: of each axis; `owner`: what keeps the memory alive."""

    owner: object
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int

    @property
    def page_bytes(self) -> int:
        return torch.Size(self.shape[1:]).numel() * self.item_bytes


def pages_of(
    array: object, plane: Plane, ordinal: int, view: Callable[[object, int, int], torch.Tensor]
) -> torch.Tensor:
    """`array`, whose first axis is pages, as a tensor `[num_pages, *page_shape]` of the plane's dtype, on the same bytes.

    What the array takes its elements for does not matter: packed, 8-bit and 16-bit types pass as bytes.
    Raises `ProtocolError` unless it is on device `ordinal` and its pages are those of the plane.
    """
    found = _describe(array)
    what = f"plane {plane.name!r} of layer {plane.layer}: array {found.shape} with strides {found.strides_bytes} bytes"
    if not found.shape or not found.shape[0]:
        raise ProtocolError(f"{what} has no pages: its first axis must be pages")
    if found.page_bytes != plane.page_bytes:
        raise ProtocolError(f"{what} has pages of {found.page_bytes} bytes, the layout's have {plane.page_bytes}")
    if not _is_contiguous(found.shape[1:], found.strides_bytes[1:], found.item_bytes):
        raise ProtocolError(f"{what} scatters a page over memory: declare it as several planes of contiguous pages")
    stride = found.strides_bytes[0] if found.shape[0] > 1 else found.page_bytes
    if stride < found.page_bytes:
        raise ProtocolError(f"{what} puts a page every {stride} bytes: its pages overlap, pass memory of their own")
    _require_on_device(found.address, ordinal, what)
    span = (found.shape[0] - 1) * stride + found.page_bytes
    rows = view(found.owner, found.address, span).as_strided((found.shape[0], found.page_bytes), (stride, 1))
    item_bytes = plane.dtype.bits // _BITS_OF_BYTE
    if stride % item_bytes or found.address % item_bytes:
        raise ProtocolError(f"{what} is not aligned to elements of {item_bytes} bytes: align it")
    return rows.view(torch_dtype(plane)).view(found.shape[0], *plane.page_shape)


def _describe(array: Any) -> _Array:
    if isinstance(array, torch.Tensor):
        strides = tuple(stride * array.element_size() for stride in array.stride())
        return _Array(array, array.data_ptr(), tuple(array.shape), strides, array.element_size())
    if hasattr(array, "__cuda_array_interface__"):
        return _of_interface(array, array.__cuda_array_interface__)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array)
    raise ProtocolError(
        f"a {type(array).__name__} is no array on a device: pass a torch tensor, or what has __cuda_array_interface__ "
        "or __dlpack__"
    )


def _of_interface(array: object, interface: dict[str, Any]) -> _Array:
    shape, item_bytes = tuple(interface["shape"]), int(interface["typestr"][2:])
    strides = interface.get("strides") or _packed(shape, item_bytes)
    return _Array(array, int(interface["data"][0]), shape, tuple(strides), item_bytes)


def _of_dlpack(array: object) -> _Array:
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise ImportError("arrays of DLPack need an extra: pip install 'swapkv[cuda]'") from error
    seen = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
    item_bytes = int(seen.dtype.itemsize)
    strides = _packed(seen.shape, item_bytes) if seen.strides is None else [item_bytes * s for s in seen.strides]
    return _Array(seen, int(seen.ptr), tuple(seen.shape), tuple(strides), item_bytes)


def _packed(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """The strides of an array in C order, in bytes."""
    strides = [item_bytes]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    wanted = _packed((1, *shape), item_bytes)[1:]
    return all(length == 1 or stride == want for length, stride, want in zip(shape, strides, wanted, strict=True))


def _require_on_device(address: int, ordinal: int, what: str) -> None:
    attribute = cu.CUpointer_attribute
    try:
        kind = int(call(cu.cuPointerGetAttribute, attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
        found = int(call(cu.cuPointerGetAttribute, attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address))
    except CudaError as error:
        raise ProtocolError(f"{what} is not memory of a device: move it to device {ordinal}") from error
    if kind != int(cu.CUmemorytype.CU_MEMORYTYPE_DEVICE) or found != ordinal:
        raise ProtocolError(f"{what} is not in the memory of device {ordinal}: move it there")
