"""Opening a slab: what is made, what is locked, and what is refused, by the name of the field, and left as it is."""

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from swapkv.errors import DiskFault, DiskNoSpace, DiskReadOnly, DiskVanished, SlabInUse, SlabMismatch
from swapkv.tiers.direct_io import DirectMode, IoPath
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_file import ScanDepth
from swapkv.tiers.slab_header import BLOCK_BYTES, ExtentHeader, Fingerprint, Superblock, payload_checksum, seal
from swapkv.tiers.slab_types import Write
from tests.kit.slab import FINGERPRINT, FaultyIo, fetch, key_of, opened, options_of, stamped, write_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


@pytest.fixture
def made(path: Path) -> Path:
    """A slab with one chunk."""
    with opened(path, options_of()) as slab:
        slab.begin_write(write_of(1, 1, 5000)).result(20)
    return path


def refused(path: Path, blocks: int = 32, fingerprint: Fingerprint = FINGERPRINT) -> str:
    """The field that opening `path` is refused by; the file is as it was."""
    before = path.read_bytes()
    with pytest.raises(SlabMismatch) as raised:
        Slab(path, fingerprint=fingerprint, options=options_of(blocks))
    assert path.read_bytes() == before
    return raised.value.field


def test_file_is_for_its_owner_only_and_all_its_bytes_are_allocated(made: Path) -> None:
    status = made.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 32 * BLOCK_BYTES
    assert status.st_blocks * 512 >= 32 * BLOCK_BYTES


@pytest.mark.parametrize("field", ["dtype", "page_size", "weights", "tokenizer"])
def test_other_fingerprint_is_refused_by_the_field(made: Path, field: str) -> None:
    fields = {**dict(FINGERPRINT.fields), field: "another"}
    assert refused(made, fingerprint=Fingerprint(fields.items())) == f"fingerprint.{field}"


def test_other_size_is_refused(made: Path) -> None:
    assert refused(made, blocks=33) == "slab_bytes"


def test_file_that_was_cut_is_refused(made: Path) -> None:
    os.truncate(made, 31 * BLOCK_BYTES)
    assert refused(made) == "slab_bytes"


@pytest.mark.parametrize(
    ("at", "value", "field"), [(0, b"x", "magic"), (8, b"\x02", "version"), (12, b"\0\2", "alignment")]
)
def test_superblock_with_a_wrong_field_is_refused_by_its_name(made: Path, at: int, value: bytes, field: str) -> None:
    block = bytearray(made.read_bytes()[:BLOCK_BYTES])
    block[at : at + len(value)] = value
    with made.open("r+b") as file:
        file.write(seal(bytes(block[:-32]), bytes(block[24:40])))
    assert refused(made) == field


def test_damaged_superblock_is_refused(made: Path) -> None:
    with made.open("r+b") as file:
        file.seek(2000)
        file.write(b"!")
    assert refused(made) == "checksum"


@pytest.mark.parametrize("content", [b"somebody's notes", b"notes" * 2000])
def test_file_of_somebody_else_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refused(path) == "magic"


