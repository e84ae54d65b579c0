"""A disk that fails: the first, second, third, … call, with each errno, cut short; typed, counted, and nothing is lost."""

import errno
import random
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

from swapkv.errors import (
    ChecksumMismatch,
    ChunkNotStored,
    DiskFault,
    DiskNoSpace,
    DiskReadOnly,
    DiskShort,
    DiskTierFull,
    DiskVanished,
    TransferError,
)
from swapkv.ids import GroupId
from swapkv.tiers.direct_io import DirectMode
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_file import SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES
from tests.kit.slab import DEADLINE_NS, FaultyIo, Ledger, fetch, key_of, opened, options_of, stamped, write_of

ERRNOS = {
    errno.ENOSPC: DiskNoSpace,
    errno.EDQUOT: DiskNoSpace,
    errno.EIO: DiskFault,
    errno.EACCES: DiskReadOnly,
    errno.EROFS: DiskReadOnly,
    errno.ENODEV: DiskVanished,
    None: DiskShort,
}
NEW_BYTES = 2 * BLOCK_BYTES


def kind_of(number: int | None) -> str:
    return "short" if number is None else errno.errorcode[number]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slab"


@pytest.mark.parametrize("nth", [0, 1], ids=["payload", "header"])
@pytest.mark.parametrize("number", ERRNOS, ids=kind_of)
def test_write_that_fails_stores_nothing_and_keeps_the_older_generation(
    path: Path, number: int | None, nth: int
) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        slab.begin_write(write_of(1, 1, 5000)).result(20)
        used_bytes = slab.usage().used_bytes
        io.arm({("pwrite", nth): number})
        with pytest.raises(ERRNOS[number]) as raised:
            slab.begin_write(write_of(1, 2, NEW_BYTES)).result(20)
        assert raised.value.kind == kind_of(number)
        assert dict(slab.usage().failures) == {kind_of(number): 1}
        assert (slab.usage().used_bytes, slab.usage().quarantined_bytes) == (used_bytes, 0)
        assert fetch(slab, 1, generation=1) == stamped(1, 1, 5000)
        slab.begin_write(write_of(1, 3, NEW_BYTES)).result(20)
    with opened(path, options_of()) as slab:
        assert fetch(slab, 1, generation=3) == stamped(1, 3, NEW_BYTES)


def test_older_generation_that_cannot_be_erased_is_quarantined_and_never_comes_back(path: Path) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        io.arm({("pwrite", 2): errno.EIO})
        slab.begin_write(write_of(1, 2, 100)).result(20)
        assert slab.usage().quarantined_bytes == 2 * BLOCK_BYTES
        slab.begin_write(write_of(2, 1, 100)).result(20)
    with opened(path, options_of(), FaultyIo()) as slab:
        assert dict(slab.usage().discarded) == {"generation": 1}
        assert fetch(slab, 1, generation=2) == stamped(1, 2, 100)
        assert slab.usage().used_bytes == 4 * BLOCK_BYTES


def test_delete_erases_older_generations_that_were_quarantined(path: Path) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        io.arm({("pwrite", 2): errno.EIO})
        slab.begin_write(write_of(1, 2, 100)).result(20)
        slab.begin_delete(key_of(1)).result(20)
        assert slab.usage().used_bytes == 0
    with opened(path, options_of()) as slab:
        assert slab.chunks() == []


def test_delete_that_fails_quarantines_and_can_be_repeated(path: Path) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        io.arm({("pwrite", 0): errno.EIO})
        with pytest.raises(DiskFault, match="EIO"):
            slab.begin_delete(key_of(1)).result(20)
        with pytest.raises(ChunkNotStored):
            fetch(slab, 1)
        assert slab.usage().quarantined_bytes == slab.usage().used_bytes == 2 * BLOCK_BYTES
        slab.begin_delete(key_of(1)).result(20)
        assert slab.usage().used_bytes == 0


