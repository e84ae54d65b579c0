"""Several ranks, one core: the leader decides, every rank executes, and what has ended is what all of them have ended."""

from swapkv.errors import RankLost
from swapkv.ranks.gloo import gloo_ranks
from swapkv.ranks.hands import WorkerForward
from swapkv.ranks.peer import Channel, RankGroup, RankOptions
from swapkv.ranks.pools import RankedPool, RankedSteppedPool, open_ranked_pool, open_ranked_stepped_pool
from swapkv.ranks.worker import RankWorker

__all__ = [
    "Channel",
    "RankGroup",
    "RankLost",
    "RankOptions",
    "RankWorker",
    "RankedPool",
    "RankedSteppedPool",
    "WorkerForward",
    "gloo_ranks",
    "open_ranked_pool",
    "open_ranked_stepped_pool",
]