@pytest.mark.parametrize("content", [b"", bytes(32 * BLOCK_BYTES), bytes(5 * BLOCK_BYTES)])
def test_slab_whose_making_was_interrupted_is_made(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with opened(path, options_of()) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        assert fetch(slab, 1) == stamped(1, 1, 100)
    assert Superblock.decode(path.read_bytes()[:BLOCK_BYTES]).slab_bytes == 32 * BLOCK_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_slab_that_is_open_is_refused_to_others_and_free_after_close(made: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from swapkv.errors import SlabInUse; from swapkv.tiers.slab import Slab\n"
        "from tests.kit.slab import *\n"
        "try: Slab(Path(sys.argv[1]), fingerprint=FINGERPRINT, options=options_of())\n"
        "except SlabInUse: sys.exit(7)\n"
    )
    with opened(made, options_of()):
        root = Path(__file__).parent.parent
        assert subprocess.run([sys.executable, "-c", code, made], cwd=root, check=False).returncode == 7
        with pytest.raises(SlabInUse, match="is open elsewhere"):
            Slab(made, fingerprint=FINGERPRINT, options=options_of())
    with opened(made, options_of()) as slab:
        assert fetch(slab, 1) == stamped(1, 1, 5000)


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("open", errno.EACCES, DiskReadOnly),
        ("open", errno.EROFS, DiskReadOnly),
        ("open", errno.ENOENT, DiskVanished),
        ("open", errno.EIO, DiskFault),
        ("allocate", errno.ENOSPC, DiskNoSpace),
        ("allocate", errno.EDQUOT, DiskNoSpace),
        ("pwrite", errno.EIO, DiskFault),
        ("fdatasync", errno.EIO, DiskFault),
    ],
)
def test_slab_that_cannot_be_made_is_a_typed_error_and_leaves_no_file(
    path: Path, call: str, number: int, kind: type[DiskFault]
) -> None:
    io = FaultyIo()
    io.arm({(call, 0): number})
    with pytest.raises(kind, match=errno.errorcode[number]) as raised:
        Slab(path, fingerprint=FINGERPRINT, options=options_of(), io=io)
    assert raised.value.kind == errno.errorcode[number]
    assert isinstance(raised.value.__cause__, OSError)
    assert not path.exists()
    with opened(path, options_of()):
        pass


def test_missing_directory_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(DiskVanished, match="ENOENT"):
        Slab(tmp_path / "missing" / "slab", fingerprint=FINGERPRINT, options=options_of())


@pytest.mark.parametrize("call", ["open", "pread"])
def test_file_system_without_direct_io_is_used_through_the_page_cache_and_says_why(made: Path, call: str) -> None:
    io = FaultyIo()
    io.arm({(call, 0): errno.EINVAL})
    with opened(made, options_of(), io) as slab:
        usage = slab.usage()
        assert usage.io_path is IoPath.BUFFERED
        assert "O_DIRECT is refused by the file system" in usage.io_note
        assert fetch(slab, 1) == stamped(1, 1, 5000)
        assert usage.copied_bytes == 0


def test_page_cache_that_was_asked_for_says_so(made: Path) -> None:
    with opened(made, options_of(direct=DirectMode.NEVER)) as slab:
        assert "DirectMode.NEVER" in slab.usage().io_note


def patched(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"fingerprint": Fingerprint([("dtype", "int8")])}, "fingerprint"), ({"file_id": b"f" * 16}, "checksum")],
)
def test_scan_discards_an_extent_of_another_model_or_file(made: Path, change: dict[str, object], reason: str) -> None:
    superblock = Superblock.decode(made.read_bytes()[:BLOCK_BYTES])
    with opened(made, options_of()) as slab:
        (header,) = slab.chunks()
    patched(made, header.offset, header.encode(attrs.evolve(superblock, **change)))
    with opened(made, options_of()) as slab:
        assert slab.chunks() == []
        assert dict(slab.usage().discarded) == {reason: 1}
        assert slab.usage().used_bytes == 0


def test_scan_discards_a_chunk_whose_payload_has_a_flipped_bit(made: Path) -> None:
    with opened(made, options_of()) as slab:
        (header,) = slab.chunks()
    at = header.payload_offset + 4999
    patched(made, at, bytes([made.read_bytes()[at] ^ 1]))
    with opened(made, options_of()) as slab:
        assert slab.lookup(key_of(1)) is None
        assert dict(slab.usage().discarded) == {"payload": 1}
        assert slab.usage().largest_free_bytes == 31 * BLOCK_BYTES


