"""A seeded run in virtual time, with faults: same seed, same trace; every request ends with what its twin has.

The memory is stamped, and a request's next token is a hash of everything that its forward reads: one wrong byte
anywhere changes all that follows.
"""

import hashlib
import zlib
from collections import Counter
from random import Random

import attrs

from swapkv.config import HostFull, RestoreOrder, SwapConfig, Verify
from swapkv.errors import ChecksumMismatch, PagesExhausted, SwapError, TransferError, WouldBlock
from swapkv.fsm import commands, events
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState, state_of
from swapkv.ids import Lane, SeqId, StepId
from swapkv.layout import KVLayout
from swapkv.simulate import VirtualCopier
from swapkv.stepdriver import StepDriver
from swapkv.streams.virtual import VirtualDevice

POISON = -1
LAYOUTS = (
    KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4),
    KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=4, page_size=1, chunk_tokens=4),
    KVLayout.dense(num_layers=3, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=8, windows=[5, None, 5]),
)


@attrs.frozen(kw_only=True)
class Faults:
    """Probabilities for each copy, by what goes wrong."""

    io_error: float = 0.0
    torn: float = 0.0
    bit_flip: float = 0.0
    lie: float = 0.0

    @classmethod
    def of(cls, rng: Random) -> "Faults":
        """Some of them, for one seed."""
        return cls(**{f.name: rng.choice([0.0, 0.02, 0.1]) for f in attrs.fields(cls)})


@attrs.define(eq=False)
class Job:
    """One request. `history`: the tokens so far, prompt first. `computing`: a forward of it is on the device."""

    name: SeqId
    arrives_ns: int
    prompt: int
    target: int
    aborts_at: int | None
    history: list[int] = attrs.field(factory=list)
    computing: bool = False
    done: bool = False
    gone: bool = False
    refused: bool = False


class StampMemory:
    """Device pages and host slots that hold a number for every token and layer."""

    def __init__(self, layout: KVLayout, rng: Random, faults: Faults) -> None:
        self._layout = layout
        self._rng = rng
        self._faults = faults
        self._pages: dict[tuple[int, int], list[int]] = {}
        self._slots: dict[tuple[int, int, int], list[int]] = {}
        self.injected: Counter[str] = Counter()

    def page(self, page: int, layer: int) -> list[int]:
        return self._pages.setdefault((page, layer), [POISON] * self._layout.page_size)

    def move(self, copy: commands.Copy) -> tuple[int, ...]:
        """Carry out one copy, or some of it, as the faults have it; with checksums, as the host device makes them."""
        if self._strikes("io_error"):
            raise TransferError("EIO")
        torn = self._strikes("torn")
        sums: list[int] = []
        for item in copy.items:
            checksums = iter(item.checksums)
            for layer in copy.layers:
                before = [next(checksums) for _ in self._layout.planes[layer]]
                if copy.lane is Lane.IN:
                    self._verify(item, layer, before)
                for index, page in enumerate(item.pages.tolist()):
                    if torn and self._rng.random() < 0.5:
                        raise TransferError("short count")
                    host = self._slot(item.host, layer, item.first + index)
                    device = self.page(page, layer)
                    source, target = (device, host) if copy.lane is Lane.OUT else (host, device)
                    target[:] = source
                if copy.lane is Lane.OUT:
                    sums += self._continue(item, layer, before)
        if copy.lane is Lane.OUT and self._strikes("bit_flip"):
            item = copy.items[0]
            self._slot(item.host, copy.layers[0], item.first)[0] ^= 1
        return tuple(sums)

    def clone(self, clone: commands.ClonePages) -> None:
        for layer in self._layout.groups[clone.group].layers:
            for source, target in zip(clone.source.tolist(), clone.target.tolist(), strict=True):
                self.page(target, layer)[:] = self.page(source, layer)

    def _verify(self, item: commands.CopyItem, layer: int, wanted: list[int]) -> None:
        pages = range(item.guard_first, item.guard_first + item.guard_pages)
        found = [self._hash(item, layer, pages, 0)] * len(wanted)
        if self._strikes("lie"):
            found[0] ^= 1  # the tier answers with other bytes than it was given
        if found != wanted:
            raise ChecksumMismatch(f"chunk {item.chunk}, layer {layer}")

    def _continue(self, item: commands.CopyItem, layer: int, before: list[int]) -> list[int]:
        """Two checksums a plane, as `Block` says; all planes of a layer hold the same stamps here."""
        middle = item.first + item.sealed
        sealed = [self._hash(item, layer, range(item.first, middle), crc) for crc in before]
        whole = [self._hash(item, layer, range(middle, item.first + len(item.pages)), crc) for crc in sealed]
        return [crc for pair in zip(sealed, whole, strict=True) for crc in pair]

    def _hash(self, item: commands.CopyItem, layer: int, pages: range, before: int) -> int:
        for page in pages:
            before = zlib.crc32(repr(self._slot(item.host, layer, page)).encode(), before)
        return before

    def _slot(self, host: int, layer: int, page: int) -> list[int]:
        return self._slots.setdefault((host, layer, page), [POISON] * self._layout.page_size)

    def _strikes(self, fault: str) -> bool:
        struck = self._rng.random() < getattr(self._faults, fault)
        self.injected[fault] += struck
        return struck


