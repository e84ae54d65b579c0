"""The slab from its caller's side: what goes in comes back, what is refused is refused whole, nothing waits for ever."""

import fcntl
import os
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

from swapkv.errors import (
    ChecksumMismatch,
    ChunkNotStored,
    DiskTierFull,
    DrainTimeout,
    NeverFits,
    PoolClosed,
    ProtocolError,
    SlabInUse,
    WouldBlock,
)
from swapkv.tiers.direct_io import DirectMode, IoPath, OsIo, aligned_buffer, is_aligned
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_file import SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES, payload_checksum
from swapkv.tiers.slab_probe import probe
from swapkv.tiers.slab_types import Read, SlabOptions, Write
from tests.kit.slab import (
    DEADLINE_NS,
    FINGERPRINT,
    FaultyIo,
    fetch,
    key_of,
    opened,
    options_of,
    stamped,
    write_of,
)

SIZES = (1, 511, 4095, 4096, 4097, 20_000)
CAP_BYTES = 31 * BLOCK_BYTES


class GatedIo(OsIo):
    """Writes and reads wait for `gate` while `is_armed`; `arrived` counts those that have come to it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.is_armed = False

    def _pass(self) -> None:
        if self.is_armed:
            self.arrived.release()
            assert self.gate.wait(20)

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().pwrite(fd, buffers, offset)

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        return super().pread(fd, buffers, offset)


@pytest.mark.parametrize("sync", SyncPolicy)
@pytest.mark.parametrize("direct", DirectMode)
def test_chunks_of_every_size_come_back_at_once_and_after_reopening(
    tmp_path: Path, direct: DirectMode, sync: SyncPolicy
) -> None:
    options = options_of(direct=direct, sync=sync)
    with opened(tmp_path / "slab", options) as slab:
        for number, num_bytes in enumerate(SIZES):
            header = slab.begin_write(write_of(number, 1, num_bytes)).result(20)
            assert header == slab.lookup(key_of(number))
            assert fetch(slab, number, generation=1) == stamped(number, 1, num_bytes)
        before = slab.usage()
    with opened(tmp_path / "slab", options) as slab:
        after = slab.usage()
        assert (after.chunks, after.used_bytes) == (len(SIZES), before.used_bytes)
        for number, num_bytes in enumerate(SIZES):
            assert fetch(slab, number) == stamped(number, 1, num_bytes)


def test_aligned_buffers_are_used_as_they_are_and_others_are_copied_and_counted(tmp_path: Path) -> None:
    num_bytes = 3 * BLOCK_BYTES
    aligned, unaligned = aligned_buffer(num_bytes), aligned_buffer(num_bytes + 1)[1:]
    assert (is_aligned(aligned), is_aligned(unaligned)) == (True, False)
    for buffer in (aligned, unaligned):
        buffer[:] = stamped(1, 1, num_bytes)
    with opened(tmp_path / "slab", options_of()) as slab:
        if slab.usage().io_path is IoPath.BUFFERED:
            pytest.skip(f"no O_DIRECT here: {slab.usage().io_note}")
        for generation, buffer, copied in ((1, aligned, 0), (2, unaligned, 2 * num_bytes)):
            slab.begin_write(Write(key=key_of(1), generation=generation, payload=buffer)).result(20)
            buffer[:] = bytes(num_bytes)
            slab.begin_read(Read(key=key_of(1), into=buffer)).result(20)
            assert buffer == stamped(1, 1, num_bytes)
            assert slab.usage().copied_bytes == copied
        tail = aligned[: BLOCK_BYTES + 10]
        slab.begin_write(Write(key=key_of(2), generation=1, payload=tail)).result(20)
        assert slab.usage().copied_bytes == 2 * num_bytes + 10, "of the last block only"


def test_last_block_of_a_chunk_holds_nothing_of_what_was_written_before(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of(depth=1)) as slab:
        slab.begin_write(Write(key=key_of(1), generation=1, payload=b"secret" * 2000)).result(20)
        header = slab.begin_write(Write(key=key_of(2, tenant="other"), generation=1, payload=b"mine")).result(20)
    block = (tmp_path / "slab").read_bytes()[header.payload_offset : header.payload_offset + BLOCK_BYTES]
    assert block == b"mine".ljust(BLOCK_BYTES, b"\0")


def test_numpy_arrays_are_written_and_filled(tmp_path: Path) -> None:
    array = np.arange(2 * 3 * 50, dtype=np.float32).reshape(2, 3, 50)
    back = np.zeros_like(array)
    with opened(tmp_path / "slab", options_of()) as slab:
        slab.begin_write(Write(key=key_of(0), generation=1, payload=memoryview(array))).result(20)
        slab.begin_read(Read(key=key_of(0), into=memoryview(back))).result(20)
        with pytest.raises(ProtocolError, match="pass one that is contiguous"):
            slab.begin_write(Write(key=key_of(1), generation=1, payload=memoryview(array[:, ::2])))
    assert np.array_equal(array, back)


def test_newer_generation_replaces_and_frees_the_older_and_an_older_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of()) as slab:
        slab.begin_write(write_of(1, 5, 5000)).result(20)
        slab.begin_write(write_of(1, 6, 9000)).result(20)
        assert slab.usage().used_bytes == 4 * BLOCK_BYTES
        assert fetch(slab, 1) == stamped(1, 6, 9000)
        for generation in (5, 6):
            with pytest.raises(ProtocolError, match=f"generation {generation} is not newer than 6"):
                slab.begin_write(write_of(1, generation, 10))
        with pytest.raises(ChunkNotStored, match="generation 6 is stored, generation 5 was asked for"):
            fetch(slab, 1, generation=5)


def test_chunk_of_another_tenant_is_not_stored(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of()) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        with pytest.raises(ChunkNotStored, match="nothing is stored"):
            slab.begin_read(Read(key=key_of(1, tenant="other"), into=bytearray(100)))
        assert slab.lookup(key_of(1, tenant="other")) is None


def test_deleted_chunk_is_gone_its_bytes_are_free_and_it_stays_gone(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of()) as slab:
        for number in range(3):
            slab.begin_write(write_of(number, 1, 5000)).result(20)
        for number in (1, 0, 2):
            slab.begin_delete(key_of(number)).result(20)
            with pytest.raises(ChunkNotStored):
                fetch(slab, number)
            with pytest.raises(ChunkNotStored, match="nothing to delete"):
                slab.begin_delete(key_of(number))
        usage = slab.usage()
        assert (usage.used_bytes, usage.free_ranges, usage.largest_free_bytes) == (0, 1, CAP_BYTES)
    with opened(tmp_path / "slab", options_of()) as slab:
        assert slab.chunks() == []


def test_buffer_of_another_size_or_read_only_is_refused_and_pins_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of()) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        with pytest.raises(ProtocolError, match="has 100 bytes, the buffer has 99"):
            slab.begin_read(Read(key=key_of(1), into=bytearray(99)))
        with pytest.raises(ProtocolError, match="read-only"):
            slab.begin_read(Read(key=key_of(1), into=bytes(100)))
        with pytest.raises(ProtocolError, match="at least 1 byte"):
            slab.begin_write(Write(key=key_of(2), generation=1, payload=b""))
        slab.begin_delete(key_of(1)).result(20)


def test_full_slab_refuses_and_never_uses_more_than_its_cap(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of()) as slab:
        with pytest.raises(NeverFits, match="make a larger slab"):
            slab.begin_write(write_of(0, 1, CAP_BYTES))
        outcomes = slab.write_batch([write_of(n, 1, 9 * BLOCK_BYTES) for n in range(4)], deadline_ns=DEADLINE_NS)
        assert [type(outcome.error) for outcome in outcomes] == [type(None)] * 3 + [DiskTierFull]
        with pytest.raises(DiskTierFull, match="4096 is the longest of 1 free ranges"):
            slab.begin_write(write_of(0, 2, 1))
        usage = slab.usage()
        assert usage.peak_bytes == usage.used_bytes == 30 * BLOCK_BYTES
        assert (tmp_path / "slab").stat().st_size == usage.slab_bytes


def test_batches_of_several_threads_end_with_an_outcome_for_each_item(tmp_path: Path) -> None:
    failed: list[object] = []

    def work(first: int) -> None:
        numbers = range(first, first + 8)
        for generation in range(1, 6):
            writes = slab.write_batch([write_of(n, generation, 3000 + n) for n in numbers], deadline_ns=DEADLINE_NS)
            buffers = [bytearray(3000 + n) for n in numbers]
            reads = [
                Read(key=key_of(n), into=buffer, generation=generation)
                for n, buffer in zip(numbers, buffers, strict=True)
            ]
            outcomes = slab.read_batch(reads, deadline_ns=DEADLINE_NS)
            failed.extend(outcome for outcome in (*writes, *outcomes) if outcome.error is not None)
            failed.extend(
                n for n, buffer in zip(numbers, buffers, strict=True) if buffer != stamped(n, generation, 3000 + n)
            )
            slab.begin_delete(key_of(first)).result(20)

    with opened(tmp_path / "slab", options_of(256)) as slab:
        threads = [threading.Thread(target=work, args=(8 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failed == []
        assert slab.usage().chunks == 4 * 7
        assert slab.usage().used_bytes == 4 * 7 * 2 * BLOCK_BYTES


def test_batch_tells_of_good_and_bad_items_apart(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of()) as slab:
        slab.begin_write(write_of(1, 3, 10)).result(20)
        writes = [write_of(0, 1, 10), write_of(1, 3, 10), write_of(2, 1, 10)]
        assert [type(o.error) for o in slab.write_batch(writes, deadline_ns=DEADLINE_NS)] == [
            type(None),
            ProtocolError,
            type(None),
        ]
        reads = [Read(key=key_of(n), into=bytearray(10)) for n in (0, 7, 2)]
        outcomes = slab.read_batch(reads, deadline_ns=DEADLINE_NS)
        assert [type(o.error) for o in outcomes] == [type(None), ChunkNotStored, type(None)]
        assert [o.key for o in outcomes] == [key_of(0), key_of(7), key_of(2)]


def test_batch_past_its_deadline_cancels_what_has_not_begun_and_names_what_has(tmp_path: Path) -> None:
    io = GatedIo()
    with opened(tmp_path / "slab", options_of(depth=1), io) as slab:
        io.is_armed = True
        outcomes = slab.write_batch([write_of(n, 1, 100) for n in range(3)], deadline_ns=1)
        assert all(isinstance(outcome.error, DrainTimeout) for outcome in outcomes)
        io.gate.set()
        slab.close()
        slab = Slab(tmp_path / "slab", fingerprint=FINGERPRINT, options=options_of())
        begun = [n for n, outcome in enumerate(outcomes) if "going on" in str(outcome.error)]
        assert {header.key for header in slab.chunks()} == {key_of(n) for n in begun}
        slab.close()


def test_future_that_is_cancelled_before_it_begins_leaves_nothing_behind(tmp_path: Path) -> None:
    io = GatedIo()
    with opened(tmp_path / "slab", options_of(depth=1), io) as slab:
        slab.begin_write(write_of(3, 1, 10)).result(20)
        io.is_armed = True
        first = slab.begin_write(write_of(0, 1, 100))
        assert io.arrived.acquire(timeout=20)
        write = slab.begin_write(write_of(1, 1, 100))
        read = slab.begin_read(Read(key=key_of(3), into=bytearray(10)))
        delete = slab.begin_delete(key_of(3))
        assert not first.cancel(), "it has begun"
        assert write.cancel()
        assert read.cancel()
        assert delete.cancel()
        io.gate.set()
        assert first.result(20).key == key_of(0)
        slab.begin_write(write_of(2, 1, 100)).result(20)
        assert slab.lookup(key_of(1)) is None
        assert fetch(slab, 3) == stamped(3, 1, 10), "its delete was cancelled"
        slab.begin_write(write_of(1, 1, 100)).result(20)
        slab.begin_delete(key_of(3)).result(20)
        assert slab.usage().used_bytes == 3 * 2 * BLOCK_BYTES


def test_more_than_pending_max_is_refused_and_reserves_nothing(tmp_path: Path) -> None:
    io = GatedIo()
    with opened(tmp_path / "slab", options_of(depth=1, pending_max=2), io) as slab:
        io.is_armed = True
        futures = [slab.begin_write(write_of(n, 1, 10)) for n in range(2)]
        used_bytes = slab.usage().used_bytes
        with pytest.raises(WouldBlock, match="pending_max=2"):
            slab.begin_write(write_of(2, 1, 10))
        assert slab.usage().used_bytes == used_bytes
        io.gate.set()
        wait(futures, 20)
        slab.close()


def test_second_write_or_delete_of_a_chunk_under_way_is_refused(tmp_path: Path) -> None:
    io = GatedIo()
    with opened(tmp_path / "slab", options_of(), io) as slab:
        io.is_armed = True
        future = slab.begin_write(write_of(1, 1, 10))
        for call in (lambda: slab.begin_write(write_of(1, 2, 10)), lambda: slab.begin_delete(key_of(1))):
            with pytest.raises(ProtocolError, match="is under way: wait for its future"):
                call()
        io.gate.set()
        future.result(20)


def test_close_finishes_what_was_begun_and_takes_nothing_more(tmp_path: Path) -> None:
    slab = Slab(tmp_path / "slab", fingerprint=FINGERPRINT, options=options_of())
    futures = [slab.begin_write(write_of(n, 1, 100)) for n in range(8)]
    slab.close()
    slab.close()
    assert all(future.result(0).num_bytes == 100 for future in futures)
    for call in (lambda: slab.begin_write(write_of(9, 1, 1)), lambda: fetch(slab, 1), lambda: slab.pin(key_of(1))):
        with pytest.raises(PoolClosed, match="open it again"):
            call()


def test_close_that_cannot_finish_says_so_and_keeps_the_file_locked(tmp_path: Path) -> None:
    io = GatedIo()
    slab = Slab(tmp_path / "slab", fingerprint=FINGERPRINT, options=options_of(deadline_ns=1_000_000), io=io)
    io.is_armed = True
    future = slab.begin_write(write_of(1, 1, 10))
    assert io.arrived.acquire(timeout=20)
    with pytest.raises(DrainTimeout, match="close again"):
        slab.close()
    with pytest.raises(SlabInUse):
        Slab(tmp_path / "slab", fingerprint=FINGERPRINT, options=options_of())
    io.gate.set()
    future.result(20)
    for thread in slab.threads._threads:
        thread.join(20)
    slab.close()
    with opened(tmp_path / "slab", options_of()) as again:
        assert fetch(again, 1) == stamped(1, 1, 10)


def test_pinned_extent_stays_while_its_chunk_is_replaced_and_a_delete_waits_for_it(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of(direct=DirectMode.NEVER)) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        pinned = slab.pin(key_of(1), 1)
        slab.begin_write(write_of(1, 2, 100)).result(20)
        assert slab.usage().used_bytes == 4 * BLOCK_BYTES
        with (tmp_path / "slab").open("rb") as file:
            file.seek(pinned.header.payload_offset)
            assert file.read(100) == stamped(1, 1, 100)
        deleted = slab.begin_delete(key_of(1))
        assert not wait([deleted], 0.05).done, "else generation 1 could come back"
        slab.unpin(pinned)
        deleted.result(20)
        assert slab.usage().used_bytes == 0
    with opened(tmp_path / "slab", options_of()) as slab:
        assert slab.chunks() == []


def test_pin_that_outlasts_the_slab_writes_to_no_file(tmp_path: Path) -> None:
    slab = Slab(tmp_path / "slab", fingerprint=FINGERPRINT, options=options_of())
    slab.begin_write(write_of(1, 1, 100)).result(20)
    pinned = slab.pin(key_of(1))
    slab.begin_write(write_of(1, 2, 100)).result(20)
    other = tmp_path / "other"
    with other.open("w+b") as file:
        slab.close()
        again_used = fcntl.fcntl(file, fcntl.F_DUPFD, slab.file.fd)
        assert again_used == slab.file.fd, "the number of the closed file stands for another"
        slab.unpin(pinned)
        os.close(again_used)
    assert other.read_bytes() == b""
    with opened(tmp_path / "slab", options_of()) as again:
        assert dict(again.usage().discarded) == {"generation": 1}
        assert fetch(again, 1) == stamped(1, 2, 100)


def test_delete_of_a_chunk_that_stays_pinned_gives_up_and_the_chunk_is_there(tmp_path: Path) -> None:
    with opened(tmp_path / "slab", options_of(deadline_ns=1_000_000)) as slab:
        slab.begin_write(write_of(1, 1, 100)).result(20)
        pinned = slab.pin(key_of(1))
        with pytest.raises(DrainTimeout, match="unpin it, then delete again"):
            slab.begin_delete(key_of(1)).result(20)
        assert fetch(slab, 1) == stamped(1, 1, 100)
        slab.unpin(pinned)
        slab.begin_delete(key_of(1)).result(20)


def test_extent_that_somebody_else_fills_is_committed_or_abandoned(tmp_path: Path) -> None:
    payload = stamped(1, 1, BLOCK_BYTES)
    with opened(tmp_path / "slab", options_of(direct=DirectMode.NEVER)) as slab:
        reserved = slab.reserve(key_of(1), 1, BLOCK_BYTES)
        with (tmp_path / "slab").open("r+b") as file:
            file.seek(reserved.payload_offset)
            file.write(payload)
        slab.begin_commit(reserved, payload_checksum(memoryview(payload))).result(20)
        assert fetch(slab, 1) == payload
        slab.abandon(slab.reserve(key_of(2), 1, BLOCK_BYTES))
        assert slab.usage().used_bytes == 2 * BLOCK_BYTES


@pytest.mark.parametrize("direct", DirectMode)
def test_probe_writes_and_reads_and_gives_all_back(tmp_path: Path, direct: DirectMode) -> None:
    with opened(tmp_path / "slab", options_of(direct=direct)) as slab:
        found = probe(slab, request_bytes=6 * BLOCK_BYTES)
        assert found.io_path is slab.usage().io_path
        assert (found.io_note == "") == (found.io_path is IoPath.DIRECT)
        assert found.num_bytes == 4 * 6 * BLOCK_BYTES
        assert min(found.write_bytes_per_s, found.read_bytes_per_s) > 0
        assert slab.usage().used_bytes == 0
        with pytest.raises(DiskTierFull):
            probe(slab, request_bytes=10 * BLOCK_BYTES)
        assert slab.usage().used_bytes == 0
    with opened(tmp_path / "slab", options_of()) as slab:
        assert slab.chunks() == []


class LyingIo(FaultyIo):
    """Gives other bytes than are in the file."""

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        moved = super().pread(fd, buffers, offset)
        if self.is_armed:
            buffers[0][len(buffers[0]) // 2] ^= 1
        return moved


def test_probe_of_a_disk_that_gives_other_bytes_refuses_it(tmp_path: Path) -> None:
    io = LyingIo()
    with opened(tmp_path / "slab", options_of(), io) as slab:
        io.arm({})
        with pytest.raises(ChecksumMismatch, match="do not use this device"):
            probe(slab, request_bytes=BLOCK_BYTES)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("slab_bytes=5000", {"slab_bytes": 5000}),
        ("slab_bytes=8192", {"slab_bytes": 8192}),
        ("depth=0", {"slab_bytes": 1 << 20, "depth": 0}),
        ("pending_max=0", {"slab_bytes": 1 << 20, "pending_max": 0}),
        ("deadline_ns=0", {"slab_bytes": 1 << 20, "deadline_ns": 0}),
    ],
)
def test_option_out_of_range_is_refused_by_name(name: str, options: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match=name):
        SlabOptions(**options)  # type: ignore[arg-type]
