"""The leader's end: every command goes to every worker, and its event is reached when all of them have said so."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from swapkv.errors import (
    BudgetExhausted,
    ChecksumMismatch,
    MalformedMessage,
    PoolClosed,
    RankLost,
    SwapError,
    TransferError,
)
from swapkv.ranks import messages
from swapkv.ranks.messages import Ack, Hello, Message, Outcome
from swapkv.ranks.peer import Peer, RankGroup
from swapkv.ranks.wire import encode
from swapkv.streams.base import CopyEvent, Event, Promise

_CHECKSUM_BITS = 32
_REFUSE_S = 5.0


class Link:
    """The workers of a leader. `lock` orders what is told; `counters` counts acknowledgements that change nothing.

    `end`: why no more is told (`RankLost`, or `PoolClosed` after `close`). `on_lost` is called once, on a thread of
    the link's own; whoever replaces it calls `release`.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.size = group.size
        self.lock = threading.Condition()
        self.counters: Counter[str] = Counter()
        self.end: SwapError | None = None
        self.on_lost: Callable[[RankLost], None] = self.release
        self.released: SwapError | None = None
        self._pending: dict[int, RankEvent] = {}
        self._hellos: dict[int, Hello] = {}
        self._byes: dict[int, tuple[str, ...]] = {}
        self._gone: set[int] = set()
        self._next = 0
        self._peers = [Peer(rank, group, self._hear, self._lost) for rank in sorted(group.channels)]

    def wait_hellos(self) -> dict[int, Hello]:
        """Block until every worker has said what it has. Raises what ended the link, if that came first."""
        with self.lock:
            self.lock.wait_for(lambda: self.end is not None or len(self._hellos) == len(self._peers))
            self.require_open()
            return dict(self._hellos)

    def require_open(self) -> None:
        """Raise what ended the link."""
        if self.end is not None:
            raise type(self.end)(str(self.end)) from self.end.__cause__

    def require_room(self) -> None:
        """Raise `BudgetExhausted` while workers are half of `backlog_max` commands behind."""
        self.require_open()
        if len(self._pending) >= self.group.options.backlog_max // 2:
            raise BudgetExhausted(
                f"{len(self._pending)} commands are under way on {self.size} ranks: wait for some, or raise backlog_max"
            )

    def next_number(self) -> int:
        """A number that no command has had. Call it, and `tell`, within `lock`: numbers go out in order."""
        self._next += 1
        return self._next

    def tell(self, message: Message) -> None:
        """The same to every worker."""
        if self.end is None and self._peers:
            encoded = encode(message)
            for peer in self._peers:
                peer.tell_encoded(encoded)

    def tell_each(self, message: Callable[[int], Message]) -> None:
        """`message(rank)` to each worker."""
        if self.end is None:
            for peer in self._peers:
                peer.tell(message(peer.rank))

    def expect(self, event: "RankEvent") -> None:
        """Workers will acknowledge the event. Too many of them that do not come: the slowest rank is lost."""
        if not self._peers or self.end is not None:
            return
        self._pending[event.number] = event
        if len(self._pending) > self.group.options.backlog_max:
            oldest = self._pending[min(self._pending)]
            slow = next(peer.rank for peer in self._peers if peer.rank not in oldest.acks)
            self._lost(slow, ConnectionError(f"it is {len(self._pending)} commands behind"))

    def release(self, cause: SwapError) -> None:
        """Let everything that waits for workers go, with a failure: nothing more will come from them."""
        with self.lock:
            if self.released is None:
                self.released = cause
            self._pending.clear()
            self.lock.notify_all()

    def refuse(self, reason: str) -> None:
        """The ranks do not fit together."""
        with self.lock:
            for peer in self._peers:
                peer.tell(messages.Refused(reason))
        self.end_now(PoolClosed(reason), _REFUSE_S)

    def ask_close(self, timeout_s: float) -> None:
        """Have the workers end their work; they take a little less than the time, so that they can say what is stuck."""
        with self.lock:
            for peer in self._peers:
                peer.tell(messages.Close(int(timeout_s * 800)))

    def close(self, timeout_s: float) -> list[str]:
        """Wait for the workers' ends, then end the link. Returns what is stuck. Lost ranks are not waited for."""
        with self.lock:
            self.lock.wait_for(lambda: not self._silent(), timeout_s)
            stuck = [f"rank {rank}" for rank in self._silent()]
            stuck += [f"rank {rank}'s {name}" for rank, names in self._byes.items() for name in names]
        self.end_now(PoolClosed("the ranks were let go: open a new pool"), 0.0)
        return stuck

    def end_now(self, cause: SwapError, timeout_s: float) -> None:
        """End the threads. Workers that have heard a last message may take the time to answer it. Idempotent."""
        with self.lock:
            self.end = self.end or cause
            self.lock.notify_all()
        until_s = time.monotonic() + timeout_s
        for peer in self._peers:
            peer.close(max(0.0, until_s - time.monotonic()))
        self.release(cause)

    def _silent(self) -> list[int]:
        """Ranks that are not lost and have not said good-bye."""
        return [peer.rank for peer in self._peers if peer.rank not in self._byes and peer.rank not in self._gone]

    def _hear(self, rank: int, message: Message) -> None:
        with self.lock:
            if isinstance(message, Ack):
                self._acknowledge(rank, message)
            elif isinstance(message, Hello):
                self._hellos[rank] = message
            elif isinstance(message, messages.Bye):
                self._byes[rank] = message.stuck
            else:
                raise MalformedMessage(f"it said {type(message).__name__}, which only the leader says")
            self.lock.notify_all()

    def _acknowledge(self, rank: int, ack: Ack) -> None:
        event = self._pending.get(ack.number)
        if event is None or rank in event.acks:
            self.counters["repeated_acks" if 0 < ack.number <= self._next else "unknown_acks"] += 1
            return
        event.acks[rank] = ack
        if event.all_acked():
            del self._pending[ack.number]

    def _lost(self, rank: int, cause: Exception) -> None:
        with self.lock:
            self._gone.add(rank)
            self.lock.notify_all()
            if self.end is not None:
                return
            lost = RankLost(
                f"rank {rank} of {self.size} is lost ({type(cause).__name__}: {cause}): the KV of all ranks is gone with "
                "it; end the other ranks and open a new pool on all of them"
            )
            lost.__cause__ = cause
            self.end = lost
        self.on_lost(lost)


