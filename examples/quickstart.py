"""A scheduler in twenty lines: three requests take turns on pages for one, and nothing is computed twice.

Run it: `python examples/quickstart.py`.
"""

import anyio

import swapkv

layout = swapkv.KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=16, dtype=swapkv.KVDtype.FLOAT32)


async def main() -> dict[str, int]:
    async with swapkv.open_pool(layout, num_pages=8, host_bytes=64 << 20) as pool:
        for name in ("a", "b", "c"):
            pool.register(name, max_tokens=128)

        for _turn in range(4):
            for name in ("a", "b", "c"):
                await pool.resume(name)  # back on the device, byte for byte (new: nothing to do)
                async with pool.forward({name: 32}) as forward:  # pages for 32 more tokens
                    rows = forward.page_tables(name)[0]  # which rows of pool.memory are its pages
                    await forward.run(lambda rows=rows: pool.memory.plane(0, "k")[rows].sum())  # your kernels
                await pool.preempt(name)  # off the device; only new pages are copied

        lengths = {name: pool.tokens(name) for name in ("a", "b", "c")}
        for name in lengths:
            await pool.finish(name)
        print(lengths, pool.statistics().counters)
        return lengths


if __name__ == "__main__":
    anyio.run(main)
