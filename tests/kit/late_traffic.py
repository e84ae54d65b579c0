"""Random traffic on a pool whose streams run late, in an order that a seed chooses."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from unittest.mock import patch

import anyio

from swapkv import HostDevice, KVDtype, KVLayout, Pool, SequenceState, SwapConfig, SwapError, Verify, open_pool
from swapkv.config import SECOND_NS
from swapkv.fsm import commands
from swapkv.stepped import SteppedPool, open_stepped_pool
from tests.kit.deferred import DeferredDevice, DeferredReaper, poison_after_events
from tests.kit.late_writing import LateWriter

PAGES = 11
HOST_CHUNKS = 14
MAX_TOKENS = 24
NAMES = ("a", "b", "c", "d")


def layout_of(rng: Random) -> KVLayout:
    windows = rng.choice([None, [None, 7]])
    return KVLayout.dense(
        num_layers=2, num_kv_heads=1, head_dim=2, dtype=KVDtype.FLOAT32, page_size=4, chunk_tokens=8, windows=windows
    )


def config_of(rng: Random) -> SwapConfig:
    """`copy_deadline_ns`: no copy hangs here, however long the test is interrupted."""
    return SwapConfig(
        segment_bytes=rng.choice([1, 1 << 20]),
        verify=rng.choice(list(Verify)),
        ops_per_lane=rng.choice([2, 64]),
        copy_deadline_ns=3600 * SECOND_NS,
    )


def host_bytes(layout: KVLayout) -> int:
    return HOST_CHUNKS * max(layout.chunk_bytes(g) for g in range(len(layout.groups)))  # type: ignore[arg-type]


class SteppedTraffic:
    """One seed's worth of calls on a `SteppedPool`."""

    def __init__(self, seed: int, pool: SteppedPool, device: DeferredDevice) -> None:
        self.rng = Random(seed)
        self.pool = pool
        self.device = device
        self.writer = LateWriter(pool)
        self.streams = [pool.compute, device.create_stream("compute-2")]
        self.gated: dict[str, GatedForward] = {}
        poison_after_events(pool)

    def run(self, actions: int) -> None:
        """Act at random, then bring everybody back once, and see that nothing is left."""
        calls = [self.forward, self.forward, self.move, self.move, self.edit, self.poll]
        for _ in range(actions):
            if self.rng.random() < 0.4:
                self.device.run_one(self.rng)
            else:
                with suppress(SwapError):  # a call that the moment does not allow
                    self.rng.choice(calls)()
        self.come_to_rest()
        for name in list(self.writer.tokens):
            self.put_away(name)
        for name in list(self.writer.tokens):
            self.bring_back(name)
            with self.pool.forward({name: 0}) as forward:
                self.writer.launch(forward, {name: 0})
            self.put_away(name)
        for name in list(self.writer.tokens):
            self.pool.finish(name)
            del self.writer.tokens[name]
        self.come_to_rest()
        self.writer.verify()
        nothing_is_left(self.pool)

    def forward(self) -> None:
        names = self.rng.sample(NAMES, self.rng.randint(1, 2))
        if any(self.pool.state(name) is SequenceState.PREFETCHING for name in names):
            return
        appends = {name: self.rng.choice([0, 1, 3, 5]) for name in names}
        with self.pool.forward(appends, stream=self.rng.choice(self.streams)) as forward:
            self.writer.launch(forward, appends)
            if self.rng.random() < 0.3:
                with suppress(SwapError):
                    self.forward()

    def move(self) -> None:
        pool = self.pool
        moves = [pool.preempt, pool.restore, pool.preempt, pool.restore, pool.cancel_preempt, pool.cancel_restore]
        self.rng.choice(moves)(self.rng.choice(NAMES))

    def edit(self) -> None:
        name, other = self.rng.sample(NAMES, 2)
        if name not in self.writer.tokens:
            self.writer.register(name, MAX_TOKENS)
        elif self.rng.random() < 0.4:
            self.writer.truncate(name, max(0, self.pool.tokens(name) - self.rng.randint(0, 3)))
        elif other not in self.writer.tokens:
            self.writer.fork(name, other, MAX_TOKENS)
        elif self.rng.random() < 0.3:
            self.pool.finish(name)
            del self.writer.tokens[name]

    def poll(self) -> None:
        """Take in the news; a forward may follow a restore layer by layer."""
        for news in self.pool.poll():
            gated = self.gated.get(getattr(news, "sequence", ""))
            if isinstance(news, commands.PagesReady) and self.rng.random() < 0.5:
                with suppress(SwapError):  # it shares its tail, or pages are short
                    self.gated[news.sequence] = GatedForward(self, news.sequence)
            elif gated is not None and isinstance(news, commands.LayerReady):
                gated.launch(news.layer)
            elif gated is not None and isinstance(news, commands.Restored | commands.LayersLost):
                del self.gated[news.sequence]
                gated.end(void=isinstance(news, commands.LayersLost))
        for name in self.writer.tokens:
            self.if_dropped(name)

    def come_to_rest(self) -> None:
        self.settle()
        for name in [n for n in self.writer.tokens if self.pool.state(n) is SequenceState.PREFETCHING]:
            self.pool.cancel_restore(name)  # it waits for pages
        self.settle()
        assert self.pool.idle()
        assert not self.gated

    def settle(self) -> None:
        """Let all that is under way end by itself."""
        self.poll()
        while self.device.run_one(self.rng) or self.gated:
            self.poll()

    def put_away(self, name: str) -> None:
        if self.pool.state(name) in (SequenceState.GPU_RESIDENT, SequenceState.GPU_READY):
            self.pool.preempt(name)
            self.come_to_rest()
        self.if_dropped(name)

    def bring_back(self, name: str) -> None:
        if self.pool.state(name) is SequenceState.OFFLOADED:
            self.pool.restore(name)
            self.come_to_rest()
        assert self.pool.state(name) is not SequenceState.OFFLOADED, f"{name} alone does not come back"

    def if_dropped(self, name: str) -> None:
        if self.pool.state(name) is SequenceState.EVICTED:
            self.pool.reset(name)
            self.writer.tokens[name].clear()


