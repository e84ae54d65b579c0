"""One key for all worlds that behave alike.

Chunks, pages, host slots, ops, fences and stamps are renamed by order of appearance, equal sequences are sorted, and
counters and absolute time are left out. Stamps that nobody expects any more are all the same: none can become right.
Whatever of the core's records is not named here goes in as it is, so that a new field makes keys finer, never coarser.
"""

import marshal
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from hashlib import blake2b
from typing import Any

import attrs

from swapkv.fsm.records import Chunk, Offload, Op, Restore, Segment, Sequence, Step, TierCopy
from swapkv.ids import Fence, Lane, SeqId
from tests.prove.lanes import Device, Mark, Move, Open, Pass, Row, Twin, Work
from tests.prove.world import World

KNOWN: dict[type, str] = {
    Chunk: "id group index pages state tokens held first_live generation copy refs ops landed aborting",
    TierCopy: "offset tokens generation checksums guard_first guard_pages sealed_checksums version",
    Offload: "goal_before leaving segments ops undoing cause",
    Restore: "priority arrival arrived_ns base_tokens layer_missing chunks waiting joined segments ops inflight_bytes "
    "voided_tokens pages_told layers_told undoing revoking gated cause",
    Sequence: "id priority max_tokens step_tokens chunks tables behind goal tokens step finishing fresh offload restore "
    "preemptions restored_ns",
    Segment: "group chunks low high num_bytes",
    Op: "id lane fence sequence group chunks firsts low high num_bytes submitted_ns after tokens generations dropped hung",
    Step: "id appends granted void arrived_ns",
}
_MORE = {kind: [f.name for f in attrs.fields(kind) if f.name not in known.split()] for kind, known in KNOWN.items()}
_CODES: dict[Enum, int] = {}

Names = tuple[Any, ...]
"""Plain numbers, nested."""


def key(world: World) -> bytes:
    """Sixteen bytes that are equal for worlds that behave alike."""
    return blake2b(marshal.dumps(Namer(world).everything(), 2), digest_size=16).digest()


def _code(value: Enum) -> int:
    code = _CODES.get(value)
    if code is None:
        code = _CODES[value] = len(_CODES) + 1
    return code


