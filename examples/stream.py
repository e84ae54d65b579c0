"""Two sequences in every step on pages for one and a third: older KV is in host memory and streams through a small ring.

Run it: `python examples/stream.py`.
"""

import anyio
import torch

import swapkv
from swapkv.attention import Rules, Step, StepRow, Streamer, write_pages
from swapkv.layout import PageOrder

LAYERS, HEADS, DIM, PAGE, NAMES = 2, 4, 64, 16, ("a", "b")
layout = swapkv.KVLayout.dense(
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype=swapkv.KVDtype.FLOAT32,
    page_size=PAGE,
    chunk_tokens=256,
)
rules = Rules(order=PageOrder.NHD, page_size=PAGE, unit_splits=1)


async def main() -> int:
    """Grow both to 768 tokens, 128 a step; return the bytes that were streamed."""
    device = swapkv.HostDevice()
    async with swapkv.open_pool(layout, num_pages=64, host_bytes=64 << 20, device=device) as pool:
        planes = [[pool.memory.plane(layer, name) for name in ("k", "v")] for layer in range(LAYERS)]
        streamer = Streamer(device, planes[0], rules, depth=2)  # two buffers of 256 tokens: all that streaming takes
        for name in NAMES:
            pool.register(name, max_tokens=768)
        while pool.tokens("a") < 768:
            try:
                await step(pool, streamer, planes, 128)
            except swapkv.PagesExhausted:
                for name in NAMES:
                    await pool.spill(name)  # whole chunks leave the device; the sequence runs on
        owned = pool.statistics().pages[0].owned
        print(f"2 x {pool.tokens('a')} tokens, 96 pages of KV, {owned} of them on the device")
        return streamer.counts.bytes_streamed


async def step(pool: swapkv.Pool, streamer: Streamer, planes: list[list[torch.Tensor]], count: int) -> None:
    """One forward: the new tokens of each sequence attend to all before them, wherever those are."""
    async with pool.forward(dict.fromkeys(NAMES, count)) as forward:
        start = forward.tokens("a")
        kvs = {name: [forward.layer_kv(name, layer, planes[layer]) for layer in range(LAYERS)] for name in NAMES}

        def run() -> None:
            rows = [StepRow(start=start, num_tokens=count, kv=kv.__getitem__) for kv in kvs.values()]
            attention = Step(streamer, rows, LAYERS, lambda layer: rules)
            for layer in range(LAYERS):
                for row, kv in enumerate(kvs.values()):
                    query, *new = torch.randn(3, count, HEADS, DIM)  # your model's projections
                    for plane, values in zip(planes[layer], new, strict=True):
                        write_pages(plane, values, kv[layer].page_table, start, PageOrder.NHD)
                    attention.attend(layer, row, query, forward.stream)

        await forward.run(run)


if __name__ == "__main__":
    print(f"{anyio.run(main):,} bytes streamed")
