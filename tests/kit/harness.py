"""A naive model beside the core: every forward checks that it reads exactly what was written, token by token."""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

import attrs

from swapkv.errors import IllegalTransition, SwapError, TransferError
from swapkv.fsm import commands, events
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import host_pages
from swapkv.fsm.steps import is_gated
from swapkv.ids import GroupId, Lane, SeqId, StepId
from tests.kit.stamps import Stamp, StampDevice, Work


@attrs.define(eq=False)
class Forward:
    """A granted forward: what it should read, and where it writes.

    `away[s]`: of each layer group, where in the host tier it reads pages that have none on the device.
    `gated[s]`: how many layers of `s` are there, while the forward waits for more.
    """

    step: StepId
    reads: dict[SeqId, list[Stamp]]
    writes: dict[SeqId, list[Stamp]]
    tables: dict[SeqId, list[list[int]]]
    away: dict[SeqId, list[dict[int, tuple[int, int]]]]
    gated: dict[SeqId, int]
    void: set[SeqId] = attrs.field(factory=set)


class Harness:
    """Drives one core with stamped memory. `tokens[s]` is what the naive model says the sequence holds."""

    def __init__(self, core: SwapCore) -> None:
        self.core = core
        self.device = StampDevice(core)
        self.now_ns = 0
        self.wake_ns: int | None = None
        self.tokens: dict[SeqId, list[Stamp]] = {}
        self.forwards: dict[StepId, Forward] = {}
        self.queued: list[Forward] = []
        self.hung: list[commands.Copy] = []
        self.released: set[int] = set()
        self.waiting: dict[StepId, dict[SeqId, int]] = {}
        self.reports: deque[object] = deque()
        self.news: list[commands.Command] = []
        self.fate: Callable[[commands.Copy], str] = lambda copy: "ok"
        self.checks_each_event = True
        self._stamp = 0

    def do(self, event: events.Event) -> bool:
        """Send one event and carry out what the core answers. False: it refused, and nothing has changed."""
        try:
            out = self.core.handle(event, self.now_ns)
        except IllegalTransition as error:
            raise AssertionError(f"{event} moved a chunk where it must not") from error
        except SwapError:
            if self.checks_each_event:
                self.core.check()
            return False
        for command in out:
            self._carry_out(command)
        if self.checks_each_event:
            self.core.check()
            self.device.poison_what_is_free()
        return True

    def begin_step(self, step: StepId, appends: dict[SeqId, int]) -> bool:
        self.waiting[step] = appends
        if not self.do(events.BeginStep(step, appends)):
            del self.waiting[step]
            return False
        return True

    def end_step(self, step: StepId) -> None:
        forward = self.forwards.pop(step)
        for name, stamps in forward.writes.items():
            self.tokens[name] = self.tokens[name] + stamps
        assert self.do(events.EndStep(step))

    def void_step(self, step: StepId) -> None:
        self.forwards.pop(step)
        assert self.do(events.VoidStep(step))

    def fork(self, parent: SeqId, child: SeqId, max_tokens: int) -> None:
        if self.do(events.Fork(parent, child, max_tokens)):
            self.tokens[child] = list(self.tokens[parent])

    def truncate(self, name: SeqId, length: int) -> None:
        before = self.tokens[name]
        self.tokens[name] = before[:length]
        if not self.do(events.Truncate(name, length)):
            self.tokens[name] = before

    def run_lane(self, rng: Random) -> bool:
        """Let one lane that can run do its first work."""
        lanes = self.device.runnable()
        if not lanes:
            return False
        answer = self.device.run(rng.choice(lanes))
        if answer is not None:
            self.reports.append(answer)
        return True

    def report(self, rng: Random) -> bool:
        """Deliver one report, in any order."""
        if not self.reports:
            return False
        at = rng.randrange(len(self.reports))
        self.reports.rotate(-at)
        report = self.reports.popleft()
        assert self.do(report)  # type: ignore[arg-type]
        return True

    def unhang(self) -> None:
        """Hung copies go on after all, and move their bytes."""
        self.released.update(copy.op for copy in self.hung)
        self.hung.clear()

    def settle(self, rng: Random) -> None:
        """Run and report until nothing is left."""
        while self.run_lane(rng) or self.report(rng):
            pass

    def wake(self) -> bool:
        """Let time pass until the core wants to be woken. False: it does not."""
        if self.wake_ns is None:
            return False
        self.now_ns, self.wake_ns = max(self.now_ns, self.wake_ns), None
        assert self.do(events.Tick())
        return True

    def _carry_out(self, command: commands.Command) -> None:
        self.news.append(command)
        if isinstance(command, commands.Copy):
            self._submit(command)
        elif isinstance(command, commands.ClonePages):
            self.device.submit_clone(command, events.FencePassed)
        elif isinstance(command, commands.RecordFence):
            self.device.submit_record(command, events.FencePassed)
        elif isinstance(command, commands.StepGranted):
            self._start(command)
        elif isinstance(command, commands.StepRefused):
            del self.waiting[command.step]
        elif isinstance(command, commands.LayersLost):
            self._lost(command.sequence)
        elif isinstance(command, commands.LayerReady):
            for forward in self._gated(command.sequence):
                forward.gated[command.sequence] = command.layer + 1
        elif isinstance(command, commands.Restored):
            for forward in self._gated(command.sequence):
                del forward.gated[command.sequence]
        elif isinstance(command, commands.RestoreUndone):
            self._undone(command)
        elif isinstance(command, commands.Parked):
            if command.outcome is commands.PreemptOutcome.RECOMPUTE:
                self.tokens[command.sequence] = []
        elif isinstance(command, commands.WakeAt):
            self.wake_ns = command.at_ns if self.wake_ns is None else min(self.wake_ns, command.at_ns)
        elif isinstance(command, commands.Gone):
            del self.tokens[command.sequence]

    def _submit(self, copy: commands.Copy) -> None:
        fate = self.fate(copy)
        if fate == "reject":
            self.reports.append(events.CopyRejected(copy.op, TransferError("rejected")))
            self.device.lanes[copy.lane].append(Work(lambda: None, (), copy.fence))
        elif fate == "fail":
            failure = TransferError("failed")
            self.device.submit_copy(copy, lambda c: events.CopyFailed(c.op, failure), moves=False)
        elif fate == "ok":
            self.device.submit_copy(copy, lambda c: events.CopyDone(c.op), moves=True)
        else:
            assert fate == "hang"
            self.hung.append(copy)
            self.device.submit_copy(copy, lambda c: events.CopyDone(c.op), moves=True)
            self.device.lanes[copy.lane][-1].gate = lambda: copy.op in self.released

    def _start(self, granted: commands.StepGranted) -> None:
        """The forward begins: it reads what the model expects, and writes new stamps."""
        appends = self.waiting.pop(granted.step)
        sequences = {name: self.core.sequences[name] for name in appends}
        forward = Forward(
            granted.step,
            reads={name: list(self.tokens[name]) for name in appends},
            writes={name: [self._next(name) for _ in range(count)] for name, count in appends.items()},
            tables={name: [t.pages.tolist() for t in s.tables] for name, s in sequences.items()},
            away={name: [self._away(name, group) for group in self.core.groups()] for name in appends},
            gated={n: s.restore.layers_told for n, s in sequences.items() if s.restore is not None and is_gated(s)},
        )
        self.forwards[granted.step] = forward
        for layer in range(self.core.layout.num_layers):
            after = granted.after if layer == 0 else ()
            run, gate = partial(self._compute, forward, layer), partial(self._may_compute, forward, layer)
            self.device.lanes[Lane.COMPUTE].append(Work(run, after, None, gate))
        self.queued.append(forward)

    def _may_compute(self, forward: Forward, layer: int) -> bool:
        return all(layer < told for told in forward.gated.values())

    def _compute(self, forward: Forward, layer: int) -> None:
        """One layer of every sequence: what is read must be what was written, then the new tokens are written."""
        for name in forward.reads:
            if name not in forward.void:
                self._read(forward, name, layer)
                self._write(forward, name, layer)
        if layer == self.core.layout.num_layers - 1:
            self.queued.remove(forward)

    def _read(self, forward: Forward, name: SeqId, layer: int) -> None:
        group = self.core.layout.group_of_layer[layer]
        window = self.core.layout.groups[group].window
        before = forward.reads[name]
        for position in range(0 if window is None else max(0, len(before) - window + 1), len(before)):
            found = self._place(forward, name, layer, position)
            assert found == before[position], f"{name} reads {found} at {position}, expects {before[position]}"

    def _write(self, forward: Forward, name: SeqId, layer: int) -> None:
        for position, stamp in enumerate(forward.writes[name], start=len(forward.reads[name])):
            self._place(forward, name, layer, position, stamp)

    def _place(self, forward: Forward, name: SeqId, layer: int, position: int, stamp: Stamp = None) -> Stamp:
        """What stands at one position of one layer, after `stamp` was written there."""
        page_size, group = self.core.layout.page_size, self.core.layout.group_of_layer[layer]
        page = forward.tables[name][group][position // page_size]
        there = forward.away[name][group].get(position // page_size)
        assert page >= 0 or (there and stamp is None), f"{name} uses position {position}, which has no page"
        stamps = self.device.page(page, layer) if page >= 0 else self.device.slot(there[0], layer, there[1])
        if stamp is not None:
            stamps[position % page_size] = stamp
        return stamps[position % page_size]

    def _away(self, name: SeqId, group: GroupId) -> dict[int, tuple[int, int]]:
        """By logical page: the slot and the place in it."""
        runs = host_pages(self.core, name, group)
        return {run.first + at: (int(run.slot), at) for run in runs for at in range(run.count)}

    def _undone(self, undone: commands.RestoreUndone) -> None:
        if undone.voided_tokens:
            del self.tokens[undone.sequence][-undone.voided_tokens :]

    def _gated(self, name: SeqId) -> list[Forward]:
        """Forwards that wait for layers of a sequence."""
        return [forward for forward in self.queued if name in forward.gated]

    def _lost(self, name: SeqId) -> None:
        """Layers will not come: forwards that wait for them compute nothing for the sequence from here on."""
        for forward in self._gated(name):
            del forward.gated[name]
            forward.void.add(name)

    def _next(self, name: SeqId) -> Stamp:
        self._stamp += 1
        return (name, self._stamp)
