"""The pools of a leader: those of one rank, with a device of several, and an end when a rank is lost."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio
import anyio.to_thread
import torch

from swapkv.basepool import BasePool
from swapkv.bridge import LoopBridge
from swapkv.config import SwapConfig, Verify
from swapkv.errors import ProtocolError, RankLost
from swapkv.forward import Forward
from swapkv.fsm import commands, events
from swapkv.ids import StepId
from swapkv.layout import KVLayout
from swapkv.observer import Observer
from swapkv.pool import Pool
from swapkv.ranks.agreement import agree, hello, take_memory
from swapkv.ranks.leader import RankDevice, RankStream, RankTransfers
from swapkv.ranks.link import Link
from swapkv.ranks.messages import Agreed, Hello
from swapkv.ranks.peer import RankGroup
from swapkv.stepdriver import News
from swapkv.stepped import SteppedPool
from swapkv.streams.base import Device, Event, Stream
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory


class _OfRanks(BasePool):
    """What both pools of a leader add."""

    _device: RankDevice

    def create_stream(self, name: str) -> RankStream:
        """A compute stream on every rank, for `forward(…, stream=…)`: one rank's alone is refused there."""
        return self._device.create_stream(name)

    def run_on_workers(self, forward: Forward, payload: bytes, *, gates: Sequence[Event] = ()) -> Event:
        """Every worker calls its `forward` with the payload, on its stream of the same name and in the same order.

        The rows of `Forward.page_tables` are the same on every rank: hand them on in the payload. `gates`: of a restore
        under way, what `Restoring.layer_event` returns. The event is reached when the work is over on every worker,
        and fails with `TransferError` if it raised on one of them: then void the forward, by an exception.
        Raises `BudgetExhausted` while workers are too far behind, `RankLost`, `ProtocolError` for foreign gates.
        """
        assert isinstance(forward.stream, RankStream)
        return forward.stream.run(payload, gates)

    def _expect(self, appends: Mapping[str, int], stream: Stream) -> StepId:
        if not isinstance(stream, RankStream):
            raise ProtocolError(f"stream {stream.name!r} is of one rank: make it with `create_stream` of the pool")
        return super()._expect(appends, stream)


class RankedPool(_OfRanks, Pool):
    """The `Pool` of a leader. Made by `open_ranked_pool`. When a rank is lost, every call raises `RankLost`."""

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        host_memory: torch.Tensor,
        device: RankDevice,
        config: SwapConfig,
        observer: Observer | None,
    ) -> None:
        super().__init__(layout, memory, host_memory, device, config, observer, RankTransfers)
        self._device = device
        bridge: LoopBridge[RankLost] = LoopBridge(self._lose)
        with device.link.lock:
            device.link.on_lost = bridge.post
            if isinstance(device.link.end, RankLost):
                bridge.post(device.link.end)

    async def run_on_workers_and_wait(self, forward: Forward, payload: bytes, *, gates: Sequence[Event] = ()) -> None:
        """`run_on_workers`, and wait for the event. Cancellation strikes after its end: it is not recalled."""
        event = self.run_on_workers(forward, payload, gates=gates)
        with anyio.CancelScope(shield=True):
            await self._driver.reached(event)
        event.wait(0)

    def _tell(self, event: events.Event) -> list[commands.Command]:
        end = self._device.link.end
        if isinstance(end, RankLost):
            self._lose([end])
        return super()._tell(event)

    def _lose(self, lost: list[RankLost]) -> None:
        """Stop first, then let the reapers go: what they wait for did not end, so the core must not hear of it."""
        self._driver.stop(lost[0])
        self._device.link.release(lost[0])


class RankedSteppedPool(_OfRanks, SteppedPool):
    """The `SteppedPool` of a leader. Made by `open_ranked_stepped_pool`. When a rank is lost, calls raise `RankLost`."""

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        host_memory: torch.Tensor,
        device: RankDevice,
        config: SwapConfig,
        observer: Observer | None,
    ) -> None:
        super().__init__(layout, memory, host_memory, device, config, observer, RankTransfers)
        self._device = device

    def poll(self) -> list[News]:
        """See `SteppedPool.poll`. Raises `RankLost`."""
        self._stop_if_lost()
        return super().poll()

    def _tell(self, event: events.Event) -> list[commands.Command]:
        self._stop_if_lost()
        return super()._tell(event)

    def _stop_if_lost(self) -> None:
        """What a lost rank had to do did not end, so the core must not hear of it."""
        end = self._device.link.end
        if isinstance(end, RankLost) and not self._closed:
            self._driver.stop(end)


@asynccontextmanager
async def open_ranked_pool(
    layout: KVLayout,
    *,
    ranks: RankGroup,
    num_pages: int | Sequence[int],
    host_bytes: int,
    device: Device | None = None,
    memory: PagedMemory | None = None,
    config: SwapConfig | None = None,
    observer: Observer | None = None,
) -> AsyncIterator[RankedPool]:
    """Open the pool of rank 0, while every other rank runs a `RankWorker`. See `open_pool`.

    `num_pages` and `host_bytes` are what this rank has; the pool gets the least of all ranks, and of `memory` the first
    pages. Raises `ProtocolError` if the ranks do not fit together, naming what differs and where, `RankLost` if one of
    them does not come. Cancelled, all ranks are let go.
    """
    own = hello(layout, ranks, num_pages, host_bytes, memory)
    config = config or SwapConfig()
    device = HostDevice() if device is None else device
    link = Link(ranks)
    try:
        said = await anyio.to_thread.run_sync(link.wait_hellos, abandon_on_cancel=True)
        agreed = _agree(link, own, said, config.verify)
        pool = RankedPool(
            layout, *take_memory(layout, agreed, device, memory), RankDevice(device, link), config, observer
        )
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_let_go, link, device, error)
        raise
    try:
        yield pool
    finally:
        await pool.close()


@contextmanager
def open_ranked_stepped_pool(
    layout: KVLayout,
    *,
    ranks: RankGroup,
    num_pages: int | Sequence[int],
    host_bytes: int,
    device: Device | None = None,
    memory: PagedMemory | None = None,
    config: SwapConfig | None = None,
    observer: Observer | None = None,
) -> Iterator[RankedSteppedPool]:
    """Open the pool of rank 0 for an engine that steps. See `open_ranked_pool`; it blocks until every rank is there."""
    own = hello(layout, ranks, num_pages, host_bytes, memory)
    config = config or SwapConfig()
    device = HostDevice() if device is None else device
    link = Link(ranks)
    try:
        agreed = _agree(link, own, link.wait_hellos(), config.verify)
        pool = RankedSteppedPool(
            layout, *take_memory(layout, agreed, device, memory), RankDevice(device, link), config, observer
        )
    except BaseException as error:
        _let_go(link, device, error)
        raise
    try:
        yield pool
    finally:
        pool.close()


def _agree(link: Link, own: Hello, said: Mapping[int, Hello], verify: Verify) -> Agreed:
    agreed = agree({0: own, **said}, verify)
    with link.lock:
        link.tell(agreed)
    return agreed


def _let_go(link: Link, device: Device, error: BaseException) -> None:
    """No pool comes of it: say so to the ranks, and end the threads."""
    with suppress(Exception):
        link.refuse(str(error) or type(error).__name__)
    device.close(0.0)
