"""The slab: chunks in one preallocated file, each whole or not there, whatever moment the process dies at.

A write reserves an extent, writes the payload, and writes the header last: the header *is* the commit. A delete zeroes the
header first and frees the extent after. So every free block of the file is no header, and what a scan finds is whole.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType

import attrs

from swapkv.errors import (
    ChecksumMismatch,
    ChunkNotStored,
    DiskFault,
    DiskTierFull,
    DrainTimeout,
    NeverFits,
    PoolClosed,
    ProtocolError,
)
from swapkv.tiers.direct_io import FileIo, IoThreads, OsIo, Scratch
from swapkv.tiers.slab_batch import bytes_of, run_batch
from swapkv.tiers.slab_extents import SlabExtents
from swapkv.tiers.slab_file import SlabScan, SyncPolicy, erase, open_slab_file
from swapkv.tiers.slab_header import BLOCK_BYTES, ChunkKey, ExtentHeader, Fingerprint, payload_checksum
from swapkv.tiers.slab_types import Outcome, Read, SlabOptions, SlabUsage, Stored, Write


class Slab:
    """A slab file, opened, locked and scanned; this blocks, for a scan of payloads as long as reading them takes.

    `begin_…` calls do not block; their futures end on a thread of the slab. Cancelling a future that has not begun
    leaves everything as it was; one that has begun goes to its end. Errors of `begin_…`, at once, nothing changed:
    `DiskTierFull`, `NeverFits`, `ProtocolError`, `ChunkNotStored`, `WouldBlock` (`pending_max`), `PoolClosed`.
    Errors of futures: `DiskFault` of the kind that happened; a failed write stores nothing and the chunk's earlier
    generation stays; `ChecksumMismatch`: the disk gave other bytes, do not use the buffer, run the tokens again.
    Errors of opening: `SlabMismatch` names the field, `SlabInUse`, `DiskFault`.
    """

    def __init__(self, path: Path, *, fingerprint: Fingerprint, options: SlabOptions, io: FileIo | None = None) -> None:
        self.path, self.options = path, options
        self.file, self._superblock = open_slab_file(
            io or OsIo(), path, slab_bytes=options.slab_bytes, fingerprint=fingerprint, mode=options.direct
        )
        try:
            scan = SlabScan(self.file, self._superblock, options.scan, options.sync).run()
        except BaseException:
            self.file.io.close(self.file.fd)
            raise
        self._discarded = scan.discarded
        self._chunks = {key: Stored(header) for key, header in scan.adopted.items()}
        self._lost_bytes = sum(scan.lost.values())
        self._quarantine = {header.offset: header for header in scan.held}
        taken = [(header.offset, header.extent_bytes) for header in (*scan.adopted.values(), *scan.held)]
        self._extents = SlabExtents(BLOCK_BYTES, options.slab_bytes, [*taken, *scan.lost.items()])
        self._busy: set[ChunkKey] = set()
        self._replaced: dict[ChunkKey, list[Stored]] = {}
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self.threads = IoThreads(depth=options.depth, pending_max=options.pending_max)
        self._is_closed = False

    def lookup(self, key: ChunkKey) -> ExtentHeader | None:
        """The committed copy of a chunk: its generation, bytes and where its payload is. None: there is none."""
        with self._lock:
            stored = self._chunks.get(key)
            return stored.header if stored else None

    def chunks(self) -> list[ExtentHeader]:
        """Every committed chunk, in no order."""
        with self._lock:
            return [stored.header for stored in self._chunks.values()]

    def usage(self) -> SlabUsage:
        with self._lock:
            return SlabUsage(
                slab_bytes=self.options.slab_bytes,
                used_bytes=self._extents.used_bytes,
                peak_bytes=self._extents.peak_bytes,
                free_bytes=self._extents.total_bytes - self._extents.used_bytes,
                largest_free_bytes=self._extents.largest_bytes,
                free_ranges=self._extents.num_ranges,
                quarantined_bytes=self._lost_bytes + sum(header.extent_bytes for header in self._quarantine.values()),
                chunks=len(self._chunks),
                io_path=self.file.path_taken,
                io_note=self.file.note,
                copied_bytes=self.file.copied_bytes,
                failures=MappingProxyType(dict(self.file.failures)),
                discarded=MappingProxyType(dict(self._discarded)),
            )

    def begin_write(self, write: Write) -> "Future[ExtentHeader]":
        """Store a chunk; done means committed, as durable as `SyncPolicy` says, and older generations erased."""
        payload = bytes_of(write.payload)
        reserved = self.reserve(write.key, write.generation, len(payload))

        def run(scratch: Scratch) -> ExtentHeader:
            header = attrs.evolve(reserved, checksum=payload_checksum(payload))
            return self._commit(header, payload, scratch)

        return self._submit_reserved(reserved, run)

    def reserve(self, key: ChunkKey, generation: int, num_bytes: int) -> ExtentHeader:
        """An extent for somebody else to fill, at `payload_offset`; then `begin_commit` or `abandon` it.

        Raises `ProtocolError` for a generation that is not newer, or while a write or delete of the chunk is under way.
        """
        header = ExtentHeader(offset=0, key=key, generation=generation, num_bytes=num_bytes, checksum=bytes(16))
        if num_bytes < 1:
            raise ProtocolError(f"a chunk of {num_bytes} bytes: it must have at least 1")
        if header.extent_bytes > self._extents.total_bytes:
            raise NeverFits(f"a chunk of {num_bytes} bytes in a slab of {self.options.slab_bytes}: make a larger slab")
        with self._lock:
            self._require_open()
            self._require_idle(key)
            stored = self._chunks.get(key)
            if stored and stored.header.generation >= generation:
                raise ProtocolError(
                    f"{key}: generation {generation} is not newer than {stored.header.generation}, which is stored"
                )
            offset = self._extents.allocate(header.extent_bytes)
            if offset is None:
                raise DiskTierFull(
                    f"no room for {header.extent_bytes} bytes in one piece: {self._extents.largest_bytes} is the longest "
                    f"of {self._extents.num_ranges} free ranges. {DiskTierFull.__doc__}"
                )
            self._busy.add(key)
        return attrs.evolve(header, offset=offset)

    def begin_commit(self, reserved: ExtentHeader, checksum: bytes) -> "Future[ExtentHeader]":
        """Commit what was written to a reserved extent, up to the end of its last block; `checksum` as `payload_checksum`."""
        header = attrs.evolve(reserved, checksum=checksum)
        return self._submit_reserved(reserved, lambda scratch: self._commit(header, None, scratch))

    def abandon(self, reserved: ExtentHeader) -> None:
        """Give a reserved extent back that was not committed."""
        with self._lock:
            self._extents.free(reserved.offset)
            self._busy.discard(reserved.key)

    def begin_read(self, read: Read) -> "Future[ExtentHeader]":
        """Fetch a chunk: header and payload are read and compared with what was committed."""
        into = bytes_of(read.into)
        if into.readonly:
            raise ProtocolError("the buffer to read into is read-only: pass one that can be written")
        with self._lock:
            stored = self.pin(read.key, read.generation)
            try:
                if len(into) != stored.header.num_bytes:
                    raise ProtocolError(f"{read.key} has {stored.header.num_bytes} bytes, the buffer has {len(into)}")
                return self.threads.submit(
                    lambda scratch: self._fetch(stored, into, scratch), lambda scratch: self.unpin(stored, scratch)
                )
            except BaseException:
                self.unpin(stored)
                raise

    def pin(self, key: ChunkKey, generation: int | None = None) -> Stored:
        """Keep a chunk's extent where it is until `unpin`, for a reader of one's own. Raises `ChunkNotStored`."""
        with self._lock:
            self._require_open()
            stored = self._chunks.get(key)
            if stored is None or generation not in (None, stored.header.generation):
                has = "nothing" if stored is None else f"generation {stored.header.generation}"
                wanted = "any" if generation is None else generation
                raise ChunkNotStored(f"{key}: {has} is stored, generation {wanted} was asked for: run its tokens again")
            stored.readers += 1
            return stored

    def unpin(self, stored: Stored, scratch: Scratch | None = None) -> None:
        """Let go of a pin. The last one of an extent that was replaced meanwhile writes a block, to erase it; after `close`
        it does not, and the next scan does."""
        with self._lock:
            stored.readers -= 1
            self._idle.notify_all()
            is_last = stored.readers == 0 and stored.is_replaced
            if is_last and scratch is None:
                # Within the lock: `close` must not take the file from under a thread that it does not join.
                self._retire(stored, Scratch())
        if is_last and scratch is not None:
            self._retire(stored, scratch)

    def begin_delete(self, key: ChunkKey) -> "Future[None]":
        """Erase a chunk. At once nobody reads it any more; done means that its bytes are free and it does not come back.

        Waits for reads that began before; after `deadline_ns` of that raises `DrainTimeout`, and the chunk is there.
        On a `DiskFault` the chunk is gone, but its header may be on the disk: its bytes are quarantined. Delete again.
        """
        with self._lock:
            self._require_open()
            self._require_idle(key)
            stored = self._chunks.get(key)
            if stored is None and not self._quarantined(key):
                raise ChunkNotStored(f"{key} is not stored: nothing to delete")
            future = self.threads.submit(
                lambda scratch: self._delete(key, stored, scratch), lambda _: self._put_back(key, stored)
            )
            self._chunks.pop(key, None)
            self._busy.add(key)
            return future

    def write_batch(self, writes: Sequence[Write], *, deadline_ns: int) -> list[Outcome]:
        """Store chunks; an outcome for each, in order. Blocks, `deadline_ns` at most.

        Past the deadline what has not begun is cancelled, and the outcome of what has is `DrainTimeout`: it goes on, and
        its buffer is in use until `close` or until `lookup` or another write of the chunk tells of its end.
        """
        return run_batch(writes, self.begin_write, deadline_ns)

    def read_batch(self, reads: Sequence[Read], *, deadline_ns: int) -> list[Outcome]:
        """Fetch chunks; as `write_batch`."""
        return run_batch(reads, self.begin_read, deadline_ns)

    def close(self) -> None:
        """Take nothing more, finish what was begun, join the threads, unlock the file. Idempotent.

        Raises `DrainTimeout` after `deadline_ns`; the file stays locked then, because threads still use it: close again.
        """
        self.threads.close(self.options.deadline_ns)
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self.file.io.close(self.file.fd)

    def _submit_reserved(
        self, reserved: ExtentHeader, run: Callable[[Scratch], ExtentHeader]
    ) -> "Future[ExtentHeader]":
        try:
            return self.threads.submit(run, lambda _: self.abandon(reserved))
        except BaseException:
            self.abandon(reserved)
            raise

    def _commit(self, header: ExtentHeader, payload: memoryview | None, scratch: Scratch) -> ExtentHeader:
        try:
            for held in self._quarantined(header.key):
                if held.generation >= header.generation:
                    self._raise(self._release(held, scratch))
            self._store(header, payload, scratch)
        except BaseException:
            self._release(header, scratch)
            self._end(header.key)
            raise
        with self._lock:
            older = self._chunks.get(header.key)
            self._chunks[header.key] = Stored(header)
            is_idle = older is not None and older.readers == 0
            if older is not None:
                older.is_replaced = True
                self._replaced.setdefault(header.key, []).append(older)
        try:
            if older is not None and is_idle:
                self._retire(older, scratch)
        finally:
            self._end(header.key)
        return header

    def _store(self, header: ExtentHeader, payload: memoryview | None, scratch: Scratch) -> None:
        """Payload first, header last: what crash safety stands on."""
        self._put_payload(header, payload, scratch)
        self._put_header(header, scratch)

    def _put_payload(self, header: ExtentHeader, payload: memoryview | None, scratch: Scratch) -> None:
        if payload is not None:
            self.file.write(payload, header.payload_offset, scratch)
        self._sync()

    def _put_header(self, header: ExtentHeader, scratch: Scratch) -> None:
        self.file.require_name()
        scratch.block[:] = header.encode(self._superblock)
        self.file.write(scratch.block, header.offset, scratch)
        self._sync()

    def _sync(self) -> None:
        if self.options.sync is SyncPolicy.DATA:
            self.file.sync()

    def _fetch(self, stored: Stored, into: memoryview, scratch: Scratch) -> ExtentHeader:
        header = stored.header
        try:
            self.file.read([scratch.block, into], header.offset, scratch)
            try:
                header.require(ExtentHeader.decode(bytes(scratch.block), self._superblock, header.offset))
            except ProtocolError as error:
                self.file.count("header")
                raise ChecksumMismatch(f"{header.key}: its header on the disk has changed: {error}") from error
            if payload_checksum(into) != header.checksum:
                self.file.count("checksum")
                raise ChecksumMismatch(
                    f"{header.key}: the disk gave other bytes. Do not use them, run the tokens again"
                )
            return header
        finally:
            self.unpin(stored, scratch)

    def _delete(self, key: ChunkKey, stored: Stored | None, scratch: Scratch) -> None:
        try:
            self._wait_for_readers(key, stored)
            for header in self._quarantined(key):
                self._raise(self._release(header, scratch))
        except BaseException:
            self._put_back(key, stored)
            raise
        try:
            if stored is not None:
                self._raise(self._release(stored.header, scratch))
        finally:
            self._end(key)

    def _wait_for_readers(self, key: ChunkKey, stored: Stored | None) -> None:
        """Those that wait here are behind all reads that they wait for, in the queue of the threads."""
        with self._idle:
            is_idle = self._idle.wait_for(
                lambda: key not in self._replaced and (stored is None or stored.readers == 0),
                self.options.deadline_ns / 1e9,
            )
        if not is_idle:
            raise DrainTimeout(f"{key} is still read after {self.options.deadline_ns} ns: unpin it, then delete again")

    @staticmethod
    def _raise(fault: DiskFault | None) -> None:
        if fault is not None:
            raise fault

    def _retire(self, stored: Stored, scratch: Scratch) -> None:
        """Erase a replaced extent. Should that fail, its quarantine tells, and the newer generation wins at a scan."""
        self._release(stored.header, scratch)
        key = stored.header.key
        with self._lock:
            self._replaced[key].remove(stored)
            if not self._replaced[key]:
                del self._replaced[key]
            self._idle.notify_all()

    def _release(self, header: ExtentHeader, scratch: Scratch) -> DiskFault | None:
        """Erase, then free. An extent that cannot be erased is quarantined: freed, it could come back half overwritten."""
        try:
            if self._is_closed:
                raise DiskFault(f"{self.path} is closed: the next scan erases {header.key}", kind="closed")
            erase(self.file, header.offset, scratch)
            self._sync()
        except DiskFault as fault:
            with self._lock:
                self._quarantine[header.offset] = header
            return fault
        with self._lock:
            self._quarantine.pop(header.offset, None)
            self._extents.free(header.offset)
        return None

    def _quarantined(self, key: ChunkKey) -> list[ExtentHeader]:
        """Oldest first, so that an interrupted delete leaves no older generation than there was."""
        with self._lock:
            held = [header for header in self._quarantine.values() if header.key == key]
        return sorted(held, key=lambda header: header.generation)

    def _put_back(self, key: ChunkKey, stored: Stored | None) -> None:
        with self._lock:
            if stored is not None:
                self._chunks[key] = stored
            self._end(key)

    def _end(self, key: ChunkKey) -> None:
        with self._lock:
            self._busy.discard(key)

    def _require_idle(self, key: ChunkKey) -> None:
        if key in self._busy:
            raise ProtocolError(f"a write or delete of {key} is under way: wait for its future")

    def _require_open(self) -> None:
        if self._is_closed:
            raise PoolClosed("the slab is closed: open it again")
