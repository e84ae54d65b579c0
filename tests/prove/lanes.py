"""Three lanes that run one piece of work when told to, over memory that holds stamps. All work is immutable.

A stamp is a whole number that was written once, for one token of one sequence; POISON was never written.
"""

from typing import NamedTuple, TypeAlias

from swapkv.fsm.commands import ClonePages, Copy
from swapkv.ids import Fence, Lane, OpId, StepId
from swapkv.layout import KVLayout
from tests.prove.violation import Violation

POISON = 0
Stamps: TypeAlias = tuple[int, ...]
Page: TypeAlias = int
Place: TypeAlias = tuple[int, int, int]
"""A page of a layer in a host slot: offset, layer, page within the chunk."""


class Item(NamedTuple):
    """One chunk's part of a copy."""

    pages: tuple[Page, ...]
    first: int
    host: int


class Move(NamedTuple):
    """A copy between device and host."""

    fence: Fence
    after: tuple[Fence, ...]
    op: OpId
    layers: tuple[int, ...]
    items: tuple[Item, ...]


class Twin(NamedTuple):
    """A copy from device pages to device pages, on the compute lane."""

    fence: Fence
    after: tuple[Fence, ...]
    layers: tuple[int, ...]
    source: tuple[Page, ...]
    target: tuple[Page, ...]


class Row(NamedTuple):
    """One sequence's part of a forward. `gated`: it may run only once its layers have come.

    `away[g]`: by logical page of group `g`, the host slot that holds it and the place there; for pages that it reads in
    the host tier.
    """

    name: str
    reads: Stamps
    writes: Stamps
    tables: tuple[tuple[Page, ...], ...]
    away: tuple[tuple[tuple[int, int, int], ...], ...]
    gated: bool
    void: bool


class Open(NamedTuple):
    """A step that was granted and has not ended. `launched`: its forward is in the compute lane."""

    rows: tuple[Row, ...]
    after: tuple[Fence, ...]
    launched: bool


class Pass(NamedTuple):
    """A forward over some layers: reads every token that it should see, then writes new ones."""

    fence: None
    after: tuple[Fence, ...]
    step: StepId
    layers: tuple[int, ...]
    rows: tuple[Row, ...]


class Mark(NamedTuple):
    """The end of what its lane was given so far. `told`: somebody wants to know."""

    fence: Fence
    after: tuple[Fence, ...]
    told: bool


Work: TypeAlias = Move | Twin | Pass | Mark


class Report(NamedTuple):
    """What the core has not been told yet. `op`: 0 for a fence."""

    verb: str
    fence: Fence
    op: int


class Device:
    """Lanes, device pages and host slots."""

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        self.layout = layout
        self.num_layers = layout.num_layers
        self.poisoned: Stamps = (POISON,) * layout.page_size
        self.lanes: list[tuple[Work, ...]] = [() for _ in Lane]
        self.reached = [0 for _ in Lane]
        self.pages: list[Stamps] = [self.poisoned] * (num_pages * self.num_layers)
        self.slots: dict[Place, Stamps] = {}

    def clone(self) -> "Device":
        twin = object.__new__(Device)
        twin.__dict__.update(self.__dict__)
        twin.lanes, twin.reached = list(self.lanes), list(self.reached)
        twin.pages, twin.slots = list(self.pages), dict(self.slots)
        return twin

    def push(self, lane: Lane, work: Work) -> None:
        self.lanes[lane] += (work,)

    def pop(self, lane: Lane) -> Work:
        """Take the lane's first work; its fence is reached when the caller has done what it says."""
        work, *rest = self.lanes[lane]
        self.lanes[lane] = tuple(rest)
        if work.fence is not None:
            assert work.fence.value > self.reached[lane]
            self.reached[lane] = work.fence.value
        return work

    def ready(self, work: Work) -> bool:
        """Whether the fences that `work` waits for have been reached."""
        return all(self.reached[fence.lane] >= fence.value for fence in work.after)

    def move(self, lane: Lane, move: Move, *, torn: bool) -> None:
        """Do a copy: it reads its source now. A torn one leaves rubbish where it should have written."""
        for item in move.items:
            for layer in move.layers:
                for at, page in enumerate(item.pages):
                    here, there = page * self.num_layers + layer, (item.host, layer, item.first + at)
                    if lane is Lane.OUT:
                        self.slots[there] = self.poisoned if torn else self.pages[here]
                    else:
                        self.pages[here] = self.poisoned if torn else self.slots.get(there, self.poisoned)

    def twin(self, work: Twin) -> None:
        for layer in work.layers:
            for source, target in zip(work.source, work.target, strict=True):
                self.pages[target * self.num_layers + layer] = self.pages[source * self.num_layers + layer]

    def forward(self, work: Pass) -> None:
        """Compute: every stamp that a row sees must be the right one. A void row reads nothing and writes rubbish."""
        for row in work.rows:
            for layer in work.layers:
                if not row.void:
                    self._read(row, layer)
                self._write(row, layer)

    def stamp(self, row: Row, layer: int, position: int) -> int:
        """The stamp of one token in one layer, on the device or in the host tier."""
        group = self.layout.group_of_layer[layer]
        page, at = divmod(position, self.layout.page_size)
        if row.tables[group][page] >= 0:
            return self.pages[row.tables[group][page] * self.num_layers + layer][at]
        there = next(((slot, layer, place) for logical, slot, place in row.away[group] if logical == page), None)
        if there is None:
            raise Violation(f"{row.name!r} reads position {position}, which has no page")
        return self.slots.get(there, self.poisoned)[at]

    def first_read(self, layer: int, tokens: int) -> int:
        """The first position that a forward over a sequence of `tokens` tokens reads in `layer`."""
        window = self.layout.groups[self.layout.group_of_layer[layer]].window
        return 0 if window is None else max(0, tokens - window + 1)

    def _read(self, row: Row, layer: int) -> None:
        for position in range(self.first_read(layer, len(row.reads)), len(row.reads)):
            found = self.stamp(row, layer, position)
            if found != row.reads[position]:
                what = "poison" if found == POISON else f"stamp {found}"
                raise Violation(
                    f"{row.name!r} reads {what} at position {position} of layer {layer}, expects {row.reads[position]}"
                )

    def _write(self, row: Row, layer: int) -> None:
        table = row.tables[self.layout.group_of_layer[layer]]
        for position, stamp in enumerate(row.writes, len(row.reads)):
            page, at = divmod(position, self.layout.page_size)
            here = table[page] * self.num_layers + layer
            before = self.pages[here]
            self.pages[here] = (*before[:at], POISON if row.void else stamp, *before[at + 1 :])


def as_move(copy: Copy) -> Move:
    items = tuple(Item(tuple(item.pages.tolist()), item.first, int(item.host)) for item in copy.items)
    return Move(copy.fence, copy.after, copy.op, tuple(int(layer) for layer in copy.layers), items)


def as_twin(clone: ClonePages, layout: KVLayout) -> Twin:
    layers = tuple(int(layer) for layer in layout.groups[clone.group].layers)
    return Twin(clone.fence, clone.after, layers, tuple(clone.source.tolist()), tuple(clone.target.tolist()))


def pages_of(work: Work) -> set[Page]:
    """Device pages that `work` touches."""
    if isinstance(work, Move):
        return {page for item in work.items for page in item.pages}
    if isinstance(work, Twin):
        return {*work.source, *work.target}
    if isinstance(work, Pass):
        return {page for row in work.rows for table in row.tables for page in table if page >= 0}
    return set()
