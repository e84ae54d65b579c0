"""A world: the real core, devices whose copies read their source when they run, and a model of what must be read."""

from collections.abc import Callable

from swapkv.errors import IllegalTransition, PagesExhausted, SwapError, TransferError
from swapkv.fsm import events
from swapkv.fsm.core import SwapCore
from swapkv.fsm.records import Goal
from swapkv.ids import Fence, Lane, OpId, SeqId, StepId
from tests.prove.audit import audit, check_exhausted
from tests.prove.cloning import clone_core
from tests.prove.lanes import Device, Mark, Move, Open, Pass, Report, Stamps, Twin
from tests.prove.news import carry_out, edit_passes, launch
from tests.prove.scenario import Action, Scenario
from tests.prove.violation import Violation

FAILURE = TransferError("scripted")


class World:
    """One state of a scenario. `apply` changes it in place; `clone` first to keep it.

    `tokens[name]`: the stamps that the sequence must hold. `unborn`: names not registered yet. `waiting`: steps that
    wait for pages. `opened[name]`: layers told as ready in the restore under way. `awaited`: news that the core owes.
    `sent`: bytes submitted a lane, rejected copies left out. `left`: what remains of the budget. `ranks`: a device of
    each, all of them told the same; what has ended on all is reported. `torn`: copies that have failed on some rank.
    `lost`: whether the last rank has died, which ends all reports.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.core = SwapCore(scenario.layout, scenario.pages, scenario.host_bytes, scenario.config)
        self.ranks = [Device(scenario.layout, sum(scenario.pages)) for _ in range(scenario.ranks)]
        self.torn: frozenset[int] = frozenset()
        self.lost = False
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
        self.next_stamp = 1
        self._next_step = 1
        for action in scenario.begun:
            if not self.apply(action):
                raise Violation(f"scenario {scenario.name!r}: {action} is refused")
        self.left = dict(scenario.budget)

    def clone(self) -> "World":
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.core, twin.ranks = clone_core(self.core), [device.clone() for device in self.ranks]
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
            at = next(
                ((lane, rank) for rank in range(len(self.ranks)) for lane in Lane if self.can_run(lane, rank)), None
            )
            if at is not None:
                self.run(at[0].name, at[1])
            elif self.reports:
                report = self.reports[0]
                self.deliver(report.verb, report.op, report.fence.lane.name, report.fence.value)
            else:
                return True

    def can_run(self, lane: Lane, rank: int) -> bool:
        """Whether the first work of `lane` could run now."""
        device = self.ranks[rank]
        queue = device.lanes[lane]
        if not queue or not device.ready(queue[0]) or (self.lost and rank == len(self.ranks) - 1):
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
        carry_out(self, answer)
        return True

    def inform(self, event: events.Event) -> bool:
        """Report something; the core must take it."""
        carry_out(self, self.core.handle(event, self.now_ns))
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
            launch(self, step, opened)
        for row in opened.rows:
            self.tokens[row.name] += row.writes
        return self.inform(events.EndStep(StepId(step)))

    def void(self, step: int) -> bool:
        """The forward was launched, or part of it, and its outcome is given up."""
        opened = self.open.pop(step)
        if not opened.launched:
            launch(self, step, opened)
        edit_passes(self, lambda work, row: row._replace(void=True) if work.step == step else row)
        return self.inform(events.VoidStep(StepId(step)))

    def cancel_step(self, step: int) -> bool:
        if not self.tell(events.CancelStep(StepId(step))):
            return False
        del self.waiting[step]
        self.awaited.remove(("step", step))
        return True

    def preempt(self, name: str) -> bool:
        return self.wish(events.Preempt(SeqId(name)), ("park", name))

    def spill(self, name: str, tokens: int) -> bool:
        return self.wish(events.Spill(SeqId(name), tokens), ("park", name))

    def cancel_preempt(self, name: str) -> bool:
        return self.tell(events.CancelPreempt(SeqId(name)))

    def restore(self, name: str, spilled: int = 0) -> bool:
        before = self.opened.pop(name, None)
        if self.wish(events.BeginRestore(SeqId(name), spilled=spilled), ("restore", name)):
            return True
        if before is not None:
            self.opened[name] = before
        return False

    def restore_part(self, name: str, spilled: int) -> bool:
        """All but the first `spilled` tokens come back."""
        return self.restore(name, spilled)

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

    def run(self, lane_name: str, rank: int = 0) -> bool:
        """Let the lane do its first work."""
        lane, device = Lane[lane_name], self.ranks[rank]
        work = device.pop(lane)
        if isinstance(work, Move):
            device.move(lane, work, torn=False)
            self._ended(work.fence, work.op)
        elif isinstance(work, Twin):
            device.twin(work)
            self._ended(work.fence, 0)
        elif isinstance(work, Pass):
            device.forward(work)
        self.skip_marks()
        return True

    def tear(self, lane_name: str, rank: int = 0) -> bool:
        """The lane's first copy fails halfway."""
        lane, device = Lane[lane_name], self.ranks[rank]
        work = device.pop(lane)
        assert isinstance(work, Move)
        device.move(lane, work, torn=True)
        self.torn |= {work.op}
        self._ended(work.fence, work.op)
        self.skip_marks()
        return True

    def reject(self, lane_name: str, at: int) -> bool:
        """The copy at place `at` of the lane was never accepted: no rank has begun it."""
        lane = Lane[lane_name]
        for device in self.ranks:
            queue = list(device.lanes[lane])
            work = queue[at]
            assert isinstance(work, Move)
            queue[at] = Mark(work.fence, (), told=False)
            device.lanes[lane] = tuple(queue)
        self.reports += (Report("rejected", work.fence, work.op),)
        self.skip_marks()
        return True

    def die(self) -> bool:
        """The last rank is gone: it ends nothing any more, so that nothing is reported any more either."""
        self.lost = True
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

    def _ended(self, fence: Fence, op: int) -> None:
        """Work has ended on one rank. When it has on all, that is reported: as failed if it has failed anywhere."""
        if any(device.reached[fence.lane] < fence.value for device in self.ranks):
            return
        verb = "passed" if not op else "failed" if op in self.torn else "done"
        self.torn -= {op}
        self.reports += (Report(verb, fence, op),)

    def skip_marks(self) -> None:
        """Marks move nothing, so they are reached at once: whatever waits for them could only come later."""
        for device in self.ranks:
            for lane in Lane:
                while device.lanes[lane] and isinstance(device.lanes[lane][0], Mark):
                    mark = device.pop(lane)
                    assert isinstance(mark, Mark)
                    if mark.told:
                        self._ended(mark.fence, 0)


_VERBS: dict[str, Callable[..., bool]] = {
    verb: getattr(World, verb)
    for verb in (
        *("register", "step", "end", "void", "cancel_step", "preempt", "spill", "cancel_preempt"),
        *("restore", "restore_part", "cancel_restore"),
        *("finish", "abort", "reset", "evict", "fork", "truncate"),
        *("run", "tear", "reject", "die", "deliver", "repeat", "hang", "wake", "tick", "settle"),
    )
}
