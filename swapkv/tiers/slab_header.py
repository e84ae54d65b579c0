"""The format of a slab file: a superblock, then extents, each a header of one block before its payload.

All numbers are little-endian, all strings UTF-8 with their length before them. Every block ends with a BLAKE2b digest
of what is before it, keyed by the file's random id, so a block of another file, a torn one, or a payload that looks like
a header is not taken for a header of this file. Lengths are checked before they are used; nothing is unpickled.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable

import attrs
import xxhash

from swapkv.errors import ProtocolError, SlabMismatch
from swapkv.ids import GroupId, SeqId

BLOCK_BYTES = 4096
"""The alignment of extents and the size of a superblock or header, in bytes."""

VERSION = 1
SUPER_MAGIC = b"swapkvSB"
HEADER_MAGIC = b"swapkvEX"
TENANT_BYTES_MAX = 1024
SEQUENCE_BYTES_MAX = 2048

_DIGEST_BYTES = 32
_BODY_BYTES = BLOCK_BYTES - _DIGEST_BYTES
_SUPER = struct.Struct("<8sIIQ16s32sH")
_HEADER = struct.Struct("<8sI16s32sQIIQQ16sHH")
_LENGTH = struct.Struct("<H")
_U32_MAX, _U64_MAX = (1 << 32) - 1, (1 << 64) - 1


def round_up(num_bytes: int) -> int:
    """`num_bytes` up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def payload_checksum(payload: memoryview) -> bytes:
    """XXH3-128 of a payload, 16 bytes: it finds accidents, not forgeries."""
    return xxhash.xxh3_128_digest(payload)


def seal(body: bytes, key: bytes) -> bytes:
    """`body` padded to a block, its digest at the end."""
    body = body.ljust(_BODY_BYTES, b"\0")
    return body + _digest(body, key)


def is_sealed(block: bytes, key: bytes) -> bool:
    """Whether the digest at the end of `block` is that of the rest."""
    return hmac.compare_digest(block[_BODY_BYTES:], _digest(block[:_BODY_BYTES], key))


def _digest(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=key).digest()


def _in_order(fields: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(fields))


@attrs.frozen
class Fingerprint:
    """What KV depends on: pairs of a name and a value (weights revision, dtype, page size, …), in any order.

    Raises `ProtocolError` for a name that is given twice, or for more than a superblock holds.
    """

    fields: tuple[tuple[str, str], ...] = attrs.field(converter=_in_order)

    def __attrs_post_init__(self) -> None:
        if len({name for name, _ in self.fields}) < len(self.fields):
            raise ProtocolError(f"the fingerprint names a field twice: {[name for name, _ in self.fields]}")
        if _SUPER.size + len(self.packed()) > _BODY_BYTES:
            raise ProtocolError(
                f"the fingerprint takes {len(self.packed())} bytes, a superblock has {_BODY_BYTES - _SUPER.size}: "
                "put digests of long values in it"
            )

    def packed(self) -> bytes:
        """Every name and value, its length before it."""
        parts = [_encoded(text, _U32_MAX, "fingerprint") for pair in self.fields for text in pair]
        if any(len(part) > 0xFFFF for part in parts):
            raise ProtocolError("a field of the fingerprint is longer than 65535 bytes: put its digest there")
        return b"".join(_LENGTH.pack(len(part)) + part for part in parts)

    @property
    def digest(self) -> bytes:
        """SHA-256 of `packed`, 32 bytes."""
        return hashlib.sha256(self.packed()).digest()

    def difference(self, other: "Fingerprint") -> str | None:
        """The first field that the two have not in common, or None."""
        mine, others = dict(self.fields), dict(other.fields)
        return next((name for name in sorted(mine | others) if mine.get(name) != others.get(name)), None)


@attrs.frozen(kw_only=True)
class Superblock:
    """The first block of a slab file. `slab_bytes`: the size of the whole file. `file_id`: 16 random bytes."""

    slab_bytes: int
    file_id: bytes
    fingerprint: Fingerprint

    def encode(self) -> bytes:
        """One block."""
        packed = self.fingerprint.packed()
        fixed = _SUPER.pack(
            SUPER_MAGIC,
            VERSION,
            BLOCK_BYTES,
            self.slab_bytes,
            self.file_id,
            self.fingerprint.digest,
            len(self.fingerprint.fields),
        )
        return seal(fixed + packed, self.file_id)

    @classmethod
    def decode(cls, block: bytes) -> "Superblock":
        """Raises `SlabMismatch`, with the field, for a block that is no superblock of this version."""
        magic, version, alignment, slab_bytes, file_id, digest, count = _SUPER.unpack_from(block)
        _require("magic", magic, SUPER_MAGIC)
        _require("version", version, VERSION)
        if not is_sealed(block, file_id):
            raise SlabMismatch("the superblock's checksum is wrong: the file is damaged, delete it", field="checksum")
        _require("alignment", alignment, BLOCK_BYTES)
        fingerprint = Fingerprint(_unpacked(block[_SUPER.size : _BODY_BYTES], count))
        _require("fingerprint", digest, fingerprint.digest)
        return cls(slab_bytes=slab_bytes, file_id=file_id, fingerprint=fingerprint)

    def require(self, *, slab_bytes: int, fingerprint: Fingerprint) -> None:
        """Raises `SlabMismatch`, with the field, unless the file is of this size and fingerprint."""
        _require("slab_bytes", self.slab_bytes, slab_bytes)
        name = self.fingerprint.difference(fingerprint)
        if name is not None:
            found, wanted = dict(self.fingerprint.fields).get(name), dict(fingerprint.fields).get(name)
            _require(f"fingerprint.{name}", found, wanted)


