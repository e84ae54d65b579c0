"""What a slab is told and what it answers: options, usage, the items of a batch and what became of them."""

from collections.abc import Mapping

import attrs

from swapkv.errors import ProtocolError
from swapkv.tiers.direct_io import DirectMode, IoPath
from swapkv.tiers.slab_file import ScanDepth, SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES, ChunkKey, ExtentHeader

Buffer = bytes | bytearray | memoryview
"""Anything of one piece with the buffer protocol (numpy arrays too, by `memoryview(array)`)."""


def _at_least_1(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise ProtocolError(f"{attribute.name}={value} must be at least 1")


@attrs.frozen(kw_only=True)
class SlabOptions:
    """How a slab is used. `slab_bytes`: the whole file, which is the cap; a multiple of 4096 and at least 12288.

    `depth`: requests before the device at a time, a thread each. `pending_max`: of all that are asked for and not done.
    `deadline_ns`: how long a delete waits for reads of what it deletes, and `close` for everything.
    """

    slab_bytes: int
    sync: SyncPolicy = SyncPolicy.NONE
    scan: ScanDepth = ScanDepth.PAYLOADS
    direct: DirectMode = DirectMode.AUTO
    depth: int = attrs.field(default=8, validator=_at_least_1)
    pending_max: int = attrs.field(default=1024, validator=_at_least_1)
    deadline_ns: int = attrs.field(default=30_000_000_000, validator=_at_least_1)

    def __attrs_post_init__(self) -> None:
        if self.slab_bytes % BLOCK_BYTES or self.slab_bytes < 3 * BLOCK_BYTES:
            raise ProtocolError(f"slab_bytes={self.slab_bytes} must be a multiple of {BLOCK_BYTES}, and at least three")


@attrs.frozen(kw_only=True)
class SlabUsage:
    """A snapshot. `used_bytes` and its `peak_bytes` count extents with their headers; `quarantined_bytes` of them belong
    to nobody: the disk would not say whether they hold a header. `discarded`: what the scan erased, by reason.

    `failures`: by errno name, "short", "vanished", "checksum", "header". `copied_bytes`: went through a thread's own
    memory because the caller's buffer did not begin or end on a block.
    """

    slab_bytes: int
    used_bytes: int
    peak_bytes: int
    free_bytes: int
    largest_free_bytes: int
    free_ranges: int
    quarantined_bytes: int
    chunks: int
    io_path: IoPath
    io_note: str
    copied_bytes: int
    failures: Mapping[str, int]
    discarded: Mapping[str, int]


@attrs.frozen(kw_only=True)
class Write:
    """A chunk to be stored. `payload` is read until the write's future is done."""

    key: ChunkKey
    generation: int
    payload: Buffer


@attrs.frozen(kw_only=True)
class Read:
    """A chunk to be fetched, of exactly this generation if one is named. `into` is written until the future is done."""

    key: ChunkKey
    into: Buffer
    generation: int | None = None


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one item of a batch: `header` if it is done, else `error`."""

    key: ChunkKey
    header: ExtentHeader | None = None
    error: Exception | None = None


@attrs.define(eq=False)
class Stored:
    """A committed extent. It keeps its place while `readers` are at it, even when its chunk has a newer one."""

    header: ExtentHeader
    readers: int = 0
    is_replaced: bool = False