def test_chunk_that_begins_anew_after_a_failed_delete_is_not_hidden_by_its_old_generation(path: Path) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        slab.begin_write(write_of(1, 9, 100)).result(20)
        io.arm({("pwrite", 0): errno.EIO})
        with pytest.raises(DiskFault):
            slab.begin_delete(key_of(1)).result(20)
        slab.begin_write(write_of(1, 1, 100)).result(20)
    with opened(path, options_of()) as slab:
        assert fetch(slab, 1) == stamped(1, 1, 100)
        assert slab.usage().used_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize("direct", DirectMode)
def test_writes_and_reads_that_are_cut_short_go_on_where_they_were(path: Path, direct: DirectMode) -> None:
    io = FaultyIo()
    with opened(path, options_of(direct=direct), io) as slab:
        io.arm({("pwrite", -1): -BLOCK_BYTES, ("pread", -1): -BLOCK_BYTES})
        slab.begin_write(write_of(1, 1, 5 * BLOCK_BYTES + 7)).result(20)
        assert fetch(slab, 1) == stamped(1, 1, 5 * BLOCK_BYTES + 7)
        assert io.calls["pwrite"] == 6 + 1
        assert io.calls["pread"] == 6 + 1


class UnevenIo(FaultyIo):
    """Does what it is asked and says that it did 100 bytes less of the first request."""

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pread(fd, buffers, offset) - 100 * (self.calls.get("pread") == 1)

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwrite(fd, buffers, offset) - 100 * (self.calls.get("pwrite") == 1)


@pytest.mark.parametrize("direct", DirectMode)
def test_count_that_is_no_whole_block_is_taken_up_where_direct_io_can(path: Path, direct: DirectMode) -> None:
    io = UnevenIo()
    with opened(path, options_of(direct=direct), io) as slab:
        io.arm({})
        slab.begin_write(write_of(1, 1, 5 * BLOCK_BYTES)).result(20)
        assert fetch(slab, 1) == stamped(1, 1, 5 * BLOCK_BYTES)
        assert (io.calls["pwrite"], io.calls["pread"]) == (3, 2)


def test_file_that_was_cut_gives_a_short_read_and_the_other_chunks_stay(path: Path) -> None:
    with opened(path, options_of()) as slab:
        for number in (1, 2):
            slab.begin_write(write_of(number, 1, 3 * BLOCK_BYTES)).result(20)
        with path.open("r+b") as file:
            file.truncate(7 * BLOCK_BYTES)
        with pytest.raises(DiskShort, match="then no more"):
            fetch(slab, 2)
        assert fetch(slab, 1) == stamped(1, 1, 3 * BLOCK_BYTES)
        assert dict(slab.usage().failures) == {"short": 1}


@pytest.mark.parametrize("number", ERRNOS, ids=kind_of)
def test_read_that_fails_is_typed_and_the_chunk_can_be_read_again(path: Path, number: int | None) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        slab.begin_write(write_of(1, 1, 5000)).result(20)
        for before in ({}, {("pread", 0): -BLOCK_BYTES}):
            io.arm({**before, ("pread", len(before)): number})
            with pytest.raises(ERRNOS[number]) as raised:
                fetch(slab, 1)
            assert raised.value.kind == kind_of(number)
            assert fetch(slab, 1) == stamped(1, 1, 5000)
        assert dict(slab.usage().failures) == {kind_of(number): 2}
        slab.begin_delete(key_of(1)).result(20)


def test_deleted_file_refuses_writes_and_says_so(path: Path) -> None:
    with opened(path, options_of()) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        path.unlink()
        with pytest.raises(DiskVanished, match="was deleted: open a new slab"):
            slab.begin_write(write_of(2, 1, 100)).result(20)
        assert dict(slab.usage().failures) == {"vanished": 1}
        assert fetch(slab, 1) == stamped(1, 1, 100), "while it is open its bytes are there"
        assert slab.usage().used_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize("nth", [0, 1], ids=["before the header", "after the header"])
