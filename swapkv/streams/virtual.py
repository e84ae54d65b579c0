"""Streams in virtual time: work takes as long as it is said to take, and time passes only when it is told to."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from swapkv.config import Verify
from swapkv.errors import ProtocolError, TransferError
from swapkv.streams.base import Block, CopyEvent, Event, Region


class VirtualEvent:
    """An event of a virtual device. `error`: why the work failed."""

    def __init__(self) -> None:
        self.reached = False
        self.error: TransferError | None = None

    def query(self) -> bool:
        return self.reached

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`: in virtual time nothing is gained by blocking, so it never does."""
        if self.reached and self.error is not None:
            raise self.error
        return self.reached


@attrs.define(eq=False)
class VirtualWork:
    """`run` is called when the work begins to be over, and may fail it by raising `TransferError`."""

    event: VirtualEvent
    duration_ns: int
    after: tuple[Event, ...]
    run: Callable[[], None] | None


class VirtualStream:
    """One lane of a virtual device."""

    def __init__(self, name: str, device: "VirtualDevice") -> None:
        self.name = name
        self._device = device
        self._queue: deque[VirtualWork] = deque()
        self._ends_ns: int | None = None
        self._waits: list[Event] = []

    def wait(self, event: Event) -> None:
        """See `Stream.wait`. Order only: a failed event lets what follows run."""
        self._waits.append(event)

    def record(self) -> VirtualEvent:
        """See `Stream.record`."""
        return self.submit(0)

    def gather(self, blocks: Sequence[Block], verify: Verify) -> CopyEvent:
        """No memory, no copies: `simulate.VirtualCopier` says how long they take."""
        raise ProtocolError(f"virtual stream {self.name!r} has no memory to copy: submit how long it takes instead")

    scatter = gather

    def clone(self, regions: Sequence[Region], source: torch.Tensor, target: torch.Tensor) -> VirtualEvent:
        """See `gather`."""
        raise ProtocolError(f"virtual stream {self.name!r} has no memory to copy: submit how long it takes instead")

    def submit(
        self, duration_ns: int, run: Callable[[], None] | None = None, event: VirtualEvent | None = None
    ) -> VirtualEvent:
        """Work that takes `duration_ns` once its turn has come and what it waits for is reached.

        `run` is called at its end, and fails it by raising `TransferError`. `event`: what stands for it; None: a new one.
        """
        work = VirtualWork(event or VirtualEvent(), duration_ns, tuple(self._waits), run)
        self._waits = []
        self._queue.append(work)
        return work.event

    def begin(self) -> None:
        """Begin the first work if it can begin now."""
        if self._ends_ns is None and self._queue and all(event.query() for event in self._queue[0].after):
            self._ends_ns = self._device.end_ns(self, self._queue[0].duration_ns)

    @property
    def ends_ns(self) -> int | None:
        """When the work that has begun is over."""
        return self._ends_ns

    def end(self) -> None:
        """The work that has begun is over."""
        work = self._queue.popleft()
        self._ends_ns = None
        if work.run is not None:
            try:
                work.run()
            except TransferError as error:
                work.event.error = error
        work.event.reached = True


class VirtualDevice:
    """Streams and their time. `stalls`: `[begin, end)` spans in ns in which no work makes progress, sorted, apart."""

    def __init__(self, stalls: Iterable[tuple[int, int]] = ()) -> None:
        self.now_ns = 0
        self._streams: list[VirtualStream] = []
        self._stalls = tuple(stalls)

    def create_stream(self, name: str) -> VirtualStream:
        """A stream of its own order."""
        stream = VirtualStream(name, self)
        self._streams.append(stream)
        return stream

    def end_ns(self, stream: VirtualStream, duration_ns: int) -> int:
        """When work that begins now is over, with the stalls that come in between."""
        end_ns = self.now_ns + duration_ns
        for begin, end in self._stalls:
            if begin < end_ns and end > self.now_ns:
                end_ns += end - max(begin, self.now_ns)
        return end_ns

    def next_ns(self) -> int | None:
        """When the next work is over; None if nothing is under way."""
        for stream in self._streams:
            stream.begin()
        return min((s.ends_ns for s in self._streams if s.ends_ns is not None), default=None)

    def advance(self, to_ns: int) -> None:
        """Let time pass until `to_ns`, ending what ends by then, in the order of time and then of streams."""
        while (at_ns := self.next_ns()) is not None and at_ns <= to_ns:
            self.now_ns = max(self.now_ns, at_ns)
            for stream in self._streams:
                if stream.ends_ns is not None and stream.ends_ns <= self.now_ns:
                    stream.end()
        self.now_ns = max(self.now_ns, to_ns)
