"""The production CUDA device, with what a test needs besides: Python callables in the place of kernels.

A callable runs on the stream's own thread of the driver, in the stream's order, as a kernel would. Behind a gate that
failed it runs all the same, and its output is dropped.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from swapkv.errors import ProtocolError
from swapkv.streams.cuda import CudaDevice
from swapkv.streams.cuda_copies import Way
from swapkv.streams.cuda_events import CudaEvent
from swapkv.streams.cuda_reaper import CudaOperation
from swapkv.streams.cuda_streams import CudaStream
from swapkv.streams.host import Work
from tests.cudahost.control import driver, view_on_host

T = TypeVar("T")
LONG_S = 60.0
STILL_PINNED: list[torch.Tensor] = []
"""Host memory of lost contexts. Copies may still touch it: a real driver holds its pages until it is unpinned."""

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, _Callback, ctypes.c_void_p]


class KernelEvent(CudaEvent, Generic[T]):
    """The event of a launched callable; see `Launched`."""

    _returned: T
    _raised: BaseException | None = None

    def result(self) -> T:
        if not self.query():
            raise ProtocolError("the work of this event is not over: `wait` for the event first")
        self.raise_failure()
        if self._raised is not None:
            raise self._raised
        return self._returned

    def run(self, function: Callable[[], T]) -> None:
        try:
            self._returned = function()
        except BaseException as error:
            self._raised = error


class KernelStream(CudaStream):
    """A stream of the production code that also runs callables; see `ComputeStream`."""

    def launch(self, function: Callable[[], T]) -> KernelEvent[T]:
        event: KernelEvent[T] = KernelEvent(self._timeline)
        callback = _Callback(lambda _: event.run(function))
        event.callback = callback  # type: ignore[attr-defined]
        operation = self._operation(Work.LAUNCH, event, run=lambda: self._launch(callback))
        with self._intake:
            self._require_open()
            self._require_room()
            operation.awaited, self._awaited = self._awaited, []
            self._give(operation)
        return event

    def _launch(self, callback: Any) -> None:
        assert driver.cuLaunchHostFunc(self.handle, callback, None) == 0


class KernelDevice(CudaDevice):
    """`CudaDevice` on the driver of the tests."""

    stream_type = KernelStream

    def __init__(self, ordinal: int = 0, *, way: Way | None = Way.BATCH, **options: Any) -> None:
        super().__init__(ordinal, way=way, view=view_on_host, **options)

    def _release(self) -> None:
        if self.context.lost is not None:
            STILL_PINNED.extend(arena.memory for arena in self.arenas)
        super()._release()


class HeldDevice(KernelDevice):
    """Copies are submitted while `open` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.open = threading.Event()
        self.open.set()

    def execute(self, operation: CudaOperation) -> None:
        if operation.work in (Work.GATHER, Work.SCATTER):
            self.open.wait(10)
        super().execute(operation)


@contextmanager
def opened(device: CudaDevice) -> Iterator[Any]:
    """Closes the device; unless the test failed, all its work must end and no thread be left."""
    try:
        yield device
    except BaseException:
        device.close(0.0)
        raise
    assert device.close(LONG_S) == []
    assert not threads_of(device)


def threads_of(device: CudaDevice) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"swapkv-{device.name}-")]
