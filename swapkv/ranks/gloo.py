"""Channels between ranks over torch.distributed's gloo backend: point to point, a pair of ranks on a context of its own.

gloo takes a send when the other end has asked for it, and cannot recall a receive. What ends both is a broken pair, and
what breaks a pair is an operation that times out; so a pair shares its context with nobody else. No group is registered
with `torch.distributed`, and none has to be: ranks meet in a store.
"""

import struct
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed

from swapkv.errors import ProtocolError, RankLost
from swapkv.ranks.peer import RankGroup, RankOptions
from swapkv.ranks.wire import FRAME_BYTES_MAX

_SIZE = struct.Struct("<q")
_FRAMES, _BREAK = 0, 1
_dist: Any = torch.distributed  # its stubs leave out what is needed here


class Store(Protocol):
    """Any store of `torch.distributed`."""

    def add(self, key: str, amount: int, /) -> int: ...


def gloo_ranks(
    store: Store,
    *,
    rank: int,
    size: int,
    hostname: str | None = None,
    name: str = "swapkv",
    options: RankOptions | None = None,
) -> RankGroup:
    """The ranks of one pool, talking over gloo. Each of `size` ranks calls it; it blocks until all have.

    `store`: where they meet, such as a `torch.distributed.TCPStore` that rank 0 is the master of. `hostname`: what this
    rank is reached by (None: its host name, or the interface `GLOO_SOCKET_IFNAME` that torch looks at). `name`: of the
    pool, if one store serves several; pools of one name follow each other, and each rank opens all of them.
    Raises `ProtocolError` if torch has no gloo, `RankLost` naming a rank that does not come within `start_timeout_s`.
    """
    if not _dist.is_available() or not _dist.is_gloo_available():
        raise ProtocolError(
            "ranks over gloo need a torch with torch.distributed and gloo: install one, or another channel"
        )
    if not 0 <= rank < size:
        raise ProtocolError(f"rank={rank} must be within 0 to size - 1 = {size - 1}")
    options = RankOptions() if options is None else options
    turn = store.add(f"{name}/opened by rank {rank}", 1)
    channels: dict[int, GlooChannel] = {}
    for other in range(1, size) if rank == 0 else [0]:
        meeting = _dist.PrefixStore(f"{name}/{turn}/rank {max(rank, other)}", store)
        try:
            channels[other] = GlooChannel(_pair(meeting, min(rank, 1), hostname, options), other=min(other, 1))
        except RuntimeError as error:
            for channel in channels.values():
                channel.close()
            raise RankLost(f"rank {other} of {size} did not come: start all ranks ({error})") from error
    return RankGroup(rank=rank, size=size, channels=channels, options=options)


def _pair(store: Store, end: int, hostname: str | None, options: RankOptions) -> Any:
    gloo = _dist.ProcessGroupGloo
    settings = gloo._Options()
    settings._timeout = timedelta(seconds=options.start_timeout_s)
    settings._devices = [gloo.create_default_device() if hostname is None else gloo.create_device(hostname=hostname)]
    return gloo(store, end, 2, settings)


class GlooChannel:
    """See `Channel`. `pair`: a gloo context of two ends, `other` the one that is not this; it ends with the channel."""

    def __init__(self, pair: Any, *, other: int) -> None:
        self._pair: Any = pair
        self._other = other
        self._closing = threading.Lock()

    def send(self, frame: bytes, timeout_s: float) -> None:
        """See `Channel.send`."""
        pair = self._open_pair()
        for part in (_SIZE.pack(len(frame)), frame):
            tensor = torch.from_numpy(np.frombuffer(part, np.uint8).copy())
            try:
                pair.send([tensor], self._other, _FRAMES).wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise ConnectionError(f"sending {len(frame)} bytes: {error}") from error

    def receive(self, timeout_s: float) -> bytes:
        """See `Channel.receive`."""
        pair = self._open_pair()
        size: int = _SIZE.unpack(self._take(pair, _SIZE.size, timeout_s))[0]
        if not 0 < size <= FRAME_BYTES_MAX:
            raise ConnectionError(f"a frame of {size} bytes, {FRAME_BYTES_MAX} are allowed")
        return self._take(pair, size, timeout_s)

    def close(self) -> None:
        """See `Channel.close`. The context is gone once no other thread is in `send` or `receive`."""
        with self._closing:
            pair, self._pair = self._pair, None
            if pair is not None:
                with suppress(RuntimeError):
                    pair.recv([torch.empty(1, dtype=torch.uint8)], self._other, _BREAK).wait(timedelta(milliseconds=1))

    def _open_pair(self) -> Any:
        pair = self._pair
        if pair is None:
            raise ConnectionError("the channel is closed")
        return pair

    def _take(self, pair: Any, num_bytes: int, timeout_s: float) -> bytes:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            pair.recv([tensor], self._other, _FRAMES).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ConnectionError(f"nothing was received: {error}") from error
        return tensor.numpy().tobytes()
