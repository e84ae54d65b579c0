"""Exact attention over paged KV, wherever the pages lie, and the merging of partial results. Experimental."""

from swapkv.attention.paged import attend, write_pages
from swapkv.attention.partial import LogBase, Partial, empty, merge
from swapkv.attention.pieces import Rules
from swapkv.attention.residency import HostRun, LayerKV
from swapkv.attention.ring import StreamCounts, Streamer
from swapkv.attention.roofline import Choice, Rates, choose, predict
from swapkv.attention.selection import KeyBounds, only_pages, relative_error, select_pages
from swapkv.attention.streaming import LayerWork, Step, StepRow, Strategy

__all__ = [
    "Choice",
    "HostRun",
    "KeyBounds",
    "LayerKV",
    "LayerWork",
    "LogBase",
    "Partial",
    "Rates",
    "Rules",
    "Step",
    "StepRow",
    "Strategy",
    "StreamCounts",
    "Streamer",
    "attend",
    "choose",
    "empty",
    "merge",
    "only_pages",
    "predict",
    "relative_error",
    "select_pages",
    "write_pages",
]