class GatedForward:
    """A forward of a sequence that is being restored: each of its layers is launched when it has landed."""

    def __init__(self, traffic: SteppedTraffic, name: str) -> None:
        self.name = name
        self.writer = traffic.writer
        self.stack = ExitStack()
        stream = traffic.rng.choice(traffic.streams)
        self.forward = self.stack.enter_context(traffic.pool.forward({name: 1}, stream=stream))
        self.parts = self.writer.begin(self.forward, {name: 1})

    def launch(self, layer: int) -> None:
        self.writer.launch_layer(self.forward, self.parts, layer)

    def end(self, *, void: bool) -> None:
        if void:
            with suppress(ZeroDivisionError), self.stack:
                raise ZeroDivisionError
            self.writer.cut(self.name)
        else:
            self.stack.close()


class PoolTraffic:
    """One seed's worth of tasks on a `Pool`, one for each sequence; a deferred device is let go on beside them."""

    def __init__(self, seed: int, pool: Pool, device: HostDevice) -> None:
        self.rng = Random(seed)
        self.pool = pool
        self.device = device
        self.writer = LateWriter(pool)
        self.streams = [pool.compute, device.create_stream("compute-2")]
        self.at_work = 0
        poison_after_events(pool)

    async def run(self, actions: int) -> None:
        """Let every task act at random and finish its sequence, then see that nothing is left."""
        self.at_work = len(NAMES)
        async with anyio.create_task_group() as group:
            for name in NAMES:
                group.start_soon(self.live, name, actions)
            if isinstance(self.device, DeferredDevice):
                await self.let_go(self.device)
        if not isinstance(self.device, DeferredDevice):
            for stream in self.streams:
                await self.pool._driver.reached(stream.record())
        self.writer.verify()
        nothing_is_left(self.pool)
        assert not self.pool._driver.waiters._by_place, str(self.pool._driver.waiters._by_place)
        assert not self.pool._driver.restores

    async def let_go(self, device: DeferredDevice) -> None:
        """Let one operation run, or one end be told, again and again."""
        idle = 0
        while self.at_work or idle < 20:
            for _ in range(self.rng.randint(1, 3)):
                await anyio.lowlevel.checkpoint()
            moves: list[Callable[[Random], bool]] = [device.run_one, DeferredReaper.report_one]
            self.rng.shuffle(moves)
            idle = 0 if any(move(self.rng) for move in moves) else idle + 1
            assert idle < 1000, "nothing is under way, and somebody waits"

    async def live(self, name: str, actions: int) -> None:
        """The life of one sequence."""
        self.writer.register(name, MAX_TOKENS)
        for _ in range(actions):
            calls = [self.append, self.append, self.preempt, self.resume, self.gated, self.cancelled, self.take_back]
            with suppress(SwapError):  # a call that the moment does not allow
                await self.rng.choice(calls)(name)
            self.if_dropped(name)
        if self.pool.state(name) is SequenceState.OFFLOADED:
            await self.pool.resume(name)
        await self.append(name, 0)
        await self.pool.finish(name)
        del self.writer.tokens[name]
        self.at_work -= 1

    async def append(self, name: str, more: int | None = None) -> None:
        more = self.rng.choice([0, 1, 3, 5]) if more is None else more
        async with self.pool.forward({name: more}, stream=self.rng.choice(self.streams)) as forward:
            launched = self.writer.launch(forward, {name: more})
            if self.rng.random() < 0.2:
                await self.pool._driver.reached(launched)

    async def preempt(self, name: str) -> None:
        await self.pool.preempt(name)

    async def resume(self, name: str) -> None:
        await self.pool.resume(name)

    async def gated(self, name: str) -> None:
        """A forward that follows its restore layer by layer."""
        try:
            async with self.pool.restoring(name) as coming:
                if self.rng.random() < 0.2:
                    raise ZeroDivisionError
                async with self.pool.forward({name: 1}) as forward:
                    parts = self.writer.begin(forward, {name: 1})
                    for layer in range(self.pool.layout.num_layers):
                        coming.gate(layer, forward.stream)
                        self.writer.launch_layer(forward, parts, layer)
                if self.rng.random() < 0.2:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            self.writer.cut(name)

    async def cancelled(self, name: str) -> None:
        """A call that is cancelled after a while, unless it is over by then."""
        call = self.rng.choice([self.preempt, self.resume, self.append])
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def within() -> None:
                with scope, suppress(SwapError):
                    await call(name)

            group.start_soon(within)
            for _ in range(self.rng.randint(0, 30)):
                await anyio.lowlevel.checkpoint()
            scope.cancel()
        self.writer.cut(name)

    async def take_back(self, name: str) -> None:
        self.writer.truncate(name, max(0, self.pool.tokens(name) - self.rng.randint(0, 3)))

    def if_dropped(self, name: str) -> None:
        if self.pool.state(name) is SequenceState.EVICTED:
            self.pool.reset(name)
            self.writer.tokens[name].clear()


