"""Copies of pages in host memory, as the host device makes them.

numpy rather than torch moves the bytes: it runs at memcpy speed on the calling thread alone, without the GIL, where
torch would start a team of OpenMP threads for every stream and stall whenever a core is busy.
"""

import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from swapkv.config import Verify
from swapkv.errors import ChecksumMismatch, ProtocolError
from swapkv.ids import PhysicalPages
from swapkv.streams.base import Block, Region

Rows: TypeAlias = slice | PhysicalPages
"""Rows of a region: a slice if they are consecutive, else their numbers."""


def gather_blocks(blocks: Sequence[Block], verify: Verify) -> tuple[int, ...]:
    """Copy the device pages of each block to its host memory, in order.

    Returns two checksums for each block and region, as `Block` says; empty without `verify`.
    """
    checksums: list[int] = []
    for block in blocks:
        gather_block(block)
        if verify is Verify.CRC32:
            checksums += hash_block(block)
    return tuple(checksums)


def scatter_blocks(blocks: Sequence[Block], verify: Verify) -> tuple[int, ...]:
    """Copy the host bytes of each block to its device pages, in order; with `verify`, each is checked before.

    Raises `ChecksumMismatch` at the first block whose guarded bytes are not those of its checksums: that block and those
    after it are not written, those before it are. Drop the stored copy, recompute its tokens.
    """
    for block in blocks:
        if verify is Verify.CRC32:
            verify_block(block)
        scatter_block(block)
    return ()


def gather_block(block: Block) -> None:
    """Copy rows `pages` of every region to `host` (D2H). The block is one that `check_block` accepts."""
    rows = _rows(block.pages)
    for region, host in zip(block.regions, block.host, strict=True):
        if isinstance(rows, slice):
            host.numpy()[:] = region.pages.numpy()[rows]
        else:
            # "raise" would copy through a buffer; `check_block` has compared the numbers with the region
            _elements(region.pages).take(rows, out=_elements(host), mode="clip")


def scatter_block(block: Block) -> None:
    """Copy `host` to rows `pages` of every region (H2D). The block is one that `check_block` accepts."""
    rows = _rows(block.pages)
    for region, host in zip(block.regions, block.host, strict=True):
        if isinstance(rows, slice):
            region.pages.numpy()[rows] = host.numpy()
        else:
            _elements(region.pages)[rows] = _elements(host)


def clone_pages(regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy rows `source` to rows `target` (int64 `[n]` each) of every region; all are read before any is written.

    The rows are ones that `check_pages` accepts.
    """
    taken, put = _rows(source), _rows(target)
    for region in regions:
        elements = _elements(region.pages)
        elements[put] = elements[taken]


def checksum(tensors: Iterable[torch.Tensor], before: int = 0) -> int:
    """CRC-32, as in zlib, of the bytes of contiguous CPU tensors one after the other; no copy is made.

    `before`: the checksum of the bytes that come before them.
    """
    crc = before
    for tensor in tensors:
        crc = zlib.crc32(tensor.numpy().data, crc)
    return crc


def check_block(block: Block, verify: Verify) -> None:
    """Raises `ProtocolError` unless `block` is of the shapes and dtypes that `Block` states; with `verify`, guarded."""
    if not block.regions or len(block.host) != len(block.regions):
        raise ProtocolError(
            f"block has {len(block.regions)} regions and {len(block.host)} host buffers: give one buffer a region"
        )
    check_pages(block.regions, block.pages)
    for region, host in zip(block.regions, block.host, strict=True):
        _check_buffer("host", host, region)
        if host.shape[0] != block.pages.shape[0]:
            raise ProtocolError(
                f"host buffer of {host.shape[0]} pages for {block.pages.shape[0]} pages: give one row a page"
            )
    if verify is Verify.CRC32 and len(block.checksums) != len(block.regions):
        raise ProtocolError(
            f"block has {len(block.regions)} regions and {len(block.checksums)} checksums: give one a region, or Verify.NONE"
        )
    for region, guarded in zip(block.regions, block.guarded, strict=False):
        _check_buffer("guarded", guarded, region)


def check_pages(regions: Sequence[Region], pages: torch.Tensor) -> None:
    """Raises `ProtocolError` unless `pages` is int64 `[n]` and names rows that every region has."""
    if pages.dtype != torch.int64 or pages.dim() != 1:
        raise ProtocolError(f"pages are {pages.dtype} {list(pages.shape)}, must be int64 [n]: convert them")
    if not pages.shape[0] or not regions:
        return
    limit = min([region.pages.shape[0] for region in regions])
    # as unsigned numbers the negative ones are the largest: one comparison finds both kinds of stray
    if int(pages.numpy().view(np.uint64).max()) >= limit:
        stray = next(page for page in pages.tolist() if not 0 <= page < limit)
        raise ProtocolError(f"page {stray} of layer {regions[0].layer} is not below {limit}: name pages on the device")


def _check_buffer(name: str, buffer: torch.Tensor, region: Region) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 2 or buffer.shape[1] != region.page_bytes:
        raise ProtocolError(
            f"{name} buffer of layer {region.layer} is {buffer.dtype} {list(buffer.shape)}, "
            f"must be uint8 [n, {region.page_bytes}]: view it as bytes of pages"
        )
    if not buffer.is_contiguous():
        raise ProtocolError(f"{name} buffer of layer {region.layer} has strides {buffer.stride()}: make it contiguous")


def hash_block(block: Block) -> list[int]:
    """Two checksums for each region of what a gather has brought to `host`, as `Block` says."""
    checksums: list[int] = []
    for host, before in zip(block.host, block.checksums, strict=True):
        sealed = checksum([host[: block.sealed]], before)
        checksums += (sealed, checksum([host[block.sealed :]], sealed))
    return checksums


def verify_block(block: Block) -> None:
    """Raises `ChecksumMismatch` unless the guarded bytes of every region hash to its checksum."""
    for region, guarded, wanted in zip(block.regions, block.guarded, block.checksums, strict=True):
        found = checksum([guarded])
        if found != wanted:
            raise ChecksumMismatch(
                f"layer {region.layer}, plane {region.name!r}: stored bytes hash to {found:#010x}, expected {wanted:#010x}; "
                "they were not used: drop this copy and recompute its tokens"
            )


def _rows(pages: torch.Tensor) -> Rows:
    rows: PhysicalPages = pages.numpy()
    if not rows.size:
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first == rows.size - 1 and bool((rows[1:] - rows[:-1] == 1).all()):
        return slice(first, last + 1)
    return rows


def _elements(pages: torch.Tensor) -> NDArray[Any]:
    """`pages` as `[n]` elements of one page each: numpy then moves a page by one memcpy, whatever the page stride."""
    rows = pages.numpy()
    elements: NDArray[Any] = rows.view(_element_dtype(rows.shape[1]))[:, 0]
    return elements


@lru_cache(maxsize=64)
def _element_dtype(num_bytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, num_bytes))
