"""Preemption-aware KV cache swapping: serve more active requests than the GPU has KV memory for, byte for byte."""

from swapkv.config import HostFull, RestoreOrder, SwapConfig, Verify
from swapkv.errors import (
    BudgetExhausted,
    ChecksumMismatch,
    DrainTimeout,
    HostTierFull,
    KVEvicted,
    NeverFits,
    PagesExhausted,
    PoolBroken,
    PoolClosed,
    ProtocolError,
    SwapError,
    TransferError,
    UnknownSequence,
    WouldBlock,
)
from swapkv.forward import Forward
from swapkv.fsm.commands import PreemptOutcome
from swapkv.fsm.queries import SequenceState
from swapkv.fsm.transitions import ChunkState
from swapkv.layout import KVDtype, KVLayout, LayerGroup, PageOrder, Plane, PlaneSplit
from swapkv.observer import Observer
from swapkv.pool import Pool, open_pool
from swapkv.sessions import AsyncForward, Restoring
from swapkv.stepped import SteppedPool, open_stepped_pool
from swapkv.streams.host import HostDevice
from swapkv.streams.memory import PagedMemory

__all__ = [
    "AsyncForward",
    "BudgetExhausted",
    "ChecksumMismatch",
    "ChunkState",
    "DrainTimeout",
    "Forward",
    "HostDevice",
    "HostFull",
    "HostTierFull",
    "KVDtype",
    "KVEvicted",
    "KVLayout",
    "LayerGroup",
    "NeverFits",
    "Observer",
    "PageOrder",
    "PagedMemory",
    "PagesExhausted",
    "Plane",
    "PlaneSplit",
    "Pool",
    "PoolBroken",
    "PoolClosed",
    "PreemptOutcome",
    "ProtocolError",
    "RestoreOrder",
    "Restoring",
    "SequenceState",
    "SteppedPool",
    "SwapConfig",
    "SwapError",
    "TransferError",
    "UnknownSequence",
    "Verify",
    "WouldBlock",
    "open_pool",
    "open_stepped_pool",
]
