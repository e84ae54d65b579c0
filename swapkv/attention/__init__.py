"""Exact attention over paged KV, and the merging of partial results. Experimental."""

from swapkv.attention.paged import attend, write_pages
from swapkv.attention.partial import LogBase, Partial, empty, merge

__all__ = ["LogBase", "Partial", "attend", "empty", "merge", "write_pages"]
