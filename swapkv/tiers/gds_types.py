"""What the GDS tier is told and what it answers: items, options, the ways that bytes may take, and what a probe found."""

from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Protocol

import attrs
import torch

from swapkv.errors import ProtocolError, TransferError
from swapkv.streams.base import Event, Stream
from swapkv.tiers.direct_io import DirectMode
from swapkv.tiers.slab_header import ChunkKey, ExtentHeader

NVIDIA_FS = Path("/proc/driver/nvidia-fs")
"""There while NVIDIA's kernel module is loaded."""


class GdsPath(Enum):
    """How bytes get from the device's memory to the disk and back."""

    DIRECT = "direct"
    """By cuFile, with NVIDIA's kernel module: no copy in host memory."""
    BOUNCED = "bounced"
    """kvikio's compatibility mode: POSIX reads and writes, and copies through pinned buffers of kvikio's own."""


class GdsOrder(Enum):
    """Who has the disk wait until the device's memory may be touched."""

    STREAM = "stream"
    """A CUDA stream: the request is put behind what it depends on."""
    HOST = "host"
    """A thread of the tier, which makes the request afterwards."""


class PayloadCheck(Enum):
    """Whether a read compares the bytes that came with the chunk's checksum."""

    ALWAYS = "always"
    """Yes: what has come is copied to host memory (D2H) and hashed there."""
    NEVER = "never"
    """No: for who checks the bytes on the device. Nothing is found out then, not even that the file was cut and grown."""


def _at_least_1(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise ProtocolError(f"{attribute.name}={value} must be at least 1")


@attrs.frozen(kw_only=True)
class GdsOptions:
    """How the tier works. `direct`: whether the direct path is tried at all.

    `depth`: items at a time, a thread and two streams each. `pending_max`: items that are begun and not released.
    `stage_bytes`: pinned memory of a thread, through which bytes are hashed; a multiple of 8192.
    `deadline_ns`: from its `begin_…` an item has so long; `close` and the probe too.
    `probe_bytes`: what the probe at start writes and reads, a multiple of 4096.
    """

    direct: DirectMode = DirectMode.AUTO
    check: PayloadCheck = PayloadCheck.ALWAYS
    depth: int = attrs.field(default=4, validator=_at_least_1)
    pending_max: int = attrs.field(default=1024, validator=_at_least_1)
    stage_bytes: int = attrs.field(default=8 << 20, validator=_at_least_1)
    deadline_ns: int = attrs.field(default=30_000_000_000, validator=_at_least_1)
    probe_bytes: int = attrs.field(default=1 << 20, validator=_at_least_1)

    def __attrs_post_init__(self) -> None:
        for name, value, unit in (("stage_bytes", self.stage_bytes, 8192), ("probe_bytes", self.probe_bytes, 4096)):
            if value % unit:
                raise ProtocolError(f"{name}={value} must be a multiple of {unit}")


@attrs.frozen(kw_only=True, eq=False)
class DeviceWrite:
    """A chunk to be stored. `memory`: contiguous, of the tier's device; it is read from when `after` is reached until the
    transfer is released.

    `checksum`: XXH3-128 of the bytes (`payload_checksum`), 16 bytes, for who has it already; it is believed, and a wrong
    one makes the chunk unreadable. None: the tier copies the bytes to host memory and hashes them there.
    """

    key: ChunkKey
    generation: int
    memory: torch.Tensor
    checksum: bytes | None = None
    after: Event | None = None


@attrs.frozen(kw_only=True, eq=False)
class DeviceRead:
    """A chunk to be fetched, of exactly this generation if one is named. `into`: contiguous, of the chunk's bytes and of
    the tier's device; it is written to from when `after` is reached until the transfer is released."""

    key: ChunkKey
    into: torch.Tensor
    generation: int | None = None
    after: Event | None = None


class Transfer(Future[ExtentHeader]):
    """How an item ends: at its deadline at the latest.

    `released`: done when neither the item's memory nor its extent is touched any more, which after a `DrainTimeout` comes
    later than the end, or never. Until then the tier refers to the memory. Cancelling works for an item that has not begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.released: Future[None] = Future()


@attrs.frozen(kw_only=True)
class GdsReport:
    """What the probe at start has found: the path that is taken, and why not a better one (`note`, empty if it is the
    best). Rates in bytes/s of one request of `num_bytes`, written and read back and compared; the first ones, so low."""

    path: GdsPath
    order: GdsOrder
    note: str
    versions: str
    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float

    def describe(self) -> str:
        """In words, on one line."""
        rates = f"{self.write_bytes_per_s / 1e9:.2f} GB/s out, {self.read_bytes_per_s / 1e9:.2f} GB/s in"
        why = f"; {self.note}" if self.note else ""
        return f"{self.path.value}, ordered by the {self.order.value} ({self.versions}; {rates}){why}"


class EndUnknown(TransferError):  # noqa: N818
    """A request failed in a way that leaves open whether it goes on. Its memory and extent are never used again: end the
    process."""


@attrs.frozen(eq=False)
class Span:
    """`num_bytes` of device memory at `address`; whoever has it keeps `owner` alive. Offers `__cuda_array_interface__`."""

    owner: torch.Tensor
    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    @classmethod
    def of(cls, memory: torch.Tensor) -> "Span":
        """All of `memory`. Raises `ProtocolError` if it is empty or not in one piece."""
        if not memory.is_contiguous() or memory.numel() < 1:
            raise ProtocolError(
                f"memory of shape {tuple(memory.shape)}: pass some that is contiguous and has at least 1 byte"
            )
        return cls(memory, memory.data_ptr(), memory.numel() * memory.element_size())

    def part(self, begin: int, num_bytes: int) -> "Span":
        """`num_bytes` from byte `begin` on."""
        return Span(self.owner, self.address + begin, num_bytes)


class GdsFile(Protocol):
    """A slab's file, as device memory is written to it and read from it. Calls block, until nothing is under way any more.

    `path_taken`, `order`: see there. `versions`: of the software, in words.
    """

    path_taken: GdsPath
    order: GdsOrder
    versions: str

    def bind(self) -> None:
        """Called once on every thread that uses the file, before."""

    def require(self, span: Span) -> None:
        """Raises `ProtocolError` unless `span` is memory that the file can use. Never blocks."""

    def write(self, span: Span, offset: int, stream: Stream) -> int:
        """Write from device memory; how many bytes were, at least 1. `stream`: where, for `GdsOrder.STREAM`.

        Raises `DiskFault` of the kind that happened, `TransferError` if it was the device's, `EndUnknown`.
        """

    def read(self, span: Span, offset: int, stream: Stream) -> int:
        """Read into device memory; as `write`."""

    def close(self) -> None:
        """Nothing may be under way."""