@attrs.frozen(kw_only=True)
class ChunkKey:
    """Which chunk: `chunk` counts the sequence's chunks in `group`.

    Raises `ProtocolError` for names of no or too many bytes (tenant 1024, sequence 2048, UTF-8) and for numbers
    outside 32 bits.
    """

    tenant: str
    sequence: SeqId
    chunk: int
    group: GroupId = attrs.field(default=GroupId(0))

    def __attrs_post_init__(self) -> None:
        _encoded(self.tenant, TENANT_BYTES_MAX, "tenant")
        _encoded(self.sequence, SEQUENCE_BYTES_MAX, "sequence")
        for name, value in (("chunk", self.chunk), ("group", self.group)):
            if not 0 <= value <= _U32_MAX:
                raise ProtocolError(f"{name}={value} must be from 0 to {_U32_MAX}")


@attrs.frozen(kw_only=True)
class ExtentHeader:
    """What an extent says of itself. `offset`: where its header is in the file; `num_bytes`: of the payload."""

    offset: int
    key: ChunkKey
    generation: int
    num_bytes: int
    checksum: bytes

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.generation <= _U64_MAX:
            raise ProtocolError(f"generation={self.generation} must be from 0 to {_U64_MAX}")

    @property
    def extent_bytes(self) -> int:
        """Header and payload, in whole blocks."""
        return BLOCK_BYTES + round_up(self.num_bytes)

    @property
    def payload_offset(self) -> int:
        return self.offset + BLOCK_BYTES

    def encode(self, superblock: Superblock) -> bytes:
        """One block."""
        tenant, sequence = self.key.tenant.encode(), self.key.sequence.encode()
        fixed = _HEADER.pack(
            HEADER_MAGIC,
            VERSION,
            superblock.file_id,
            superblock.fingerprint.digest,
            self.offset,
            self.key.chunk,
            self.key.group,
            self.generation,
            self.num_bytes,
            self.checksum,
            len(tenant),
            len(sequence),
        )
        return seal(fixed + tenant + sequence, superblock.file_id)

    @classmethod
    def decode(cls, block: bytes, superblock: Superblock, offset: int) -> "ExtentHeader":
        """The header at `offset` of the file of `superblock`. Raises `SlabMismatch`, with the field, if it is none."""
        fields = _HEADER.unpack_from(block)
        magic, version, file_id, fingerprint, at, chunk, group, generation, num_bytes, checksum, tenants, sequences = (
            fields
        )
        _require("magic", magic, HEADER_MAGIC)
        if not is_sealed(block, superblock.file_id):
            raise SlabMismatch(f"the header at {offset} is torn, damaged or of another file", field="checksum")
        _require("version", version, VERSION)
        _require("file_id", file_id, superblock.file_id)
        _require("fingerprint", fingerprint, superblock.fingerprint.digest)
        _require("offset", at, offset)
        if num_bytes < 1 or offset + BLOCK_BYTES + round_up(num_bytes) > superblock.slab_bytes:
            raise SlabMismatch(
                f"num_bytes is {num_bytes} in the header at {offset}: none, or past the file's end", field="num_bytes"
            )
        begin, middle = _HEADER.size, _HEADER.size + tenants
        key = ChunkKey(
            tenant=_decoded(block, begin, tenants, TENANT_BYTES_MAX, "tenant"),
            sequence=SeqId(_decoded(block, middle, sequences, SEQUENCE_BYTES_MAX, "sequence")),
            chunk=chunk,
            group=GroupId(group),
        )
        return cls(offset=offset, key=key, generation=generation, num_bytes=num_bytes, checksum=checksum)

    def require(self, other: "ExtentHeader") -> None:
        """Raises `SlabMismatch`, with the field, unless `other`, as read from the file, is this header."""
        for name in ("tenant", "sequence", "chunk", "group"):
            _require(name, getattr(other.key, name), getattr(self.key, name))
        for name in ("offset", "generation", "num_bytes", "checksum"):
            _require(name, getattr(other, name), getattr(self, name))


def _require(field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SlabMismatch(
            f"{field} is {found!r} in the slab, {wanted!r} was asked for: open it as it was made, or make a new one at "
            "another path",
            field=field,
        )


def _encoded(text: str, most: int, name: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{name}={text!r} is not text that UTF-8 can hold: {error.reason}") from error
    if not 0 < len(encoded) <= most:
        raise ProtocolError(f"{name} takes {len(encoded)} bytes, must take 1 to {most}")
    return encoded


def _decoded(block: bytes, begin: int, length: int, most: int, name: str) -> str:
    if not 0 < length <= most or begin + length > _BODY_BYTES:
        raise SlabMismatch(f"{name} has a length of {length} bytes, must have 1 to {most}", field=name)
    try:
        return block[begin : begin + length].decode()
    except UnicodeDecodeError as error:
        raise SlabMismatch(f"{name} is not UTF-8: {error.reason}", field=name) from error


def _unpacked(packed: bytes, count: int) -> list[tuple[str, str]]:
    texts, at = [], 0
    for _ in range(2 * count):
        if at + _LENGTH.size > len(packed):
            raise SlabMismatch(f"the fingerprint has {count} fields, more than the block holds", field="fingerprint")
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        texts.append(_decoded(packed, at, length, len(packed) - at, "fingerprint"))
        at += length
    return list(zip(texts[::2], texts[1::2], strict=True))