def test_sync_that_fails_once_is_not_trusted_again_and_committed_chunks_stay(path: Path, nth: int) -> None:
    io = FaultyIo()
    with opened(path, options_of(sync=SyncPolicy.DATA, depth=1), io) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        io.arm({("fdatasync", nth): errno.EIO})
        with pytest.raises(DiskFault, match="fdatasync of"):
            slab.begin_write(write_of(2, 1, 100)).result(20)
        with pytest.raises(DiskFault, match="an earlier fdatasync failed"):
            slab.begin_write(write_of(3, 1, 100)).result(20)
        assert fetch(slab, 1) == stamped(1, 1, 100)
        assert {header.key for header in slab.chunks()} == {key_of(1)}
    with opened(path, options_of()) as slab:
        assert {header.key for header in slab.chunks()} == {key_of(1)}
        assert slab.usage().used_bytes == 2 * BLOCK_BYTES


def test_data_policy_syncs_before_and_after_the_header_and_after_an_erase(path: Path) -> None:
    for sync, writes, deletes in ((SyncPolicy.NONE, 0, 0), (SyncPolicy.DATA, 2, 1)):
        io = FaultyIo()
        with opened(path.with_name(sync.value), options_of(sync=sync), io) as slab:
            io.arm({})
            slab.begin_write(write_of(1, 1, 100)).result(20)
            assert io.calls.get("fdatasync", 0) == writes
            slab.begin_delete(key_of(1)).result(20)
            assert io.calls.get("fdatasync", 0) == writes + deletes


def test_payload_that_changed_on_the_disk_is_refused_and_counted(path: Path) -> None:
    with opened(path, options_of(direct=DirectMode.NEVER)) as slab:
        header = slab.begin_write(write_of(1, 1, 5000)).result(20)
        with path.open("r+b") as file:
            file.seek(header.payload_offset + 4096)
            file.write(b"?")
        with pytest.raises(ChecksumMismatch, match="the disk gave other bytes"):
            fetch(slab, 1)
        assert dict(slab.usage().failures) == {"checksum": 1}


@pytest.mark.parametrize("field", ["tenant", "sequence", "chunk", "group", "generation", "num_bytes", "checksum"])
def test_header_that_changed_on_the_disk_is_refused_by_the_field(path: Path, field: str) -> None:
    with opened(path, options_of(direct=DirectMode.NEVER)) as slab:
        header = slab.begin_write(write_of(1, 1, 5000)).result(20)
        other = {
            "tenant": attrs.evolve(header, key=key_of(1, tenant="other")),
            "sequence": attrs.evolve(header, key=key_of(5)),
            "chunk": attrs.evolve(header, key=key_of(3)),
            "group": attrs.evolve(header, key=attrs.evolve(key_of(1), group=GroupId(7))),
            "generation": attrs.evolve(header, generation=2),
            "num_bytes": attrs.evolve(header, num_bytes=4999),
            "checksum": header,
        }[field]
        block = other.encode(slab._superblock)
        if field == "checksum":
            block = block[:-1] + bytes([block[-1] ^ 1])
        with path.open("r+b") as file:
            file.seek(header.offset)
            file.write(block)
        said = "torn, damaged" if field == "checksum" else field
        with pytest.raises(ChecksumMismatch, match=f"header on the disk has changed: .*{said}"):
            fetch(slab, 1)
        assert dict(slab.usage().failures) == {"header": 1}


