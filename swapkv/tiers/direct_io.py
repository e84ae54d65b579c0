"""Reads and writes of one file past the page cache, and the threads that keep a queue of them before the device.

O_DIRECT takes buffers, lengths and offsets of whole blocks. A caller's buffer that begins on a block is used as it is
(only the last, incomplete block goes through memory of the thread's own); any other is copied, and that is counted.
Where the file system refuses O_DIRECT the file is read and written through the page cache, and `note` says why.
"""

import errno
import mmap
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import attrs
import numpy as np

from swapkv.errors import (
    DiskFault,
    DiskNoSpace,
    DiskReadOnly,
    DiskShort,
    DiskVanished,
    DrainTimeout,
    PoolClosed,
    WouldBlock,
)

T = TypeVar("T")

ALIGN_BYTES = 4096
_FAULTS: dict[int, type[DiskFault]] = {
    errno.ENOSPC: DiskNoSpace,
    errno.EDQUOT: DiskNoSpace,
    errno.EACCES: DiskReadOnly,
    errno.EPERM: DiskReadOnly,
    errno.EROFS: DiskReadOnly,
    errno.ENOENT: DiskVanished,
    errno.ENODEV: DiskVanished,
    errno.ENXIO: DiskVanished,
    errno.ESTALE: DiskVanished,
}


class DirectMode(Enum):
    """Whether to ask for O_DIRECT."""

    AUTO = "auto"
    """Yes, and go through the page cache where it is refused."""
    NEVER = "never"


class IoPath(Enum):
    """How bytes get to the device."""

    DIRECT = "direct"
    BUFFERED = "buffered"


class FileIo(Protocol):
    """The system calls that a slab needs. Each raises OSError as the system does; reads and writes may fall short.

    `buffers` lie one after the other in the file, from `offset` on.
    """

    def open(self, path: Path, flags: int) -> int: ...
    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...
    def fdatasync(self, fd: int) -> None: ...
    def allocate(self, fd: int, num_bytes: int) -> None: ...
    def num_links(self, fd: int) -> int: ...
    def close(self, fd: int) -> None: ...


class OsIo:
    """The operating system's calls."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def pread(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwrite(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, 0, num_bytes)

    def num_links(self, fd: int) -> int:
        return os.fstat(fd).st_nlink

    def close(self, fd: int) -> None:
        os.close(fd)


def aligned_buffer(num_bytes: int) -> memoryview:
    """New zeroed memory of `num_bytes` that begins on a block: uint8 `[num_bytes]`."""
    return memoryview(mmap.mmap(-1, max(1, num_bytes)))[:num_bytes]


def is_aligned(buffer: memoryview) -> bool:
    """Whether `buffer` begins on a block, so that O_DIRECT can use it without a copy."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]) % ALIGN_BYTES == 0


