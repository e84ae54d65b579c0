"""kvikio as the GDS tier uses it: a file that is read into device memory and written from it, and why not directly.

The one file that imports kvikio (an extra, `swapkv[gds]`). Requests are `raw_read` and `raw_write`, or their `_async`
twins on a stream of the tier's own, each on a thread of the tier's own. `pread` and `pwrite` are not used: they split a
request into tasks of one process-wide pool (of one thread, unless told otherwise) and, when a task fails, end while the
others still run; a failed request would then give its memory and extent back while they are written.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from swapkv.errors import DiskFault, DiskShort, ProtocolError, TransferError
from swapkv.streams.base import Stream
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_driver import call, cu
from swapkv.streams.cuda_streams import CudaStream
from swapkv.tiers.direct_io import DirectMode, disk_fault
from swapkv.tiers.gds_types import NVIDIA_FS, EndUnknown, GdsFile, GdsOrder, GdsPath, Span

try:
    import kvikio
    import kvikio.cufile_driver
    import kvikio.defaults
except ImportError as error:
    raise ImportError("GPUDirect Storage needs an extra: pip install 'swapkv[gds]'") from error
except (OSError, RuntimeError) as error:  # what kvikio raises where it finds no cuFile library
    raise ImportError(
        f"kvikio is installed and cannot be loaded ({error}): pip install 'swapkv[gds]' again, which brings cuFile"
    ) from error

_MOUNTS = Path("/proc/self/mounts")
_DEVICE_MEMORY = 2
_ERRNOS = {os.strerror(number): number for number in errno.errorcode}


class KvikioFile:
    """See `GdsFile`. Raises `TransferError` with kvikio's reason where the file cannot be had on this path.

    kvikio keeps streams and pinned memory in the device's context until the process ends, so the context is retained
    once more, for good: one that came back after its end would not know them.
    """

    def __init__(self, path: Path, device: CudaDevice, path_taken: GdsPath, order: GdsOrder) -> None:
        self.path, self.path_taken, self.order = path, path_taken, order
        self._context = device.context
        self._unknown: list[object] = []
        """Requests of unknown end: cuFile would write to memory that they free."""
        mode = kvikio.CompatMode.OFF if path_taken is GdsPath.DIRECT else kvikio.CompatMode.ON
        try:
            with kvikio.defaults.set({"compat_mode": mode}):
                self._file: Any = kvikio.CuFile(path, "r+")
        except RuntimeError as error:
            raise fault_of(error, f"opening {path}") from error
        call(cu.cuDevicePrimaryCtxRetain, device.ordinal)
        major, minor = kvikio.cufile_driver.libcufile_version()
        self.versions = f"kvikio {kvikio.__version__}, cuFile {major}.{minor}"

    def bind(self) -> None:
        """See `GdsFile.bind`."""
        self._context.bind()

    def require(self, span: Span) -> None:
        """See `GdsFile.require`."""
        kinds = cu.CUpointer_attribute
        status, kind = cu.cuPointerGetAttribute(kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, span.address)
        if status != cu.CUresult.CUDA_SUCCESS or int(kind) != _DEVICE_MEMORY:
            raise ProtocolError(
                f"{span.num_bytes} bytes at {span.address:#x} are not memory of a CUDA device: write host memory by `Slab`"
            )
        ordinal = int(call(cu.cuPointerGetAttribute, kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, span.address))
        if ordinal != self._context.ordinal:
            raise ProtocolError(
                f"memory of device {ordinal} for a slab of device {self._context.ordinal}: use the other's slab"
            )

    def write(self, span: Span, offset: int, stream: Stream) -> int:
        """See `GdsFile.write`."""
        what = f"writing {span.num_bytes} bytes of {self.path} from the device"
        if self.order is GdsOrder.STREAM:
            return self._ordered(self._file.raw_write_async, span, offset, stream, what)
        return self._counted(lambda: self._file.raw_write(span, span.num_bytes, offset), what)

    def read(self, span: Span, offset: int, stream: Stream) -> int:
        """See `GdsFile.read`."""
        what = f"reading {span.num_bytes} bytes of {self.path} into the device"
        if self.order is GdsOrder.STREAM:
            return self._ordered(self._file.raw_read_async, span, offset, stream, what)
        return self._counted(lambda: self._file.raw_read(span, span.num_bytes, offset), what)

    def close(self) -> None:
        """See `GdsFile.close`."""
        self._file.close()

    def _ordered(self, begin: Callable[..., Any], span: Span, offset: int, stream: Stream, what: str) -> int:
        """The request behind all that `stream` was given, and its end: nothing else is put on the stream meanwhile."""
        try:
            under_way = begin(span, cast(CudaStream, stream).handle, span.num_bytes, offset)
        except RuntimeError as error:
            raise fault_of(error, what) from error
        try:
            return self._counted(under_way.check_bytes_done, what)
        except DiskFault:
            raise
        except TransferError as error:
            self._unknown.append(under_way)
            raise EndUnknown(f"{what}: the stream failed, and whether the request goes on is unknown") from error

    @staticmethod
    def _counted(run: Callable[[], int], what: str) -> int:
        try:
            moved = run()
        except RuntimeError as error:
            raise fault_of(error, what) from error
        if moved < 1:
            raise DiskShort(f"{what} moved nothing. {DiskShort.__doc__}", kind="short")
        return moved


def fault_of(error: RuntimeError, what: str) -> TransferError:
    """The typed error for what kvikio raised while `what` was done: it hands on nothing but words."""
    words = str(error)
    number = next((number for text, number in _ERRNOS.items() if words.endswith(text)), None)
    if (
        number == errno.EPERM and "cuFile" in words
    ):  # the -1 of a failed cuFileRead, whose errno kvikio does not look at
        return DiskFault(
            f"{what}: cuFile failed and kvikio does not say why: look at the device (dmesg)", kind="unknown"
        )
    if number is not None:
        return disk_fault(OSError(number, os.strerror(number)), what)
    if words.endswith("EOF") or "unexpected EOF" in words:
        return DiskShort(f"{what}: the file ends before. {DiskShort.__doc__}", kind="short")
    if "CUDA error" in words or "CUDA_ERROR" in words:
        return TransferError(f"{what}: the device failed ({words}): see nvidia-smi and dmesg")
    return DiskFault(f"{what}: cuFile failed ({words}): see its cufile.log, or use DirectMode.NEVER", kind="cufile")


def candidates(path: Path, device: CudaDevice, direct: DirectMode) -> Iterator[Callable[[], GdsFile]]:
    """How the slab at `path` could be opened, the best way first; each call raises `TransferError` if it cannot."""
    if direct is DirectMode.AUTO:
        for order in (GdsOrder.STREAM, GdsOrder.HOST):
            yield lambda order=order: _open_direct(path, device, order)  # type: ignore[misc]
    yield lambda: KvikioFile(path, device, GdsPath.BOUNCED, GdsOrder.HOST)


def _open_direct(path: Path, device: CudaDevice, order: GdsOrder) -> GdsFile:
    reason = why_not_direct()
    if reason:
        raise TransferError(reason)
    try:
        return KvikioFile(path, device, GdsPath.DIRECT, order)
    except TransferError as error:
        raise TransferError(f"cuFile does not take {path} on {file_system_of(path)}: {error}") from error


def why_not_direct() -> str:
    """What this machine lacks for the direct path, whatever the file; empty if nothing.

    cuFile's own driver is opened last: without the kernel module that is slow, and leaves a `cufile.log` behind.
    """
    if kvikio.cufile_driver.libcufile_version() == (0, 0):
        return "no cuFile library is found: pip install 'swapkv[gds]' again, or install CUDA's libcufile"
    if not NVIDIA_FS.exists():
        return f"{NVIDIA_FS} is missing: load the kernel module nvidia-fs"
    try:
        is_used = kvikio.cufile_driver.get("is_gds_available")
    except RuntimeError as error:
        return f"cuFile's driver does not open ({error}): see cufile.log"
    return "" if is_used else "the kernel module nvidia-fs is loaded and cuFile does not use it: run gdscheck -p"


def file_system_of(path: Path) -> str:
    """The type of the file system that `path` is on, such as `ext4`."""
    best, found = "", "an unknown file system"
    real = str(path.resolve())
    for line in _MOUNTS.read_text().splitlines():
        _source, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, found = point, kind
    return found
