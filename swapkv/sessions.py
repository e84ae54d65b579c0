"""What a caller of the async pool holds while something is under way: a forward pass, a restore."""

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import anyio

from swapkv.config import Verify
from swapkv.driver import Driver
from swapkv.errors import ProtocolError, SwapError, TransferError
from swapkv.forward import Forward
from swapkv.fsm import events
from swapkv.ids import LayerId
from swapkv.streams.base import Device, Event, Promise, Stream
from swapkv.transfers import Transfers
from swapkv.waiters import Waiter

T = TypeVar("T")


class AsyncForward(Forward):
    """A forward pass whose work can be awaited."""

    def __init__(self, driver: Driver, transfers: Transfers, stream: Stream) -> None:
        super().__init__(driver.core, transfers, stream)
        self._driver = driver

    async def run(self, function: Callable[[], T]) -> T:
        """`launch` a callable and return what it returns.

        Raises what the callable raises, and `TransferError` if it was not run because a layer that it waits for did
        not come. Cancellation strikes after its end: it is not recalled.
        """
        launched = self.launch(function)
        with anyio.CancelScope(shield=True):
            await self._driver.reached(launched)
        return launched.result()


class Restoring:
    """A restore under way: every page is granted, and layers arrive one by one.

    Used as `async with pool.restoring(name) as coming:`. The block may run a `forward` of the sequence, which then
    gates each layer; leaving it waits until everything is there. Left by an exception before that, the restore is
    undone: what such a forward appended does not count, and its output has to be dropped. If the restore itself fails,
    leaving the block raises the cause.
    """

    def __init__(self, driver: Driver, device: Device, begin: events.BeginRestore) -> None:
        self._driver = driver
        self._device = device
        self._begin = begin
        self._name = begin.sequence
        self._landed = 0
        self._error: BaseException | None = None
        self._promises: dict[int, Promise] = {}
        self._gated: list[Stream] = []
        self._whole: Waiter | None = None

    async def wait_layer(self, layer: int) -> None:
        """Wait until the KV of `layer` is on the device, verified.

        Raises the cause if the restore fails first. Cancellation changes nothing.
        """
        self._require_layer(layer)
        if self._error is not None:
            raise self._error
        if layer >= self._landed:
            await self._driver.waiters.add("layer", (self._name, layer)).wait()

    def gate(self, layer: int, stream: Stream) -> None:
        """Later work of `stream` starts once the KV of `layer` is there; it fails if the restore fails first."""
        stream.wait(self.layer_event(layer))
        if stream not in self._gated:
            self._gated.append(stream)

    def layer_event(self, layer: int) -> Event:
        """An event that is reached once the KV of `layer` is there; it fails if the restore fails first.

        For callables that run on a compute stream's own thread: they wait for it there.
        """
        self._require_layer(layer)
        promise = self._promises.get(layer)
        if promise is None:
            promise = self._promises[layer] = self._device.create_promise()
            if layer < self._landed or self._error is not None:
                promise.set(self._error)
        return promise

    def layer_ready(self, layer: LayerId) -> None:
        """The driver's word that `layer` has landed, and all before it."""
        for landed in range(self._landed, layer + 1):
            if landed in self._promises:
                self._promises[landed].set()
            self._driver.waiters.end("layer", (self._name, landed))
        self._landed = max(self._landed, layer + 1)

    def undone(self, error: BaseException) -> None:
        """The driver's word that the restore has failed or was cancelled."""
        self._error = error
        for layer in range(self._landed, self._driver.core.layout.num_layers):
            if layer in self._promises:
                self._promises[layer].set(error)
            self._driver.waiters.end("layer", (self._name, layer), error=error)

    async def __aenter__(self) -> "Restoring":
        """Wait until every page is granted. Cancelled or failed, the sequence is off the device as before."""
        driver, waiters = self._driver, self._driver.waiters
        pages, self._whole = waiters.add("pages", self._name), waiters.add("restore", self._name)
        driver.restores.setdefault(self._name, self)
        try:
            driver.tell(self._begin)
        except BaseException:
            waiters.drop(pages)
            waiters.drop(self._whole)
            if driver.restores.get(self._name) is self:
                del driver.restores[self._name]
            raise
        await pages.settle(self._cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._whole is not None
        try:
            if error is None:
                await self._whole.settle(self._cancel)
            elif not self._whole.done:
                self._cancel()
                with anyio.CancelScope(shield=True):
                    await self._whole.ended()
        finally:
            self._use_up_gates()
        if isinstance(error, Exception) and self._whole.done and isinstance(self._whole.error, TransferError):
            raise self._whole.error from error

    def _use_up_gates(self) -> None:
        """A gate that failed with no work behind it fails a copy of nothing, not the work of another sequence."""
        if self._error is not None:
            for stream in self._gated:
                with suppress(SwapError):  # closed, or full: then there is work behind the gate
                    stream.gather((), Verify.NONE)

    def _cancel(self) -> None:
        self._driver.tell(events.CancelRestore(self._name))

    def _require_layer(self, layer: int) -> None:
        if self._whole is None:
            raise ProtocolError("a restore's layers were asked for before it began: enter it by `async with` first")
        if not 0 <= layer < self._driver.core.layout.num_layers:
            raise ProtocolError(
                f"layer {layer} is not within the model's 0 to {self._driver.core.layout.num_layers - 1}"
            )
