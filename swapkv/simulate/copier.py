"""What moves bytes in virtual time: a link with a rate and a latency each way."""

from collections.abc import Callable, Sequence

from swapkv.config import SECOND_NS
from swapkv.executor import Submitted
from swapkv.fsm.commands import ClonePages, Copy
from swapkv.ids import Lane
from swapkv.streams.base import Event, Stream
from swapkv.streams.virtual import VirtualDevice, VirtualEvent, VirtualStream

MoveHook = Callable[[Copy], tuple[int, ...]]
CloneHook = Callable[[ClonePages], None]


class VirtualCopyEvent(VirtualEvent):
    """The event of a simulated copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: tuple[int, ...] = ()

    def checksums(self) -> tuple[int, ...]:
        """See `CopyEvent.checksums`."""
        return self.sums


class VirtualCopier:
    """Copies take `latency_ns` + bytes / rate. `move` is called when a copy ends: it may move simulated memory, returns
    the copy's checksums, and fails the copy by raising `TransferError`. `clone` likewise.
    """

    def __init__(
        self,
        device: VirtualDevice,
        *,
        out_bytes_per_s: int,
        in_bytes_per_s: int,
        latency_ns: int = 10_000,
        move: MoveHook = lambda copy: (),
        clone: CloneHook = lambda clone: None,
    ) -> None:
        self._rates = {Lane.OUT: out_bytes_per_s, Lane.IN: in_bytes_per_s}
        self._latency_ns = latency_ns
        self._move = move
        self._clone = clone
        self._streams = {lane: device.create_stream(lane.name) for lane in (Lane.OUT, Lane.IN)}

    def submit(self, copy: Copy, after: Sequence[Event]) -> Submitted:
        """See `Copier.submit`."""
        stream = self._streams[copy.lane]
        for event in after:
            stream.wait(event)
        moved = VirtualCopyEvent()

        def run() -> None:
            moved.sums = self._move(copy)

        duration_ns = self._latency_ns + copy.num_bytes * SECOND_NS // self._rates[copy.lane]
        stream.submit(duration_ns, run, moved)
        return Submitted(moved, stream.record())

    def clone(self, clone: ClonePages, stream: Stream, after: Sequence[Event]) -> Event:
        """See `Copier.clone`."""
        assert isinstance(stream, VirtualStream)
        for event in after:
            stream.wait(event)
        return stream.submit(self._latency_ns, lambda: self._clone(clone))
