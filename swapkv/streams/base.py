"""What a device must offer: streams, events, memory, and copies of pages. Implementations: `host`, `cuda`.

A stream does what it is given in order. `wait` orders it after an event of another stream without blocking the caller.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import attrs
import torch

from swapkv.config import Verify
from swapkv.ids import LayerId

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@attrs.frozen(kw_only=True, eq=False)
class Region:
    """A plane of all pages of one layer, as the data path sees it.

    `pages`: uint8, shape `[num_pages, page_bytes]`, strides `(page_stride, 1)`; the page stride may exceed the bytes.
    """

    layer: LayerId
    name: str
    pages: torch.Tensor

    @property
    def page_bytes(self) -> int:
        return self.pages.shape[1]


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """One chunk's pages of one layer, as one copy moves them.

    `regions`: the planes of the layer. `pages`: int64 `[n]`, rows of those regions on the device.
    `host`: for each region, uint8 `[n, page_bytes]`, contiguous: those pages in the host slot.
    With verification, and a checksum for each region in `checksums`: before a scatter, `guarded`, uint8
    `[m, page_bytes]` for each region, must hash to it; a gather continues it, first over the leading `sealed` of its
    pages and then over the others.
    """

    regions: Sequence[Region]
    pages: torch.Tensor
    host: Sequence[torch.Tensor]
    guarded: Sequence[torch.Tensor] = ()
    checksums: Sequence[int] = ()
    sealed: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(self.pages) * region.page_bytes for region in self.regions)


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the point has been reached (or the work before it has failed)."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread until the point is reached. False: the time ran out first.

        Raises `TransferError` if the work that the event stands for failed, the cause chained.
        """


class Stream(Protocol):
    """An ordered queue of device work. Calls enqueue and return; none of them blocks on the device.

    Work that fails fails its own event only. Tensors that were given must not change until the work is over.
    Raises `BudgetExhausted` if the queue is full (wait for some of its events) and `PoolClosed` after `close`.
    """

    name: str

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after `event`. If the event failed, so does the next work, without running
        (a `clone` runs all the same).

        Within a callable that this stream runs, the wait takes place there: the call returns when the event is
        reached, or raises `TransferError` if it failed.
        """

    def record(self) -> Event:
        """An event reached when all work given so far is over, whether or not it failed: it stands for order.

        Within a callable that this stream runs, the event stands for the place of the call and is reached already.
        """

    def gather(self, blocks: Sequence[Block], verify: Verify) -> "CopyEvent":
        """Copy device pages to their places in host memory (D2H). Raises `ProtocolError` for ill-formed blocks."""

    def scatter(self, blocks: Sequence[Block], verify: Verify) -> "CopyEvent":
        """Copy host bytes to their device pages (H2D). With `verify`, a block is checked before it is written.

        A block that is not what it was fails the event with `ChecksumMismatch`: it and later blocks are not written,
        earlier ones may be. Raises `ProtocolError` for ill-formed blocks.
        """

    def clone(self, regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> Event:
        """Copy pages `source` to pages `target` (int64 `[n]` each) in every region, on the device.

        It waits in its order, but runs even if an event that the stream waits for has failed: a gate that fails is
        meant for the work of one forward, and a clone is the pool's.
        """


class CopyEvent(Event, Protocol):
    """The event of a gather or scatter."""

    def checksums(self) -> tuple[int, ...]:
        """What a gather hashed, once reached: for each block and region two checksums, after the sealed pages and
        after the last. Empty without `verify`, and of a scatter. Never blocks.

        Raises `ProtocolError` before that (`wait` first), `TransferError` if the copy failed.
        """


class Promise(Event, Protocol):
    """An event that the host sets: streams can wait for a decision that is still to be made."""

    def set(self, error: BaseException | None = None) -> None:
        """Reach the point; with `error`, fail it, and so the work that waits for it. Later calls change nothing."""


class Device(Protocol):
    """One device and its memory."""

    name: str

    def create_stream(self, name: str) -> Stream: ...

    def create_promise(self) -> Promise: ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Device memory, uint8 `[num_bytes]`, zeroed."""

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that this device can copy from and to at full speed, uint8 `[num_bytes]`, pre-faulted."""

    def close(self, timeout_s: float) -> list[str]:
        """Take no more work, let the given work end, stop all streams. Idempotent.

        Returns the names of the streams whose work did not end within `timeout_s` seconds. What had not been reached
        then fails with `DrainTimeout`: the copies may still run, so memory that they touch must not be reused.
        """


@attrs.frozen
class ChosenWay:
    """How a device copies scattered runs of about `run_bytes`, `direction` "out" or "in", and what its probe measured."""

    way: str
    direction: str
    run_bytes: int
    bytes_per_s: float


@runtime_checkable
class ProbedDevice(Protocol):
    """A device that has several ways to copy scattered pages, and has measured them."""

    def chosen_ways(self) -> tuple[ChosenWay, ...]:
        """The fastest way for each size and direction that was measured; empty if the way was named by the caller."""


@runtime_checkable
class ComputeStream(Stream, Protocol):
    """A stream that runs Python callables in its order: what a host device computes with."""

    def launch(self, function: Callable[[], T]) -> "Launched[T]":
        """Run `function` in the stream's order."""


class Launched(Event, Protocol[T_co]):
    """The event of a launched callable: reached when the callable is over, even if it raised.

    It fails only if the callable was not run, because of a failed wait or a device that closed.
    """

    def result(self) -> T_co:
        """What the callable returned, once reached; raises what it raised. Never blocks.

        Raises `ProtocolError` before that (`wait` first), `TransferError` if the callable was not run.
        """
