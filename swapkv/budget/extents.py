"""Which bytes of an arena are taken: an allocator of extents that coalesces."""

from bisect import bisect_left, insort

from swapkv.errors import ProtocolError


class Extents:
    """Hands out byte ranges of `[0, total)`. Finds room whenever a run of untaken bytes is long enough.

    Extents come in few sizes (one a layer group), so the free ones wait in a bin of their size; only when no bin and
    no untouched space serves are neighbours merged.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._fresh = 0
        self._bins: dict[int, list[int]] = {}
        self._taken: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        """The offset of a new extent of `size` bytes, or None when there is no room in one piece."""
        assert size > 0, "an extent has at least one byte"
        offset = self._find(size)
        if offset is not None:
            self._taken[offset] = size
            self.used += size
        return offset

    def free(self, offset: int) -> None:
        """Give an extent back. Raises `ProtocolError` for one that is not taken."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ProtocolError(f"extent at offset {offset} is not taken: it was freed already or never handed out")
        self.used -= size
        self._bins.setdefault(size, []).append(offset)

    def taken(self) -> dict[int, int]:
        """Offset to size of every extent that is taken."""
        return dict(self._taken)

    def _find(self, size: int) -> int | None:
        if self._bins.get(size):
            return self._bins[size].pop()
        if self._fresh + size <= self.total:
            self._fresh += size
            return self._fresh - size
        if self.total - self.used < size:
            return None
        return self._carve(size)

    def _carve(self, size: int) -> int | None:
        """Merge free neighbours, then cut the first range that is large enough."""
        ranges: list[tuple[int, int]] = []
        for start, length in sorted((o, s) for s, offsets in self._bins.items() for o in offsets):
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
            else:
                ranges.append((start, length))
        if ranges and sum(ranges[-1]) == self._fresh:
            self._fresh, _ = ranges.pop()
        self._bins = {}
        for start, length in ranges:
            self._bins.setdefault(length, []).append(start)
        if self._fresh + size <= self.total:
            self._fresh += size
            return self._fresh - size
        sizes = sorted(length for length, offsets in self._bins.items() if offsets)
        at = bisect_left(sizes, size)
        if at == len(sizes):
            return None
        start = self._bins[sizes[at]].pop()
        if sizes[at] > size:
            insort(self._bins.setdefault(sizes[at] - size, []), start + size)
        return start
