"""Ranks for tests: channels in memory, workers in threads or processes, and a worker that says what a test tells it to."""

import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from swapkv import Forward, KVDtype, KVLayout, SwapConfig
from swapkv.ids import GroupId
from swapkv.ranks import (
    RankedPool,
    RankedSteppedPool,
    RankGroup,
    RankLost,
    RankOptions,
    RankWorker,
    WorkerForward,
    open_ranked_stepped_pool,
)
from swapkv.ranks.agreement import layout_fields
from swapkv.ranks.messages import Ack, Alive, Hello, Message, Outcome, Record, SubmitCopy
from swapkv.ranks.wire import decode, encode
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.writing import token_bytes

M = TypeVar("M")

LONG_S = 60.0
LAYOUT = KVLayout.dense(
    num_layers=3,
    num_kv_heads=1,
    head_dim=8,
    dtype=KVDtype.FLOAT32,
    page_size=4,
    chunk_tokens=8,
    windows=[None, 6, None],
)
CONFIG = SwapConfig(segment_bytes=512)
PAGES = 14
HOST_BYTES = 1 << 14
CHUNK_BYTES = LAYOUT.chunk_bytes(GroupId(0))
PATIENT = RankOptions(heartbeat_s=0.5, deadline_s=LONG_S, start_timeout_s=LONG_S)


class MemoryChannel:
    """A `Channel` within one process. `mute`: what is sent from here on is swallowed, as by a process that was stopped."""

    def __init__(self, inbox: "queue.Queue[bytes | None]", outbox: "queue.Queue[bytes | None]") -> None:
        self.mute = False
        self._inbox = inbox
        self._outbox = outbox
        self._closed = False

    def send(self, frame: bytes, timeout_s: float) -> None:
        if self._closed:
            raise ConnectionError("the channel is closed")
        if not self.mute:
            self._outbox.put(frame)

    def receive(self, timeout_s: float) -> bytes:
        try:
            frame = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {timeout_s} s") from None
        if frame is None:
            self._inbox.put(None)
            raise ConnectionError("the other end hung up")
        return frame

    def close(self) -> None:
        self._closed = True
        for end in (self._inbox, self._outbox):
            end.put(None)


def memory_ranks(size: int, options: RankOptions = PATIENT) -> list[RankGroup]:
    """The groups of `size` ranks, the leader's first."""
    leader: dict[int, MemoryChannel] = {}
    workers = []
    for rank in range(1, size):
        up: queue.Queue[bytes | None] = queue.Queue()
        down: queue.Queue[bytes | None] = queue.Queue()
        leader[rank] = MemoryChannel(up, down)
        worker = {0: MemoryChannel(down, up)}
        workers.append(RankGroup(rank=rank, size=size, channels=worker, options=options))
    return [RankGroup(rank=0, size=size, channels=leader, options=options), *workers]


