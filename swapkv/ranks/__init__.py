"""Several ranks, one core: the leader decides, every rank executes, and what has ended is what all of them have ended.

    ranks = gloo_ranks(store, rank=rank, size=size)
    if ranks.rank == 0:
        async with open_ranked_pool(layout, ranks=ranks, num_pages=…, host_bytes=…) as pool:
            async with pool.forward({"a": 16}) as forward:
                done = pool.run_on_workers(forward, payload)
                …                                              # and this rank's own part
    else:
        RankWorker(layout, ranks=ranks, num_pages=…, host_bytes=…, forward=run_payload).run()

Each rank's checksums of a copy stay with the core as parts of one number, so that nothing but bytes of KV lives on a
worker: what a chunk is, where it lies and whether it is clean is known to the core alone.
"""

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
