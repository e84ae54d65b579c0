"""A slab file on disk: made, locked, checked, scanned. What is in it is its headers' to say, see `slab_header`."""

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import attrs
import numpy as np
import xxhash

from swapkv.errors import DiskFault, ProtocolError, SlabInUse, SlabMismatch
from swapkv.tiers.direct_io import DirectFile, DirectMode, FileIo, Scratch, aligned_buffer, disk_fault, open_direct
from swapkv.tiers.slab_header import BLOCK_BYTES, HEADER_MAGIC, ChunkKey, ExtentHeader, Fingerprint, Superblock

_WINDOW_BYTES = 1 << 20
_ZEROS = bytes(BLOCK_BYTES)


class SyncPolicy(Enum):
    """What a committed chunk outlasts."""

    NONE = "none"
    """The death of the process (kill -9), not a loss of power: nothing is synced."""
    DATA = "data"
    """A loss of power too: fdatasync before and after the header is written, and after one is erased."""


class ScanDepth(Enum):
    """What the scan at start reads of the chunks that it adopts."""

    PAYLOADS = "payloads"
    """All of them, checksums compared."""
    HEADERS = "headers"
    """Headers only; quick. A payload that was damaged is found when it is read. Enough after the death of a process,
    and with `SyncPolicy.DATA` after a loss of power."""


@attrs.define(kw_only=True)
class Scan:
    """What a scan has found. `discarded`: erased extents by reason ("payload": torn; "generation": an older one).

    Nobody gets what could not be read or not be erased: `held` are such extents whose header is known, `lost` is offset and
    bytes of all others.
    """

    adopted: dict[ChunkKey, ExtentHeader] = attrs.field(factory=dict)
    discarded: Counter[str] = attrs.field(factory=Counter)
    held: list[ExtentHeader] = attrs.field(factory=list)
    lost: dict[int, int] = attrs.field(factory=dict)


def open_slab_file(
    io: FileIo, path: Path, *, slab_bytes: int, fingerprint: Fingerprint, mode: DirectMode
) -> tuple[DirectFile, Superblock]:
    """Open the slab at `path`, or make it: mode 0600, all its bytes allocated.

    Raises `SlabInUse`; `SlabMismatch` (naming the field) for a file of another size or fingerprint and for one that is
    no slab, which is left as it is; `DiskFault` of the kind that happened, and a file that was just made is gone again.
    """
    is_new = not path.exists()
    file = open_direct(io, path, os.O_RDWR | os.O_CREAT, mode)
    try:
        _lock(file)
        superblock = _read_superblock(file, slab_bytes)
        if superblock is None:
            superblock = _make(file, Superblock(slab_bytes=slab_bytes, file_id=os.urandom(16), fingerprint=fingerprint))
        superblock.require(slab_bytes=slab_bytes, fingerprint=fingerprint)
        size = os.fstat(file.fd).st_size
        if size < slab_bytes:
            raise SlabMismatch(f"{path} was cut to {size} of its {slab_bytes} bytes: delete it", field="slab_bytes")
    except BaseException as error:
        if is_new and not isinstance(error, SlabInUse):
            path.unlink(missing_ok=True)
        io.close(file.fd)
        raise
    return file, superblock


def _lock(file: DirectFile) -> None:
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SlabInUse(f"{file.path} is open elsewhere: close it there, or use another path") from error
    except OSError as error:
        raise disk_fault(error, f"locking {file.path}") from error
    if not file.path.exists() or not os.path.samestat(os.fstat(file.fd), file.path.stat()):
        raise SlabInUse(f"{file.path} was replaced while it was opened: open it again")


def _read_superblock(file: DirectFile, slab_bytes: int) -> Superblock | None:
    """None for a file that is empty or whose making was interrupted: nothing but zeros where the superblock goes."""
    size = os.fstat(file.fd).st_size
    if size == 0:
        return None
    if size < BLOCK_BYTES:
        raise SlabMismatch(f"{file.path} has {size} bytes and is no slab: use another path", field="magic")
    scratch = Scratch()
    file.read([scratch.block], 0, scratch)
    block = bytes(scratch.block)
    return None if block == _ZEROS and size <= slab_bytes else Superblock.decode(block)


