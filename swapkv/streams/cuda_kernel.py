"""A kernel that copies small pages: gather and scatter by threads, over memory that both sides see.

The copy engines take each piece by itself, and small ones cost them more than their bytes do; threads of the card have
thousands of reads in flight, and read and write pinned host memory in place. They take little of the card (`BLOCKS`), and
run in the order of the stream that they are launched on.

A copy that is a kernel waits for its turn among kernels. Its blocks get in as those of a forward end, at once on a stream
of a greater priority (`CudaDevice.create_stream`). And more streams of one priority than the card has queues
(`CUDA_DEVICE_MAX_CONNECTIONS`, 8 unless set) share them: a stream that waits for a gate then holds up the others of its
queue, which may be the one that is to open it. Where a process has so many, name another way.

CUDA C by NVRTC and not Triton: the kernel has to be launched on swapkv's own streams, from any thread, without torch's
notion of a current stream; a compiled Triton kernel hides its launcher, and needs torch built for CUDA. It is forty lines.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from swapkv.streams.cuda_driver import CudaContext, CudaError, cu
from swapkv.streams.cuda_grids import Addresses
from swapkv.streams.cuda_kernel_nvrtc import compile_kernel

NAME = b"swapkv_copy_pieces"

THREADS = 512
BLOCKS = 8
"""At most so many blocks at a time: 128 warps with 4 KiB in flight each are 512 KiB, and a PCIe 5 link of 55 GB/s with
2 us to answer is full with 110 KB. They sit on at most 8 multiprocessors (an H100 has 132): a forward keeps the others."""

PIECE_BYTES = 16 << 10
"""A warp copies so much at most, that large runs are spread over all warps."""

ROW_BYTES, SECTION_ROWS, SECTIONS = 24, 2048, 4
_LANES = 32
_PORTABLE_AND_MAPPED = 0x01 | 0x02
_NON_BLOCKING = 1


class MappedMemory:
    """Host memory that kernels may touch: where it is pinned for this device, and at which address the device sees it.

    An address that is not in here would cost a kernel the whole context, where the driver's own copies refuse it.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._same = bool(context.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
        self._lock = threading.Lock()
        self._ranges: dict[int, tuple[int, int]] = {}
        self._table = np.zeros((3, 0), dtype=np.uint64)

    def add(self, address: int, num_bytes: int) -> None:
        """Memory that has been pinned and mapped. The context is current. Raises `CudaError` if it is not mapped."""
        seen = address if self._same else int(self._context.call(cu.cuMemHostGetDevicePointer, address, 0))
        with self._lock:
            self._ranges[address] = (address + num_bytes, seen)
            self._rebuild()

    def remove(self, address: int) -> None:
        """Memory that is going to be unpinned."""
        with self._lock:
            self._ranges.pop(address, None)
            self._rebuild()

    def seen_by_device(self, addresses: Addresses, sizes: Addresses) -> Addresses | None:
        """`addresses` `[n]` as the device sees them; None unless each of the `sizes` bytes from there is mapped."""
        begins, ends, seen = self._table
        at = np.searchsorted(begins, addresses, side="right") - 1
        if not len(begins) or (at < 0).any() or (addresses + sizes > ends[at]).any():
            return None
        return addresses - begins[at] + seen[at]

    def _rebuild(self) -> None:
        """One assignment, so that readers need no lock."""
        rows = [(begin, end, seen) for begin, (end, seen) in sorted(self._ranges.items())]
        self._table = np.array(rows, dtype=np.uint64).reshape(-1, 3).T


