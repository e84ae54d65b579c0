"""The format of a slab: what is written reads back, and every flipped bit, wrong field and random block is refused."""

import random
from contextlib import suppress

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv.errors import ProtocolError, SlabMismatch
from swapkv.ids import GroupId, SeqId
from swapkv.tiers import slab_header
from swapkv.tiers.slab_header import (
    BLOCK_BYTES,
    HEADER_MAGIC,
    ChunkKey,
    ExtentHeader,
    Fingerprint,
    Superblock,
    is_sealed,
    round_up,
    seal,
)
from tests.kit.slab import FINGERPRINT, key_of

SUPERBLOCK = Superblock(slab_bytes=64 * BLOCK_BYTES, file_id=bytes(range(16)), fingerprint=FINGERPRINT)
HEADER = ExtentHeader(offset=8 * BLOCK_BYTES, key=key_of(5), generation=7, num_bytes=9000, checksum=b"c" * 16)
BLOCK = HEADER.encode(SUPERBLOCK)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)


@given(
    tenant=names,
    sequence=names,
    chunk=st.integers(0, 2**32 - 1),
    group=st.integers(0, 2**32 - 1),
    generation=st.integers(0, 2**64 - 1),
    num_bytes=st.integers(1, 50 * BLOCK_BYTES),
)
def test_header_reads_back_as_it_was_written(
    tenant: str, sequence: str, chunk: int, group: int, generation: int, num_bytes: int
) -> None:
    key = ChunkKey(tenant=tenant, sequence=SeqId(sequence), chunk=chunk, group=GroupId(group))
    header = ExtentHeader(
        offset=BLOCK_BYTES, key=key, generation=generation, num_bytes=num_bytes, checksum=b"0123456789abcdef"
    )
    block = header.encode(SUPERBLOCK)
    assert len(block) == BLOCK_BYTES
    assert ExtentHeader.decode(block, SUPERBLOCK, BLOCK_BYTES) == header


def test_longest_names_fit_a_header_and_longer_ones_are_refused() -> None:
    key = ChunkKey(tenant="t" * 1024, sequence=SeqId("é" * 1024), chunk=0)
    header = attrs.evolve(HEADER, key=key)
    assert ExtentHeader.decode(header.encode(SUPERBLOCK), SUPERBLOCK, HEADER.offset) == header
    with pytest.raises(ProtocolError, match="tenant takes 1025 bytes, must take 1 to 1024"):
        ChunkKey(tenant="t" * 1025, sequence=SeqId("s"), chunk=0)
    with pytest.raises(ProtocolError, match="sequence takes 0 bytes"):
        ChunkKey(tenant="t", sequence=SeqId(""), chunk=0)
    with pytest.raises(ProtocolError, match="not text that UTF-8 can hold"):
        ChunkKey(tenant="\ud800", sequence=SeqId("s"), chunk=0)
    with pytest.raises(ProtocolError, match="chunk=-1 must be from 0"):
        ChunkKey(tenant="t", sequence=SeqId("s"), chunk=-1)


def unnoticed_flips(bits: "range | list[int]") -> int:
    """How many single flipped bits of a header are not refused."""
    unnoticed = 0
    for bit in bits:
        block = bytearray(BLOCK)
        block[bit // 8] ^= 1 << bit % 8
        with suppress(SlabMismatch):
            ExtentHeader.decode(bytes(block), SUPERBLOCK, HEADER.offset)
            unnoticed += 1
    return unnoticed


def test_every_flipped_bit_of_a_header_is_refused() -> None:
    assert unnoticed_flips(range(BLOCK_BYTES * 8)) == 0


def test_canary_without_header_checksum_lets_flipped_bits_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_header, "is_sealed", lambda block, key: True)
    generation_at = slab_header._HEADER.size - 36
    with pytest.raises(AssertionError):
        assert unnoticed_flips([generation_at * 8]) == 0


def resealed(at: int, value: bytes, key: bytes = SUPERBLOCK.file_id) -> bytes:
    """The header with other bytes at `at` and a digest that fits."""
    body = bytearray(BLOCK[:-32])
    body[at : at + len(value)] = value
    return seal(bytes(body), key)


TENANT_LENGTH_AT = slab_header._HEADER.size - 4


@pytest.mark.parametrize(
    ("at", "value", "field"),
    [
        (0, b"x", "magic"),
        (8, b"\x02", "version"),
        (12, b"\xff", "file_id"),
        (28, b"\xff\xff", "fingerprint"),
        (60, b"\x01", "offset"),
        (84, bytes(8), "num_bytes"),
        (84, b"\xff" * 8, "num_bytes"),
        (84, (55 * BLOCK_BYTES + 1).to_bytes(8, "little"), "num_bytes"),
        (TENANT_LENGTH_AT, b"\0\0", "tenant"),
        (TENANT_LENGTH_AT, b"\xff\xff", "tenant"),
        (TENANT_LENGTH_AT + 2, b"\0\0", "sequence"),
        (TENANT_LENGTH_AT + 2, b"\xff\xff", "sequence"),
        (TENANT_LENGTH_AT + 4, b"\xff", "tenant"),
    ],
)
def test_header_with_a_wrong_field_is_refused_by_its_name(at: int, value: bytes, field: str) -> None:
    with pytest.raises(SlabMismatch) as raised:
        ExtentHeader.decode(resealed(at, value), SUPERBLOCK, HEADER.offset)
    assert raised.value.field == field
    assert field in str(raised.value)


