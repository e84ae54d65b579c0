"""A worker: it does on its own device what the leader's core has decided, and says when it is done. It decides nothing."""

import queue
from collections.abc import Callable, Sequence

from swapkv.errors import MalformedMessage, ProtocolError, RankLost
from swapkv.layout import KVLayout
from swapkv.ranks import messages
from swapkv.ranks.agreement import hello, take_memory
from swapkv.ranks.hands import Hands, WorkerForward, page_bases
from swapkv.ranks.messages import Agreed, Message
from swapkv.ranks.peer import Peer, RankGroup
from swapkv.streams.base import Device
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory
from swapkv.tiers.host import HostArena
from swapkv.transfers import Transfers

CLOSE_TIMEOUT_S = 10.0
_INBOX = 8


class RankWorker:
    """A rank that follows. Its process makes one and calls `run`; the leader's is in `open_ranked_pool`.

    `num_pages`, `host_bytes`, `device`, `memory`: as in `open_pool`, of this rank. `forward`: called with each
    `WorkerForward` on the thread of `run`; it may take its time, but what the leader says next waits for it.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        ranks: RankGroup,
        num_pages: int | Sequence[int],
        host_bytes: int,
        device: Device | None = None,
        memory: PagedMemory | None = None,
        forward: Callable[[WorkerForward], None] | None = None,
    ) -> None:
        if ranks.rank == 0:
            raise ProtocolError("rank 0 leads: open its pool with open_ranked_pool")
        self._hello = hello(layout, ranks, num_pages, host_bytes, memory)
        self._layout = layout
        self._ranks = ranks
        self._device: Device = HostDevice(name=f"host{ranks.rank}") if device is None else device
        self._memory = memory
        self._forward = forward
        self._inbox: queue.Queue[Message | Exception] = queue.Queue(_INBOX * ranks.options.backlog_max)

    def run(self) -> None:
        """Serve the leader until it closes its pool; blocks. Call it once: it closes device and channel.

        Raises `ProtocolError` if the ranks do not fit together, `RankLost` if the leader is lost.
        """
        peer = Peer(0, self._ranks, self._hear, self._lost)
        try:
            peer.tell(self._hello)
            agreed = self._next()
            if isinstance(agreed, messages.Refused):
                raise ProtocolError(f"rank 0 lets rank {self._ranks.rank} go: {agreed.reason}")
            if isinstance(agreed, Agreed):
                self._serve(peer, agreed)
            elif not isinstance(agreed, messages.Close):
                raise MalformedMessage(f"rank 0 began with {type(agreed).__name__}")
        except BaseException as error:
            peer.tell(_failed(error))
            raise
        finally:
            self._device.close(CLOSE_TIMEOUT_S)
            peer.close(CLOSE_TIMEOUT_S)

    def _serve(self, peer: Peer, agreed: Agreed) -> None:
        memory, host_memory = take_memory(self._layout, agreed, self._device, self._memory)
        bases = page_bases(agreed.pages)
        arena = HostArena(self._layout, host_memory)
        transfers = Transfers(self._layout, memory, arena, self._device, agreed.verify, bases)
        hands = Hands(self._layout, self._ranks.rank, self._device, memory, transfers, agreed, peer.tell, self._forward)
        try:
            while not isinstance(message := self._next(), messages.Close):
                hands.carry_out(message)
        except BaseException as error:
            peer.tell(_failed(error))
            hands.close(CLOSE_TIMEOUT_S)
            raise
        peer.tell(messages.Bye(tuple(hands.close(message.timeout_ms / 1000))))

    def _next(self) -> Message:
        message = self._inbox.get()
        if isinstance(message, Exception):
            raise RankLost(
                f"rank 0 is lost ({type(message).__name__}: {message}): end this rank, start all of them anew"
            ) from message
        return message

    def _hear(self, rank: int, message: Message) -> None:
        try:
            self._inbox.put_nowait(message)
        except queue.Full:
            raise MalformedMessage(f"{self._inbox.maxsize} commands are more than a leader has under way") from None

    def _lost(self, rank: int, cause: Exception) -> None:
        """Nothing that is still queued matters any more."""
        while True:
            try:
                self._inbox.put_nowait(cause)
                return
            except queue.Full:
                self._inbox.queue.clear()


def _failed(error: BaseException) -> messages.Failed:
    return messages.Failed(f"{type(error).__name__}: {error}")