class Tables:
    """Pinned memory of one stream, in which its launches find what they copy. The context is current throughout.

    Rows are read when the kernel runs, so they stay until then: sections are filled in turn, and one is not written
    again before the event after its last launch is reached. `close` once all work of the stream is over.
    """

    def __init__(self, context: CudaContext, section_rows: int = SECTION_ROWS) -> None:
        self._context = context
        self.section_rows = section_rows
        self._events: list[Any] = []
        num_bytes = SECTIONS * section_rows * ROW_BYTES
        self._memory = context.call(cu.cuMemHostAlloc, num_bytes, _PORTABLE_AND_MAPPED)
        try:
            self._address = int(context.call(cu.cuMemHostGetDevicePointer, self._memory, 0))
            flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING | cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC
            for _ in range(SECTIONS):
                self._events.append(context.call(cu.cuEventCreate, flags))
        except BaseException:
            self.close()
            raise
        memory = (ctypes.c_uint64 * (num_bytes // 8)).from_address(int(self._memory))
        self._rows = np.frombuffer(memoryview(memory), dtype=np.uint64).reshape(SECTIONS, section_rows, 3)
        self._section, self._used = 0, 0

    def place(self, rows: Addresses, stream: int) -> int:
        """Write `rows` `[n, 3]`, at most a section of them, where the device sees them; their address there.

        Waits for launches of `stream`, the tables' own one, if all sections are in use.
        """
        if self._used + len(rows) > self.section_rows:
            self._turn(stream)
        begin = self._used
        self._rows[self._section, begin : begin + len(rows)] = rows
        self._used += len(rows)
        return self._address + (self._section * self.section_rows + begin) * ROW_BYTES

    def _turn(self, stream: int) -> None:
        following = (self._section + 1) % SECTIONS
        self._context.call(cu.cuEventRecord, self._events[self._section], stream)
        self._context.call(cu.cuEventSynchronize, self._events[following])  # returns at once if it was never recorded
        self._section, self._used = following, 0

    def close(self) -> None:
        """Give the memory back; not on a context that is lost, whose kernels nobody can follow."""
        if self._context.lost is None:
            for event in self._events:
                cu.cuEventDestroy(event)
            cu.cuMemFreeHost(self._memory)


class CopyKernel:
    """The kernel, loaded for one device. `mapped`: the host memory that it may touch."""

    def __init__(
        self, context: CudaContext, mapped: MappedMemory, compiler: Callable[[str], bytes] = compile_kernel
    ) -> None:
        """Compile and load it: some tenths of a second.

        Raises `CudaError` if there is no compiler, no such architecture, or the card does not share addresses with the
        host: its message says which, and the remedy.
        """
        if not context.attribute("UNIFIED_ADDRESSING"):
            raise CudaError("the device has no unified addresses: take another way to copy", "CUDA_ERROR_NOT_SUPPORTED")
        self.mapped = mapped
        self._context = context
        major, minor = (context.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        cubin = compiler(f"sm_{major}{minor}")
        with context:
            self._module = context.call(cu.cuModuleLoadData, cubin)
            try:
                self._function = context.call(cu.cuModuleGetFunction, self._module, NAME)
                self._launch_nothing()
            except CudaError:
                cu.cuModuleUnload(self._module)
                raise

    def __call__(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, tables: Tables) -> None:
        """Launch copies of `sizes` `[n]` bytes, in no order among them; every address is one that the device sees.

        On a thread on which the context is current. Raises `CudaError` if the driver does not take a launch, `CudaLost`
        if it never will again; launches before may be under way.
        """
        rows = _pieces(targets, sources, sizes)
        for begin in range(0, len(rows), tables.section_rows):
            part = rows[begin : begin + tables.section_rows]
            self._launch(tables.place(part, stream), len(part), stream)

    def _launch_nothing(self) -> None:
        """The driver loads a kernel with its first launch, and may wait for the whole context to do so: not later, when
        streams may be waiting for what this kernel brings."""
        stream = self._context.call(cu.cuStreamCreate, _NON_BLOCKING)
        try:
            self._launch(0, 0, int(stream))
            self._context.call(cu.cuStreamSynchronize, stream)
        finally:
            cu.cuStreamDestroy(stream)

    def _launch(self, table: int, count: int, stream: int) -> None:
        blocks = max(1, min(BLOCKS, -(-count * _LANES // THREADS)))
        arguments = ((table, count), (ctypes.c_uint64, ctypes.c_uint64))
        self._context.call(cu.cuLaunchKernel, self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)

    def close(self) -> None:
        """Unload it: no launch is under way."""
        if self._context.lost is None:
            with self._context:
                cu.cuModuleUnload(self._module)


def _pieces(targets: Addresses, sources: Addresses, sizes: Addresses) -> Addresses:
    """Rows `[n, 3]` of target, source and bytes, none of more than `PIECE_BYTES`."""
    if not len(sizes) or sizes.max() <= PIECE_BYTES:
        return np.stack([targets, sources, sizes], axis=1)
    counts = -(-sizes.astype(np.int64) // PIECE_BYTES)
    run = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (number * PIECE_BYTES).astype(np.uint64)
    num_bytes = np.minimum(sizes[run] - offsets, np.uint64(PIECE_BYTES))
    return np.stack([targets[run] + offsets, sources[run] + offsets, num_bytes], axis=1)