def _make(file: DirectFile, superblock: Superblock) -> Superblock:
    try:
        file.io.allocate(file.fd, superblock.slab_bytes)
    except OSError as error:
        raise disk_fault(error, f"allocating {superblock.slab_bytes} bytes for {file.path}") from error
    os.fchmod(file.fd, 0o600)
    scratch = Scratch()
    scratch.block[:] = superblock.encode()
    file.write(scratch.block, 0, scratch)
    file.sync()
    directory = os.open(file.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return superblock


def supersedes(header: ExtentHeader, other: ExtentHeader) -> bool:
    """Whether of two committed versions of a chunk `header` is the one to keep."""
    return header.generation > other.generation


class SlabScan:
    """Reads a slab file from front to back: adopts whole chunks, erases what is torn, damaged or superseded.

    A device that cannot read a part of the file costs that part only.
    """

    def __init__(self, file: DirectFile, superblock: Superblock, depth: ScanDepth, policy: SyncPolicy) -> None:
        self._file, self._superblock, self._depth, self._policy = file, superblock, depth, policy
        self._scratch = Scratch()
        self._window = aligned_buffer(_WINDOW_BYTES)
        self._found = Scan()

    def run(self) -> Scan:
        """What is in the file. Raises `DiskFault` when what was erased cannot be made durable."""
        at = BLOCK_BYTES
        while at < self._superblock.slab_bytes:
            at = self._window_at(at)
        if self._policy is SyncPolicy.DATA and self._found.discarded:
            self._file.sync()
        return self._found

    def _window_at(self, begin: int) -> int:
        """Look for headers in the window that begins at `begin`; where to go on."""
        num_bytes = min(_WINDOW_BYTES, self._superblock.slab_bytes - begin)
        window = self._window[:num_bytes]
        try:
            self._file.read([window], begin, self._scratch)
        except DiskFault:
            return self._block_at(begin)
        at = begin
        for candidate in self._candidates(window):
            if begin + candidate >= at:
                at = self._extent_at(bytes(window[candidate : candidate + BLOCK_BYTES]), begin + candidate)
        return max(at, begin + num_bytes)

    def _block_at(self, begin: int) -> int:
        block = self._scratch.block
        try:
            self._file.read([block], begin, self._scratch)
        except DiskFault:
            self._found.lost[begin] = BLOCK_BYTES
            return begin + BLOCK_BYTES
        return self._extent_at(bytes(block), begin)

    @staticmethod
    def _candidates(window: memoryview) -> list[int]:
        """Offsets of the blocks that begin like a header."""
        words = np.frombuffer(window, np.uint64).reshape(-1, BLOCK_BYTES // 8)[:, 0]
        magic = np.frombuffer(HEADER_MAGIC, np.uint64)[0]
        return [int(index) * BLOCK_BYTES for index in np.flatnonzero(words == magic)]

    def _extent_at(self, block: bytes, at: int) -> int:
        """Adopt or discard what `block` heads; where to go on."""
        if block.startswith(HEADER_MAGIC):
            try:
                header = ExtentHeader.decode(block, self._superblock, at)
            except (SlabMismatch, ProtocolError) as error:
                return self._discard(at, None, error.field if isinstance(error, SlabMismatch) else "key")
            try:
                is_whole = self._depth is ScanDepth.HEADERS or self._checksum(header) == header.checksum
            except DiskFault:
                self._found.held.append(header)
                return at + header.extent_bytes
            if is_whole:
                self._adopt(header)
                return at + header.extent_bytes
            return self._discard(at, header, "payload")
        return at + BLOCK_BYTES

    def _adopt(self, header: ExtentHeader) -> None:
        other = self._found.adopted.get(header.key)
        older = None
        if other is None or supersedes(header, other):
            self._found.adopted[header.key], older = header, other
        else:
            older = header
        if older is not None:
            self._discard(older.offset, older, "generation")

    def _discard(self, at: int, header: ExtentHeader | None, reason: str) -> int:
        """Erase the header at `at`; where to go on: an extent that keeps its header keeps all its bytes."""
        self._found.discarded[reason] += 1
        try:
            erase(self._file, at, self._scratch)
        except DiskFault:
            if header is None:
                self._found.lost[at] = BLOCK_BYTES
                return at + BLOCK_BYTES
            self._found.held.append(header)
            return at + header.extent_bytes
        return at + BLOCK_BYTES

    def _checksum(self, header: ExtentHeader) -> bytes:
        digest = xxhash.xxh3_128()
        for at, num_bytes in _pieces(header.payload_offset, header.num_bytes):
            buffer = self._scratch.take(-(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            self._file.read([buffer], at, self._scratch)
            digest.update(buffer[:num_bytes])
        return digest.digest()


def erase(file: DirectFile, at: int, scratch: Scratch) -> None:
    """Zero the header at `at`: from now on there is no extent. Raises `DiskFault`; then there may be one or not."""
    scratch.block[:] = _ZEROS
    file.write(scratch.block, at, scratch)


def _pieces(begin: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and bytes of what is read at a time."""
    for at in range(begin, begin + num_bytes, _WINDOW_BYTES):
        yield at, min(_WINDOW_BYTES, begin + num_bytes - at)
