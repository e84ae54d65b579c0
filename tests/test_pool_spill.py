"""Sequences of a pool that run with a part of their KV in host memory: their bytes, and attention over them."""

from random import Random

import anyio
import pytest
import torch

from swapkv import KVDtype, KVLayout, SequenceState, SwapConfig, Verify, WouldBlock, open_pool, open_stepped_pool
from swapkv.attention.paged import attend, write_pages
from swapkv.attention.pieces import Rules
from swapkv.attention.residency import LayerKV
from swapkv.attention.ring import Streamer
from swapkv.attention.streaming import Step, StepRow, Strategy
from swapkv.forward import Forward
from swapkv.fsm.commands import Spilled
from swapkv.layout import PageOrder
from swapkv.pool import Pool
from swapkv.streams.host import HostDevice
from tests.kit.small_pool import pool_of, small_layout
from tests.kit.writing import Writer

BACKENDS = ("asyncio", "trio")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("windows", [None, [None, 6]])
def test_spilled_sequence_runs_on_with_every_byte(backend: str, windows: list[int | None] | None) -> None:
    async def main() -> None:
        config = SwapConfig(verify=Verify.CRC32, segment_bytes=256)
        async with pool_of(small_layout(windows=windows), config=config) as pool:
            writer = Writer(pool)
            pool.register("a", max_tokens=60)
            await writer.append({"a": 27})
            free = pool.statistics().pages[0].free
            await pool.spill("a", tokens=17)
            assert pool.state("a") is SequenceState.SPILLED
            assert pool.statistics().pages[0].free == free + 4
            await writer.append({"a": 9})
            await writer.check("a")
            await pool.spill("a")
            await writer.check("a")
            await pool.preempt("a")
            await pool.resume("a", spilled=8)
            assert pool.state("a") is SequenceState.SPILLED
            await writer.check("a")
            await pool.resume("a")
            assert pool.state("a") is SequenceState.GPU_READY
            await writer.check("a")

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("seed", range(20))
def test_spills_at_random_read_what_was_written(seed: int) -> None:
    async def main() -> None:
        random = Random(seed)
        async with pool_of(pages=14, config=SwapConfig(segment_bytes=64)) as pool:
            writer = Writer(pool)
            for name in ("a", "b"):
                pool.register(name, max_tokens=40)
                await writer.append({name: 9})
            for _ in range(40):
                name = random.choice("ab")
                tokens = pool.tokens(name)
                if random.random() < 0.4 and tokens < 40 and pool.statistics().pages[0].free:
                    await writer.append({name: 1})
                elif random.random() < 0.3:
                    await pool.resume(name, spilled=random.randrange(40)) if _fits(pool, name) else None
                elif random.random() < 0.2:
                    await pool.preempt(name)
                    await pool.resume(name, spilled=random.choice([8, 16, tokens]))
                else:
                    await pool.spill(name, tokens=random.choice([None, random.randrange(40)]))
                await writer.check(random.choice("ab"))

    anyio.run(main)


def _fits(pool: Pool, name: str) -> bool:
    return pool.statistics().pages[0].free * pool.layout.page_size >= pool.tokens(name)


def test_decodes_while_it_comes_back() -> None:
    async def main() -> None:
        device = HostDevice(link_bytes_per_s=40_000)
        async with pool_of(device=device, config=SwapConfig(segment_bytes=256)) as pool:
            writer = Writer(pool)
            pool.register("a", max_tokens=60)
            await writer.append({"a": 33})
            await pool.spill("a")
            steps = 0
            async with anyio.create_task_group() as group:
                group.start_soon(pool.resume, "a")
                await anyio.lowlevel.checkpoint()
                while pool.state("a") is SequenceState.PREFETCHING:
                    await writer.append({"a": 1})
                    await writer.check("a")
                    steps += 1
            assert steps >= 2
            await writer.check("a")

    anyio.run(main)


def test_spill_nowait_moves_nothing() -> None:
    async def main() -> None:
        async with pool_of() as pool:
            writer = Writer(pool)
            pool.register("a", max_tokens=40)
            await writer.append({"a": 20})
            with pytest.raises(WouldBlock, match="use `await spill`"):
                pool.spill_nowait("a")
            assert pool.state("a") is SequenceState.GPU_RESIDENT
            await pool.preempt("a")
            await pool.resume("a")
            pool.spill_nowait("a", tokens=8)
            pool.spill_nowait("a")
            assert pool.state("a") is SequenceState.SPILLED
            with pytest.raises(WouldBlock, match="use `await resume`"):
                pool.resume_nowait("a")
            pool.resume_nowait("a", spilled=16)
            await writer.check("a")

    anyio.run(main)


