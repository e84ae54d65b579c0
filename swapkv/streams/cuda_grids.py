"""Pages of planes with gaps: adjacent ones are a grid, which a copy engine moves as one operand of `cuMemcpy3DBatchAsync`.

A pool's own memory has no gaps, so adjacent pages are one run of bytes. An engine's may: K and V of a page side by side,
or all layers of a page, seen as planes of their own.
"""

import ctypes
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.streams.cuda_driver import BATCH_VERSIONS, find_function, raise_failed

Addresses: TypeAlias = NDArray[np.uint64]

PITCH_MAX = (1 << 31) - 1
"""What every card takes (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`)."""

_OPERATION = np.dtype(
    {
        "names": [
            "source_kind", "source", "source_pitch", "target_kind", "target", "target_pitch",
            "width", "height", "depth", "order",
        ],
        "formats": ["i4", "u8", "u8", "i4", "u8", "u8", "u8", "u8", "u8", "i4"],
        "offsets": [0, 8, 16, 40, 48, 56, 80, 88, 96, 104],
        "itemsize": 112,
    }
)  # fmt: skip
"""`CUDA_MEMCPY3D_BATCH_OP` of two operands that are pointers; heights of layers, hints and flags are 0."""

_POINTER, _IN_STREAM_ORDER = 1, 1


@attrs.frozen(eq=False)
class Grids:
    """Rows of `widths` bytes, `heights` of them, `[n]` each: `pitches` bytes apart on the device, without gap at `far`."""

    near: Addresses
    far: Addresses
    widths: Addresses
    heights: Addresses
    pitches: Addresses

    def __len__(self) -> int:
        return len(self.widths)


def grids_of(near: Addresses, far: Addresses, sizes: Addresses, pitches: Addresses) -> Grids:
    """Runs `[n]` as grids, in their order. `pitches`: how far apart the pages of a run's plane are, 0 for no plane with
    gaps: only pages of such a plane that follow each other on both sides, without one between, become one grid."""
    if not len(sizes):
        return Grids(near, far, sizes, sizes, sizes)
    pitch = pitches[1:]
    follows = (pitch > 0) & (pitch <= PITCH_MAX) & (pitch == pitches[:-1]) & (sizes[1:] == sizes[:-1])
    follows &= (near[1:] - near[:-1] == pitch) & (far[1:] - far[:-1] == sizes[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    heights = np.diff(heads, append=len(sizes)).astype(np.uint64)
    apart = np.where(heights > 1, pitches[heads], sizes[heads])
    return Grids(near[heads], far[heads], sizes[heads], heights, apart)


@attrs.frozen
class GridCopy:
    """`cuMemcpy3DBatchAsync`, called by its address so that arrays pass as they are. `version`: see `BatchCopy`."""

    version: int
    _function: Any

    def out(self, grids: Grids, stream: int) -> None:
        """One submission of all grids from the device. On a thread on which the context is current."""
        self._submit(grids, "source", "target", stream)

    def into(self, grids: Grids, stream: int) -> None:
        """One submission of all grids to the device."""
        self._submit(grids, "target", "source", stream)

    def _submit(self, grids: Grids, near: str, far: str, stream: int) -> None:
        operations = np.zeros(len(grids), dtype=_OPERATION)
        operations["source_kind"] = operations["target_kind"] = _POINTER
        operations["order"] = _IN_STREAM_ORDER
        operations["depth"] = 1
        operations["width"], operations["height"] = grids.widths, grids.heights
        operations[near], operations[f"{near}_pitch"] = grids.near, grids.pitches
        operations[far], operations[f"{far}_pitch"] = grids.far, grids.widths
        failed = [ctypes.byref(ctypes.c_size_t(0))] if self.version < BATCH_VERSIONS[0] else []
        status = self._function(len(operations), operations.ctypes.data, *failed, 0, stream)
        if status:
            raise_failed("cuMemcpy3DBatchAsync", status)

    @classmethod
    def find(cls) -> "GridCopy | None":
        """The function as this driver has it; None if it is too old."""
        for version in BATCH_VERSIONS:
            address = find_function(b"cuMemcpy3DBatchAsync", version)
            if address is not None:
                return cls(version, _prototype(version)(address))
        return None


def _prototype(version: int) -> Any:
    """A function of C that lets go of the GIL while it runs."""
    failed = [ctypes.c_void_p] if version < BATCH_VERSIONS[0] else []
    return ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, *failed, ctypes.c_ulonglong, ctypes.c_void_p
    )
