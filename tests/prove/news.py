"""What a world does with the core's answers: copies go into lanes, news is checked against what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from swapkv.errors import PagesExhausted
from swapkv.fsm import commands
from swapkv.fsm.commands import PreemptOutcome
from swapkv.fsm.ledger import PageState
from swapkv.fsm.queries import host_pages
from swapkv.fsm.steps import is_gated
from swapkv.ids import GroupId, Lane, SeqId, StepId
from tests.prove.audit import check_exhausted, check_hand_over
from tests.prove.lanes import Mark, Open, Pass, Row, Work, as_move, as_twin
from tests.prove.violation import Violation

if TYPE_CHECKING:
    from tests.prove.world import World


def carry_out(world: World, answer: list[commands.Command]) -> None:
    """Do what the core has decided."""
    for command in answer:
        _CARRY_OUT[type(command)](world, command)
    world.skip_marks()
    _poison(world)


def _submit(world: World, copy: commands.Copy) -> None:
    check_hand_over(world, copy.after)
    sequence = world.core.sequences[copy.sequence]
    work = sequence.offload if copy.lane is Lane.OUT else sequence.restore
    if work is None or work.undoing:
        raise Violation(f"a copy of {copy.sequence!r} is submitted for what is being undone")
    per_page = sum(world.core.layout.layer_bytes[layer] for layer in copy.layers)
    if copy.num_bytes != per_page * sum(len(item.pages) for item in copy.items):
        raise Violation(f"copy {copy.op} is said to move {copy.num_bytes} bytes")
    world.sent[copy.lane] += copy.num_bytes
    _push(world, copy.lane, as_move(copy))


def _clone_pages(world: World, clone: commands.ClonePages) -> None:
    _push(world, Lane.COMPUTE, as_twin(clone, world.core.layout))


def _push(world: World, lane: Lane, work: Work) -> None:
    for device in world.ranks:
        device.push(lane, work)


def _record(world: World, record: commands.RecordFence) -> None:
    _push(world, Lane.COMPUTE, Mark(record.fence, (), told=True))


def _granted(world: World, granted: commands.StepGranted) -> None:
    _paid(world, "step", granted.step)
    check_hand_over(world, granted.after)
    rows = []
    for name, count in world.waiting.pop(granted.step).items():
        sequence = world.core.sequences[SeqId(name)]
        writes = tuple(range(world.next_stamp, world.next_stamp + count))
        world.next_stamp += count
        tables = tuple(tuple(table.pages.tolist()) for table in sequence.tables)
        away = tuple(_away(world, name, group) for group in world.core.groups())
        world.sent[Lane.IN] += sum(len(away[g]) * world.core.layout.page_bytes(g) for g in world.core.groups())
        rows.append(Row(name, world.tokens[name], writes, tables, away, is_gated(sequence), void=False))
    gated = any(row.gated for row in rows)
    opened = Open(tuple(rows), granted.after, launched=gated)
    world.open[granted.step] = opened
    if gated:
        launch(world, granted.step, opened)


def _away(world: World, name: str, group: GroupId) -> tuple[tuple[int, int, int], ...]:
    runs = host_pages(world.core, SeqId(name), group)
    return tuple((run.first + at, int(run.slot), at) for run in runs for at in range(run.count))


def launch(world: World, step: int, opened: Open) -> None:
    """Put the forward into the compute lane; a gated one layer by layer."""
    layers = tuple(range(world.core.layout.num_layers))
    if not opened.launched:
        _push(world, Lane.COMPUTE, Pass(None, opened.after, StepId(step), layers, opened.rows))
        return
    for layer in layers:
        rows = tuple(row._replace(gated=row.gated and world.opened.get(row.name, 0) <= layer) for row in opened.rows)
        _push(world, Lane.COMPUTE, Pass(None, opened.after, StepId(step), (layer,), rows))


def _refused(world: World, refused: commands.StepRefused) -> None:
    _paid(world, "step", refused.step)
    appends = world.waiting.pop(refused.step)
    if isinstance(refused.cause, PagesExhausted):
        check_exhausted(world, appends)


def _parked(world: World, parked: commands.Parked) -> None:
    _paid(world, "park", parked.sequence)
    if parked.outcome is PreemptOutcome.RECOMPUTE:
        world.tokens[parked.sequence] = ()


def _spilled(world: World, spilled: commands.Spilled) -> None:
    _paid(world, "park", spilled.sequence)


def _park_undone(world: World, undone: commands.ParkUndone) -> None:
    _paid(world, "park", undone.sequence)


def _pages_ready(world: World, ready: commands.PagesReady) -> None:
    if world.opened.setdefault(ready.sequence, 0):
        raise Violation(f"pages of {ready.sequence!r} are ready after its layers")


def _layer_ready(world: World, ready: commands.LayerReady) -> None:
    name, layer = ready.sequence, int(ready.layer)
    if world.opened.get(name) != layer:
        raise Violation(f"layer {layer} of {name!r} is ready after {world.opened.get(name)} layers")
    world.opened[name] = layer + 1
    edit_passes(
        world, lambda work, row: row._replace(gated=False) if row.name == name and layer in work.layers else row
    )


def _restored(world: World, restored: commands.Restored) -> None:
    name = restored.sequence
    _paid(world, "restore", name)
    world.opened.pop(name, None)
    edit_passes(world, lambda work, row: row._replace(gated=False) if row.name == name else row)


def _layers_lost(world: World, lost: commands.LayersLost) -> None:
    name = lost.sequence
    edit_passes(world, lambda work, row: row._replace(void=True) if row.name == name and row.gated else row)


def _restore_undone(world: World, undone: commands.RestoreUndone) -> None:
    _paid(world, "restore", undone.sequence)
    world.opened.pop(undone.sequence, None)
    if undone.voided_tokens:
        world.tokens[undone.sequence] = world.tokens[undone.sequence][: -undone.voided_tokens]


def _gone(world: World, gone: commands.Gone) -> None:
    _paid(world, "gone", gone.sequence)
    del world.tokens[gone.sequence]


def _ignore(world: World, command: commands.Command) -> None:
    """A wake-up time: `audit` looks at it."""


def _paid(world: World, kind: str, about: str | int) -> None:
    if (kind, about) not in world.awaited:
        raise Violation(f"news that nobody waits for: {kind} of {about!r}")
    world.awaited.remove((kind, about))


def edit_passes(world: World, change: Callable[[Pass, Row], Row]) -> None:
    """Change rows of forwards that have not run."""
    for device in world.ranks:
        device.lanes[Lane.COMPUTE] = tuple(
            work._replace(rows=tuple(change(work, row) for row in work.rows)) if isinstance(work, Pass) else work
            for work in device.lanes[Lane.COMPUTE]
        )


def _poison(world: World) -> None:
    """Nobody may read a free page or slot: make sure that it shows."""
    free = [page for page, state in enumerate(world.core.ledger._state.tolist()) if state == PageState.FREE]
    taken = world.core.host._taken
    for device in world.ranks:
        for page in free:
            low = page * device.num_layers
            device.pages[low : low + device.num_layers] = [device.poisoned] * device.num_layers
        if any(place[0] not in taken for place in device.slots):
            device.slots = {place: stamps for place, stamps in device.slots.items() if place[0] in taken}


_CARRY_OUT: dict[type, Callable[[World, Any], None]] = {
    commands.Copy: _submit,
    commands.ClonePages: _clone_pages,
    commands.RecordFence: _record,
    commands.StepGranted: _granted,
    commands.StepRefused: _refused,
    commands.Parked: _parked,
    commands.Spilled: _spilled,
    commands.ParkUndone: _park_undone,
    commands.PagesReady: _pages_ready,
    commands.LayerReady: _layer_ready,
    commands.Restored: _restored,
    commands.LayersLost: _layers_lost,
    commands.RestoreUndone: _restore_undone,
    commands.Gone: _gone,
    commands.WakeAt: _ignore,
}