def test_scan_does_not_take_a_payload_for_headers(path: Path) -> None:
    with opened(path, options_of()) as slab:
        slab.begin_write(write_of(0, 1, 10)).result(20)
        (header,) = slab.chunks()
        block = path.read_bytes()[header.offset : header.offset + BLOCK_BYTES]
        inner = attrs.evolve(write_of(1, 1, 1), payload=b"p" * BLOCK_BYTES + block * 2)
        slab.begin_write(inner).result(20)
        slab.begin_delete(key_of(1)).result(20)
    with opened(path, options_of()) as slab:
        assert slab.chunks() == [header]
        assert dict(slab.usage().discarded) == {"offset": 2}


def test_scan_does_not_look_into_the_payload_of_a_whole_chunk(path: Path) -> None:
    blocks = 400
    with opened(path, options_of(512)) as slab:
        at = slab.reserve(key_of(0), 1, blocks * BLOCK_BYTES).offset
        superblock = Superblock.decode(path.read_bytes()[:BLOCK_BYTES])
        real = ExtentHeader(
            offset=0, key=key_of(2), generation=1, num_bytes=1, checksum=payload_checksum(memoryview(b"1"))
        )
        forged = [attrs.evolve(real, offset=at + n * BLOCK_BYTES).encode(superblock) for n in range(1, blocks + 1)]
    with opened(path, options_of(512, scan=ScanDepth.HEADERS)) as slab:
        header = slab.begin_write(Write(key=key_of(0), generation=1, payload=b"".join(forged))).result(20)
        assert header.offset == at
    with opened(path, options_of(512, scan=ScanDepth.HEADERS)) as slab:
        assert slab.chunks() == [header]


@pytest.mark.parametrize("reason", ["payload", "generation"])
def test_extent_that_the_scan_cannot_erase_is_kept_from_everybody(path: Path, reason: str) -> None:
    with opened(path, options_of(direct=DirectMode.NEVER)) as slab:
        first = slab.begin_write(write_of(1, 1, 5000)).result(20)
        superblock = Superblock.decode(path.read_bytes()[:BLOCK_BYTES])
        slab.begin_write(write_of(1 if reason == "generation" else 2, 2, 5000)).result(20)
    if reason == "generation":
        patched(path, first.offset, first.encode(superblock))
    else:
        patched(path, first.payload_offset, b"?")
    io = FaultyIo()
    io.arm({("pwrite", 0): errno.EIO})
    with opened(path, options_of(), io) as slab:
        assert dict(slab.usage().discarded) == {reason: 1}
        assert slab.usage().quarantined_bytes == first.extent_bytes
        assert slab.usage().used_bytes == 2 * first.extent_bytes
        slab.begin_delete(key_of(1)).result(20)
        assert slab.usage().quarantined_bytes == 0
    with opened(path, options_of()) as slab:
        assert slab.lookup(key_of(1)) is None
        assert dict(slab.usage().discarded) == {}


def test_scan_over_more_than_a_window_adopts_all_and_frees_the_rest(path: Path) -> None:
    options = options_of(700)
    sizes = {n: 1 + n * 37_123 % 200_000 for n in range(20)}
    with opened(path, options) as slab:
        for number, num_bytes in sizes.items():
            slab.begin_write(write_of(number, 1, num_bytes)).result(20)
        for number in range(0, 20, 3):
            slab.begin_delete(key_of(number)).result(20)
        before = slab.usage()
    with opened(path, options) as slab:
        after = slab.usage()
        assert (after.used_bytes, after.free_ranges) == (before.used_bytes, before.free_ranges)
        for number, num_bytes in sizes.items():
            if number % 3:
                assert fetch(slab, number) == stamped(number, 1, num_bytes)


def test_file_that_is_replaced_while_it_is_opened_is_not_used(made: Path) -> None:
    class ReplacingIo(FaultyIo):
        def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if not self.is_armed:
                self.is_armed = True
                made.rename(made.with_name("moved"))
            return super().pread(fd, buffers, offset)

    with pytest.raises(SlabInUse, match="was replaced while it was opened"):
        Slab(made, fingerprint=FINGERPRINT, options=options_of(), io=ReplacingIo())