def nothing_is_left(pool: Pool | SteppedPool) -> None:
    """No page, no host byte, no fence and no forward."""
    core = pool._core
    core.check()
    assert not core.sequences
    assert not core.chunks
    assert not core.ops
    assert core.host.used == 0
    for group in core.groups():
        assert core.ledger.free(group) == core.ledger.total(group)
    assert not pool._executor._fences
    assert not pool._executor._forwards


@contextmanager
def deferred_stepped_pool(seed: int) -> Iterator[SteppedTraffic]:
    rng, device = Random(seed), DeferredDevice()
    layout = layout_of(rng)
    with open_stepped_pool(
        layout, num_pages=PAGES, host_bytes=host_bytes(layout), device=device, config=config_of(rng)
    ) as pool:
        yield SteppedTraffic(seed, pool, device)


async def run_pool_traffic(seed: int, actions: int, device: HostDevice) -> None:
    """On a `DeferredDevice`, with `DeferredReaper` in the place of the driver's reapers, or on one with threads."""
    DeferredReaper.made.clear()
    rng = Random(seed)
    layout = layout_of(rng)
    async with open_pool(
        layout, num_pages=PAGES, host_bytes=host_bytes(layout), device=device, config=config_of(rng)
    ) as pool:
        await PoolTraffic(seed, pool, device).run(actions)


def run_late_stepped(seed: int) -> None:
    """One seed on a `SteppedPool`. Raises `AssertionError` for the first thing that reads something else."""
    with deferred_stepped_pool(seed) as traffic:
        traffic.run(250)


def run_late_async(seed: int) -> None:
    """One seed on a `Pool`, on asyncio. Raises `AssertionError` for the first thing that reads something else."""
    with patch("swapkv.driver.Reaper", DeferredReaper):
        anyio.run(run_pool_traffic, seed, 15, DeferredDevice())
