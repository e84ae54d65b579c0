"""Everything that swapkv raises, by whose fault it is.

`ProtocolError`: the caller's. `BudgetExhausted`: nobody's, try again later. `TransferError`: the device's or a
tier's. `PoolClosed` and `PoolBroken`: the pool cannot serve any more. Messages name the value, the limit, the remedy.
"""


class SwapError(Exception):
    """The root of every error that swapkv raises on purpose."""


class ProtocolError(SwapError):
    """The caller asked for something that the present state does not allow. Nothing has changed."""


class UnknownSequence(ProtocolError):  # noqa: N818
    """No sequence of this name is registered."""


class NeverFits(ProtocolError):  # noqa: N818
    """The request is larger than the whole pool: waiting would not help."""


class IllegalTransition(ProtocolError):  # noqa: N818
    """The chunk's state has no such event. Reaching this through the public API is a bug of swapkv."""


class KVEvicted(ProtocolError):  # noqa: N818
    """The sequence's KV is gone; `reset` it and run its tokens again."""


class ChunkNotStored(ProtocolError):  # noqa: N818
    """The tier has no committed copy of this chunk, or not of this generation."""


class SlabMismatch(ProtocolError):  # noqa: N818
    """A slab file, or an extent of it, is not what was asked for; `field` names in what. It was not used."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class BudgetExhausted(SwapError):  # noqa: N818
    """Something is used up for now. Nothing has changed; try again later or free some."""


class PagesExhausted(BudgetExhausted):
    """Not enough free device pages: preempt or finish a sequence."""


class HostTierFull(BudgetExhausted):
    """Not enough room in the host tier: finish a sequence, enlarge `host_bytes`, or allow recompute."""


class DiskTierFull(BudgetExhausted):
    """No free extent of the slab is large enough: delete chunks, or make a larger slab."""


class SlabInUse(BudgetExhausted):
    """Another pool or process has the slab file open: close it there, or use another path."""


class WouldBlock(BudgetExhausted):
    """A `_nowait` call would have had to wait. Nothing has changed; use the call without `_nowait`."""


class TransferError(SwapError):
    """A copy failed. The KV is where it was before the copy began."""


class ChecksumMismatch(TransferError):  # noqa: N818
    """The bytes that came back are not those that were stored. They were not used."""


class DiskFault(TransferError):  # noqa: N818
    """The disk failed a read or write; `kind` is the name of its errno, or "short". Committed chunks stay as they are:
    try again, or look at the device (dmesg) and use another path."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class DiskNoSpace(DiskFault):
    """The file system is full, or a quota is (ENOSPC, EDQUOT): free some, or make a smaller slab."""


class DiskReadOnly(DiskFault):
    """The file may not be written (EACCES, EPERM, EROFS): give the process the right, or mount it for writing."""


class DiskVanished(DiskFault):
    """The file or its directory is gone (deleted, unmounted): what is written to it would be lost. Open a new slab."""


class DiskShort(DiskFault):
    """The disk moved fewer bytes than asked and then none: the file was cut, or the device is broken."""


class DrainTimeout(TransferError):  # noqa: N818
    """Copies in flight did not end in time; what they touch is quarantined, not reused."""


class MalformedMessage(TransferError):  # noqa: N818
    """What another rank sent is no message of this version. Nothing of it was used."""


class PoolClosed(SwapError):  # noqa: N818
    """The pool was closed, by `close()` or by leaving `open_pool`."""


class PoolBroken(SwapError):  # noqa: N818
    """An internal invariant or the device failed for good. The cause is chained; open a new pool."""


class RankLost(PoolBroken):
    """Another rank died, fell silent, or cannot go on; its message names the rank. Open a new pool on all ranks."""
