"""Ranks as two processes on gloo: the same commands on both, other bytes in each, and a rank that dies."""

import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import anyio
import attrs
import pytest
import torch.distributed as dist

from swapkv import (
    ChunkState,
    HostTierFull,
    KVDtype,
    KVLayout,
    PreemptOutcome,
    ProtocolError,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
)
from swapkv.config import HostFull
from swapkv.ranks import RankGroup, RankLost, RankOptions, RankWorker, gloo_ranks, open_ranked_pool
from tests.kit.ranks import (
    HOST_BYTES,
    LAYOUT,
    LONG_S,
    PAGES,
    PATIENT,
    ObedientDevice,
    RanksWriter,
    WorkerScript,
    no_thread_left,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch has no gloo"),
]

SLOTS_BYTES = sum(LAYOUT.chunk_bytes(g) for g in range(2))  # type: ignore[arg-type]
LOOPBACK = "127.0.0.1"
HASTY = RankOptions(heartbeat_s=0.1, deadline_s=3.0, start_timeout_s=60)


class GlooPair:
    """Two processes that meet over the loopback: this one leads, a child is rank 1. Rounds: a pool each.

    The child takes the arguments of each round from the store, as JSON; None ends it.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._start()

    def begin(self, options: RankOptions = PATIENT, **rest: int) -> RankGroup:
        """Begin a round: the child makes a worker with the arguments `rest`. Returns this process's side."""
        if not self._child.is_alive():
            self._start()
        self._tell({**rest, "options": attrs.asdict(options)})
        return gloo_ranks(self._store, rank=0, size=2, hostname=LOOPBACK, options=options)

    def strike(self, blow: signal.Signals) -> None:
        """Send the child a signal."""
        assert self._child.pid is not None
        os.kill(self._child.pid, blow)
        if blow is signal.SIGKILL:
            self._child.join(LONG_S)

    def ended(self) -> str:
        """How the child's side of the last round ended: what it raised, or ""."""
        return str(self._store.get(f"end {self._rounds}").decode())

    def close(self) -> None:
        """End the child."""
        if self._child.is_alive():
            self._tell(None)
        self._child.join(LONG_S)
        assert not self._child.is_alive()

    def _start(self) -> None:
        self._rounds = 0
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        self._child = spawn.Process(target=serve_rounds, args=(self._store.port, self._layout), daemon=True)
        self._child.start()

    def _tell(self, arguments: dict[str, Any] | None) -> None:
        self._rounds += 1
        self._store.set(f"round {self._rounds}", json.dumps(arguments))


