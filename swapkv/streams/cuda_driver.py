"""The CUDA driver as swapkv calls it: every status is checked, every failure is typed and names its remedy.

The one file that imports `cuda.bindings`. Contexts and memory are here; streams, events and copies build on it.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.errors import BudgetExhausted, PoolBroken, ProtocolError, TransferError

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ImportError("CUDA devices need an extra: pip install 'swapkv[cuda]'") from error

cu: Any = driver
"""The functions, enumerations and types of the driver API, by their names in C."""

BATCH_VERSIONS = (13000, 12080)
"""The versions of the driver API whose `cuMemcpyBatchAsync` is called, the newest first."""

_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "ask for less, or free some",
    "CUDA_ERROR_INVALID_CONTEXT": "the device was reset or its context destroyed; create a new device",
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no device of this number: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_SUPPORTED": "the driver or the device does not offer this: update the driver",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the memory is pinned already: register it once",
    "CUDA_ERROR_INVALID_VALUE": "an address or a size is not what the driver knows: is the memory freed, or not pinned?",
}

_STICKY = frozenset(
    [
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_UNKNOWN",
    ]
)
"""What leaves the context of a process unusable for good: every later call returns it again."""


class CudaError(TransferError):
    """A call of the CUDA driver failed, and only that call. `status`: the name that CUDA gives the failure."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status