class ScriptedRank:
    """A worker that does nothing by itself: the test reads what it is told, and says what it answers."""

    def __init__(self, group: RankGroup) -> None:
        self.rank = group.rank
        self.channel = group.channels[0]
        self._size = group.size
        self._heard: list[Message] = []

    def hello(self, layout: KVLayout, pages: Sequence[int], host_bytes: int) -> None:
        self.say(Hello(self.rank, self._size, tuple(pages), host_bytes, layout_fields(layout)))

    def say(self, message: Message) -> None:
        self.channel.send(encode(message), LONG_S)

    def ack(self, number: int, outcome: Outcome = Outcome.DONE, checksums: tuple[int, ...] = (), why: str = "") -> None:
        self.say(Ack(number, outcome, checksums, why))

    def hear(self, kind: type[M] | tuple[type[M], ...]) -> M:
        """The next message of this kind, or of one of these; others are passed over."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            self._heard = [m for m in decode(self.channel.receive(LONG_S)) if not isinstance(m, Alive)]


class ObedientDevice(HostDevice):
    """Fails or holds up copies when it is told to."""

    def __init__(self, name: str = "host") -> None:
        super().__init__(name=name)
        self.failing: list[Work] = []
        self.held: dict[Work, threading.Event] = {}
        self.ran: list[Work] = []
        self.pinned = torch.empty(0, dtype=torch.uint8)

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        self.pinned = super().allocate_pinned(num_bytes)
        return self.pinned

    def execute(self, operation: Operation) -> None:
        if operation.work in self.held:
            self.held[operation.work].wait()
        if operation.work in self.failing:
            self.failing.remove(operation.work)
            raise OSError("link down")
        super().execute(operation)
        self.ran.append(operation.work)

    def hold(self, work: Work) -> None:
        self.held[work] = threading.Event()

    def let_go(self) -> None:
        for gate in self.held.values():
            gate.set()


class WorkerScript:
    """What a worker does with the payloads of `RanksWriter` and with orders: JSON, `do` names one of its methods."""

    def __init__(self, rank: int, device: ObedientDevice, layout: KVLayout) -> None:
        self._rank = rank
        self._device = device
        self._layout = layout

    def __call__(self, forward: WorkerForward) -> None:
        order: dict[str, Any] = json.loads(forward.payload)
        getattr(self, order.pop("do"))(forward, **order)

    def tokens(self, forward: WorkerForward, parts: list[dict[str, Any]], write: bool) -> None:
        """Write or compare the bytes of tokens; layer by layer, each after its gate if there are any."""

        def work() -> None:
            for layer in range(self._layout.num_layers):
                if forward.gates:
                    forward.gates[layer].wait()
                for part in parts:
                    each_token(self._layout, forward.memory.plane, self._rank, layer, write=write, **part)

        forward.launch(work)

    def nothing(self, forward: WorkerForward) -> None:
        pass

    def launch_nothing(self, forward: WorkerForward) -> None:
        forward.launch(lambda: None)

    def pass_gates(self, forward: WorkerForward) -> None:
        forward.launch(lambda: [gate.wait() for gate in forward.gates])

    def fail(self, forward: WorkerForward, work: str) -> None:
        self._device.failing.append(Work(work))

    def hold(self, forward: WorkerForward, work: str) -> None:
        self._device.hold(Work(work))

    def let_go(self, forward: WorkerForward) -> None:
        self._device.let_go()

    def damage(self, forward: WorkerForward, offset: int) -> None:
        """Flip the bits of a byte of the host tier; a second time flips them back."""
        self._device.pinned[offset] ^= 0xFF

    def refuse(self, forward: WorkerForward) -> None:
        raise ValueError("not today")

    def refuse_later(self, forward: WorkerForward) -> None:
        def work() -> None:
            raise ValueError("not tonight")

        forward.launch(work)


def each_token(
    layout: KVLayout,
    plane_of: Callable[[int, str], torch.Tensor],
    rank: int,
    layer: int,
    *,
    write: bool,
    tables: list[list[int]],
    owners: list[str],
    first: int,
    length: int,
) -> None:
    """Write or compare one layer's bytes of tokens `first` and on. `owners`: whose bytes each of them has."""
    group = layout.group_of_layer[layer]
    window = layout.groups[group].window
    for position, owner in enumerate(owners, first):
        if not write and window is not None and position < length - window:
            continue
        page = tables[group][position // layout.page_size]
        assert page >= 0, f"{owner} has no page for position {position}"
        for plane in layout.planes[layer]:
            place = plane_of(layer, plane.name)[page, position % layout.page_size].view(torch.uint8).view(-1)
            wanted = token_bytes(f"{owner}@{rank}", position, layer, plane.name, place.numel())
            if write:
                place.copy_(wanted)
            else:
                assert torch.equal(place, wanted), f"rank {rank}, {owner}: token {position} of layer {layer} is wrong"


class RanksWriter:
    """Runs forwards on every rank. Every token has other bytes on every rank, and they are read back."""

    def __init__(self, pool: RankedPool) -> None:
        self.pool = pool
        self.written: dict[str, list[str]] = {}

    async def append(self, **appends: int) -> None:
        """One forward that appends to each sequence."""
        async with self.pool.forward(appends) as forward:
            parts = [self._part(forward, name, self.pool.tokens(name), [name] * n) for name, n in appends.items()]
            await self._everywhere(forward, parts, write=True)
        for name, count in appends.items():
            self.written.setdefault(name, []).extend([name] * count)

    async def check(self, name: str) -> None:
        """A forward that reads every token of the sequence on every rank, and compares."""
        async with self.pool.forward({name: 0}) as forward:
            await self._everywhere(forward, [self._part(forward, name, 0, self.written[name])], write=False)

    async def order(self, do: str, **rest: object) -> None:
        """Tell every worker's script to do something, outside any forward."""
        event = self.pool.compute.run(json.dumps({"do": do, **rest}).encode(), ())  # type: ignore[attr-defined]
        await self.pool._driver.reached(event)
        event.wait(0)

    def part(self, forward: Forward, name: str) -> dict[str, object]:
        """All that the sequence holds."""
        return self._part(forward, name, 0, self.written[name])

    def _part(self, forward: Forward, name: str, first: int, owners: list[str]) -> dict[str, object]:
        tables = [table.tolist() for table in forward.page_tables(name)]
        return {"tables": tables, "owners": owners, "first": first, "length": forward.tokens(name)}

    async def _everywhere(self, forward: Any, parts: list[dict[str, Any]], *, write: bool) -> None:
        payload = json.dumps({"do": "tokens", "parts": parts, "write": write}).encode()
        event = self.pool.run_on_workers(forward, payload)
        layout = self.pool.layout

        def work() -> None:
            for layer in range(layout.num_layers):
                for part in parts:
                    each_token(layout, self.pool.memory.plane, 0, layer, write=write, **part)

        await forward.run(work)
        await self.pool._driver.reached(event)
        event.wait(0)


class Workers:
    """Real workers, each on a thread of this process. `ended[rank]`: what its `run` raised, None if it returned."""

    def __init__(
        self,
        layout: KVLayout,
        groups: Sequence[RankGroup],
        pages: int | Sequence[int],
        host_bytes: int,
        layouts: dict[int, KVLayout] | None = None,
    ) -> None:
        self.ended: dict[int, BaseException | None] = {}
        self.devices: dict[int, ObedientDevice] = {}
        self.workers: dict[int, RankWorker] = {}
        self._threads: list[threading.Thread] = []
        for group in groups[1:]:
            own = (layouts or {}).get(group.rank, layout)
            device = self.devices[group.rank] = ObedientDevice(f"host{group.rank}")
            script = WorkerScript(group.rank, device, own)
            worker = RankWorker(own, ranks=group, num_pages=pages, host_bytes=host_bytes, device=device, forward=script)
            self.workers[group.rank] = worker
            self._threads.append(threading.Thread(target=self._run, args=(group.rank, worker), daemon=True))
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for device in self.devices.values():
            device.let_go()
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), "a worker did not end"
        held = tuple(f"swapkv-{device.name}-" for device in self.devices.values())
        for thread in threading.enumerate():  # of streams that were abandoned while they were held up
            if thread.name.startswith(held):
                thread.join(LONG_S)

    def _run(self, rank: int, worker: RankWorker) -> None:
        try:
            worker.run()
            self.ended[rank] = None
        except BaseException as error:
            self.ended[rank] = error


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Whatever the block starts has ended when it is left."""
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("swapkv-")]
    assert not left, f"threads are left: {left}"


class Scripted:
    """A stepped pool whose workers are played by the test. `ranks[r]`: rank `r`, from 1."""

    def __init__(self, pool: RankedSteppedPool, ranks: dict[int, ScriptedRank]) -> None:
        self.pool = pool
        self.ranks = ranks
        self.link = pool.device.link

    def append(self, name: str, tokens: int) -> None:
        """A forward; every rank's part of it is over at once."""
        with self.pool.forward({name: tokens}):
            pass
        for rank in self.ranks.values():
            rank.ack(rank.hear(Record).number)
        self.settle()
        self.pool.poll()

    def copies(self) -> dict[int, list[SubmitCopy]]:
        """Every copy under way, as each rank is told of it. This rank's own part is over."""
        for work in itertools.chain(*self.pool._driver._work.values()):
            work.event.local.wait()  # type: ignore[attr-defined]
        count = sum(self.pool._core.inflight)
        return {number: [rank.hear(SubmitCopy) for _ in range(count)] for number, rank in self.ranks.items()}

    def settle(self) -> None:
        """All that the ranks have said has reached the pool: each says an odd, last thing, which is counted."""
        before = self.link.counters["unknown_acks"]
        for rank in self.ranks.values():
            rank.ack(1 << 40)
        with self.link.lock:
            wanted = before + len(self.ranks)
            assert self.link.lock.wait_for(lambda: self.link.counters["unknown_acks"] == wanted, LONG_S)

    def owned(self) -> list[int]:
        return [pages.owned for pages in self.pool.statistics().pages]

    def is_lost(self) -> None:
        """Wait until the pool has found a rank lost."""
        with self.link.lock:
            assert self.link.lock.wait_for(lambda: isinstance(self.link.end, RankLost), LONG_S)


@contextmanager
def scripted(size: int, config: SwapConfig = CONFIG, options: RankOptions = PATIENT) -> Iterator[Scripted]:
    groups = memory_ranks(size, options)
    ranks = {group.rank: ScriptedRank(group) for group in groups[1:]}
    for rank in ranks.values():
        rank.hello(LAYOUT, [PAGES] * 2, HOST_BYTES)
    with open_ranked_stepped_pool(
        LAYOUT, ranks=groups[0], num_pages=PAGES, host_bytes=HOST_BYTES, config=config
    ) as pool:
        pool.register("a", max_tokens=40)
        try:
            yield Scripted(pool, ranks)
        finally:
            for rank in ranks.values():  # they were only played: the pool need not wait for them
                rank.channel.close()
