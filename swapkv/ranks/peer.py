"""One other rank, seen from this one: a queue of what it is told, a thread that hears it, and an eye on its silence."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from swapkv.errors import ProtocolError
from swapkv.ranks import messages
from swapkv.ranks.messages import LAST, Message
from swapkv.ranks.wire import decode, encode

_FRAME_BYTES = 1 << 20
_JOIN_S = 10.0


class Channel(Protocol):
    """An ordered pipe of frames to one other rank. One thread sends, another receives.

    `send` and `receive` raise `OSError` (`TimeoutError`, `ConnectionError`, …) if the other end is gone or the time
    runs out; the channel is useless afterwards.
    """

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Returns when the other end has the frame, or will get it."""

    def receive(self, timeout_s: float) -> bytes:
        """The next frame."""

    def close(self) -> None:
        """End `send` and `receive` at once, on both ends. From any thread; idempotent."""


def _positive(instance: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
    if value <= 0:
        raise ProtocolError(f"{attribute.name}={value!r} must be above 0")


@attrs.frozen(kw_only=True)
class RankOptions:
    """How long ranks wait for each other. Raises `ProtocolError` for values that do not fit together.

    `heartbeat_s`: who has nothing to say says so as often. `deadline_s`: a rank that is silent for so long is lost.
    `start_timeout_s`: how long the others may take to open their side. `backlog_max`: commands that a rank may be
    behind; at half of it new copies are refused, beyond it the rank is lost.
    """

    heartbeat_s: float = attrs.field(default=1.0, validator=_positive)
    deadline_s: float = attrs.field(default=30.0, validator=_positive)
    start_timeout_s: float = attrs.field(default=600.0, validator=_positive)
    backlog_max: int = attrs.field(default=4096, validator=_positive)

    def __attrs_post_init__(self) -> None:
        if self.deadline_s < 2 * self.heartbeat_s:
            raise ProtocolError(
                f"deadline_s={self.deadline_s} must be at least twice heartbeat_s={self.heartbeat_s}: raise it"
            )


@attrs.frozen(kw_only=True, eq=False)
class RankGroup:
    """The ranks of one pool, as one of them sees them. Rank 0 leads.

    `channels`: of the leader, one to each other rank; of a worker, one to the leader: `{0: channel}`. They are closed
    with the pool, so a group serves once. One rank alone: `RankGroup(rank=0, size=1, channels={})`.
    Raises `ProtocolError` if the channels are not those.
    """

    rank: int
    size: int
    channels: Mapping[int, Channel]
    options: RankOptions = attrs.field(factory=RankOptions)

    def __attrs_post_init__(self) -> None:
        wanted = list(range(1, self.size)) if self.rank == 0 else [0]
        if not 0 <= self.rank < self.size or sorted(self.channels) != wanted:
            raise ProtocolError(
                f"rank {self.rank} of {self.size} has channels to {sorted(self.channels)}, not to {wanted}: the leader "
                "has one to every worker, a worker has one to rank 0"
            )


class Peer:
    """Talks to `rank` over a channel. `hear` is called with each message, `lost` once with what broke the channel.

    `hear` is called on the peer's own thread, `lost` on any. A message that `hear` does not want, it refuses with
    `MalformedMessage`. Nothing comes after one of the `LAST` messages, nor is it missed.
    """

    def __init__(
        self,
        rank: int,
        group: RankGroup,
        hear: Callable[[int, Message], None],
        lost: Callable[[int, Exception], None],
    ) -> None:
        self.rank = rank
        self._channel = group.channels[rank]
        self._options = group.options
        self._hear = hear
        self._lost = lost
        self._outbox: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._silence_s = group.options.start_timeout_s
        self._closing = False
        self._ended = False
        self._over = False
        self._threads = [
            threading.Thread(target=work, name=f"swapkv-rank{group.rank}-{way}-rank{rank}", daemon=True)
            for way, work in (("to", self._send), ("from", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, message: Message) -> None:
        """Queue a message. Never blocks; a rank that has `backlog_max` messages not taken is lost."""
        self._queue(encode(message), last=isinstance(message, LAST))

    def tell_encoded(self, message: bytes) -> None:
        """The same for a message that was encoded before, and is not the last."""
        self._queue(message, last=False)

    def close(self, timeout_s: float) -> None:
        """Let the queue empty and the other end say its last message for at most `timeout_s`, then end both threads."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            self._closing = self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._channel.close()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _queue(self, message: bytes, *, last: bool) -> None:
        with self._changed:
            if self._closing or self._ended:
                return
            full = len(self._outbox) >= self._options.backlog_max
            self._outbox.append(message)
            self._closing = last
            self._changed.notify_all()
        if full:
            self._fail(ConnectionError(f"it has not taken {self._options.backlog_max} messages"))

    def _send(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                self._channel.send(frame, self._silence_s)
        except Exception as error:  # whatever it is: who waits for this rank must hear of it
            self._fail(error)

    def _next_frame(self) -> bytes | None:
        """What is queued, up to a size; a sign of life if nothing is; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closing or self._ended, self._options.heartbeat_s)
            if self._ended or (self._closing and not self._outbox):
                return None
            parts = [self._outbox.popleft()] if self._outbox else [encode(messages.Alive())]
            size = len(parts[0])
            while self._outbox and size + len(self._outbox[0]) <= _FRAME_BYTES:
                parts.append(self._outbox.popleft())
                size += len(parts[-1])
            return b"".join(parts)

    def _receive(self) -> None:
        try:
            while not self._ended:
                for message in decode(self._channel.receive(self._silence_s)):
                    self._silence_s = self._options.deadline_s
                    if isinstance(message, messages.Failed):
                        raise ConnectionError(f"it cannot go on: {message.reason}")
                    if not isinstance(message, messages.Alive):
                        self._hear(self.rank, message)
                    if isinstance(message, LAST):
                        return
        except Exception as error:  # as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """The channel is broken: end both threads, and tell once, unless `close` has broken it."""
        with self._changed:
            told, self._ended = self._ended or self._over, True
            self._outbox.clear()
            self._changed.notify_all()
        self._channel.close()
        if not told:
            self._lost(self.rank, error)