class RankEvent:
    """A point in the work of every rank. `local`: this rank's part; `acks`: what the others have said, by rank."""

    def __init__(self, link: Link, number: int, local: Event) -> None:
        self.number = number
        self.local = local
        self.acks: dict[int, Ack] = {}
        self._link = link
        link.expect(self)

    def all_acked(self) -> bool:
        return len(self.acks) == self._link.size - 1

    def query(self) -> bool:
        """See `Event.query`: whether every rank has reached the point, well or badly."""
        return self.local.query() and (self.all_acked() or self._link.released is not None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`. If the work failed on any rank, raises that (once it is over on all), naming the ranks.

        Work of ranks that were given up never ends: raises what ended the link, which is no `TransferError`.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        failure: TransferError | None = None
        try:
            if not self.local.wait(timeout_s):
                return False
        except TransferError as error:
            failure = error
        with self._link.lock:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not self._link.lock.wait_for(lambda: self.all_acked() or self._link.released is not None, left_s):
                return False
        self._raise_failure(failure)
        return True

    def _raise_failure(self, local: TransferError | None) -> None:
        released = self._link.released
        if not self.all_acked() and released is not None:
            raise type(released)(str(released)) from released.__cause__
        failures = {} if local is None else {0: str(local)}
        failures |= {rank: ack.reason for rank, ack in sorted(self.acks.items()) if ack.outcome is not Outcome.DONE}
        if not failures:
            return
        if local is not None and self._link.size == 1:
            raise local
        wrong = isinstance(local, ChecksumMismatch) or any(a.outcome is Outcome.MISMATCH for a in self.acks.values())
        kind = ChecksumMismatch if wrong else TransferError
        raise kind("; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())) from local


class RankCopyEvent(RankEvent):
    """The event of a copy on every rank."""

    local: CopyEvent

    def checksums(self) -> tuple[int, ...]:
        """See `CopyEvent.checksums`; each is the ranks' own checksums side by side (see `split_checksums`)."""
        own = self.local.checksums()
        if not own or not self.acks:
            return own
        columns = [own, *(self.acks[rank].checksums for rank in range(1, self._link.size))]
        return tuple(
            sum(checksum << _CHECKSUM_BITS * rank for rank, checksum in enumerate(row))
            for row in zip(*columns, strict=True)
        )

    def _raise_failure(self, local: TransferError | None) -> None:
        super()._raise_failure(local)
        wanted = len(self.local.checksums())
        for rank, ack in self.acks.items():
            if len(ack.checksums) != wanted:
                raise TransferError(f"rank {rank}: {len(ack.checksums)} checksums of a copy, {wanted} are due")


def split_checksums(checksums: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """What `rank` had hashed: bits `[32 * rank, 32 * rank + 32)` of each. The core keeps them together, unread."""
    mask = (1 << _CHECKSUM_BITS) - 1
    return tuple(checksum >> _CHECKSUM_BITS * rank & mask for checksum in checksums)


class RankPromise:
    """A promise that every rank's streams can wait for."""

    def __init__(self, link: Link, number: int, local: Promise) -> None:
        self.number = number
        self.local = local
        self.failure = ""
        self._link = link
        self._is_set = False

    def set(self, error: BaseException | None = None) -> None:
        """See `Promise.set`: on every rank."""
        with self._link.lock:
            if self._is_set:
                return
            self._is_set = True
            if error is not None:
                self.failure = str(error) or repr(error)
            self._link.tell(messages.SetPromise(self.number, self.failure))
        self.local.set(error)

    def gate(self) -> int:
        """How workers are told of it: its number while it is open, 0 when it is kept, -1 when it failed."""
        if not self._is_set:
            return self.number
        return -1 if self.failure else 0

    def query(self) -> bool:
        return self.local.query()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`: on this rank."""
        return self.local.wait(timeout_s)