class Simulation:
    """One seed. `room`: a twin's pool has room for every request at once, and no faults."""

    def __init__(self, seed: int, *, twin: bool = False) -> None:
        rng = Random(seed)
        self.layout = rng.choice(LAYOUTS)
        config = _config(rng)
        pages = [rng.randint(14, 24)] * len(self.layout.groups)
        host_chunks = rng.choice([0, 3, 8, 100])
        self.jobs = _jobs(rng, self.layout)
        faults, stalls = Faults.of(rng), _stalls(rng)
        rates = [rng.choice([20_000, 1_000_000, 1_000_000_000]) for _ in range(2)]
        if twin:
            faults, stalls, pages, rates = Faults(), [], [1000] * len(pages), [10**9, 10**9]
        self.trace: list[str] = []
        self.device = VirtualDevice(stalls)
        self.memory = StampMemory(self.layout, Random(seed + 1), faults)
        largest = max(self.layout.chunk_bytes(g) for g in range(len(self.layout.groups)))  # type: ignore[arg-type]
        self.core = SwapCore(self.layout, pages, host_chunks * largest, config)
        copier = VirtualCopier(
            self.device,
            out_bytes_per_s=rates[0],
            in_bytes_per_s=rates[1],
            move=self.memory.move,
            clone=self.memory.clone,
        )
        self.driver = StepDriver(self.core, copier, clock=lambda: self.device.now_ns)
        self.compute = self.device.create_stream("compute")
        self.swaps = not twin
        self.rng = Random(seed + 2)
        self._steps = 0
        self._waiting_for_tick_ns: int | None = None

    def run(self) -> dict[str, list[int]]:
        """Run to the end, checking every invariant after every event; the answer is every request's tokens."""
        for _ in range(20_000):
            for news in self.driver.poll():
                self._hear(news)
            if all(job.gone for job in self.jobs):
                break
            self._act()
            self.core.check()
            self._pass_time()
        else:
            raise AssertionError(
                f"no end after 20,000 rounds: {[(j.name, len(j.history), self._state(j)) for j in self.jobs]}"
            )
        self._quiesce()
        return {job.name: job.history for job in self.jobs}

    def _tell(self, event: events.Event) -> list[commands.Command] | None:
        """Tell the core; None if it refuses for now."""
        try:
            answer = self.driver.tell(event)
        except SwapError as error:
            self.trace.append(f"{self.device.now_ns} {event} !! {type(error).__name__}")
            return None
        self.trace.append(f"{self.device.now_ns} {event} -> {[type(c).__name__ for c in answer]}")
        return answer

    def _act(self) -> None:
        """Arrivals, aborts, swaps, and a forward over some of what is on the device."""
        for job in self.jobs:
            if job.gone or job.done:
                continue
            if job.name not in self.core.sequences:
                if job.arrives_ns <= self.device.now_ns:
                    register = events.Register(job.name, job.prompt + job.target, None, self.rng.randrange(2))
                    job.refused = job.gone = self._tell(register) is None
            elif job.aborts_at is not None and len(job.history) >= job.aborts_at:
                job.done = True
                self._tell(events.Finish(job.name))
        if self.swaps:
            self._swap()
        self._forward()

    def _swap(self) -> None:
        """Restore who is off, preempt who is on, change one's mind now and then."""
        for job in self._live():
            state = self._state(job)
            if state is SequenceState.EVICTED:
                self._tell(events.Reset(job.name))
            elif state is SequenceState.OFFLOADED and self.rng.random() < 0.5:
                self._tell(events.BeginRestore(job.name))
            elif state is SequenceState.GPU_RESIDENT and self.rng.random() < 0.15:
                self._tell(events.Preempt(job.name))
            elif state is SequenceState.OFFLOADING and self.rng.random() < 0.02:
                self._tell(events.CancelPreempt(job.name))
            elif state is SequenceState.PREFETCHING and self.rng.random() < 0.02:
                self._tell(events.CancelRestore(job.name))

    def _forward(self) -> None:
        """One forward over the requests that are on the device; if pages are lacking, over fewer, else preempt one."""
        ready = [job for job in self._live() if self._state(job) in _READY and not job.computing]
        while ready:
            appends = {job.name: self._missing(job) for job in ready}
            self._steps += 1
            step = StepId(self._steps)
            self.driver.executor.expect_forward(step, list(appends), self.compute)
            try:
                answer = self.driver.tell(events.BeginStep(step, appends))
                if not any(isinstance(c, commands.StepGranted) for c in answer):
                    self.driver.tell(events.CancelStep(step))
                    raise WouldBlock
            except (PagesExhausted, WouldBlock):
                self.driver.executor.forget_forward(step)
                left_out = ready.pop(self.rng.randrange(len(ready)))
                if not ready and self._state(left_out) in _READY:
                    self._make_room(left_out)
                continue
            self._compute(step, ready)
            self._tell(events.EndStep(step))
            return

    def _make_room(self, job: Job) -> None:
        """Nobody can go on: preempt one, and if no tier has room and nothing is under way, have it computed again."""
        if self._tell(events.Preempt(job.name)) is None and self.driver.idle():
            self._tell(events.Evict(job.name))

    def _missing(self, job: Job) -> int:
        """Tokens whose KV has to be written before the next token is known: the prompt, or all after a reset, or one."""
        return max(len(job.history), job.prompt) - self.core.sequences[job.name].tokens

    def _compute(self, step: StepId, jobs: list[Job]) -> None:
        """Launch the forward: it reads everything, and its result is a hash of what it read."""
        plans = []
        for job in jobs:
            sequence = self.core.sequences[job.name]
            tables = [table.pages.tolist() for table in sequence.tables]
            plans.append((job, sequence.tokens, tables))
            job.computing = True
        self.compute.submit(
            self.rng.randrange(1_000, 100_000), lambda: [self._attend(*plan) for plan in plans] and None
        )

    def _attend(self, job: Job, start: int, tables: list[list[int]]) -> None:
        job.computing = False
        if not job.history:
            job.history = [zlib.crc32(f"{job.name}/{n}".encode()) for n in range(job.prompt)]
        for position in range(start, len(job.history)):
            for layer in range(self.layout.num_layers):
                page = tables[self.layout.group_of_layer[layer]][position // self.layout.page_size]
                self.memory.page(page, layer)[position % self.layout.page_size] = job.history[position] + layer
        digest = hashlib.sha256()
        end = len(job.history)
        for layer in range(self.layout.num_layers):
            group = self.layout.group_of_layer[layer]
            window = self.layout.groups[group].window
            for position in range(0 if window is None else max(0, end - window), end):
                page = tables[group][position // self.layout.page_size]
                digest.update(
                    self.memory.page(page, layer)[position % self.layout.page_size].to_bytes(8, "big", signed=True)
                )
        job.history.append(int.from_bytes(digest.digest()[:4], "big"))
        if len(job.history) >= job.prompt + job.target:
            job.done = True

    def _hear(self, news: object) -> None:
        self.trace.append(f"{self.device.now_ns} news {type(news).__name__} {getattr(news, 'sequence', '')}")
        if isinstance(news, commands.Gone):
            next(job for job in self.jobs if job.name == news.sequence).gone = True
        if isinstance(news, commands.RestoreUndone) and isinstance(news.cause, ChecksumMismatch):
            self._tell(events.Evict(news.sequence))

    def _pass_time(self) -> None:
        """On to the next thing that happens."""
        for job in self.jobs:
            if job.done and not job.gone and job.name in self.core.sequences:
                self._tell(events.Finish(job.name))
            elif job.done and job.name not in self.core.sequences:
                job.gone = True
        times = [self.device.next_ns(), self.driver.wake_ns]
        times += [job.arrives_ns for job in self.jobs if job.arrives_ns > self.device.now_ns]
        self.device.advance(min((t for t in times if t is not None), default=self.device.now_ns + 1_000))

    def _quiesce(self) -> None:
        """Let everything end: nothing may be left anywhere."""
        while (at_ns := self.device.next_ns()) is not None:
            self.device.advance(at_ns)
            self.driver.poll()
        self.core.check()
        assert not self.core.sequences
        assert not self.core.chunks
        assert not self.core.ops
        assert not self.core.steps
        assert self.core.host.used == 0
        assert all(self.core.ledger.free(g) == self.core.ledger.total(g) for g in self.core.groups())

    def _live(self) -> list[Job]:
        """Requests that are registered and not about to end, in an order that the seed shuffles."""
        live = [job for job in self.jobs if not job.done and job.name in self.core.sequences]
        self.rng.shuffle(live)
        return live

    def _state(self, job: Job) -> SequenceState | None:
        sequence = self.core.sequences.get(job.name)
        return None if sequence is None else state_of(sequence)


_READY = (SequenceState.REGISTERED, SequenceState.GPU_RESIDENT, SequenceState.GPU_READY)


def _config(rng: Random) -> SwapConfig:
    return SwapConfig(
        restore_bytes_per_s=rng.choice([None, 100_000]),
        offload_bytes_per_s=rng.choice([None, 100_000]),
        segment_bytes=rng.choice([1, 100, 10_000]),
        inflight_bytes_per_sequence=rng.choice([1, 10_000]),
        ops_per_lane=rng.choice([1, 4, 64]),
        copy_deadline_ns=rng.choice([50_000_000, 30_000_000_000]),
        restore_order=rng.choice(list(RestoreOrder)),
        host_full=rng.choice(list(HostFull)),
        verify=Verify.CRC32,
    )


def _jobs(rng: Random, layout: KVLayout) -> list[Job]:
    jobs = []
    for number in range(rng.randint(3, 7)):
        target = rng.randint(1, 2 * layout.chunk_tokens)
        jobs.append(
            Job(
                name=SeqId(f"r{number}"),
                arrives_ns=rng.choice([0, rng.randrange(1_000_000)]),
                prompt=rng.choice([1, rng.randint(1, layout.chunk_tokens)]),
                target=target,
                aborts_at=rng.randint(1, target) if rng.random() < 0.15 else None,
            )
        )
    return jobs


def _stalls(rng: Random) -> list[tuple[int, int]]:
    """Spans in which the links and the device stand still; some outlast the deadline of a copy."""
    if rng.random() < 0.6:
        return []
    begin = rng.randrange(1_000_000)
    return [(begin, begin + rng.choice([1_000_000, 200_000_000]))]
