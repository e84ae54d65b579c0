"""Commands become work on a device, and its ends become events again. Shared by all drivers; nothing is decided here."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import attrs

from swapkv.errors import SwapError, TransferError
from swapkv.fsm import commands, events
from swapkv.ids import Fence, Lane, SeqId, StepId
from swapkv.observer import Observer
from swapkv.streams.base import CopyEvent, Event, Stream

Clock: TypeAlias = Callable[[], int]


@attrs.frozen
class Submitted:
    """A copy that is under way. `copy` tells how it ended; `over` is reached then, well or badly: it stands for order."""

    copy: CopyEvent
    over: Event


class Copier(Protocol):
    """What moves bytes for an executor: `transfers.Transfers`, or a simulation of it."""

    def submit(self, copy: commands.Copy, after: Sequence[Event]) -> Submitted:
        """Queue a copy behind the events `after`. Raises what the stream raises if it does not take it."""

    def clone(self, clone: commands.ClonePages, stream: Stream, after: Sequence[Event]) -> Event:
        """Queue a copy of device pages on `stream`; the event fails if the copy does."""


@attrs.frozen
class Work:
    """Work on a lane. Once `event` is reached (or has failed), `finish` says what the core has to be told.

    `finish` raises what left the device unusable.
    """

    lane: Lane
    event: Event
    finish: Callable[[], events.Event]


@attrs.frozen
class _Forward:
    """A forward that is under way: the stream that it was given, and when its pages were there."""

    stream: Stream
    sequences: tuple[SeqId, ...]
    begin_ns: int


class Executor:
    """Carries out the commands of one core on one device. `clock`: nanoseconds, as the core is told them."""

    def __init__(self, copier: Copier, observer: Observer | None, clock: Clock = time.monotonic_ns) -> None:
        self._copier = copier
        self._observer = observer
        self._clock = clock
        self._fences: dict[Fence, Event] = {}
        self._forwards: dict[StepId, _Forward] = {}
        self._computed: list[tuple[Stream, Event]] = []
        self._lane_free_ns = dict.fromkeys(Lane, 0)

    def carry_out(self, command: commands.Command) -> Work | None:
        """Start what the command asks for; None if it asks for nothing on the device."""
        if isinstance(command, commands.Copy):
            return self._copy(command)
        if isinstance(command, commands.ClonePages):
            return self._clone(command)
        if isinstance(command, commands.RecordFence):
            return self._record(command)
        if isinstance(command, commands.StepGranted):
            self._grant(command)
        return None

    def expect_forward(self, step: StepId, sequences: Sequence[SeqId], stream: Stream) -> None:
        """Name the stream of a forward that is about to begin."""
        self._forwards[step] = _Forward(stream, tuple(sequences), self._clock())

    def forget_forward(self, step: StepId) -> None:
        """The forward will not happen."""
        self._forwards.pop(step, None)

    def _copy(self, copy: commands.Copy) -> Work:
        begin_ns = self._clock()
        try:
            submitted = self._copier.submit(copy, self._events(copy.after))
        except Exception as error:
            cause = (
                error if isinstance(error, SwapError) else TransferError(f"copy {copy.op} was not accepted: {error}")
            )
            rejected = events.CopyRejected(copy.op, cause)
            return Work(copy.lane, _Reached(), lambda: rejected)
        self._fences[copy.fence] = submitted.over
        return Work(copy.lane, submitted.copy, lambda: self._copy_ended(copy, submitted.copy, begin_ns))

    def _copy_ended(self, copy: commands.Copy, event: CopyEvent, begin_ns: int) -> events.Event:
        """The link was busy with a copy from its submission, or the end of the copy before, to now."""
        end_ns = self._clock()
        begin_ns = max(begin_ns, self._lane_free_ns[copy.lane])
        self._lane_free_ns[copy.lane] = end_ns
        self._fences.pop(copy.fence, None)
        error: TransferError | None = None
        try:
            _require_over(event)
        except TransferError as failure:
            error = failure
        if self._observer is not None:
            sizes = (len(copy.items), copy.num_bytes)
            self._observer.on_copy(copy.op, copy.lane, copy.sequence, *sizes, begin_ns, end_ns, error)
        if error is not None:
            return events.CopyFailed(copy.op, error)
        return events.CopyDone(copy.op, event.checksums(), end_ns - begin_ns)

    def _clone(self, clone: commands.ClonePages) -> Work:
        stream = self._forwards[clone.step].stream
        self._join(stream)
        event = self._copier.clone(clone, stream, self._events(clone.after))
        self._fences[clone.fence] = self._record_on(stream)
        return Work(Lane.COMPUTE, event, lambda: self._passed(clone.fence, event))

    def _record(self, record: commands.RecordFence) -> Work:
        forward = self._forwards.pop(record.step)
        self._join(forward.stream)
        event = self._fences[record.fence] = self._record_on(forward.stream)

        def finish() -> events.Event:
            if self._observer is not None:
                self._observer.on_forward(forward.sequences, forward.begin_ns, self._clock())
            return self._passed(record.fence, event)

        return Work(Lane.COMPUTE, event, finish)

    def _passed(self, fence: Fence, event: Event) -> events.Event:
        _require_over(event)
        self._fences.pop(fence, None)
        return events.FencePassed(fence)

    def _grant(self, granted: commands.StepGranted) -> None:
        forward = self._forwards[granted.step]
        self._join(forward.stream)
        for event in self._events(granted.after):
            forward.stream.wait(event)
        self._forwards[granted.step] = attrs.evolve(forward, begin_ns=self._clock())

    def _join(self, stream: Stream) -> None:
        """Order what `stream` is given from now on after the fences of the other compute streams.

        To the core they are one lane, whose work ends in the order of its fences: a forward on one stream begins after
        those that have ended on others, and its own fence stands for theirs as well.
        """
        self._computed = [(other, event) for other, event in self._computed if not event.query()]
        for other, event in self._computed:
            if other is not stream:
                stream.wait(event)

    def _record_on(self, stream: Stream) -> Event:
        """A fence of the compute lane; it stands for the earlier ones of `stream`."""
        event = stream.record()
        self._computed = [pair for pair in self._computed if pair[0] is not stream]
        self._computed.append((stream, event))
        return event

    def _events(self, fences: Sequence[Fence]) -> list[Event]:
        return [self._fences[fence] for fence in fences if fence in self._fences]


def _require_over(event: Event) -> None:
    """Raise what the work failed with. A wait that ran out of time is not an end: it must never be reported as one."""
    over = event.wait(0)
    assert over, "work was reported as over that is not"


class _Reached:
    """The event of a copy that was not accepted: there is nothing to wait for."""

    def query(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True
