"""Slabs for tests: chunks whose bytes say who they are, what may be in a file after a crash, and devices that fail."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from swapkv.ids import GroupId, SeqId
from swapkv.tiers.direct_io import DirectMode, OsIo
from swapkv.tiers.slab import Slab
from swapkv.tiers.slab_file import ScanDepth, SyncPolicy
from swapkv.tiers.slab_header import BLOCK_BYTES, ChunkKey, Fingerprint
from swapkv.tiers.slab_types import Read, SlabOptions, Write

FINGERPRINT = Fingerprint([("dtype", "bfloat16"), ("page_size", "16"), ("weights", "r1")])
SECOND_NS = 1_000_000_000
DEADLINE_NS = 20 * SECOND_NS


def key_of(number: int, *, tenant: str = "acme") -> ChunkKey:
    return ChunkKey(tenant=tenant, sequence=SeqId(f"seq-{number // 4}"), chunk=number % 4, group=GroupId(number % 2))


def stamped(number: int, generation: int, num_bytes: int) -> bytes:
    """Bytes that no other chunk and no other generation has, anywhere."""
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= np.uint64(number << 40 | generation << 8 | 0xA5)
    return words.tobytes()[:num_bytes]


def write_of(number: int, generation: int, num_bytes: int) -> Write:
    return Write(key=key_of(number), generation=generation, payload=stamped(number, generation, num_bytes))


def fetch(slab: Slab, number: int, *, generation: int | None = None) -> bytes:
    """The bytes of a stored chunk."""
    header = slab.lookup(key_of(number))
    into = bytearray(header.num_bytes if header else 1)
    slab.begin_read(Read(key=key_of(number), into=into, generation=generation)).result(20)
    return bytes(into)


def options_of(
    blocks: int = 32,
    *,
    direct: DirectMode = DirectMode.AUTO,
    scan: ScanDepth = ScanDepth.PAYLOADS,
    sync: SyncPolicy = SyncPolicy.NONE,
    depth: int = 4,
    pending_max: int = 64,
    deadline_ns: int = DEADLINE_NS,
) -> SlabOptions:
    """A slab of `blocks` blocks, one of them the superblock."""
    return SlabOptions(
        slab_bytes=blocks * BLOCK_BYTES,
        direct=direct,
        scan=scan,
        sync=sync,
        depth=depth,
        pending_max=pending_max,
        deadline_ns=deadline_ns,
    )


@contextmanager
def opened(path: Path, options: SlabOptions, io: OsIo | None = None, kind: type[Slab] = Slab) -> Iterator[Slab]:
    slab = kind(path, fingerprint=FINGERPRINT, options=options, io=io)
    try:
        yield slab
    finally:
        slab.close()


class Ledger:
    """What was reported of each chunk, and so which generations may be in the file; None stands for no copy."""

    def __init__(self) -> None:
        self.allowed: dict[int, set[int | None]] = {}
        self.sizes: dict[tuple[int, int], int] = {}

    def begin_write(self, number: int, generation: int, num_bytes: int) -> None:
        self.allowed.setdefault(number, {None}).add(generation)
        self.sizes[number, generation] = num_bytes

    def begin_delete(self, number: int) -> None:
        self.allowed[number].add(None)

    def settle(self, number: int, generation: int | None) -> None:
        self.allowed[number] = {generation}

    def verify(self, slab: Slab) -> None:
        """Every chunk is one that may be there, byte for byte; no other is; and all other space is free."""
        found = {header.key: header for header in slab.chunks()}
        for number, allowed in self.allowed.items():
            header = found.pop(key_of(number), None)
            generation = header.generation if header else None
            assert generation in allowed, f"chunk {number}: generation {generation} is there, {allowed} may be"
            if generation is not None:
                expected = stamped(number, generation, self.sizes[number, generation])
                assert fetch(slab, number) == expected, f"chunk {number}, generation {generation}: other bytes"
            self.settle(number, generation)
        assert not found, f"{list(found)} were never written"
        usage = slab.usage()
        assert usage.used_bytes == sum(header.extent_bytes for header in slab.chunks()), "space was not reclaimed"
        assert usage.quarantined_bytes == 0
        assert usage.used_bytes + usage.free_bytes == usage.slab_bytes - BLOCK_BYTES


def first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The first `num_bytes` of `buffers`."""
    taken = []
    for buffer in buffers:
        taken.append(buffer[:num_bytes])
        num_bytes = max(0, num_bytes - len(buffer))
    return [buffer for buffer in taken if len(buffer)]


class FaultyIo(OsIo):
    """Makes chosen calls fail. `plan`: (name of the call, which one counted from 0 since `arm`) to an errno, or to a
    negative number: at most so many bytes are moved (0 by None).
    """

    def __init__(self, plan: dict[tuple[str, int], int | None] | None = None) -> None:
        self.plan = plan or {}
        self.is_armed = False
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def arm(self, plan: dict[tuple[str, int], int | None]) -> None:
        self.plan, self.is_armed, self.calls = plan, True, {}

    def _limit(self, name: str, num_bytes: int) -> int:
        if not self.is_armed:
            return num_bytes
        with self._lock:
            number = self.calls.get(name, 0)
            self.calls[name] = number + 1
        what = self.plan.get((name, number), self.plan.get((name, -1), -num_bytes))
        if what is None:
            return 0
        if what > 0:
            raise OSError(what, os.strerror(what))
        return min(num_bytes, -what)

    def open(self, path: Path, flags: int) -> int:
        self._limit("open", 1)
        return super().open(path, flags)

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._limit("pread", sum(map(len, buffers)))
        return super().pread(fd, first(buffers, limit), offset) if limit else 0

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self._limit("pwrite", sum(map(len, buffers)))
        return super().pwrite(fd, first(buffers, limit), offset) if limit else 0

    def fdatasync(self, fd: int) -> None:
        self._limit("fdatasync", 1)
        super().fdatasync(fd)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._limit("allocate", 1)
        super().allocate(fd, num_bytes)

    def num_links(self, fd: int) -> int:
        return 0 if self._limit("num_links", 1) == 0 else super().num_links(fd)


class CrashIo(OsIo):
    """A machine that dies in its `crash_at`th write, of which `prefix_bytes` get to the file; then nothing works."""

    def __init__(self, crash_at: int, prefix_bytes: int) -> None:
        self.crash_at, self.prefix_bytes = crash_at, prefix_bytes
        self.writes = 0
        self.is_dead = False

    def _alive(self) -> None:
        if self.is_dead:
            raise OSError(errno.EIO, "the machine is off")

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._alive()
        return super().pread(fd, buffers, offset)

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._alive()
        if self.writes == self.crash_at:
            self.is_dead = True
            if self.prefix_bytes:
                super().pwrite(fd, first(buffers, self.prefix_bytes), offset)
            self._alive()
        self.writes += 1
        return super().pwrite(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._alive()
        super().fdatasync(fd)