def serve_rounds(port: int, layout: KVLayout) -> None:
    """The child of a `GlooPair`."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    for number in itertools.count(1):
        arguments: dict[str, Any] | None = json.loads(store.get(f"round {number}"))
        if arguments is None:
            return
        options = RankOptions(**arguments.pop("options"))
        ranks = gloo_ranks(store, rank=1, size=2, hostname=LOOPBACK, options=options)
        device = ObedientDevice("host1")
        script = WorkerScript(1, device, layout)
        ended = ""
        try:
            with no_thread_left():
                RankWorker(layout, ranks=ranks, device=device, forward=script, **arguments).run()
        except (Exception, AssertionError) as error:
            ended = f"{type(error).__name__}: {error}"
        store.set(f"end {number}", ended)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    with no_thread_left():
        yield


@pytest.fixture(scope="module")
def pair() -> Iterator[GlooPair]:
    pair = GlooPair(LAYOUT)
    yield pair
    pair.close()


async def test_bytes_of_both_ranks_come_back(pair: GlooPair) -> None:
    ranks = pair.begin(num_pages=PAGES, host_bytes=HOST_BYTES)
    config = SwapConfig(segment_bytes=512, verify=Verify.CRC32)
    async with open_ranked_pool(LAYOUT, ranks=ranks, num_pages=PAGES, host_bytes=HOST_BYTES, config=config) as pool:
        writer = RanksWriter(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=40)
        await writer.append(a=13, b=3)
        for more in (2, 9):
            assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
            await writer.append(b=more)
            await pool.resume("a")
            await writer.check("a")
            await writer.append(a=more)
        await writer.check("b")
        await pool.finish("a")
    assert pair.ended() == ""


async def test_host_pool_that_is_a_chunk_smaller_on_one_rank_binds_both(pair: GlooPair) -> None:
    ranks = pair.begin(num_pages=PAGES, host_bytes=SLOTS_BYTES)
    config = SwapConfig(host_full=HostFull.REFUSE)
    async with open_ranked_pool(
        LAYOUT, ranks=ranks, num_pages=PAGES, host_bytes=2 * SLOTS_BYTES, config=config
    ) as pool:
        assert pool.statistics().host_bytes_total == SLOTS_BYTES
        writer = RanksWriter(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=8)
        await writer.append(a=8, b=8)
        await pool.preempt("a")
        with pytest.raises(HostTierFull):
            await pool.preempt("b")
        await writer.check("b")
        await pool.resume("a")
        await writer.check("a")
        await pool.preempt("b")
        await pool.resume("b")
        await writer.check("b")
    assert pair.ended() == ""


async def test_slow_rank_keeps_the_pages_held_until_it_has_ended(pair: GlooPair) -> None:
    ranks = pair.begin(num_pages=PAGES, host_bytes=HOST_BYTES)
    async with open_ranked_pool(LAYOUT, ranks=ranks, num_pages=PAGES, host_bytes=HOST_BYTES) as pool:
        writer = RanksWriter(pool)
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        await writer.order("hold", work="gather")
        seen: list[str] = []

        async def preempt() -> None:
            await pool.preempt("a")
            seen.append("preempted")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(preempt)
            await anyio.wait_all_tasks_blocked()
            owned = [pages.owned for pages in pool.statistics().pages]
            for event in list(pool.device.link._pending.values()):
                await anyio.to_thread.run_sync(event.local.wait)
            # another order goes there and back after the copies: had rank 1 ended them, it would have said so
            await writer.order("nothing")
            assert set(pool.chunk_states("a")) == {ChunkState.OFFLOADING}
            assert [pages.owned for pages in pool.statistics().pages] == owned
            seen.append("let go")
            await writer.order("let_go")
        assert seen == ["let go", "preempted"]
        await pool.resume("a")
        await writer.check("a")
    assert pair.ended() == ""


async def test_copy_that_fails_on_rank_1_fails_the_preempt_and_leaves_both_as_before(pair: GlooPair) -> None:
    ranks = pair.begin(num_pages=PAGES, host_bytes=HOST_BYTES)
    async with open_ranked_pool(LAYOUT, ranks=ranks, num_pages=PAGES, host_bytes=HOST_BYTES) as pool:
        writer = RanksWriter(pool)
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        await writer.order("fail", work="gather")
        with pytest.raises(TransferError, match=r"rank 1: .*link down"):
            await pool.preempt("a")
        assert pool.state("a") is SequenceState.GPU_RESIDENT
        await writer.check("a")
        await writer.append(a=3)
        await pool.preempt("a")
        await writer.order("fail", work="scatter")
        with pytest.raises(TransferError, match=r"rank 1: .*link down"):
            await pool.resume("a")
        await pool.resume("a")
        await writer.check("a")
    assert pair.ended() == ""


async def test_ranks_of_unlike_sizes_of_page_tables_are_refused_on_both(pair: GlooPair) -> None:
    ranks = pair.begin(num_pages=PAGES, host_bytes=HOST_BYTES)
    other = KVLayout.dense(num_layers=2, num_kv_heads=2, head_dim=8, dtype=KVDtype.FLOAT32, page_size=4, chunk_tokens=8)
    with pytest.raises(ProtocolError, match=r"groups: 1 on ranks \[0\], 2 on ranks \[1\]"):
        async with open_ranked_pool(other, ranks=ranks, num_pages=PAGES, host_bytes=HOST_BYTES):
            pass
    assert pair.ended().startswith("ProtocolError: rank 0 lets rank 1 go")


async def test_rank_without_others_is_the_ordinary_case() -> None:
    alone = gloo_ranks(dist.HashStore(), rank=0, size=1)
    async with open_ranked_pool(LAYOUT, ranks=alone, num_pages=PAGES, host_bytes=HOST_BYTES) as pool:
        writer = RanksWriter(pool)
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        await pool.preempt("a")
        await pool.resume("a")
        await writer.check("a")


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL])
async def test_rank_that_is_gone_is_lost_and_the_pool_closes(pair: GlooPair, blow: signal.Signals) -> None:
    """Killed, its connection breaks; stopped, only its silence tells."""
    ranks = pair.begin(HASTY if blow is signal.SIGSTOP else PATIENT, num_pages=PAGES, host_bytes=HOST_BYTES)
    async with open_ranked_pool(LAYOUT, ranks=ranks, num_pages=PAGES, host_bytes=HOST_BYTES) as pool:
        writer = RanksWriter(pool)
        pool.register("a", max_tokens=40)
        await writer.append(a=13)
        if blow is signal.SIGSTOP:
            pair.strike(blow)
        else:
            await writer.order("hold", work="gather")
        ends: list[RankLost] = []

        async def preempt() -> None:
            with pytest.raises(RankLost, match="rank 1 of 2 is lost") as raised:
                await pool.preempt("a")
            ends.append(raised.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(preempt)
            await anyio.wait_all_tasks_blocked()
            if blow is signal.SIGKILL:
                assert not ends
                pair.strike(blow)
        with pytest.raises(RankLost):
            pool.register("b", max_tokens=1)
    assert len(ends) == 1
    if blow is signal.SIGSTOP:
        pair.strike(signal.SIGCONT)
        assert pair.ended().startswith("RankLost: rank 0 is lost")


async def test_rank_that_does_not_come_is_named() -> None:
    options = RankOptions(heartbeat_s=0.1, deadline_s=1.0, start_timeout_s=0.5)
    with pytest.raises(RankLost, match="rank 1 of 2 did not come"):
        gloo_ranks(dist.HashStore(), rank=0, size=2, hostname=LOOPBACK, options=options)


def test_rank_beyond_the_size_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rank=2"):
        gloo_ranks(dist.HashStore(), rank=2, size=2)