def after(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `buffers` behind their first `num_bytes`; none of it is empty."""
    left = []
    for buffer in buffers:
        if len(buffer) > num_bytes:
            left.append(buffer[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return left


def disk_fault(error: OSError, what: str) -> DiskFault:
    """The typed error for `error`, which happened while `what` was done; its `__cause__` is to be `error`."""
    kind = errno.errorcode.get(error.errno or 0, "unknown")
    fault = _FAULTS.get(error.errno or 0, DiskFault)
    remedy = " ".join((fault.__doc__ or "").split())
    return fault(f"{what}: {error.strerror or error} ({kind}). {remedy}", kind=kind)


class Scratch:
    """A thread's own aligned memory: one block, and as many bytes more as it has needed so far."""

    def __init__(self) -> None:
        self.block = aligned_buffer(ALIGN_BYTES)
        self._more = aligned_buffer(ALIGN_BYTES)

    def take(self, num_bytes: int) -> memoryview:
        """Memory of `num_bytes`, the same at every call."""
        if len(self._more) < num_bytes:
            self._more = aligned_buffer(-(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        return self._more[:num_bytes]


class DirectFile:
    """`fd`: an open file, which stays the caller's to close; `path_taken`: with O_DIRECT or not; `note`: why not.

    Offsets are of whole blocks. Threads may read and write at once, each with its own `Scratch`.
    """

    def __init__(self, io: FileIo, fd: int, path: Path, path_taken: IoPath, note: str) -> None:
        self.io, self.fd, self.path, self.path_taken, self.note = io, fd, path, path_taken, note
        self.failures: Counter[str] = Counter()
        self.copied_bytes = 0
        self._lock = threading.Lock()
        self._sync_turn = threading.Lock()
        self._sync_fault: DiskFault | None = None

    def read(self, buffers: Sequence[memoryview], offset: int, scratch: Scratch) -> None:
        """Fill `buffers` with what is in the file from `offset` on, in one request. All but the last are whole blocks.

        Raises `DiskFault` of the kind that happened; then the buffers' bytes mean nothing.
        """
        *before, last = buffers
        whole, padded = self._split(last, scratch)
        self._move(self.io.pread, [*before, last[:whole], padded], offset, "reading")
        last[whole:] = padded[: len(last) - whole]

    def write(self, buffer: memoryview, offset: int, scratch: Scratch) -> None:
        """Write `buffer`, with zeros up to the end of its last block. Raises `DiskFault` of the kind that happened;
        then any part of it may be in the file."""
        whole, padded = self._split(buffer, scratch)
        rest = len(buffer) - whole
        padded[:rest] = buffer[whole:]
        padded[rest:] = bytes(len(padded) - rest)
        self._move(self.io.pwrite, [buffer[:whole], padded], offset, "writing")

    def sync(self) -> None:
        """Let everything that is written outlast a loss of power.

        Raises `DiskFault` when the device refuses, and from then on always: the system forgets after one report which
        writes it has lost, so a later success would mean nothing. Open the file anew.
        """
        with self._sync_turn:
            if self._sync_fault is not None:
                raise DiskFault(
                    f"{self.path}: an earlier fdatasync failed, so nothing more is promised to be durable: open it anew",
                    kind=self._sync_fault.kind,
                ) from self._sync_fault
            try:
                self.io.fdatasync(self.fd)
            except OSError as error:
                self._sync_fault = self._counted(disk_fault(error, f"fdatasync of {self.path}"))
                raise self._sync_fault from error

    def require_name(self) -> None:
        """Raises `DiskVanished` if the file has been deleted: what is written to it goes with the last descriptor."""
        try:
            links = self.io.num_links(self.fd)
        except OSError as error:
            raise self._counted(disk_fault(error, f"fstat of {self.path}")) from error
        if links == 0:
            raise self._counted(DiskVanished(f"{self.path} was deleted: open a new slab", kind="vanished"))

    def _split(self, buffer: memoryview, scratch: Scratch) -> tuple[int, memoryview]:
        """How many bytes of `buffer` can go as they are, and memory of whole blocks for the others, which counts them."""
        whole = len(buffer)
        if self.path_taken is IoPath.DIRECT:
            whole = whole // ALIGN_BYTES * ALIGN_BYTES if is_aligned(buffer) else 0
        rest = len(buffer) - whole
        if rest:
            with self._lock:
                self.copied_bytes += rest
        return whole, scratch.take(-(-rest // ALIGN_BYTES) * ALIGN_BYTES)

    def _move(
        self, call: Callable[[int, Sequence[memoryview], int], int], buffers: list[memoryview], offset: int, what: str
    ) -> None:
        total, done = sum(map(len, buffers)), 0
        while done < total:
            try:
                moved = call(self.fd, after(buffers, done), offset + done)
            except OSError as error:
                raise self._counted(disk_fault(error, f"{what} {total} bytes of {self.path}")) from error
            if self.path_taken is IoPath.DIRECT:
                moved -= moved % ALIGN_BYTES
            if moved <= 0:
                raise self._counted(
                    DiskShort(
                        f"{what} {self.path} at {offset}: {done} of {total} bytes, then no more. {DiskShort.__doc__}",
                        kind="short",
                    )
                )
            done += moved

    def _counted(self, fault: DiskFault) -> DiskFault:
        self.count(fault.kind)
        return fault

    def count(self, kind: str) -> None:
        """One failure more of `kind`."""
        with self._lock:
            self.failures[kind] += 1


def open_direct(io: FileIo, path: Path, flags: int, mode: DirectMode) -> DirectFile:
    """Open `path` for O_DIRECT if the file system grants it, tried by a read of the first block.

    Raises `DiskFault` of the kind that happened. The caller closes `fd`.
    """
    note = "not asked for (DirectMode.NEVER)"
    if mode is DirectMode.AUTO:
        fd = -1
        try:
            fd = io.open(path, flags | os.O_DIRECT)
            io.pread(fd, [aligned_buffer(ALIGN_BYTES)], 0)
            return DirectFile(io, fd, path, IoPath.DIRECT, "")
        except OSError as error:
            if fd >= 0:
                io.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise disk_fault(error, f"opening {path}") from error
            note = f"O_DIRECT is refused by the file system of {path}: {error.strerror}"
    try:
        return DirectFile(io, io.open(path, flags), path, IoPath.BUFFERED, note)
    except OSError as error:
        raise disk_fault(error, f"opening {path}") from error


@attrs.define(eq=False)
class _Job(Generic[T]):
    future: "Future[T]"
    run: Callable[[Scratch], T]
    cancelled: Callable[[Scratch], None]

    def work(self, scratch: Scratch) -> None:
        if not self.future.set_running_or_notify_cancel():
            self.cancelled(scratch)
            return
        try:
            result = self.run(scratch)
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class IoThreads:
    """`depth` threads, so that as many requests are before the device at a time; `pending_max` may be asked for.

    The threads are daemons: a device that never answers does not keep the process from ending.
    """

    def __init__(self, *, depth: int, pending_max: int) -> None:
        self._pending_max = pending_max
        self._pending = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"swapkv-io-{n}", daemon=True) for n in range(depth)]
        for thread in self._threads:
            thread.start()

    def submit(self, run: Callable[[Scratch], T], cancelled: Callable[[Scratch], None]) -> "Future[T]":
        """Have a thread call `run`. A future that is cancelled before it runs calls `cancelled` instead.

        Raises `WouldBlock` when `pending_max` jobs wait or run, `PoolClosed` after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise PoolClosed("the slab is closed: open it again")
            if self._pending >= self._pending_max:
                raise WouldBlock(f"{self._pending} reads and writes are pending, pending_max={self._pending_max}: wait")
            self._pending += 1
            self._jobs.put(_Job(future, run, cancelled))  # type: ignore[arg-type]
        return future

    def close(self, deadline_ns: int) -> None:
        """Take nothing more, finish what was taken, join the threads. Idempotent.

        Raises `DrainTimeout` if they are not done `deadline_ns` from now; what they do goes on, so call it again.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._jobs.put(None)
        end_ns = time.monotonic_ns() + deadline_ns
        for thread in self._threads:
            thread.join(max(0, end_ns - time.monotonic_ns()) / 1e9)
        alive = sum(thread.is_alive() for thread in self._threads)
        if alive:
            raise DrainTimeout(f"{alive} threads wait for the disk after {deadline_ns} ns: close again, or look at it")

    def _serve(self) -> None:
        scratch = Scratch()
        while (job := self._jobs.get()) is not None:
            try:
                job.work(scratch)
            finally:
                with self._lock:
                    self._pending -= 1
            del job