class BadSectorIo(FaultyIo):
    """Cannot read the block at `bad`."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= self.bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "bad sector")
        return super().pread(fd, buffers, offset)


@pytest.mark.parametrize("part", ["header", "payload"])
def test_scan_over_a_bad_sector_loses_that_extent_only_and_hands_it_to_nobody(path: Path, part: str) -> None:
    with opened(path, options_of()) as slab:
        headers = [slab.begin_write(write_of(n, 1, 5000)).result(20) for n in range(3)]
    bad = headers[1].offset if part == "header" else headers[1].payload_offset + BLOCK_BYTES
    with opened(path, options_of(), BadSectorIo(bad)) as slab:
        assert {header.key for header in slab.chunks()} == {key_of(0), key_of(2)}
        for number in (0, 2):
            assert fetch(slab, number) == stamped(number, 1, 5000)
        lost_bytes = BLOCK_BYTES if part == "header" else 3 * BLOCK_BYTES
        assert slab.usage().quarantined_bytes == lost_bytes
        free_bytes = slab.usage().free_bytes
        assert free_bytes == 31 * BLOCK_BYTES - 6 * BLOCK_BYTES - lost_bytes
    if part == "payload":
        with opened(path, options_of(), BadSectorIo(bad)) as slab:
            slab.begin_delete(key_of(1)).result(20)
            assert slab.usage().quarantined_bytes == 0
        with opened(path, options_of()) as slab:
            assert slab.lookup(key_of(1)) is None, "what was deleted does not come back with the sector"


def ruin(rng: random.Random) -> dict[tuple[str, int], int | None]:
    """Some calls of the next that fail."""
    numbers = [errno.EIO, errno.ENOSPC, None, -BLOCK_BYTES]
    return {(rng.choice(["pwrite", "pread", "fdatasync"]), rng.randrange(30)): rng.choice(numbers) for _ in range(6)}


def traffic(slab: Slab, io: FaultyIo, ledger: Ledger, rng: random.Random, generation: int) -> tuple[int, int]:
    """Random writes, reads and deletes on a disk that fails. Returns the last generation and how many calls failed."""
    failed = 0
    io.arm(ruin(rng))
    for _ in range(25):
        number = rng.randrange(6)
        there = slab.lookup(key_of(number))
        before = there.generation if there else None
        try:
            if there and rng.random() < 0.3:
                ledger.begin_delete(number)
                slab.begin_delete(key_of(number)).result(20)
                ledger.settle(number, None)
            elif there and rng.random() < 0.4:
                assert fetch(slab, number) == stamped(number, there.generation, there.num_bytes)
            else:
                generation += 1
                num_bytes = rng.choice([1, 4096, 9000])
                ledger.begin_write(number, generation, num_bytes)
                slab.begin_write(write_of(number, generation, num_bytes)).result(20)
                ledger.settle(number, generation)
        except DiskTierFull:
            ledger.allowed[number].discard(generation)
        except TransferError:
            failed += 1
            now = slab.lookup(key_of(number))
            assert now is None or now.generation == before, "a failed call stores nothing"
        usage = slab.usage()
        assert usage.peak_bytes <= usage.slab_bytes - BLOCK_BYTES
    return generation, failed


@pytest.mark.parametrize("sync", SyncPolicy)
def test_random_traffic_on_a_failing_disk_loses_nothing_that_was_committed(path: Path, sync: SyncPolicy) -> None:
    failed = generation = 0
    ledger = Ledger()
    for seed in range(40):
        rng, io = random.Random(seed), FaultyIo()
        with opened(path, options_of(30, sync=sync, depth=2), io) as slab:
            ledger.verify(slab)
            generation, more = traffic(slab, io, ledger, rng, generation)
            failed += more
            io.is_armed = False
    with opened(path, options_of(30)) as slab:
        ledger.verify(slab)
    assert failed > 40


def test_batch_on_a_failing_disk_names_the_item_that_failed(path: Path) -> None:
    io = FaultyIo()
    with opened(path, options_of(depth=1), io) as slab:
        io.arm({("pwrite", 2): errno.ENOSPC})
        outcomes = slab.write_batch([write_of(n, 1, BLOCK_BYTES) for n in range(3)], deadline_ns=DEADLINE_NS)
        assert [type(outcome.error) for outcome in outcomes] == [type(None), DiskNoSpace, type(None)]
        assert {header.key for header in slab.chunks()} == {key_of(0), key_of(2)}
