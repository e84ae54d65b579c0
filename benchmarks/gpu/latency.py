"""What a preempt and a restore take, by context length: with clean copies only the tail has to move."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import anyio

from benchmarks.gpu.rows import MakeDevice, Row
from swapkv.ids import GroupId
from swapkv.layout import KVDtype, KVLayout
from swapkv.pool import Pool, open_pool

CONTEXTS = (1024, 8192, 32768)
REPEATS = 5


def swaps(make: MakeDevice, contexts: tuple[int, ...] = CONTEXTS, num_layers: int = 32) -> Iterator[Row]:
    """Llama-3.1-8B's KV: first and later preempts, and restores, to pages that can be granted."""
    layout = KVLayout.dense(
        num_layers=num_layers, num_kv_heads=8, head_dim=128, dtype=KVDtype.BFLOAT16, page_size=16, chunk_tokens=256
    )
    again = {}
    for context in contexts:
        first, again[context], restore = anyio.run(_swaps, make, layout, context)
        label = f"{context} tokens ({context * layout.page_bytes(GroupId(0)) // layout.page_size >> 20} MiB)"
        yield Row("latency", f"first preempt, {label}", first * 1e3, "ms")
        yield Row("latency", f"later preempt (clean but for one page), {label}", again[context] * 1e3, "ms")
        yield Row("latency", f"restore, {label}", restore * 1e3, "ms")
    shortest, longest = min(contexts), max(contexts)
    if shortest < longest:
        ratio = again[longest] / again[shortest]
        yield Row("latency", f"later preempt, {longest} over {shortest} tokens", ratio, "")


async def _swaps(make: MakeDevice, layout: KVLayout, context: int) -> tuple[float, float, float]:
    """Seconds of the first preempt, of later ones and of restores (medians)."""
    tokens = context + REPEATS + 1
    host_bytes = (-(-tokens // layout.chunk_tokens) + 1) * layout.chunk_bytes(GroupId(0))
    pages = layout.pages_for(tokens) + 1
    async with open_pool(layout, num_pages=pages, host_bytes=host_bytes, device=make()) as pool:
        pool.register("a", max_tokens=tokens)
        with pool.forward_nowait({"a": context}):
            pass
        first = await _timed(pool, "preempt")
        later, restores = [], []
        for _ in range(REPEATS):
            restores.append(await _timed(pool, "resume"))
            with pool.forward_nowait({"a": 1}):
                pass
            later.append(await _timed(pool, "preempt"))
        return first, median(later), median(restores)


async def _timed(pool: Pool, call: str) -> float:
    begin_s = perf_counter()
    await getattr(pool, call)("a")
    return perf_counter() - begin_s
