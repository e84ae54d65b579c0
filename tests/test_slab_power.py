"""Power cuts: of what was written since the last fdatasync each sector is there, older, or as it was, as chance has it."""

import errno
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from swapkv.errors import DiskFault, SwapError
from swapkv.tiers.direct_io import DirectMode, OsIo, Scratch
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_file import ScanDepth, SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES, ExtentHeader
from swapkv.tiers.slab_types import SlabOptions
from tests.kit.slab import Ledger, key_of, opened, options_of, write_of

SECTOR_BYTES = 512
BLOCKS = 24
SIZES = (100, BLOCK_BYTES, 3 * BLOCK_BYTES)


class VolatileIo(OsIo):
    """A disk with a cache: `cut` takes the power, in the middle of what the slab does once `writes_left` is used up."""

    def __init__(self, rng: random.Random, writes_left: int) -> None:
        self.rng, self.writes_left = rng, writes_left
        self.versions: dict[int, list[bytes]] = {}

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._spend()
        data = b"".join(buffers)
        for at in range(0, len(data), SECTOR_BYTES):
            if offset + at not in self.versions:
                self.versions[offset + at] = [self._sector(fd, offset + at)]
            self.versions[offset + at].append(data[at : at + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0"))
        return super().pwrite(fd, [memoryview(data)], offset)

    def fdatasync(self, fd: int) -> None:
        self._spend()
        self.versions.clear()

    def _spend(self) -> None:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise OSError(errno.EIO, "the power is off")

    def _sector(self, fd: int, at: int) -> bytes:
        sector = bytearray(SECTOR_BYTES)
        super().pread(fd, [memoryview(sector)], at)
        return bytes(sector)

    def cut(self, path: Path) -> None:
        with path.open("r+b") as file:
            for at, versions in self.versions.items():
                file.seek(at)
                file.write(self.rng.choice(versions))


def play(slab: Slab, ledger: Ledger, rng: random.Random, last: int) -> None:
    """Random writes and deletes of three chunks until the power is off."""
    for generation in range(last + 1, last + 1000):
        number = rng.randrange(3)
        if slab.lookup(key_of(number)) and rng.random() < 0.4:
            ledger.begin_delete(number)
            slab.begin_delete(key_of(number)).result(20)
            ledger.settle(number, None)
        else:
            num_bytes = rng.choice(SIZES)
            ledger.begin_write(number, generation, num_bytes)
            slab.begin_write(write_of(number, generation, num_bytes)).result(20)
            ledger.settle(number, generation)


def live(path: Path, options: SlabOptions, io: VolatileIo, kind: type[Slab], ledger: Ledger, last: int) -> None:
    """Look at what the slab holds, then play on it."""
    with opened(path, options, io, kind) as slab:
        ledger.verify(slab)
        play(slab, ledger, io.rng, last)


def cut_power(
    tmp_path: Path, sync: SyncPolicy, scan: ScanDepth, kind: type[Slab] = Slab, *, count: int = 60, cuts: int = 4
) -> None:
    """For each of `count` seeds a slab whose power is cut `cuts` times; looked at after each."""
    empty, path = tmp_path / "empty", tmp_path / "cut"
    with opened(empty, options_of(BLOCKS)):
        pass
    options = options_of(BLOCKS, sync=sync, scan=scan, direct=DirectMode.NEVER, depth=1)
    for seed in range(count):
        shutil.copy(empty, path)
        rng, ledger = random.Random(seed), Ledger()
        for cut in range(cuts):
            io = VolatileIo(rng, rng.randrange(60))
            with pytest.raises(DiskFault):
                live(path, options, io, kind, ledger, cut * 1000)
            io.cut(path)
        with opened(path, options) as slab:
            ledger.verify(slab)


@pytest.mark.parametrize("scan", ScanDepth)
def test_power_cut_loses_nothing_that_a_synced_slab_reported_committed(tmp_path: Path, scan: ScanDepth) -> None:
    cut_power(tmp_path, SyncPolicy.DATA, scan)


def test_power_cut_of_a_slab_that_is_not_synced_loses_chunks_as_its_policy_says(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="generation"):
        cut_power(tmp_path, SyncPolicy.NONE, ScanDepth.PAYLOADS)


class HeaderUnordered(Slab):
    """Syncs once, after the header: the disk may keep the header and lose the payload."""

    def _put_payload(self, header: ExtentHeader, payload: memoryview | None, scratch: Scratch) -> None:
        assert payload is not None
        self.file.write(payload, header.payload_offset, scratch)


class EraseUnsynced(Slab):
    """Frees an erased extent before the erasure is durable."""

    def _release(self, header: ExtentHeader, scratch: Scratch) -> DiskFault | None:
        self._sync = lambda: None  # type: ignore[method-assign]
        try:
            return super()._release(header, scratch)
        finally:
            del self._sync


@pytest.mark.parametrize("kind", [HeaderUnordered, EraseUnsynced])
def test_canary_without_one_of_the_syncs_is_caught(tmp_path: Path, kind: type[Slab]) -> None:
    with pytest.raises((AssertionError, SwapError)):
        cut_power(tmp_path, SyncPolicy.DATA, ScanDepth.HEADERS, kind)
