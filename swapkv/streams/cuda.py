"""The CUDA device: streams and memory of one GPU, through cuda-python.

Exercised on a driver whose memory is the host's (see the tests); not yet run on a GPU.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet

import torch

from swapkv.errors import DrainTimeout, PoolClosed, ProtocolError
from swapkv.ids import LayerId
from swapkv.layout import KVLayout
from swapkv.streams.base import ChosenWay
from swapkv.streams.cuda_arrays import pages_of
from swapkv.streams.cuda_copies import Copies, Direction, Runs, Way
from swapkv.streams.cuda_driver import (
    BatchCopy,
    CudaContext,
    CudaError,
    CudaLost,
    DeviceMemory,
    EventPool,
    call,
    cu,
    start_driver,
)
from swapkv.streams.cuda_events import CudaPromise, Gates
from swapkv.streams.cuda_grids import GridCopy
from swapkv.streams.cuda_kernel import CopyKernel, MappedMemory
from swapkv.streams.cuda_probe import RUN_BYTES, CopyRate, Preference, probe
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.cuda_streams import CudaStream
from swapkv.streams.memory import PagedMemory
from swapkv.tiers.pinned import PinnedArena, PinnedOptions

View: TypeAlias = Callable[[object, int, int], torch.Tensor]
"""Makes uint8 `[num_bytes]` of `(owner, address, num_bytes)`, which keeps the owner alive."""

_NON_BLOCKING = 1
_REGISTER_PORTABLE_AND_MAPPED = 0x01 | 0x02


def view_on_device(owner: object, address: int, num_bytes: int) -> torch.Tensor:
    """Memory of a device as a torch tensor on that device. Raises `ProtocolError` if torch is not built for CUDA."""
    if not torch.cuda.is_available():
        raise ProtocolError("this torch is not built for CUDA, or sees no device: install one that is")
    ordinal = call(cu.cuPointerGetAttribute, cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
    return torch.as_tensor(_Span(owner, address, num_bytes), device=f"cuda:{int(ordinal)}")


class _Span:
    """A part of somebody's device memory."""

    def __init__(self, owner: object, address: int, num_bytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice:
    """One GPU; see `Device`. Its primary context is shared with torch and whatever else uses the device.

    `ordinal`: its number in the process. `way`: how scattered pages are copied; None: what a probe of some tenths of a
    second finds to be the fastest for runs of each size, the copy kernel among them if it can be compiled.
    `queue_depth`: the operations that a stream holds at most; the driver itself blocks at about a thousand entries, of
    which an operation takes some three. `pinned`: how host memory is pinned. `view`: what makes a tensor of device
    memory; None: torch's own.

    Raises `ProtocolError` if there is no driver, no such device, or it cannot copy in that way.
    """

    stream_type: ClassVar[type[CudaStream]] = CudaStream

    def __init__(
        self,
        ordinal: int = 0,
        *,
        name: str | None = None,
        way: Way | None = None,
        queue_depth: int = 256,
        pinned: PinnedOptions | None = None,
        view: View | None = None,
    ) -> None:
        count = start_driver()
        if not 0 <= ordinal < count:
            raise ProtocolError(f"ordinal={ordinal}: this process sees {count} devices, from 0 on")
        if queue_depth < 1:
            raise ProtocolError(f"queue_depth={queue_depth} must be at least 1; without it, 256 operations fit")
        self.ordinal = ordinal
        self.name = name or f"cuda:{ordinal}"
        self.queue_depth = queue_depth
        self.context = CudaContext(ordinal)
        self.mapped = MappedMemory(self.context)
        self.copies = Copies(self.context, BatchCopy.find(), GridCopy.find())
        self.preference = self._prefer(way)
        self.event_pool = EventPool(self.context)
        self.gates = Gates(self.context)
        self._view = view or view_on_device
        self._pinned = pinned or PinnedOptions()
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._streams: list[CudaStream] = []
        self._own: set[int] = set()
        self._wrapped: dict[int, CudaStream] = {}
        self._promises: WeakSet[CudaPromise] = WeakSet()
        self._arenas: list[PinnedArena] = []
        self._stuck: tuple[str, ...] = ()

    @property
    def rates(self) -> tuple[CopyRate, ...]:
        """What the probe measured; empty if the way was named."""
        return self.preference.rates

    def chosen_ways(self) -> tuple[ChosenWay, ...]:
        """See `ProbedDevice`."""
        best = [self.preference.best(direction, size) for direction in Direction for size in RUN_BYTES if self.rates]
        return tuple(ChosenWay(r.way.value, r.direction.value, r.run_bytes, r.bytes_per_s) for r in best)

    @property
    def missing_ways(self) -> dict[str, str]:
        """The ways that this device does not offer, and why."""
        return {way.value: reason for way, reason in self.copies.missing.items()}

    @property
    def numa_node(self) -> int | None:
        """The node of the host's memory that is nearest to the device; None if the system does not say."""
        file = Path(f"/sys/bus/pci/devices/{self.context.pci_bus_id}/numa_node")
        node = int(file.read_text()) if file.exists() else -1
        return node if node >= 0 else None

    @property
    def arenas(self) -> tuple[PinnedArena, ...]:
        """The host memory that is pinned for this device: what it got of what was asked for."""
        return tuple(self._arenas)

    def create_stream(self, name: str, *, priority: int = 0) -> CudaStream:
        """A stream of its own, which does not wait for the default stream. Raises `PoolClosed` after `close`.

        `priority`: of its kernels, lower numbers first; brought within what the device has, see `CudaStream.priority`.
        """
        least, greatest = self.context.priorities
        priority = min(least, max(greatest, priority))
        with self._lock:
            self._require_open()
            with self.context:
                handle = int(self.context.call(cu.cuStreamCreateWithPriority, _NON_BLOCKING, priority))
            self._own.add(handle)
            return self._add(self.stream_type(name, self, handle, priority))

    def wrap_stream(self, stream: Any, *, name: str | None = None) -> CudaStream:
        """A stream that exists already, as a `Stream`: a handle, or what has `__cuda_stream__` or `cuda_stream`.

        So `torch.cuda.Stream` works as given. The same handle gives the same object; the stream is not destroyed, and
        has to live as long as the device. Raises `ProtocolError` if it is a stream of another device, or none.
        """
        handle = _handle_of(stream)
        with self._lock:
            self._require_open()
            if handle not in self._wrapped:
                self._require_here(handle)
                with self.context:
                    priority = int(self.context.call(cu.cuStreamGetPriority, handle))
                wrapped = self.stream_type(name or f"stream-{handle:#x}", self, handle, priority)
                self._wrapped[handle] = self._add(wrapped)
            return self._wrapped[handle]

    def create_promise(self) -> CudaPromise:
        """A promise that is not set. Raises `PoolClosed` after `close`."""
        with self._lock:
            self._require_open()
            promise = CudaPromise()
            self._promises.add(promise)
            return promise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Device.allocate`: one allocation, freed with the last tensor on it.

        Raises `ProtocolError` for a negative size, `BudgetExhausted` if there is not as much: ask for less.
        """
        _require_size(num_bytes)
        memory = DeviceMemory(self.context, num_bytes)
        return self._view(memory, memory.address, num_bytes)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device.allocate_pinned`: an arena, pinned until the device is closed. See `PinnedArena` for its errors."""
        _require_size(num_bytes)
        arena = PinnedArena(num_bytes, self._pinned, near_node=self.numa_node)
        if num_bytes:
            with self._lock:
                self._require_open()
                arena.pin(self._register, self._unregister)
                self._arenas.append(arena)
        return arena.memory

    def adopt(self, layout: KVLayout, arrays: Mapping[tuple[int, str], object]) -> PagedMemory:
        """Device pages that exist already, by layer and plane's name, as a pool's memory. Nothing is copied.

        An array is a torch tensor, or has `__cuda_array_interface__` or DLPack; shape `[num_pages, …]`, any dtype, a
        page contiguous and of as many bytes as the layout says.
        Raises `ProtocolError` for one that is elsewhere, or does not match.
        """
        planes = {(plane.layer, plane.name): plane for planes in layout.planes for plane in planes}
        tensors = {}
        for (layer, name), array in arrays.items():
            plane = planes.get((LayerId(layer), name))
            if plane is None:
                raise ProtocolError(f"the layout has no plane {name!r} in layer {layer}: pass its planes only")
            tensors[plane.layer, name] = pages_of(array, plane, self.ordinal, self._view)
        return PagedMemory(layout, tensors)

    def way_for(self, direction: Direction, runs: Runs) -> Way:
        """How these runs are copied."""
        return self.preference.choose(direction, runs)

    def execute(self, operation: CudaOperation) -> None:
        """Submit one operation; what it raises fails the operation's event.

        The one place to override in order to delay or fail work. Waits and points do not pass through here, nor does
        work that a failed wait has failed.
        """
        assert operation.run is not None
        operation.run()

    def lose(self, lost: CudaLost) -> None:
        """The context is lost for good: fail all that is not over, and all that waits."""
        self.context.lost = lost.again()
        with self._lock:
            streams, promises = list(self._streams), tuple(self._promises)
        for stream in streams:
            stream._lose(lost)
        for promise in promises:
            promise.set(lost)

    def close(self, timeout_s: float) -> list[str]:
        """See `Device.close`. Every call returns the names that the first one found.

        Pinned memory is unpinned and own streams are destroyed, unless work is stuck: then they are left as they are.
        """
        with self._closing:
            with self._lock:
                first, self._closed = not self._closed, True
                streams = list(self._streams)
            if first:
                self._stuck = tuple(self._stop(streams, timeout_s))
                if not self._stuck:
                    self._release()
            return list(self._stuck)

    def _stop(self, streams: list[CudaStream], timeout_s: float) -> list[str]:
        deadline_s = time.monotonic() + timeout_s
        for stream in streams:
            stream._stop_intake()
        stuck = [stream for stream in streams if not stream._is_over(max(0.0, deadline_s - time.monotonic()))]
        advice = f"within {timeout_s} s of closing device {self.name!r}: do not reuse what the work touches"
        for stream in stuck:
            stream._abandon(DrainTimeout(f"stream {stream.name!r} did not end its work {advice}"))
        for promise in tuple(self._promises) if stuck else ():
            promise.set(DrainTimeout(f"a promise was not set {advice}"))
        for stream in streams:
            if stream not in stuck:
                stream._join()
        return [stream.name for stream in stuck]

    def _release(self) -> None:
        """Give back what the driver holds for this device; on a context that is lost there is nothing to give back."""
        with self._lock:
            arenas, self._arenas, streams, self._streams = self._arenas, [], self._streams, []
        for arena in arenas:
            arena.unpin()
        self._wrapped.clear()
        if self.context.lost is None:
            with self.context:
                for stream in streams:
                    stream._release()
                for handle in self._own:
                    call(cu.cuStreamDestroy, handle)
            self.copies.close()
            self.event_pool.close()
            self.gates.close()

    def _prefer(self, way: Way | None) -> Preference:
        if way is None or way is Way.KERNEL:
            self._load_kernel()
        if way is not None:
            return Preference.of(self.copies.require(way))
        return probe(self.context, self.copies, self.mapped)

    def _load_kernel(self) -> None:
        """Without it there are other ways, so what is missing is noted only."""
        try:
            self.copies.offer(CopyKernel(self.context, self.mapped))
        except CudaError as error:
            self.copies.withdraw(Way.KERNEL, str(error))

    def _add(self, stream: CudaStream) -> CudaStream:
        self._streams.append(stream)
        return stream

    def _require_here(self, handle: int) -> None:
        with self.context:
            context = self.context.call(cu.cuStreamGetCtx, handle)
        if int(context) != int(self.context.handle):
            raise ProtocolError(f"stream {handle:#x} is not of device {self.name!r}: pass one of that device")

    def _register(self, address: int, num_bytes: int) -> None:
        with self.context:
            self.context.call(cu.cuMemHostRegister, address, num_bytes, _REGISTER_PORTABLE_AND_MAPPED)
            self.mapped.add(address, num_bytes)

    def _unregister(self, address: int) -> None:
        self.mapped.remove(address)
        if self.context.lost is None:
            with self.context:
                self.context.call(cu.cuMemHostUnregister, address)

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"device {self.name!r} is closed: create a new one")


def _handle_of(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    raise ProtocolError(f"a {type(stream).__name__} is no CUDA stream: pass a handle, or what has __cuda_stream__")


def _require_size(num_bytes: int) -> None:
    if num_bytes < 0:
        raise ProtocolError(f"num_bytes={num_bytes} must be 0 or more")
