"""Which bytes of a slab file are free: ranges that merge with their neighbours as soon as they are given back.

Unlike the host arena's extents these start from what a scan of the file has found, at any offset.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

from swapkv.errors import ProtocolError


class SlabExtents:
    """The range `[begin, end)` but for `taken`, pairs of offset and bytes. Takes the smallest range that is large enough.

    Raises `ProtocolError` when two of `taken` overlap or leave the range.
    """

    def __init__(self, begin: int, end: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.total_bytes = end - begin
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._taken: dict[int, int] = {}
        at = begin
        for offset, size in sorted(taken):
            if size < 1 or offset < at or offset + size > end:
                raise ProtocolError(f"extent of {size} bytes at offset {offset} overlaps another or leaves the slab")
            self._add(at, offset - at)
            self._taken[offset] = size
            at = offset + size
        self._add(at, end - at)
        self.used_bytes = sum(self._taken.values())
        self.peak_bytes = self.used_bytes

    @property
    def largest_bytes(self) -> int:
        """The longest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def num_ranges(self) -> int:
        """How many pieces the free bytes are in."""
        return len(self._starts)

    def allocate(self, size: int) -> int | None:
        """The offset of a new extent of `size` bytes, or None when there is no room in one piece."""
        assert size > 0, "an extent has at least one byte"
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        length, start = self._by_size[at]
        self._remove(start)
        self._add(start + size, length - size)
        self._taken[start] = size
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return start

    def free(self, offset: int) -> None:
        """Give an extent back. Raises `ProtocolError` for one that is not taken."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ProtocolError(f"extent at offset {offset} is not taken: it was freed already or never handed out")
        self.used_bytes -= size
        end = offset + size
        if end in self._sizes:
            end += self._remove(end)
        before = bisect_left(self._starts, offset) - 1
        if before >= 0 and self._starts[before] + self._sizes[self._starts[before]] == offset:
            start = self._starts[before]
            self._remove(start)
            offset = start
        self._add(offset, end - offset)

    def _add(self, start: int, size: int) -> None:
        if size > 0:
            insort(self._starts, start)
            self._sizes[start] = size
            insort(self._by_size, (size, start))

    def _remove(self, start: int) -> int:
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
