"""Random traffic for the harness: everything a caller may do, at any time, with copies that fail."""

from collections.abc import Mapping
from random import Random

from swapkv.config import SwapConfig
from swapkv.fsm import events
from swapkv.fsm.core import SwapCore
from swapkv.fsm.records import Goal
from swapkv.ids import SeqId, StepId
from swapkv.layout import KVLayout
from tests.kit.harness import Harness


class Chaos:
    """One seed's worth of traffic. `failures`, `hangs`: probability that a copy fails or is rejected, or hangs.

    `bias`: weights of actions, by name, other than the usual ones. `max_chunks`: how long sequences get.
    """

    def __init__(
        self,
        seed: int,
        layout: KVLayout,
        pages: list[int],
        host_chunks: int,
        config: SwapConfig,
        failures: float = 0.1,
        hangs: float = 0.0,
        bias: Mapping[str, float] | None = None,
        max_chunks: int = 3,
    ) -> None:
        self.rng = Random(seed)
        weights = {action: (bias or {}).get(action.__name__, weight) for action, weight in _TABLE.items()}
        self._actions, self._weights = list(weights), list(weights.values())
        host_bytes = host_chunks * max(layout.chunk_bytes(g) for g in range(len(layout.groups)))  # type: ignore[arg-type]
        self.core = SwapCore(layout, pages, host_bytes, config)
        self.harness = Harness(self.core)
        self.harness.fate = lambda copy: self._fate(failures, hangs)
        self.max_tokens = max_chunks * layout.chunk_tokens
        self._names = 0
        self._steps = 0

    def run(self, actions: int) -> None:
        """Act at random, then check that everyone could still run, let everything end, and see that nothing is left."""
        for _ in range(actions):
            self.act()
        self.everyone_runs()
        self.wind_down()

    def act(self) -> None:
        choice = self.rng.choices(self._actions, weights=self._weights)[0]
        choice(self)

    def everyone_runs(self) -> None:
        """Nobody is stuck: with no more failures each sequence, the others parked, comes back and grows to its end."""
        self.harness.fate = lambda copy: "ok"
        self._come_to_rest()
        for name in [n for n, s in self.core.sequences.items() if s.goal is Goal.RESTORING]:
            assert self.harness.do(events.CancelRestore(name))
        self._come_to_rest()
        while (name := self._on_device()) is not None:
            self._put_away(name)
        for name, sequence in list(self.core.sequences.items()):
            if sequence.goal is Goal.EVICTED:
                assert self.harness.do(events.Reset(name))
            else:
                assert self.harness.do(events.BeginRestore(name))
                self._come_to_rest()
            assert sequence.goal is Goal.ACTIVE, f"{name} alone does not come back"
            while sequence.tokens < sequence.max_tokens:
                self._steps += 1
                count = min(sequence.step_tokens, sequence.max_tokens - sequence.tokens)
                assert self.harness.begin_step(StepId(self._steps), {name: count}), f"{name} alone cannot go on"
                self.harness.end_step(StepId(self._steps))
            self._put_away(name)

    def _on_device(self) -> SeqId | None:
        """A sequence that is on the device or, when none is, one that has pages there although it is parked."""
        active = (name for name, sequence in self.core.sequences.items() if sequence.goal is Goal.ACTIVE)
        owners = (name for chunk in self.core.chunks.values() if chunk.on_device for name in chunk.refs)
        return next(active, None) or next(owners, None)

    def _put_away(self, name: SeqId) -> None:
        if not self.harness.do(events.Preempt(name)):
            assert self.harness.do(events.Evict(name)), f"{name} neither leaves nor can be dropped"
            self.harness.tokens[name] = []
        self._come_to_rest()

    def _come_to_rest(self) -> None:
        """Let forwards, copies and waiting end by themselves; the clock goes only where the core asked to be woken."""
        harness, core = self.harness, self.core
        for _ in range(500):
            for step in list(harness.forwards):
                harness.end_step(step)
            harness.unhang()
            harness.settle(self.rng)
            if not harness.wake():
                break
        assert not core.ops
        assert not core.offloads
        assert not any(s.restore is not None and s.restore.segments for s in core.restores.values())
        assert not core.waiting_steps, "a forward waits for pages that nobody will give back"

    def wind_down(self) -> None:
        """Finish every sequence; all pages and host bytes must come back."""
        self.harness.fate = lambda copy: "ok"
        for step in list(self.harness.forwards):
            self.harness.end_step(step)
        for name in list(self.core.sequences):
            if name in self.core.sequences:
                self.harness.do(events.Finish(name))
        for _ in range(5):
            for step in list(self.harness.forwards):
                self.harness.end_step(step)
            self.harness.settle(self.rng)
            self.harness.unhang()
            self.harness.now_ns += self.core.config.copy_deadline_ns
            self.harness.do(events.Tick())
        self.harness.settle(self.rng)
        core = self.core
        assert not core.sequences
        assert not core.chunks
        assert not core.ops
        assert not core.steps
        assert core.host.used == 0
        for group in core.groups():
            assert core.ledger.free(group) == core.ledger.total(group)

    def any_sequence(self, *goals: Goal) -> SeqId | None:
        names = [n for n, s in self.core.sequences.items() if not goals or s.goal in goals]
        return self.rng.choice(names) if names else None

    def new_name(self) -> SeqId:
        self._names += 1
        return SeqId(f"s{self._names}")

    def register(self) -> None:
        if len(self.core.sequences) < 6:
            name = self.new_name()
            step_tokens = self.rng.choice([None, self.core.layout.chunk_tokens])
            if self.harness.do(events.Register(name, self.max_tokens, step_tokens, self.rng.randrange(3))):
                self.harness.tokens[name] = []

    def begin_step(self) -> None:
        names = [n for n, s in self.core.sequences.items() if s.goal in (Goal.ACTIVE, Goal.RESTORING)]
        chosen = self.rng.sample(names, min(len(names), self.rng.randint(1, 3)))
        chunk = self.core.layout.chunk_tokens
        appends = {n: self.rng.choice([0, 1, 1, 1, 2, chunk // 2, chunk, self.max_tokens // 3]) for n in chosen}
        for name in chosen:
            left = self.max_tokens - len(self.harness.tokens[name])
            appends[name] = min(appends[name], self.core.sequences[name].step_tokens, left)
        if appends:
            self._steps += 1
            self.harness.begin_step(StepId(self._steps), appends)

    def end_step(self) -> None:
        if self.harness.forwards:
            step = self.rng.choice(list(self.harness.forwards))
            (self.harness.void_step if self.rng.random() < 0.15 else self.harness.end_step)(step)

    def cancel_step(self) -> None:
        if self.harness.waiting and self.rng.random() < 0.3:
            step = self.rng.choice(list(self.harness.waiting))
            if self.harness.do(events.CancelStep(step)):
                del self.harness.waiting[step]

    def preempt(self) -> None:
        self._tell(events.Preempt, Goal.ACTIVE)

    def restore(self) -> None:
        name = self.any_sequence(Goal.PARKED)
        if name is not None:
            self.harness.do(events.BeginRestore(name, self.rng.choice([None, 0, 1])))

    def restore_in_part(self) -> None:
        """The sequence comes back, or runs on, with some of its tokens in the host tier."""
        name = self.any_sequence(Goal.PARKED, Goal.ACTIVE)
        if name is not None:
            self.harness.do(events.BeginRestore(name, spilled=self._some_tokens()))

    def spill(self) -> None:
        name = self.any_sequence(Goal.ACTIVE)
        if name is not None:
            self.harness.do(events.Spill(name, self.rng.choice([None, self._some_tokens()])))

    def rush(self) -> None:
        """Everyone wants to come back, some sooner than others."""
        for name in [n for n, s in self.core.sequences.items() if s.goal is Goal.PARKED]:
            self.harness.do(events.BeginRestore(name, self.rng.randrange(4)))

    def grow(self) -> None:
        """A forward that adds as much as it may."""
        name = self.any_sequence(Goal.ACTIVE)
        if name is not None:
            sequence = self.core.sequences[name]
            count = min(sequence.step_tokens, sequence.max_tokens - sequence.tokens)
            self._steps += 1
            self.harness.begin_step(StepId(self._steps), {name: count})

    def anything(self) -> None:
        """A wish in whatever state: it is served or refused, and nothing breaks."""
        kinds = (events.Preempt, events.BeginRestore, events.CancelPreempt, events.CancelRestore)
        self._tell(self.rng.choice(kinds))

    def cancel(self) -> None:
        self._tell(events.CancelPreempt, Goal.PARKING)
        self._tell(events.CancelRestore, Goal.RESTORING)

    def fork(self) -> None:
        parent = self.any_sequence()
        if parent is not None and len(self.core.sequences) < 6:
            self.harness.fork(parent, self.new_name(), self.max_tokens)

    def truncate(self) -> None:
        name = self.any_sequence()
        if name is not None and self.harness.tokens[name]:
            length = len(self.harness.tokens[name])
            self.harness.truncate(name, self.rng.randint(max(0, length - 5), length))

    def evict(self) -> None:
        name = self.any_sequence()
        if name is not None and self.harness.do(events.Evict(name)):
            self.harness.tokens[name] = []

    def reset(self) -> None:
        self._tell(events.Reset, Goal.EVICTED)

    def finish(self) -> None:
        self._tell(events.Finish)

    def run_lane(self) -> None:
        self.harness.run_lane(self.rng)

    def report(self) -> None:
        self.harness.report(self.rng)

    def pass_time(self) -> None:
        self.harness.now_ns += self.rng.choice([1_000, 1_000_000, 100_000_000])
        self.harness.do(events.Tick())

    def hang_on(self) -> None:
        if self.rng.random() < 0.1:
            self.harness.unhang()

    def repeat(self) -> None:
        """A completion that was reported before, or of a copy that never was."""
        known = self.core._next_op + 1
        op = self.rng.randint(1, known)
        if op not in self.core.ops:
            self.harness.do(events.CopyDone(op))  # type: ignore[arg-type]

    def _some_tokens(self) -> int:
        return self.rng.randrange(self.max_tokens)

    def _tell(self, kind: type, *goals: Goal) -> None:
        name = self.any_sequence(*goals)
        if name is not None:
            self.harness.do(kind(name))

    def _fate(self, failures: float, hangs: float) -> str:
        if self.rng.random() < hangs:
            return "hang"
        if self.rng.random() < failures:
            return self.rng.choice(["fail", "reject"])
        return "ok"


_TABLE = {
    Chaos.register: 3,
    Chaos.begin_step: 10,
    Chaos.end_step: 10,
    Chaos.cancel_step: 1,
    Chaos.preempt: 5,
    Chaos.restore: 5,
    Chaos.restore_in_part: 0,
    Chaos.spill: 0,
    Chaos.rush: 0,
    Chaos.grow: 0,
    Chaos.anything: 2,
    Chaos.cancel: 1,
    Chaos.fork: 1,
    Chaos.truncate: 1,
    Chaos.evict: 0.3,
    Chaos.reset: 1,
    Chaos.finish: 0.7,
    Chaos.run_lane: 25,
    Chaos.report: 20,
    Chaos.pass_time: 2,
    Chaos.hang_on: 1,
    Chaos.repeat: 0.5,
}