class Namer:
    """Gives names to what one world consists of."""

    def __init__(self, world: World) -> None:
        self.world, self.core = world, world.core
        self.passed: list[int] = world.core.clock._passed_up_to
        self.reached = [min(values) for values in zip(*(device.reached for device in world.ranks), strict=True)]
        self.order = self._sorted_sequences()
        self.seqs: dict[str, int] = {name: at for at, name in enumerate(self.order)}
        self.ops: dict[int, int] = {op: at for at, op in enumerate(world.core.ops)}
        self.steps: dict[int, int] = {step: at for at, step in enumerate(sorted(world.core.steps))}
        self.chunks: dict[int, int] = {}
        self.met: list[Chunk] = []
        self.pages: dict[int, int] = {-1: -1}
        self.slots: dict[int, int] = {}
        self.stamps: dict[int, int] = {}

    def everything(self) -> Names:
        """The world in plain numbers. Order matters: names are given as things are met."""
        core, world = self.core, self.world
        return (
            [self._stamps(world.tokens[name]) for name in self.order],
            [self._sequence(core.sequences[SeqId(name)]) for name in self.order],
            [self._op(op) for op in core.ops.values()],
            [self._chunk(chunk) for chunk in self.met],
            len(core.chunks),
            [self._step(step) for step in core.steps.values()],
            [self.steps[step.id] for step in core.waiting_steps],
            [self.seqs[name] for name in core.offloads],
            [self.seqs[name] for name in core.restores],
            core.inflight,
            [(self._slot(offset), self._fence(fence)) for offset, fence in core.stuck_slots],
            [[[self._work(work, device) for work in lane] for lane in device.lanes] for device in world.ranks],
            sorted([self.ops.get(op, -1) for op in world.torn]),
            world.lost,
            sorted([self._open(step, opened) for step, opened in world.open.items()]),
            sorted([(r.verb, self._fence(r.fence), self.ops.get(r.op, -1)) for r in world.reports]),
            self._budget(),
            self._links(),
            self._clock(),
            self._ledger(),
            self._host(),
            [self._memory(device) for device in world.ranks],
        )

    def _sorted_sequences(self) -> list[str]:
        """Names in an order that does not depend on names, as far as that goes without trying every one."""
        core, scenario = self.core, self.world.scenario
        if len(core.sequences) < 2:
            return [str(name) for name in core.sequences]
        coming = {name: at for at, name in enumerate(core.restores)}
        leaving = {name: at for at, name in enumerate(core.offloads)}
        signed = [
            (
                scenario.kinds[name],
                _code(s.goal),
                s.tokens,
                s.step is None,
                s.finishing,
                s.fresh,
                coming.get(name, -1),
                leaving.get(name, -1),
                [_code(chunk.state) for chunks in s.chunks for chunk in chunks if chunk is not None],
                name,
            )
            for name, s in core.sequences.items()
        ]
        signed.sort()
        return [str(signature[-1]) for signature in signed]

    def _more(self, record: Any) -> Names:
        """Fields that this file does not know, as they are but for fences and chunks."""
        names = _MORE[type(record)]
        return tuple([self._plain(getattr(record, name)) for name in names]) if names else ()

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Fence):
            return self._fence(value)
        if isinstance(value, Chunk):
            return self._chunk_name(value)
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, tuple | list):
            return tuple(map(self._plain, value))
        if isinstance(value, dict | set | frozenset):
            return tuple(sorted(map(repr, value)))
        assert value is None or type(value) in (bool, int, str), f"teach canonical.py about {value!r}"
        return value

    def _fence(self, fence: Fence) -> int:
        """How far the lane has to go, from what it has been told to have passed; negative for the other lanes."""
        lane, value = fence
        ahead = value - self.passed[lane]
        return 0 if ahead <= 0 else ahead * 4 + lane

    def _late(self, since_ns: int) -> bool:
        """Whether a copy's deadline has passed since then: no finer time matters to copies."""
        return self.core.now_ns - since_ns >= self.core.config.copy_deadline_ns

    def _after(self, fences: Iterable[Fence], reached: list[int]) -> list[int]:
        """What work still waits for on a device that has got so far."""
        passed = self.passed
        return sorted([(value - passed[lane]) * 4 + lane for lane, value in fences if value > reached[lane]])

    def _pages(self, pages: Iterable[int]) -> list[int]:
        names = self.pages
        return [names.setdefault(page, len(names) - 1) for page in pages]

    def _slot(self, offset: int | None) -> int:
        return -1 if offset is None else self.slots.setdefault(offset, len(self.slots))

    def _stamps(self, stamps: Iterable[int]) -> list[int]:
        names = self.stamps
        return [names.setdefault(stamp, len(names) + 1) for stamp in stamps]

    def _chunk_name(self, chunk: Chunk) -> int:
        if chunk.id not in self.core.chunks:
            return -1
        name = self.chunks.get(chunk.id)
        if name is None:
            name = self.chunks[chunk.id] = len(self.met)
            self.met.append(chunk)
        return name

    def _names(self, chunks: Iterable[Chunk]) -> list[int]:
        return [self._chunk_name(chunk) for chunk in chunks]

    def _ops(self, ops: Iterable[int]) -> list[int]:
        return sorted([self.ops.get(op, -1) for op in ops])

    def _sequence(self, s: Sequence) -> Names:
        return (
            self.world.scenario.kinds[s.id],
            _code(s.goal),
            s.tokens,
            s.step is not None,
            s.finishing,
            s.fresh,
            s.behind,
            [[-2 if c is None else self._chunk_name(c) for c in chunks] for chunks in s.chunks],
            [self._pages(table.pages.tolist()) for table in s.tables],
            None if s.offload is None else self._offload(s.offload),
            None if s.restore is None else self._restore(s.restore),
            self.world.opened.get(s.id, -1),
            *self._more(s),
        )

    def _offload(self, work: Offload) -> Names:
        return (
            _code(work.goal_before),
            self._names(work.leaving),
            [self._segment(segment) for segment in work.segments],
            self._ops(work.ops),
            work.undoing,
            work.cause is None,
            *self._more(work),
        )

    def _restore(self, work: Restore) -> Names:
        config = self.core.config
        return (
            work.priority - min((self.core.now_ns - work.arrived_ns) // config.aging_ns, config.aging_cap),
            work.base_tokens,
            work.layer_missing,
            self._names(work.chunks),
            self._names(work.waiting),
            self._names(work.joined.values()),
            [self._segment(segment) for segment in work.segments],
            self._ops(work.ops),
            work.inflight_bytes,
            work.voided_tokens,
            work.pages_told,
            work.layers_told,
            work.undoing,
            work.revoking,
            self._turn(work),
            work.cause is None,
            *self._more(work),
        )

    def _turn(self, work: Restore) -> int:
        """The place of the restore among those that a forward waits for."""
        turns = sorted({getattr(s.restore, "gated", None) or 0 for s in self.core.restores.values()})
        return turns.index(getattr(work, "gated", None) or 0)

    def _segment(self, s: Segment) -> Names:
        return s.group, self._names(s.chunks), s.low, s.high, s.num_bytes, *self._more(s)

    def _op(self, op: Op) -> Names:
        return (
            self._fence(op.fence),
            self.seqs.get(op.sequence, -1),
            op.group,
            self._names(op.chunks),
            op.tokens,
            [c.generation - g for c, g in zip(op.chunks, op.generations, strict=True)],
            op.low,
            op.high,
            op.num_bytes,
            self._late(op.submitted_ns),
            [self._fence(fence) for fence in op.after],
            sorted([self.chunks.get(c, -1) for c in op.dropped]),
            op.hung,
            *self._more(op),
        )

    def _chunk(self, c: Chunk) -> Names:
        copy = c.copy
        return (
            _code(c.state),
            c.group,
            c.index,
            c.tokens,
            c.held,
            c.first_live,
            self._pages(c.pages.tolist()),
            self._slot(copy.offset),
            copy.tokens,
            c.generation - copy.generation if copy.offset is not None else 0,
            [self.seqs.get(name, -1) for name in c.refs],
            self._ops(c.ops),
            c.landed,
            c.aborting,
            c.id in self.core.copied,
            *self._more(c),
            *self._more(copy),
        )

    def _step(self, s: Step) -> Names:
        appends = [(self.seqs[name], count) for name, count in s.appends.items()]
        return appends, s.granted, sorted([self.seqs[name] for name in s.void]), *self._more(s)

    def _rows(self, rows: Iterable[Row]) -> list[Names]:
        return [
            (
                self.seqs.get(row.name, -1),
                self._stamps(row.reads),
                self._stamps(row.writes),
                [self._pages(table) for table in row.tables],
                [[(page, self._slot(slot), place) for page, slot, place in pages] for pages in row.away],
                row.gated,
                row.void,
            )
            for row in rows
        ]

    def _open(self, step: int, opened: Open) -> Names:
        """A forward not launched yet: it may wait for what only some ranks have reached."""
        return self.steps[step], self._rows(opened.rows), self._after(opened.after, self.reached), opened.launched

    def _work(self, work: Work, device: Device) -> Names:
        after = self._after(work.after, device.reached)
        if isinstance(work, Move):
            items = [(self._pages(item.pages), item.first, self._slot(item.host)) for item in work.items]
            return self._fence(work.fence), after, self.ops.get(work.op, -1), work.layers, items
        if isinstance(work, Pass):
            return self.steps.get(work.step, -1), after, work.layers, self._rows(work.rows)
        if isinstance(work, Twin):
            pages = (self._pages(work.source), self._pages(work.target))
            return self._fence(work.fence), after, work.layers, pages
        assert isinstance(work, Mark)
        return self._fence(work.fence), work.told

    def _budget(self) -> Names:
        world = self.world
        return (
            list(world.left.values()),
            sorted(Counter([world.scenario.kinds[name] for name in world.unborn]).items()) if world.unborn else 0,
            len(world.unforked),
            sorted(
                [(kind, (self.steps if kind == "step" else self.seqs).get(about, -1)) for kind, about in world.awaited]
            ),  # type: ignore[call-overload]
            sorted([self.steps.get(step, -1) for step in world.waiting]),
        )

    def _links(self) -> list[int]:
        """Link tokens that are booked and not sent (none, if all is well); time only where a rate makes it matter."""
        core = self.core
        links = []
        for lane, bucket in core.buckets.items():
            links.append(self.world.sent[lane] - bucket.sent_bytes)
            if bucket.rate is not None:
                armed = -1 if core._armed_ns is None else core._armed_ns - core.now_ns
                links += [bucket._level, core.now_ns - bucket._filled_ns, armed]
        return links

    def _clock(self) -> list[Names]:
        clock, passed = self.core.clock, self.passed
        return [
            (
                clock._issued[lane] - passed[lane],
                [device.reached[lane] - passed[lane] for device in self.world.ranks],
                sorted([value - passed[lane] for value in clock._reported_ahead[lane]]),
                self._late(self.core.moved_ns[lane]),
            )
            for lane in Lane
        ]

    def _ledger(self) -> Names:
        """Pages by name with their hazards; those without a name are told apart only by being unlike a free page."""
        ledger, names = self.core.ledger, self.pages
        batches = [
            [(self._pages(batch.pages.tolist()), [self._fence(f) for f in batch.until]) for batch in group]
            for group in (*ledger._fenced, *ledger._quarantine)
        ]
        free = [
            [names.get(page, -1) for page in pages[:count].tolist()]
            for pages, count in zip(ledger._free, ledger._num_free, strict=True)
        ]
        hazards = self._hazards()
        named, rest = [], []
        for page, (state, owner) in enumerate(zip(ledger._state.tolist(), ledger._owner.tolist(), strict=True)):
            entry = (state, -2 if owner < 0 else self.chunks.get(owner, -1), [table[page] for table in hazards])
            if page in names:
                named.append((names[page], entry))
            else:
                rest.append(entry)
        named.sort()
        rest.sort()
        stuck = [self._fence(fence) for fence in ledger._stuck]
        return batches, free, named, rest, ledger._num_fenced, ledger._num_quarantined, stuck

    def _hazards(self) -> list[list[int]]:
        """For each lane with open fences, how far it has to go until it has read each page, and written it."""
        ledger, issued = self.core.ledger, self.core.clock._issued
        return [
            [value - passed if value > passed else 0 for value in table[lane].tolist()]
            for lane, passed in enumerate(self.passed)
            if issued[lane] > passed
            for table in (ledger._last_read, ledger._last_write)
        ]

    def _host(self) -> Names:
        """Slots of one size are all alike; of several sizes, where they lie matters."""
        host, layout = self.core.host, self.core.layout
        if len(layout.groups) > 1 and len({layout.chunk_bytes(g) for g in self.core.groups()}) > 1:
            bins = [(size, offsets) for size, offsets in sorted(host._bins.items())]
            return host._fresh, bins, sorted(host._taken.items()), list(self.slots.items())
        return host.used, sorted([self.slots.get(offset, -1) for offset in host._taken])

    def _memory(self, device: Device) -> Names:
        stamps = self.stamps
        wide = device.num_layers
        pages = [
            [stamps.get(stamp, 0) for cell in device.pages[page * wide : (page + 1) * wide] for stamp in cell]
            for page in self.pages
            if page >= 0
        ]
        slots = [
            (self.slots.get(offset, -1), layer, at, [stamps.get(stamp, 0) for stamp in cell])
            for (offset, layer, at), cell in device.slots.items()
        ]
        slots.sort()
        return pages, slots
