"""What a worker does: the leader's commands, on its own streams and memory, each acknowledged when it is over."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import attrs

from swapkv.bridge import Reaper
from swapkv.config import Verify
from swapkv.errors import ChecksumMismatch, DrainTimeout, MalformedMessage, ProtocolError, SwapError, TransferError
from swapkv.fsm.commands import ClonePages, Copy
from swapkv.fsm.fences import FenceClock
from swapkv.fsm.ledger import PageLedger
from swapkv.ids import Fence, GroupId, Lane, StepId
from swapkv.layout import KVLayout
from swapkv.ranks import messages
from swapkv.ranks.messages import Ack, Agreed, Message, Outcome
from swapkv.streams.base import ComputeStream, Device, Event, Launched, Promise, Stream
from swapkv.streams.memory import PagedMemory
from swapkv.transfers import Transfers

T = TypeVar("T")

_NO_STEP = StepId(0)
_JOIN_S = 1.0


@attrs.define(eq=False)
class WorkerForward:
    """A worker's part of a forward: launch it on `stream`, over the planes of `memory`, before the call returns.

    `payload`: the leader's. `gates`: an event for each that the leader passed. The stream's work, and what is launched
    on it, may wait for them; the call itself must not, since what they wait for is told after it.
    """

    payload: bytes
    memory: PagedMemory
    stream: Stream
    gates: tuple[Event, ...]
    launched: list[Launched[Any]] = attrs.field(factory=list)

    def launch(self, function: Callable[[], T]) -> Launched[T]:
        """Run a callable on the stream's own thread. What it raises fails the forward at the leader.

        Raises `ProtocolError` for streams that run no Python: launch kernels on them.
        """
        if not isinstance(self.stream, ComputeStream):
            raise ProtocolError(f"stream {self.stream.name!r} runs no Python callables: launch kernels on it instead")
        launched = self.stream.launch(function)
        self.launched.append(launched)
        return launched


class Hands:
    """Carries out commands, in their order, and acknowledges what has a number when it is over."""

    def __init__(
        self,
        layout: KVLayout,
        rank: int,
        device: Device,
        memory: PagedMemory,
        transfers: Transfers,
        agreed: Agreed,
        tell: Callable[[Message], None],
        forward: Callable[[WorkerForward], None] | None,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._device = device
        self._memory = memory
        self._transfers = transfers
        self._agreed = agreed
        self._tell = tell
        self._forward = forward
        self._events: dict[int, Event] = {}
        self._promises: dict[int, Promise] = {}
        self._streams: list[Stream] = []
        self._reapers: dict[str, Reaper] = {}
        self._bases = page_bases(agreed.pages)
        self._last_number = 0

    def carry_out(self, message: Message) -> None:
        """Begin what a message asks for. Raises what leaves this rank unable to follow."""
        handle = _HANDLERS.get(type(message))
        if handle is None:
            raise MalformedMessage(f"rank 0 said {type(message).__name__}, which is not for a worker at work")
        handle(self, message)

    def close(self, timeout_s: float) -> list[str]:
        """Fail promises that were not kept, close the device, end the reapers. Returns the names of what is stuck."""
        for promise in self._promises.values():
            promise.set(TransferError("the leader has let go of its ranks"))
        stuck = self._device.close(timeout_s)
        for reaper in self._reapers.values():
            reaper.stop()
        return stuck + [f"reaper of {name}" for name, reaper in self._reapers.items() if not reaper.join(_JOIN_S)]

    def _copy(self, message: messages.SubmitCopy) -> None:
        self._number(message.number)
        try:
            self._check_copy(message.copy)
            submitted = self._transfers.submit(message.copy, self._after(message.after))
        except Exception as error:
            self._refuse(message.number, f"copy {message.copy.op} was not accepted", error)
            return
        self._events[message.number] = submitted.over
        self._watch(message.copy.lane, message.number, submitted.copy, submitted.copy.checksums)

    def _clone(self, message: messages.Clone) -> None:
        self._number(message.number)
        stream, fence = self._stream(message.stream), Fence(Lane.COMPUTE, message.number)
        clone = ClonePages(_NO_STEP, fence, message.group, message.source, message.target, ())
        try:
            event = self._transfers.clone(clone, stream, self._after(message.after))
        except Exception as error:
            self._refuse(message.number, "a copy of device pages was not accepted", error)
            return
        self._events[message.number] = event
        self._watch(message.stream, message.number, event, tuple)

    def _open_stream(self, message: messages.OpenStream) -> None:
        if message.stream != len(self._streams):
            raise MalformedMessage(f"stream {message.stream} follows stream {len(self._streams) - 1}")
        self._streams.append(self._device.create_stream(message.name))

    def _wait(self, message: messages.Wait) -> None:
        stream = self._stream(message.stream)
        if message.failure:
            stream.wait(self._failed(message.failure))
            return
        for event in self._after((message.number,)):
            stream.wait(event)

    def _record(self, message: messages.Record) -> None:
        self._number(message.number)
        stream = self._stream(message.stream)
        self._events[message.number] = event = stream.record()
        self._watch(message.stream, message.number, event, tuple)

    def _use_up_gates(self, message: messages.UseUpGates) -> None:
        with suppress(SwapError):  # full: then there is work behind the gate
            self._stream(message.stream).gather((), Verify.NONE)

    def _open_promise(self, message: messages.OpenPromise) -> None:
        self._number(message.number)
        self._events[message.number] = self._promises[message.number] = self._device.create_promise()

    def _set_promise(self, message: messages.SetPromise) -> None:
        promise = self._promises.pop(message.number, None)
        if promise is None:
            raise MalformedMessage(f"promise {message.number} is not open")
        promise.set(TransferError(message.failure) if message.failure else None)
        del self._events[message.number]

    def _run(self, message: messages.Run) -> None:
        self._number(message.number)
        stream = self._stream(message.stream)
        forward = WorkerForward(message.payload, self._memory, stream, tuple(map(self._gate, message.gates)))
        try:
            if self._forward is None:
                raise ProtocolError("it runs no forwards: give its RankWorker a `forward`")
            self._forward(forward)
            over = stream.record()
        except Exception as error:
            self._refuse(message.number, "the forward failed", error)
            return

        def result() -> tuple[int, ...]:
            for launched in forward.launched:
                launched.result()
            return ()

        self._watch(message.stream, message.number, over, result)

    def _watch(self, queue: int | Lane, number: int, event: Event, result: Callable[[], tuple[int, ...]]) -> None:
        """Acknowledge `number` once `event` is reached, after everything before it on its stream (a number) or lane."""
        name = f"copy-{queue.name.lower()}" if isinstance(queue, Lane) else f"stream-{queue}"
        if name not in self._reapers:
            self._reapers[name] = Reaper(f"swapkv-rank{self._rank}-reap-{name}")

        def reap() -> None:
            try:
                event.wait()
                ack = Ack(number, Outcome.DONE, result(), "")
            except DrainTimeout:
                return  # the work may go on: nobody may be told that it is over
            except BaseException as error:  # foreign work may raise anything; the leader hears of it
                ack = _bad(number, str(error) or repr(error), error)
            self._events.pop(number, None)
            self._tell(ack)

        self._reapers[name].watch(reap)

    def _refuse(self, number: int, what: str, error: Exception) -> None:
        self._tell(_bad(number, f"{what} ({type(error).__name__}: {error})", error))

    def _number(self, number: int) -> None:
        if number <= self._last_number:
            raise MalformedMessage(f"number {number} follows {self._last_number}")
        self._last_number = number

    def _stream(self, number: int) -> Stream:
        if number >= len(self._streams):
            raise MalformedMessage(f"stream {number} is not open")
        return self._streams[number]

    def _after(self, numbers: Sequence[int]) -> list[Event]:
        """The events of these numbers, as far as they are not reached."""
        if any(number > self._last_number for number in numbers):
            raise MalformedMessage(f"numbers {list(numbers)} to wait for, the last is {self._last_number}")
        found = (self._events.get(number) for number in numbers)
        return [event for event in found if event is not None]

    def _gate(self, number: int) -> Event:
        if number < 0:
            return self._failed("the restore had failed")
        return self._events.get(number) or self._kept()

    def _failed(self, reason: str) -> Event:
        promise = self._device.create_promise()
        promise.set(TransferError(reason))
        return promise

    def _kept(self) -> Event:
        promise = self._device.create_promise()
        promise.set()
        return promise

    def _check_copy(self, copy: Copy) -> None:
        """Raises `ProtocolError` unless the copy stays within this rank's pages and host slots."""
        groups = self._layout.groups
        if copy.group >= len(groups) or not set(copy.layers) <= set(groups[copy.group].layers):
            raise ProtocolError(f"layers {list(copy.layers)} are not in layer group {copy.group}")
        low = self._bases[copy.group]
        high = low + self._agreed.pages[copy.group]
        room = self._agreed.host_bytes - self._layout.chunk_bytes(copy.group)
        for item in copy.items:
            end = max(item.first + len(item.pages), item.guard_first + item.guard_pages)
            if end > self._layout.chunk_pages or item.sealed > len(item.pages) or item.host > room:
                raise ProtocolError(f"chunk {item.chunk}: pages up to {end} of a slot at {item.host} leave the slot")
            if len(item.pages) and not low <= int(item.pages.min()) <= int(item.pages.max()) < high:
                raise ProtocolError(
                    f"chunk {item.chunk}: pages {item.pages.tolist()} are not within {low} to {high - 1}"
                )


def _bad(number: int, reason: str, error: BaseException) -> Ack:
    outcome = Outcome.MISMATCH if isinstance(error, ChecksumMismatch) else Outcome.FAILED
    return Ack(number, outcome, (), reason)


def page_bases(pages: Sequence[int]) -> list[int]:
    """The first page number of each group, as the core counts them."""
    ledger = PageLedger(pages, FenceClock())
    return [ledger.base(GroupId(g)) for g in range(len(pages))]


_HANDLERS: dict[type, Callable[[Hands, Any], None]] = {
    messages.SubmitCopy: Hands._copy,
    messages.Clone: Hands._clone,
    messages.OpenStream: Hands._open_stream,
    messages.Wait: Hands._wait,
    messages.Record: Hands._record,
    messages.UseUpGates: Hands._use_up_gates,
    messages.OpenPromise: Hands._open_promise,
    messages.SetPromise: Hands._set_promise,
    messages.Run: Hands._run,
}
