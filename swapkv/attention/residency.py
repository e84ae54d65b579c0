"""Where the KV of one layer of one sequence lies: pages on the device, and runs of pages in host memory."""

from collections.abc import Hashable, Sequence

import attrs
import torch

from swapkv.attention.paged import Gatherer, check_pages
from swapkv.errors import ProtocolError


@attrs.frozen(kw_only=True, eq=False)
class HostRun:
    """Consecutive logical pages in host memory, the first one's number `first`; `planes`: uint8 `[n, page_bytes]` each."""

    first: int
    planes: tuple[torch.Tensor, ...]

    @property
    def stop(self) -> int:
        return self.first + self.planes[0].shape[0]


@attrs.frozen(kw_only=True, eq=False)
class LayerKV:
    """The KV of one layer of one sequence.

    `name`: of the sequence. `version`: another one whenever what `runs` hold has changed. `planes`: on the device,
    keys and values (or one latent plane, whose first `value_dim` numbers are the values). `page_table`: int64 `[pages]`,
    rows of the planes; -1 for a page that is in none, or in one of `runs`, which are in order.
    """

    name: Hashable
    layer: int
    version: Hashable
    planes: tuple[torch.Tensor, ...]
    page_table: torch.Tensor
    runs: tuple[HostRun, ...] = ()
    value_dim: int | None = None


def resident_pages(kv: LayerKV, unit: range, page_size: int, gather: Gatherer) -> tuple[torch.Tensor, ...]:
    """The pages of a unit that all lie on the device, by plane, as `gather` gives them."""
    check_pages(kv.page_table, unit, page_size, kv.planes[0].shape[0])
    return gather(kv.page_table[unit.start : unit.stop])


def completed_pages(
    kv: LayerKV, unit: range, staged: Sequence[torch.Tensor], pieces: Sequence[range]
) -> tuple[torch.Tensor, ...]:
    """Staged pages, to which those are added that lie on the device."""
    if sum(map(len, pieces)) == len(unit):
        return tuple(plane[: len(unit)] for plane in staged)
    here = torch.ones(len(unit), dtype=torch.bool)
    for piece in pieces:
        here[piece.start : piece.stop] = False
    pages = tuple(plane[: len(unit)] for plane in staged)
    rows = kv.page_table[unit.start : unit.stop][here]
    if int(rows.min()) < 0:
        raise ProtocolError(f"sequence {kv.name!r}: pages {unit} are neither all on the device nor in host memory")
    for page, plane in zip(pages, kv.planes, strict=True):
        page[here] = plane.index_select(0, rows)
    return pages


def as_kv(kv: LayerKV, pages: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; of a latent plane the values are its first numbers."""
    if len(pages) == 1:
        return pages[0], pages[0][..., : kv.value_dim]
    keys, values = pages
    return keys, values
