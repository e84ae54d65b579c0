"""Channels between ranks over torch.distributed's gloo backend: point to point, a pair of ranks on a context of its own.

gloo takes a send when the other end has asked for it, and cannot recall a receive. What ends both is a broken pair, and
what breaks a pair is an operation that times out; so a pair shares its context with nobody else.
"""

import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from swapkv.errors import ProtocolError
from swapkv.ranks.peer import RankGroup, RankOptions
from swapkv.ranks.wire import FRAME_BYTES_MAX

_SIZE = struct.Struct("<q")
_FRAMES, _BREAK = 0, 1
_BROKEN = (RuntimeError, ValueError, KeyError)
"""What torch raises for a pair that is broken, and for a group that was destroyed meanwhile."""


def gloo_ranks(*, ranks: Sequence[int] | None = None, options: RankOptions | None = None) -> RankGroup:
    """The ranks of a pool, talking over gloo. Every one of them calls it, with the same arguments; it blocks.

    `ranks`: the global ranks of `torch.distributed`, the leader first; None: all. The default group may be of any
    backend, and is needed for this call only.
    Raises `ProtocolError` if `torch.distributed` has no gloo, is not initialized, or this process is not in `ranks`.
    """
    if not dist.is_available() or not dist.is_gloo_available() or not dist.is_initialized():
        raise ProtocolError("ranks need torch.distributed with gloo: call torch.distributed.init_process_group first")
    options = RankOptions() if options is None else options
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    if dist.get_rank() not in members:
        raise ProtocolError(f"this process is rank {dist.get_rank()}, not in ranks={members}: let members call only")
    rank = members.index(dist.get_rank())
    others = range(1, len(members)) if rank == 0 else [0]
    channels = {other: _channel(members, rank, other, options) for other in others}
    return RankGroup(rank=rank, size=len(members), channels=channels, options=options)


def _channel(members: Sequence[int], rank: int, other: int, options: RankOptions) -> "GlooChannel":
    worker = members[max(rank, other)]
    group = dist.new_group(
        [members[0], worker],
        backend="gloo",
        timeout=timedelta(seconds=options.start_timeout_s),
        use_local_synchronization=True,
    )
    return GlooChannel(group, members[other])


class GlooChannel:
    """See `Channel`. `group`: a gloo group of this process and the global rank `other` alone; it is destroyed at last."""

    def __init__(self, group: dist.ProcessGroup, other: int) -> None:
        self._group = group
        self._other = other
        self._closing = threading.Lock()
        self._closed = False

    def send(self, frame: bytes, timeout_s: float) -> None:
        """See `Channel.send`."""
        for part in (_SIZE.pack(len(frame)), frame):
            tensor = torch.from_numpy(np.frombuffer(part, np.uint8).copy())
            try:
                work = dist.isend(tensor, dst=self._other, group=self._group, tag=_FRAMES)
                assert work is not None
                work.wait(timedelta(seconds=timeout_s))
            except _BROKEN as error:
                raise ConnectionError(f"sending {len(frame)} bytes: {error}") from error

    def receive(self, timeout_s: float) -> bytes:
        """See `Channel.receive`."""
        size: int = _SIZE.unpack(self._take(_SIZE.size, timeout_s))[0]
        if not 0 < size <= FRAME_BYTES_MAX:
            raise ConnectionError(f"a frame of {size} bytes, {FRAME_BYTES_MAX} are allowed")
        return self._take(size, timeout_s)

    def close(self) -> None:
        """See `Channel.close`."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with suppress(*_BROKEN):
                self._take_within(1, timedelta(milliseconds=1), _BREAK)
            with suppress(*_BROKEN):
                dist.destroy_process_group(self._group)

    def _take(self, num_bytes: int, timeout_s: float) -> bytes:
        try:
            return self._take_within(num_bytes, timedelta(seconds=timeout_s), _FRAMES)
        except _BROKEN as error:
            raise ConnectionError(f"nothing was received: {error}") from error

    def _take_within(self, num_bytes: int, timeout: timedelta, tag: int) -> bytes:
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        work = dist.irecv(tensor, src=self._other, group=self._group, tag=tag)
        assert work is not None
        work.wait(timeout)
        return tensor.numpy().tobytes()
