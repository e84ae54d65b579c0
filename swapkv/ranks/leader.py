"""The device of several ranks, as their leader sees it: its own, and an order on it that every worker repeats.

Streams, their waits and their records, promises, copies and clones are mirrored; what a caller launches is not (see
`Run`). Ordering is each rank's own: no rank's device ever waits for another's.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import attrs
import torch

from swapkv.config import Verify
from swapkv.errors import ProtocolError, TransferError
from swapkv.executor import Submitted
from swapkv.fsm.commands import ClonePages, Copy
from swapkv.layout import KVLayout
from swapkv.ranks import messages
from swapkv.ranks.link import Link, RankCopyEvent, RankEvent, RankPromise, split_checksums
from swapkv.streams.base import Block, ComputeStream, CopyEvent, Device, Event, Launched, Region, Stream
from swapkv.streams.memory import PagedMemory
from swapkv.tiers.host import HostArena
from swapkv.transfers import Transfers

T = TypeVar("T")


class RankStream:
    """A compute stream of every rank; see `Stream`. `local`: this rank's. Made by `RankDevice.create_stream`."""

    def __init__(self, link: Link, number: int, local: Stream) -> None:
        self.name = local.name
        self.number = number
        self.local = local
        self._link = link

    def wait(self, event: Event) -> None:
        """See `Stream.wait`. Each rank waits for its own part of the event; one that is no rank event is this rank's."""
        if not isinstance(event, RankEvent | RankPromise):
            self.local.wait(event)
            return
        self.local.wait(event.local)
        failure = event.failure if isinstance(event, RankPromise) else ""
        with self._link.lock:
            self._link.tell(messages.Wait(self.number, event.number, failure))

    def record(self) -> RankEvent:
        """See `Stream.record`: reached when every rank has got so far."""
        with self._link.lock:
            event = RankEvent(self._link, self._link.next_number(), self.local.record())
            self._link.tell(messages.Record(self.number, event.number))
            return event

    def gather(self, blocks: Sequence[Block], verify: Verify) -> CopyEvent:
        """A copy of nothing: on every rank it uses up waits that failed. The event is of this rank.

        Raises `ProtocolError` for blocks: they are memory of one rank. Copies of all ranks go through `RankTransfers`.
        """
        if blocks:
            raise ProtocolError(f"stream {self.name!r} is of several ranks, blocks are of one: copy on its `local` one")
        with self._link.lock:
            self._link.tell(messages.UseUpGates(self.number))
        return self.local.gather((), verify)

    scatter = gather

    def clone(self, regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> Event:
        """Raises `ProtocolError`: regions are memory of one rank. Clones of all ranks go through `RankTransfers`."""
        raise ProtocolError(
            f"stream {self.name!r} is of several ranks, regions are of one: clone on its `local` stream"
        )

    def launch(self, function: Callable[[], T]) -> Launched[T]:
        """See `ComputeStream.launch`: on this rank alone."""
        if not isinstance(self.local, ComputeStream):
            raise ProtocolError(f"stream {self.name!r} runs no Python callables: launch kernels on its `local` stream")
        return self.local.launch(function)

    def run(self, payload: bytes, gates: Sequence[Event]) -> RankEvent:
        """Every worker runs its part of a forward here; reached when that is over on all of them."""
        foreign = [gate for gate in gates if not isinstance(gate, RankPromise)]
        if foreign:
            raise ProtocolError(f"gates {foreign} are known to this rank alone: pass what `layer_event` returns")
        with self._link.lock:
            self._link.require_room()
            number = self._link.next_number()
            told = tuple(gate.gate() for gate in gates if isinstance(gate, RankPromise))
            self._link.tell(messages.Run(number, self.number, payload, told))
            return RankEvent(self._link, number, _Reached())


class RankDevice:
    """A `Device` of several ranks. `local`: this rank's, closed with it; so are the ranks of `link`."""

    def __init__(self, local: Device, link: Link) -> None:
        self.name = local.name
        self.local = local
        self.link = link
        self._streams = 0
        self._stuck: list[str] | None = None

    def create_stream(self, name: str) -> RankStream:
        """A compute stream on every rank."""
        with self.link.lock:
            stream = RankStream(self.link, self._streams, self.local.create_stream(name))
            self._streams += 1
            self.link.tell(messages.OpenStream(stream.number, name))
            return stream

    def create_promise(self) -> RankPromise:
        """A promise on every rank."""
        with self.link.lock:
            promise = RankPromise(self.link, self.link.next_number(), self.local.create_promise())
            self.link.tell(messages.OpenPromise(promise.number))
            return promise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Device.allocate`: of this rank."""
        return self.local.allocate(num_bytes)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """See `Device.allocate_pinned`: of this rank."""
        return self.local.allocate_pinned(num_bytes)

    def close(self, timeout_s: float) -> list[str]:
        """See `Device.close`: on every rank, this one and the workers at the same time."""
        if self._stuck is None:
            until_s = time.monotonic() + timeout_s
            self.link.ask_close(timeout_s)
            stuck = self.local.close(timeout_s)
            self._stuck = stuck + self.link.close(max(0.0, until_s - time.monotonic()))
        return list(self._stuck)


class RankTransfers(Transfers):
    """The copies of every rank: one command, each rank's own pages, host slots and checksums.

    `device`: a `RankDevice`. An event is reached when every rank has ended the work, and fails if any of them failed.
    """

    def __init__(
        self,
        layout: KVLayout,
        memory: PagedMemory,
        arena: HostArena,
        device: Device,
        verify: Verify,
        page_bases: Sequence[int],
    ) -> None:
        if not isinstance(device, RankDevice):
            raise ProtocolError(f"device {device.name!r} is of one rank: wrap it in a RankDevice")
        super().__init__(layout, memory, arena, device.local, verify, page_bases)
        self._link = device.link

    def submit(self, copy: Copy, after: Sequence[Event]) -> Submitted:
        """See `Copier.submit`. If this rank does not take the copy, no other is told of it."""
        with self._link.lock:
            self._link.require_room()
            own = super().submit(_for_rank(copy, 0), [_local(event) for event in after])
            number, numbers = self._link.next_number(), _numbers(after)
            event = RankCopyEvent(self._link, number, own.copy)
            part = partial(_for_rank, copy)
            if any(item.checksums for item in copy.items):
                self._link.tell_each(lambda rank: messages.SubmitCopy(number, part(rank), numbers))
            else:
                self._link.tell(messages.SubmitCopy(number, copy, numbers))
            return Submitted(event, _Over(event, own.over))

    def clone(self, clone: ClonePages, stream: Stream, after: Sequence[Event]) -> Event:
        """See `Copier.clone`. `stream`: a `RankStream`."""
        assert isinstance(stream, RankStream)
        with self._link.lock:
            own = super().clone(clone, stream.local, [_local(event) for event in after])
            event = RankEvent(self._link, self._link.next_number(), own)
            pages = (clone.group, clone.source, clone.target)
            self._link.tell(messages.Clone(event.number, stream.number, *pages, _numbers(after)))
            return event


class _Over(RankEvent):
    """The order that a copy stands for: under its number, but never failed."""

    def __init__(self, copy: RankCopyEvent, local: Event) -> None:
        self.number = copy.number
        self.local = local
        self.acks = copy.acks
        self._link = copy._link

    def _raise_failure(self, local: TransferError | None) -> None:
        """It stands for order alone."""


class _Reached:
    """This rank's part of work that only the others do."""

    def query(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


def _local(event: Event) -> Event:
    return event.local if isinstance(event, RankEvent) else event


def _numbers(events: Sequence[Event]) -> tuple[int, ...]:
    return tuple(event.number for event in events if isinstance(event, RankEvent))


def _for_rank(copy: Copy, rank: int) -> Copy:
    """The copy with the checksums that this rank had hashed."""
    if not any(item.checksums for item in copy.items):
        return copy
    items = (attrs.evolve(item, checksums=split_checksums(item.checksums, rank)) for item in copy.items)
    return attrs.evolve(copy, items=tuple(items))
