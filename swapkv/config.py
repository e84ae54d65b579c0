"""How a pool behaves. One frozen object, validated once; the effective values are the attributes."""

from enum import Enum

import attrs

from swapkv.errors import ProtocolError

MIB = 1 << 20
SECOND_NS = 1_000_000_000


class HostFull(Enum):
    """What `preempt` does when the host tier has no room left, clean copies of resident chunks reclaimed."""

    RECOMPUTE = "recompute"
    """Drop the sequence's KV; its tokens have to be run again."""
    REFUSE = "refuse"
    """Raise `HostTierFull`; the sequence stays on the device."""


class RestoreOrder(Enum):
    """In which order the segments of a restore are copied."""

    AUTO = "auto"
    """Layer-major when all pages are there, chunk-major while pages are scarce."""
    LAYER_MAJOR = "layer_major"
    """Layer 0 of every chunk first; waits until every page is there."""
    CHUNK_MAJOR = "chunk_major"
    """Chunk by chunk, all layers of each."""


class Verify(Enum):
    """Whether copies compute and compare a checksum (CRC-32, as in zlib) of every layer of every chunk."""

    NONE = "none"
    CRC32 = "crc32"


def _at_least(minimum: int) -> object:
    def check(instance: object, attribute: "attrs.Attribute[int]", value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or value < minimum):
            raise ProtocolError(f"{attribute.name}={value!r} must be a whole number of at least {minimum}")

    return check


def _limit(default: int | None, minimum: int = 1) -> int:
    return attrs.field(default=default, validator=_at_least(minimum))  # type: ignore[call-overload, no-any-return]


@attrs.frozen(kw_only=True)
class SwapConfig:
    """Budgets and policies of a pool. Raises `ProtocolError` for a value out of range.

    `restore_bytes_per_s`, `restore_burst_bytes`: the token bucket that all restores share; None: unlimited, and a
    burst that lasts 10 ms. `offload_…`: the same for the other direction.
    `segment_bytes`: what one copy command moves at most (but at least one layer of one chunk).
    `inflight_bytes_per_sequence`: bytes of one restore under way at a time. `ops_per_lane`: copy commands under way
    a direction. `copy_deadline_ns`: a link that makes no progress for so long hangs, and what its copies touch is quarantined.
    `aging_ns`, `aging_cap`: a waiting restore gains one priority step each `aging_ns`, at most `aging_cap` steps.
    """

    restore_bytes_per_s: int | None = _limit(None)
    restore_burst_bytes: int | None = _limit(None)
    offload_bytes_per_s: int | None = _limit(None)
    offload_burst_bytes: int | None = _limit(None)
    segment_bytes: int = _limit(4 * MIB)
    inflight_bytes_per_sequence: int = _limit(64 * MIB)
    ops_per_lane: int = _limit(64)
    copy_deadline_ns: int = _limit(30 * SECOND_NS)
    aging_ns: int = _limit(SECOND_NS)
    aging_cap: int = _limit(8, minimum=0)
    restore_order: RestoreOrder = RestoreOrder.AUTO
    host_full: HostFull = HostFull.RECOMPUTE
    verify: Verify = Verify.NONE