def test_stepped_pool_tells_when_a_spill_is_over() -> None:
    layout = small_layout()
    with open_stepped_pool(layout, num_pages=16, host_bytes=1 << 16) as pool:
        pool.register("a", max_tokens=40)
        with pool.forward({"a": 20}):
            pass
        pool.drain(10)
        pool.spill("a", tokens=16)
        assert any(isinstance(news, Spilled) and news.sequence == "a" for news in pool.drain(10))
        pool.restore("a")
        pool.drain(10)
        assert pool.state("a") is SequenceState.GPU_READY


HEADS, DIM, PAGE = 2, 16, 4


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("seed", range(4))
def test_attention_of_spilled_sequences_has_the_bits_of_resident_ones(strategy: Strategy, seed: int) -> None:
    """A batch that grows token by token, each sequence spilled as chance has it, against a pool with room for all."""

    async def main() -> None:
        random = Random(seed)
        layout = KVLayout.dense(
            num_layers=2, num_kv_heads=HEADS, head_dim=DIM, dtype=KVDtype.FLOAT32, page_size=PAGE, chunk_tokens=8
        )
        rules = Rules(order=PageOrder.NHD, page_size=PAGE, split_tokens=8, unit_splits=2)
        device = HostDevice()
        async with (
            open_pool(layout, num_pages=60, host_bytes=1 << 20, device=device) as pool,
            open_pool(layout, num_pages=90, host_bytes=0) as roomy,
        ):
            planes = [[pool.memory.plane(layer, name) for name in "kv"] for layer in range(2)]
            streamer = Streamer(device, planes[0], rules, depth=2)
            names = ("a", "b", "c")
            for name in names:
                pool.register(name, max_tokens=60)
                roomy.register(name, max_tokens=60)
            for step in range(14):
                counts = {name: random.choice([1, 1, 3, 9]) if step else 11 for name in names}
                inputs = {
                    name: [
                        torch.randn(3 * HEADS * counts[name], DIM).view(3, counts[name], HEADS, DIM) for _ in range(2)
                    ]
                    for name in names
                }
                if any(pool.tokens(name) + counts[name] > 60 for name in names):
                    break
                async with pool.forward(counts) as forward, roomy.forward(counts) as plain:
                    kvs = {n: [forward.layer_kv(n, layer, planes[layer]) for layer in range(2)] for n in names}
                    mine = await forward.run(
                        lambda kvs=kvs, forward=forward, inputs=inputs, counts=counts: streamed(
                            streamer, rules, forward, kvs, inputs, counts
                        )
                    )
                    other = await plain.run(lambda plain=plain, inputs=inputs: resident(roomy, plain, inputs))
                assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True)), step
                for name in names:
                    if random.random() < 0.5:
                        await pool.spill(name, tokens=random.choice([None, random.randrange(60)]))
            assert streamer.counts.bytes_streamed or strategy is not Strategy.STREAM

    def streamed(
        streamer: Streamer,
        rules: Rules,
        forward: Forward,
        kvs: dict[str, list[LayerKV]],
        inputs: dict[str, list[torch.Tensor]],
        counts: dict[str, int],
    ) -> list[torch.Tensor]:
        rows = [StepRow(start=forward.tokens(n), num_tokens=counts[n], kv=kvs[n].__getitem__) for n in kvs]
        step = Step(streamer, rows, 2, lambda layer: rules, strategy=lambda work: strategy)
        found = []
        for layer in range(2):
            for at, name in enumerate(kvs):
                kv, (query, key, value) = kvs[name][layer], inputs[name][layer]
                for plane, new in zip(kv.planes, (key, value), strict=True):
                    write_pages(plane, new, kv.page_table, forward.tokens(name), PageOrder.NHD)
                found.append(step.attend(layer, at, query, forward.stream))
        return found

    def resident(pool: Pool, forward: Forward, inputs: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        found = []
        for layer in range(2):
            for name in inputs:
                query, key, value = inputs[name][layer]
                table, start = forward.page_tables(name)[0], forward.tokens(name)
                keys, values = pool.memory.plane(layer, "k"), pool.memory.plane(layer, "v")
                write_pages(keys, key, table, start, PageOrder.NHD)
                write_pages(values, value, table, start, PageOrder.NHD)
                found.append(attend(query, keys, values, table, start, order=PageOrder.NHD, split_tokens=8))
        return found

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    anyio.run(main)