def test_header_of_another_file_is_no_header_of_this_one() -> None:
    other = attrs.evolve(SUPERBLOCK, file_id=b"f" * 16)
    with pytest.raises(SlabMismatch, match="of another file"):
        ExtentHeader.decode(HEADER.encode(other), SUPERBLOCK, HEADER.offset)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tenant", {"key": key_of(5, tenant="other")}),
        ("sequence", {"key": key_of(1)}),
        ("chunk", {"key": key_of(7)}),
        ("group", {"key": attrs.evolve(key_of(5), group=GroupId(9))}),
        ("generation", {"generation": 8}),
        ("num_bytes", {"num_bytes": 1}),
        ("checksum", {"checksum": b"d" * 16}),
        ("offset", {"offset": 0}),
    ],
)
def test_header_that_is_not_the_one_asked_for_is_refused_by_the_field(field: str, change: dict[str, object]) -> None:
    with pytest.raises(SlabMismatch) as raised:
        HEADER.require(attrs.evolve(HEADER, **change))
    assert raised.value.field == field


@settings(max_examples=2000)
@given(body=st.binary(max_size=300), offset=st.integers(0, 70))
def test_random_block_with_a_fitting_digest_is_a_header_or_refused(body: bytes, offset: int) -> None:
    block = seal(HEADER_MAGIC + b"\x01\0\0\0" + body, SUPERBLOCK.file_id)
    assert is_sealed(block, SUPERBLOCK.file_id)
    with pytest.raises(SlabMismatch):
        ExtentHeader.decode(block, SUPERBLOCK, offset * BLOCK_BYTES)


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_random_changes_of_a_sealed_header_decode_within_bounds_or_are_refused(count: int) -> None:
    rng = random.Random(count)
    decoded = 0
    for _ in range(count):
        block = resealed(rng.randrange(200), rng.randbytes(rng.randint(1, 8)))
        try:
            header = ExtentHeader.decode(block, SUPERBLOCK, HEADER.offset)
        except SlabMismatch:
            continue
        decoded += 1
        assert header.offset + header.extent_bytes <= SUPERBLOCK.slab_bytes
        assert header.encode(SUPERBLOCK)[:-32].rstrip(b"\0") in block
    assert decoded > 100, "some changes are of fields that may have any value"


def test_superblock_reads_back_and_every_flipped_bit_is_refused() -> None:
    encoded = SUPERBLOCK.encode()
    assert Superblock.decode(encoded) == SUPERBLOCK
    for bit in range(BLOCK_BYTES * 8):
        block = bytearray(encoded)
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SlabMismatch):
            Superblock.decode(bytes(block))


@settings(max_examples=500)
@given(count=st.integers(0, 65535), fields=st.binary(max_size=200))
def test_superblock_with_random_fields_is_refused(count: int, fields: bytes) -> None:
    fixed = SUPERBLOCK.encode()[: slab_header._SUPER.size - 2] + count.to_bytes(2, "little")
    with pytest.raises((SlabMismatch, ProtocolError)):
        Superblock.decode(seal(fixed + fields, SUPERBLOCK.file_id))


def test_fingerprint_does_not_depend_on_order_and_keeps_names_and_values_apart() -> None:
    assert Fingerprint([("b", "2"), ("a", "1")]) == Fingerprint([("a", "1"), ("b", "2")])
    assert Fingerprint([("ab", "c")]).digest != Fingerprint([("a", "bc")]).digest
    assert Fingerprint([("a", "1")]).difference(Fingerprint([("a", "1")])) is None
    assert Fingerprint([("a", "1"), ("b", "2")]).difference(Fingerprint([("a", "1")])) == "b"


def test_fingerprint_that_no_superblock_holds_is_refused() -> None:
    with pytest.raises(ProtocolError, match="names a field twice"):
        Fingerprint([("a", "1"), ("a", "2")])
    with pytest.raises(ProtocolError, match="put digests of long values in it"):
        Fingerprint([("a", "x" * 4096)])


@pytest.mark.parametrize(("num_bytes", "blocks"), [(1, 1), (4095, 1), (4096, 1), (4097, 2)])
def test_extent_is_a_header_and_whole_blocks(num_bytes: int, blocks: int) -> None:
    assert round_up(num_bytes) == blocks * BLOCK_BYTES
    assert attrs.evolve(HEADER, num_bytes=num_bytes).extent_bytes == (blocks + 1) * BLOCK_BYTES
