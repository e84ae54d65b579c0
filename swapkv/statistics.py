"""Frozen snapshots of what a pool holds and has done."""

from collections.abc import Mapping

import attrs

from swapkv.streams.base import ChosenWay


@attrs.frozen(kw_only=True)
class PageCounts:
    """Device pages of one layer group: every page is in exactly one of these."""

    free: int
    owned: int
    fenced: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.owned + self.fenced + self.quarantined


@attrs.frozen(kw_only=True)
class LinkStatistics:
    """One direction of the link. `bytes_per_s`: measured over the last copies, None before the first.

    `bucket_fill`: how full the token bucket is, 0 to 1, None without a limit.
    """

    bytes_copied: int
    bytes_per_s: float | None
    copies_in_flight: int
    bucket_fill: float | None


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """A pool at one moment.

    `sequences`: how many are in each state, by name. `counters`: what has happened since the pool was opened, by name
    (preemptions, restores, failed_in_copies, reclaimed_copies, …). `ways`: how the device copies scattered pages and
    what its probe measured; empty for a device without a probe.
    """

    pages: tuple[PageCounts, ...]
    host_bytes_used: int
    host_bytes_total: int
    sequences: Mapping[str, int]
    out: LinkStatistics
    into: LinkStatistics
    counters: Mapping[str, int]
    ways: tuple[ChosenWay, ...] = ()
