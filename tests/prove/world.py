"""A world: the real core, a device whose copies read their source when they run, and a model of what must be read."""

from collections.abc import Callable
from typing import Any, NamedTuple

from swapkv.errors import IllegalTransition, PagesExhausted, SwapError, TransferError
from swapkv.fsm import commands, events
from swapkv.fsm.commands import PreemptOutcome
from swapkv.fsm.core import SwapCore
from swapkv.fsm.ledger import PageState
from swapkv.fsm.records import Goal
from swapkv.ids import Fence, Lane, OpId, SeqId, StepId
from tests.prove.audit import audit, check_exhausted, check_hand_over
from tests.prove.cloning import clone_core
from tests.prove.lanes import Device, Mark, Move, Pass, Report, Row, Stamps, Twin, as_move, as_twin
from tests.prove.scenario import Action, Scenario
from tests.prove.violation import Violation

FAILURE = TransferError("scripted")


class Open(NamedTuple):
    """A step that was granted and has not ended. `launched`: its forward is in the compute lane."""

    rows: tuple[Row, ...]
    after: tuple[Fence, ...]
    launched: bool


class World:
    """One state of a scenario. `apply` changes it in place; `clone` first to keep it.

    `tokens[name]`: the stamps that the sequence must hold. `unborn`: names not registered yet. `waiting`: steps that
    wait for pages. `opened[name]`: layers told as ready in the restore under way. `awaited`: news that the core owes.
    `sent`: bytes submitted a lane, rejected copies left out. `left`: what remains of the budget.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.core = SwapCore(scenario.layout, scenario.pages, scenario.host_bytes, scenario.config)
        self.device = Device(scenario.layout, sum(scenario.pages))
        self.tokens: dict[str, Stamps] = {}
        self.unborn = tuple(name for name in scenario.targets if name not in scenario.children)
        self.unforked = scenario.children
        self.open: dict[int, Open] = {}
        self.waiting: dict[int, dict[str, int]] = {}
        self.reports: tuple[Report, ...] = ()
        self.opened: dict[str, int] = {}
        self.awaited: set[tuple[str, str | int]] = set()
        self.sent = [0 for _ in Lane]
        self.left: dict[str, int] = {}
        self.now_ns = 0
        self.refusal: SwapError | None = None
        self.last_over: tuple[int, Fence] | None = None
        self._next_stamp = 1
        self._next_step = 1
        for action in scenario.begun:
            if not self.apply(action):
                raise Violation(f"scenario {scenario.name!r}: {action} is refused")
        self.left = dict(scenario.budget)

    def clone(self) -> "World":
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.core, twin.device = clone_core(self.core), self.device.clone()
        twin.tokens, twin.open, twin.waiting = dict(self.tokens), dict(self.open), dict(self.waiting)
        twin.opened, twin.awaited = dict(self.opened), set(self.awaited)
        twin.sent, twin.left = list(self.sent), dict(self.left)
        return twin

    def apply(self, action: Action) -> bool:
        """Let `action` happen. False: the core refused. Raises `Violation`, or what the core raises when it breaks."""
        verb, *about = action
        return bool(_VERBS[str(verb)](self, *about))

    def replay(self, *actions: Action) -> "World":
        """Let all `actions` happen, with every check after each."""
        for action in actions:
            self.apply(action)
            audit(self)
        return self

    def next_target(self, name: str) -> int | None:
        """The length that the sequence's next step reaches; None: it has reached its last."""
        have = len(self.tokens[name])
        return next((target for target in self.scenario.targets[name] if target > have), None)

    def goal(self, name: str) -> Goal:
        return self.core.sequences[SeqId(name)].goal

    def wakes_soon(self) -> bool:
        """Whether the core asked to be woken for a link's tokens, before any copy is overdue."""
        armed_ns = self.core._armed_ns
        if armed_ns is None or all(bucket.rate is None for bucket in self.core.buckets.values()):
            return False
        return armed_ns - self.now_ns < self.scenario.config.copy_deadline_ns // 2

    def settle(self) -> bool:
        """Run and report until nothing is left."""
        while True:
            lane = next((lane for lane in Lane if self.can_run(lane)), None)
            if lane is not None:
                self.run(lane.name)
            elif self.reports:
                report = self.reports[0]
                self.deliver(report.verb, report.op, report.fence.lane.name, report.fence.value)
            else:
                return True

    def can_run(self, lane: Lane) -> bool:
        """Whether the first work of `lane` could run now."""
        queue = self.device.lanes[lane]
        if not queue or not self.device.ready(queue[0]):
            return False
        work = queue[0]
        return not (isinstance(work, Pass) and any(row.gated and not row.void for row in work.rows))

    def tell(self, event: events.Event) -> bool:
        """Make a wish. False: the core refuses it."""
        try:
            answer = self.core.handle(event, self.now_ns)
        except IllegalTransition:
            raise
        except SwapError as error:
            self.refusal = error
            return False
        self._carry_out(answer)
        return True

    def inform(self, event: events.Event) -> bool:
        """Report something; the core must take it."""
        self._carry_out(self.core.handle(event, self.now_ns))
        return True

    def wish(self, event: events.Event, *owed: tuple[str, str | int]) -> bool:
        """Make a wish whose answer comes as news, now or later."""
        before = set(self.awaited)
        self.awaited.update(owed)
        if self.tell(event):
            return True
        self.awaited = before
        return False

    def register(self, name: str) -> bool:
        self.unborn = tuple(other for other in self.unborn if other != name)
        self.tokens[name] = ()
        priority = self.scenario.priorities.get(name, 0)
        return self.tell(events.Register(SeqId(name), self.scenario.targets[name][-1], priority=priority))

    def step(self, *names: str) -> bool:
        """Begin a forward over `names`, each to its next target (none left: it only reads)."""
        appends = {name: (self.next_target(name) or len(self.tokens[name])) - len(self.tokens[name]) for name in names}
        step = self._next_step
        self._next_step += 1
        self.waiting[step] = appends
        by_id = {SeqId(name): count for name, count in appends.items()}
        if self.wish(events.BeginStep(StepId(step), by_id), ("step", step)):
            return True
        del self.waiting[step]
        if isinstance(self.refusal, PagesExhausted):
            check_exhausted(self, appends)
        return False

    def end(self, step: int) -> bool:
        opened = self.open.pop(step)
        if not opened.launched:
            self._launch(step, opened)
        for row in opened.rows:
            self.tokens[row.name] += row.writes
        return self.inform(events.EndStep(StepId(step)))

    def void(self, step: int) -> bool:
        """The forward was launched, or part of it, and its outcome is given up."""
        opened = self.open.pop(step)
        if not opened.launched:
            self._launch(step, opened)
        self._edit_passes(lambda work, row: row._replace(void=True) if work.step == step else row)
        return self.inform(events.VoidStep(StepId(step)))

    def cancel_step(self, step: int) -> bool:
        if not self.tell(events.CancelStep(StepId(step))):
            return False
        del self.waiting[step]
        self.awaited.remove(("step", step))
        return True

    def preempt(self, name: str) -> bool:
        return self.wish(events.Preempt(SeqId(name)), ("park", name))

    def cancel_preempt(self, name: str) -> bool:
        return self.tell(events.CancelPreempt(SeqId(name)))

    def restore(self, name: str) -> bool:
        before = self.opened.pop(name, None)
        if self.wish(events.BeginRestore(SeqId(name)), ("restore", name)):
            return True
        if before is not None:
            self.opened[name] = before
        return False

    def cancel_restore(self, name: str) -> bool:
        return self.tell(events.CancelRestore(SeqId(name)))

    def finish(self, name: str) -> bool:
        return self.wish(events.Finish(SeqId(name)), ("gone", name))

    def abort(self, name: str) -> bool:
        """The request is given up, in whatever state it is."""
        return self.finish(name)

    def reset(self, name: str) -> bool:
        return self.tell(events.Reset(SeqId(name)))

    def evict(self, name: str) -> bool:
        if not self.tell(events.Evict(SeqId(name))):
            return False
        self.tokens[name] = ()
        return True

    def fork(self, parent: str, child: str) -> bool:
        if not self.tell(events.Fork(SeqId(parent), SeqId(child), self.scenario.targets[child][-1])):
            return False
        self.unforked = tuple(name for name in self.unforked if name != child)
        self.tokens[child] = self.tokens[parent]
        return True

    def truncate(self, name: str, tokens: int) -> bool:
        if not self.tell(events.Truncate(SeqId(name), tokens)):
            return False
        self.tokens[name] = self.tokens[name][:tokens]
        return True

    def run(self, lane_name: str) -> bool:
        """Let the lane do its first work."""
        lane = Lane[lane_name]
        work = self.device.pop(lane)
        if isinstance(work, Move):
            self.device.move(lane, work, torn=False)
            self._report(Report("done", work.fence, work.op))
        elif isinstance(work, Twin):
            self.device.twin(work)
            self._report(Report("passed", work.fence, 0))
        elif isinstance(work, Pass):
            self.device.forward(work)
        self._skip_marks()
        return True

    def tear(self, lane_name: str) -> bool:
        """The lane's first copy fails halfway."""
        lane = Lane[lane_name]
        work = self.device.pop(lane)
        assert isinstance(work, Move)
        self.device.move(lane, work, torn=True)
        self._report(Report("failed", work.fence, work.op))
        self._skip_marks()
        return True

    def reject(self, lane_name: str, at: int) -> bool:
        """The copy at place `at` of the lane was never accepted by the device."""
        lane = Lane[lane_name]
        queue = list(self.device.lanes[lane])
        work = queue[at]
        assert isinstance(work, Move)
        queue[at] = Mark(work.fence, (), told=False)
        self.device.lanes[lane] = tuple(queue)
        self._report(Report("rejected", work.fence, work.op))
        self._skip_marks()
        return True

    def deliver(self, verb: str, op: int, lane_name: str, value: int) -> bool:
        """Tell the core of something that has ended."""
        fence = Fence(Lane[lane_name], value)
        self.reports = tuple(report for report in self.reports if report.fence != fence)
        self.last_over = (op, fence) if op else self.last_over
        if verb == "passed":
            return self.inform(events.FencePassed(fence))
        if verb == "done":
            return self.inform(events.CopyDone(OpId(op)))
        if verb == "rejected":
            self.sent[fence.lane] -= self.core.ops[OpId(op)].num_bytes
            return self.inform(events.CopyRejected(OpId(op), FAILURE))
        return self.inform(events.CopyFailed(OpId(op), FAILURE))

    def repeat(self, verb: str) -> bool:
        """A report comes once more, or one of an op that never was."""
        op, fence = self.last_over or (1 << 40, None)
        if verb == "passed":
            return fence is None or self.inform(events.FencePassed(fence))
        if verb == "done":
            return self.inform(events.CopyDone(OpId(op)))
        return self.inform(events.CopyFailed(OpId(op), FAILURE))

    def hang(self) -> bool:
        """So much time passes that every copy under way is past its deadline."""
        self.now_ns += self.scenario.config.copy_deadline_ns
        return self.tick()

    def wake(self) -> bool:
        """Time passes until the core asked to be woken."""
        assert self.core._armed_ns is not None
        self.now_ns = max(self.now_ns, self.core._armed_ns)
        return self.tick()

    def tick(self) -> bool:
        return self.inform(events.Tick())

    def _carry_out(self, answer: list[commands.Command]) -> None:
        for command in answer:
            _CARRY_OUT[type(command)](self, command)
        self._skip_marks()
        self._poison()

    def _submit(self, copy: commands.Copy) -> None:
        check_hand_over(self, copy.after)
        self.sent[copy.lane] += copy.num_bytes
        self.device.push(copy.lane, as_move(copy))

    def _clone_pages(self, clone: commands.ClonePages) -> None:
        self.device.push(Lane.COMPUTE, as_twin(clone, self.core.layout))

    def _record(self, record: commands.RecordFence) -> None:
        self.device.push(Lane.COMPUTE, Mark(record.fence, (), told=True))

    def _granted(self, granted: commands.StepGranted) -> None:
        self._paid("step", granted.step)
        check_hand_over(self, granted.after)
        rows = []
        for name, count in self.waiting.pop(granted.step).items():
            sequence = self.core.sequences[SeqId(name)]
            writes = tuple(range(self._next_stamp, self._next_stamp + count))
            self._next_stamp += count
            tables = tuple(tuple(table.pages.tolist()) for table in sequence.tables)
            rows.append(Row(name, self.tokens[name], writes, tables, sequence.goal is Goal.RESTORING, void=False))
        gated = any(row.gated for row in rows)
        opened = Open(tuple(rows), granted.after, launched=gated)
        self.open[granted.step] = opened
        if gated:
            self._launch(granted.step, opened)

    def _launch(self, step: int, opened: Open) -> None:
        """Put the forward into the compute lane; a gated one layer by layer."""
        layers = tuple(range(self.core.layout.num_layers))
        if not opened.launched:
            self.device.push(Lane.COMPUTE, Pass(None, opened.after, StepId(step), layers, opened.rows))
            return
        for layer in layers:
            rows = tuple(row._replace(gated=row.gated and self.opened.get(row.name, 0) <= layer) for row in opened.rows)
            self.device.push(Lane.COMPUTE, Pass(None, opened.after, StepId(step), (layer,), rows))

    def _refused(self, refused: commands.StepRefused) -> None:
        self._paid("step", refused.step)
        appends = self.waiting.pop(refused.step)
        if isinstance(refused.cause, PagesExhausted):
            check_exhausted(self, appends)

    def _parked(self, parked: commands.Parked) -> None:
        self._paid("park", parked.sequence)
        if parked.outcome is PreemptOutcome.RECOMPUTE:
            self.tokens[parked.sequence] = ()

    def _park_undone(self, undone: commands.ParkUndone) -> None:
        self._paid("park", undone.sequence)

    def _pages_ready(self, ready: commands.PagesReady) -> None:
        if self.opened.setdefault(ready.sequence, 0):
            raise Violation(f"pages of {ready.sequence!r} are ready after its layers")

    def _layer_ready(self, ready: commands.LayerReady) -> None:
        name, layer = ready.sequence, int(ready.layer)
        if self.opened.get(name) != layer:
            raise Violation(f"layer {layer} of {name!r} is ready after {self.opened.get(name)} layers")
        self.opened[name] = layer + 1
        self._edit_passes(
            lambda work, row: row._replace(gated=False) if row.name == name and layer in work.layers else row
        )

    def _restored(self, restored: commands.Restored) -> None:
        name = restored.sequence
        self._paid("restore", name)
        self.opened.pop(name, None)
        self._edit_passes(lambda work, row: row._replace(gated=False) if row.name == name else row)

    def _layers_lost(self, lost: commands.LayersLost) -> None:
        name = lost.sequence
        self._edit_passes(lambda work, row: row._replace(void=True) if row.name == name and row.gated else row)

    def _restore_undone(self, undone: commands.RestoreUndone) -> None:
        self._paid("restore", undone.sequence)
        self.opened.pop(undone.sequence, None)
        if undone.voided_tokens:
            self.tokens[undone.sequence] = self.tokens[undone.sequence][: -undone.voided_tokens]

    def _gone(self, gone: commands.Gone) -> None:
        self._paid("gone", gone.sequence)
        del self.tokens[gone.sequence]

    def _ignore(self, command: commands.Command) -> None:
        """A wake-up time: `audit` looks at it."""

    def _paid(self, kind: str, about: str | int) -> None:
        if (kind, about) not in self.awaited:
            raise Violation(f"news that nobody waits for: {kind} of {about!r}")
        self.awaited.remove((kind, about))

    def _report(self, report: Report) -> None:
        self.reports += (report,)

    def _skip_marks(self) -> None:
        """Marks move nothing, so they are reached at once: whatever waits for them could only come later."""
        for lane in Lane:
            while self.device.lanes[lane] and isinstance(self.device.lanes[lane][0], Mark):
                mark = self.device.pop(lane)
                assert isinstance(mark, Mark)
                if mark.told:
                    self._report(Report("passed", mark.fence, 0))

    def _edit_passes(self, change: Callable[[Pass, Row], Row]) -> None:
        """Change rows of forwards that have not run."""
        queue = self.device.lanes[Lane.COMPUTE]
        self.device.lanes[Lane.COMPUTE] = tuple(
            work._replace(rows=tuple(change(work, row) for row in work.rows)) if isinstance(work, Pass) else work
            for work in queue
        )

    def _poison(self) -> None:
        """Nobody may read a free page or slot: make sure that it shows."""
        device = self.device
        for page, state in enumerate(self.core.ledger._state.tolist()):
            if state == PageState.FREE:
                low = page * device.num_layers
                device.pages[low : low + device.num_layers] = [device.poisoned] * device.num_layers
        taken = self.core.host._taken
        if any(place[0] not in taken for place in device.slots):
            device.slots = {place: stamps for place, stamps in device.slots.items() if place[0] in taken}


_VERBS: dict[str, Callable[..., bool]] = {
    verb: getattr(World, verb)
    for verb in (
        *("register", "step", "end", "void", "cancel_step", "preempt", "cancel_preempt", "restore", "cancel_restore"),
        *("finish", "abort", "reset", "evict", "fork", "truncate"),
        *("run", "tear", "reject", "deliver", "repeat", "hang", "wake", "tick", "settle"),
    )
}
_CARRY_OUT: dict[type, Callable[[World, Any], None]] = {
    commands.Copy: World._submit,
    commands.ClonePages: World._clone_pages,
    commands.RecordFence: World._record,
    commands.StepGranted: World._granted,
    commands.StepRefused: World._refused,
    commands.Parked: World._parked,
    commands.ParkUndone: World._park_undone,
    commands.PagesReady: World._pages_ready,
    commands.LayerReady: World._layer_ready,
    commands.Restored: World._restored,
    commands.LayersLost: World._layers_lost,
    commands.RestoreUndone: World._restore_undone,
    commands.Gone: World._gone,
    commands.WakeAt: World._ignore,
}