class CudaLost(PoolBroken):
    """The device's context failed for good, by `status`. Nothing on it can be relied on: end the process."""

    def __init__(self, message: str, status: str) -> None:
        super().__init__(message)
        self.status = status

    def again(self) -> "CudaLost":
        """The same to raise once more: one that is kept must not keep the frames that it went through."""
        return CudaLost(str(self), self.status)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of `cuda.bindings.driver` and return what it hands out.

    Raises `CudaError`, or `CudaLost` if the failure is one that stays.
    """
    status, *values = function(*arguments)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise _failure(function.__name__, status.name)
    return values[0] if values else None


def _failure(function: str, status: str) -> CudaError | CudaLost:
    if status in _STICKY:
        return CudaLost(f"{function}: {status}: the device's context is lost for good: end the process", status)
    remedy = _REMEDIES.get(status, "see the CUDA driver API's reference for this status")
    return CudaError(f"{function}: {status}: {remedy}", status)


def raise_failed(function: str, status: int) -> NoReturn:
    """Raise what `call` would, for a function that was called by its address."""
    raise _failure(function, cu.CUresult(status).name)


def find_function(name: bytes, version: int) -> int | None:
    """The address of a function as this version of the API has it; None if the driver has none."""
    status, address, found = cu.cuGetProcAddress(name, version, 0)
    return int(address) if status == cu.CUresult.CUDA_SUCCESS and int(found) == 0 and address else None


def start_driver() -> int:
    """Initialize the driver and return how many devices it has.

    Raises `ProtocolError` if there is no driver, `CudaError` if there is no device.
    """
    try:
        call(cu.cuInit, 0)
    except (ImportError, OSError, RuntimeError) as error:  # what cuda-python raises where it finds no libcuda
        raise ProtocolError(
            f"no CUDA driver ({type(error).__name__}): install the NVIDIA driver, or use HostDevice"
        ) from error
    return int(call(cu.cuDeviceGetCount))


class CudaContext:
    """The primary context of one device, the one that torch uses, retained until nobody refers to this object.

    `lost`: why the context is lost for good, once it is; it is then retained for good, for the last one to let go of it
    frees its memory, which work that nobody can follow may still touch. `with context:` makes it current on the calling
    thread and puts back what was current before.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.lost: CudaLost | None = None
        self._device = call(cu.cuDeviceGet, ordinal)
        self.handle = call(cu.cuDevicePrimaryCtxRetain, self._device)
        self._release = cu.cuDevicePrimaryCtxRelease

    def __enter__(self) -> "CudaContext":
        call(cu.cuCtxPushCurrent, self.handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        call(cu.cuCtxPopCurrent)

    def __del__(self) -> None:
        if hasattr(self, "_release") and self.lost is None and not sys.is_finalizing():  # its end frees it, too
            self._release(self._device)

    def bind(self) -> None:
        """Make the context current on a thread of swapkv's own, for good."""
        call(cu.cuCtxSetCurrent, self.handle)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`call`, on a thread on which the context is current. A failure that stays is kept in `lost`."""
        if self.lost is not None:
            raise self.lost.again()
        try:
            return call(function, *arguments)
        except CudaLost as error:
            self.lost = error.again()
            raise

    def attribute(self, name: str) -> int:
        """A device attribute by its name in CUDA, without `CU_DEVICE_ATTRIBUTE_`."""
        return int(
            call(cu.cuDeviceGetAttribute, getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), self._device)
        )

    @property
    def device_name(self) -> str:
        return str(call(cu.cuDeviceGetName, 256, self._device).rstrip(b"\0").decode())

    @property
    def pci_bus_id(self) -> str:
        """Such as `0000:3b:00.0`."""
        return str(call(cu.cuDeviceGetPCIBusId, 64, self._device).rstrip(b"\0").decode().lower())

    @property
    def priorities(self) -> tuple[int, int]:
        """The least and the greatest stream priority; greater ones are lower numbers."""
        with self:
            status, least, greatest = cu.cuCtxGetStreamPriorityRange()
        return (int(least), int(greatest)) if status == cu.CUresult.CUDA_SUCCESS else (0, 0)


class DeviceMemory:
    """`num_bytes` of device memory, zeroed; freed when nobody refers to it. Offers `__cuda_array_interface__`.

    Raises `BudgetExhausted` if the device has not as much.
    """

    def __init__(self, context: CudaContext, num_bytes: int) -> None:
        self.context = context
        self.num_bytes = num_bytes
        self.address = 0
        self._free = cu.cuMemFree
        with context:
            try:
                self.address = int(context.call(cu.cuMemAlloc, max(1, num_bytes)))
            except CudaError as error:
                free_bytes = call(_free_bytes)
                raise BudgetExhausted(
                    f"device {context.ordinal} has {free_bytes} bytes left, asked for {num_bytes}: "
                    "ask for less or free some (torch keeps freed memory: torch.cuda.empty_cache())"
                ) from error
            context.call(cu.cuMemsetD8, self.address, 0, max(1, num_bytes))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if getattr(self, "address", 0) and self.context.lost is None and not sys.is_finalizing():
            with self.context:
                self._free(self.address)


def _free_bytes() -> tuple[Any, int]:
    status, free_bytes, _total = cu.cuMemGetInfo()
    return status, int(free_bytes)


@attrs.frozen
class BatchCopy:
    """`cuMemcpyBatchAsync`, called by its address so that arrays pass as they are, without an object for each entry.

    `version`: of the API that it was found in; up to 12.9 it reports the entry that failed, later it does not.
    """

    version: int
    _function: Any

    def __call__(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> None:
        """One submission of all copies, in no order among them. On a thread on which the context is current."""
        kinds, first = _Attributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
        arrays = [np.ascontiguousarray(array) for array in (targets, sources, sizes)]
        arguments: list[Any] = [
            *(array.ctypes.data for array in arrays),
            len(sizes),
            ctypes.byref(kinds),
            ctypes.byref(first),
            1,
        ]
        if self.version < BATCH_VERSIONS[0]:
            arguments.append(ctypes.byref(ctypes.c_size_t(0)))
        status = self._function(*arguments, stream)
        if status:
            raise_failed("cuMemcpyBatchAsync", status)

    @classmethod
    def find(cls) -> "BatchCopy | None":
        """The function as this driver has it; None if it is too old."""
        for version in BATCH_VERSIONS:
            address = find_function(b"cuMemcpyBatchAsync", version)
            if address is not None:
                return cls(version, _prototype(version)(address))
        return None


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`: the order of reads, hints of places (not used), flags."""

    _fields_ = (("order", ctypes.c_int), ("places", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_IN_STREAM_ORDER = 1


def _prototype(version: int) -> Any:
    """A function of C that lets go of the GIL while it runs."""
    array, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = [array, array, array, size, array, array, size]
    if version < BATCH_VERSIONS[0]:
        arguments.append(array)
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments, array)


class EventPool:
    """CUDA events without timing, whose waiters sleep; they are used again, because to make one costs microseconds."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._free: list[Any] = []
        self._lock = threading.Lock()
        self.made = 0

    def take(self) -> Any:
        """An event that nobody uses. The context is current."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self.made += 1
        flags = cu.CUevent_flags
        return self._context.call(cu.cuEventCreate, flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC)

    def give_back(self, event: Any) -> None:
        """The event is reached, and no stream will be told to wait for it any more."""
        with self._lock:
            self._free.append(event)

    def close(self) -> None:
        """Destroy what was given back."""
        with self._lock:
            events, self._free = self._free, []
        with self._context:
            for event in events:
                cu.cuEventDestroy(event)
