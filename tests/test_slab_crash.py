"""What a slab file holds after a crash: at every write of a scenario, at every class of byte boundary within it.

The canaries are slabs with one guard taken out: each has to be caught by the same checks.
"""

import shutil
from pathlib import Path

import pytest

from swapkv.errors import DiskFault, SwapError
from swapkv.tiers import slab_file, slab_header
from swapkv.tiers.direct_io import DirectMode, Scratch
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_file import ScanDepth, SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES, ExtentHeader
from tests.kit.slab import CrashIo, Ledger, key_of, opened, options_of, write_of

SIZES = {1: 2 * BLOCK_BYTES + 100, 2: BLOCK_BYTES, 3: 3 * BLOCK_BYTES, 4: 5}
SCENARIO: list[tuple[int, int | None]] = [(1, 1), (2, 1), (1, 2), (2, None), (3, 1), (1, 3), (4, 1), (3, 2), (4, None)]
"""Chunk and generation to write, or to delete by None. In 15 blocks, so that later extents lie on earlier ones."""

BLOCKS = 16
PREFIXES = (0, 1, 7, 8, 12, 28, 60, 68, 84, 100, 104, 120, 511, 512, 2048, 4063, 4064, 4065, 4095, 4096, 8192)
"""Within and between the fields of a header, at a sector, around its digest, whole; and in the middle of a payload."""


def play(slab: Slab, ledger: Ledger) -> None:
    """The scenario, until something fails."""
    for number, generation in SCENARIO:
        if generation is None:
            ledger.begin_delete(number)
            slab.begin_delete(key_of(number)).result(20)
        else:
            ledger.begin_write(number, generation, SIZES[number])
            slab.begin_write(write_of(number, generation, SIZES[number])).result(20)
        ledger.settle(number, generation)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.slab"
    with opened(path, options_of(BLOCKS)):
        pass
    return path


def num_writes(empty: Path, kind: type[Slab] = Slab) -> int:
    path = empty.with_name("counted.slab")
    shutil.copy(empty, path)
    io = CrashIo(-1, 0)
    with opened(path, options_of(BLOCKS, direct=DirectMode.NEVER), io, kind) as slab:
        play(slab, Ledger())
    return io.writes


def crash(
    empty: Path, at: int, prefix_bytes: int, kind: type[Slab] = Slab, scan: ScanDepth = ScanDepth.PAYLOADS
) -> None:
    path = empty.with_name("crashed.slab")
    shutil.copy(empty, path)
    ledger = Ledger()
    io = CrashIo(at, prefix_bytes)
    with (
        opened(path, options_of(BLOCKS, direct=DirectMode.NEVER, depth=1), io, kind) as slab,
        pytest.raises(DiskFault),
    ):
        play(slab, ledger)
    with opened(path, options_of(BLOCKS, direct=DirectMode.NEVER, scan=scan, depth=1)) as slab:
        ledger.verify(slab)
        for header in slab.chunks():
            slab.begin_delete(header.key).result(20)
        assert slab.usage().largest_free_bytes == (BLOCKS - 1) * BLOCK_BYTES, "free extents coalesce"


def crashes(empty: Path, kind: type[Slab] = Slab, scan: ScanDepth = ScanDepth.PAYLOADS) -> int:
    """Crash everywhere. Returns how often."""
    total = num_writes(empty, kind)
    for at in range(total):
        for prefix_bytes in PREFIXES:
            crash(empty, at, prefix_bytes, kind, scan)
    return total * len(PREFIXES)


@pytest.mark.parametrize("scan", ScanDepth)
def test_crash_at_every_write_and_byte_boundary_leaves_whole_chunks_only(empty: Path, scan: ScanDepth) -> None:
    assert crashes(empty, scan=scan) >= 19 * len(PREFIXES)


class HeaderFirst(Slab):
    """Commits before there is anything to commit."""

    def _store(self, header: ExtentHeader, payload: memoryview | None, scratch: Scratch) -> None:
        self._put_header(header, scratch)
        self._put_payload(header, payload, scratch)


class FreesFirst(Slab):
    """Frees a deleted or replaced extent without erasing its header."""

    def _release(self, header: ExtentHeader, scratch: Scratch) -> DiskFault | None:
        with self._lock:
            self._extents.free(header.offset)
        return None


def test_canary_that_writes_the_header_before_the_payload_is_caught(empty: Path) -> None:
    with pytest.raises(SwapError, match="the disk gave other bytes"):
        crashes(empty, HeaderFirst, ScanDepth.HEADERS)


def test_canary_that_frees_without_erasing_is_caught(empty: Path) -> None:
    with pytest.raises((AssertionError, SwapError)):
        crashes(empty, FreesFirst, ScanDepth.HEADERS)


def test_canary_without_header_checksum_is_caught(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_header, "is_sealed", lambda block, key: True)
    with pytest.raises((AssertionError, SwapError)):
        crashes(empty)


def test_canary_that_ignores_generations_is_caught(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_file, "supersedes", lambda header, other: header.offset > other.offset)
    with pytest.raises(AssertionError, match="generation"):
        crashes(empty)


def test_crash_of_a_synced_slab_leaves_whole_chunks_only(empty: Path) -> None:
    path = empty.with_name("synced.slab")
    for at in range(num_writes(empty)):
        shutil.copy(empty, path)
        ledger = Ledger()
        options = options_of(BLOCKS, sync=SyncPolicy.DATA, depth=1, direct=DirectMode.NEVER)
        with opened(path, options, CrashIo(at, 2048)) as slab, pytest.raises(DiskFault):
            play(slab, ledger)
        with opened(path, options) as slab:
            ledger.verify(slab)
