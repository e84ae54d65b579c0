"""Exact attention over paged KV, wherever the pages lie, and the merging of partial results. Experimental."""

from swapkv.attention.paged import attend, write_pages
from swapkv.attention.partial import LogBase, Partial, empty, merge
from swapkv.attention.pieces import Rules
from swapkv.attention.streaming import HostRun, LayerKV, Step, StepRow, Strategy, StreamCounts, Streamer

__all__ = [
    "HostRun",
    "LayerKV",
    "LogBase",
    "Partial",
    "Rules",
    "Step",
    "StepRow",
    "Strategy",
    "StreamCounts",
    "Streamer",
    "attend",
    "empty",
    "merge",
    "write_pages",
]
