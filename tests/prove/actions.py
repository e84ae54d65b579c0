"""What may happen next in a world."""

from collections.abc import Iterator

from swapkv.fsm.records import Goal, Sequence
from swapkv.ids import Lane
from tests.prove.lanes import Move
from tests.prove.scenario import Action
from tests.prove.world import World

ADVERSE = {
    "void": "void",
    "cancel_step": "cancel",
    "preempt": "preempt",
    "spill": "spill",
    "restore_part": "spill",
    "cancel_preempt": "cancel",
    "cancel_restore": "cancel",
    "abort": "abort",
    "evict": "evict",
    "fork": "fork",
    "truncate": "truncate",
    "tear": "fault",
    "reject": "fault",
    "hang": "hang",
    "die": "die",
}
"""Verbs that use up a budget, and which. All others are fair: they bring requests nearer to their end."""

QUIET = frozenset({"run", "tear", "reject", "die", "deliver", "hang", "wake"})
"""Verbs that are no wish of the caller."""


def actions(world: World) -> Iterator[Action]:
    """Everything that may happen now, within the budget; one of several that are alike."""
    yield from _devices(world)
    if world.lost:
        return
    for step in world.open:
        yield "end", step
        if _left(world, "void"):
            yield "void", step
    if _left(world, "cancel"):
        yield from (("cancel_step", step) for step in world.waiting)
    seen = set()
    for name in world.unborn:
        if world.scenario.kinds[name] not in seen:
            seen.add(world.scenario.kinds[name])
            yield "register", name
    yield from _steps(world)
    for name, sequence in world.core.sequences.items():
        if not sequence.finishing:
            yield from _wishes(world, str(name), sequence)


def rude_actions(world: World) -> Iterator[Action]:
    """Wishes that the present state does not allow, and reports that come again: none may change anything."""
    if world.scenario.repeats:
        yield from (("repeat", verb) for verb in ("done", "failed", "passed"))
    if not world.scenario.rude:
        return
    for name, sequence in world.core.sequences.items():
        if sequence.finishing or sequence.goal not in (Goal.ACTIVE, Goal.PARKED) or sequence.step is not None:
            yield "preempt", name
        if sequence.goal is not Goal.PARKED and not sequence.spilled:
            yield "restore", name
        if sequence.goal is not Goal.PARKING:
            yield "cancel_preempt", name
        if sequence.goal is not Goal.RESTORING:
            yield "cancel_restore", name
        if sequence.goal in (Goal.PARKING, Goal.RESTORING) or sequence.step is not None:
            yield "truncate", name, 0
            yield "evict", name
            yield from (("fork", name, child) for child in world.unforked[:1])
        if (sequence.goal is not Goal.ACTIVE and not _may_begin(sequence)) or sequence.step is not None:
            yield "step", name


def _left(world: World, budget: str) -> bool:
    return world.left.get(budget, 0) > 0


def _devices(world: World) -> Iterator[Action]:
    for rank, device in enumerate(world.ranks):
        for lane in Lane:
            if world.can_run(lane, rank):
                yield "run", lane.name, rank
                if isinstance(device.lanes[lane][0], Move) and _left(world, "fault"):
                    yield "tear", lane.name, rank
    if _left(world, "die"):
        yield ("die",)
    if world.lost:
        return
    if _left(world, "fault") and len(world.ranks) == 1:
        for lane in Lane:
            for at, work in enumerate(world.ranks[0].lanes[lane]):
                if isinstance(work, Move) and not world.core.ops[work.op].hung:
                    yield "reject", lane.name, at
    for report in world.reports:
        if world.scenario.in_order and any(
            other.fence < report.fence for other in world.reports if other.fence.lane is report.fence.lane
        ):
            continue
        yield "deliver", report.verb, report.op, report.fence.lane.name, report.fence.value
    if _left(world, "hang") and any(not op.hung for op in world.core.ops.values()):
        yield ("hang",)
    if world.wakes_soon():
        yield ("wake",)


def _steps(world: World) -> Iterator[Action]:
    """Forwards over one sequence, or over as many as a batch may have."""
    waiting = {name for appends in world.waiting.values() for name in appends}
    ready = [
        str(name)
        for name, s in world.core.sequences.items()
        if s.step is None and not s.finishing and name not in waiting and _may_step(world, s)
    ]
    for name in ready:
        yield "step", name
    if world.scenario.batch > 1 and len(ready) > 1:
        yield "step", *ready[: world.scenario.batch]


def _may_step(world: World, sequence: Sequence) -> bool:
    if world.next_target(sequence.id) is None:
        return False
    if sequence.goal is Goal.ACTIVE:
        return True
    return (world.scenario.gates or sequence.spilled > 0) and _may_begin(sequence)


def _may_begin(sequence: Sequence) -> bool:
    """Whether a forward may begin before the sequence's restore is over."""
    work = sequence.restore
    return work is not None and (sequence.spilled > 0 or (work.granted and work.spilled == 0))


def _wishes(world: World, name: str, sequence: Sequence) -> Iterator[Action]:
    """What the caller may want of one sequence."""
    goal, idle = sequence.goal, sequence.step is None
    more = world.next_target(name) is not None
    here = goal is Goal.ACTIVE or any(chunk.on_device for chunk in sequence.live_chunks())
    worth = (more or world.scenario.late) and here and idle and sequence.tokens
    if goal in (Goal.ACTIVE, Goal.PARKED) and worth and _left(world, "preempt"):
        yield "preempt", name
    if goal is Goal.PARKED or (goal is Goal.ACTIVE and sequence.spilled):
        yield "restore", name
    if goal in (Goal.ACTIVE, Goal.PARKED) and idle and _left(world, "spill"):
        chunk = world.core.layout.chunk_tokens
        lengths = range(chunk, sequence.tokens + 1, chunk)
        if goal is Goal.PARKED:
            yield from (("restore_part", name, tokens) for tokens in lengths)
        elif more or world.scenario.late:
            yield from (("spill", name, tokens) for tokens in lengths if tokens > sequence.spilled * chunk)
    if goal is Goal.EVICTED:
        yield "reset", name
    if goal is Goal.PARKING and _left(world, "cancel") and sequence.offload.goal_before is Goal.ACTIVE:
        yield "cancel_preempt", name
    if goal is Goal.RESTORING and _left(world, "cancel"):
        yield "cancel_restore", name
    if not more and idle and goal is Goal.ACTIVE:
        yield "finish", name
    elif _left(world, "abort"):
        yield "abort", name
    if goal in (Goal.ACTIVE, Goal.PARKED) and idle and sequence.tokens:
        yield from _edits(world, name, sequence)


def _edits(world: World, name: str, sequence: Sequence) -> Iterator[Action]:
    if _left(world, "fork"):
        yield from (("fork", name, child) for child in world.unforked[:1])
    if _left(world, "truncate"):
        yield from (("truncate", name, tokens) for tokens in {sequence.tokens - 1, max(0, sequence.tokens - 3)})
    if _left(world, "evict"):
        yield "evict", name
