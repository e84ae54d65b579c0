"""Breadth-first over all interleavings of a scenario: every state within the bounds is met, the nearest first.

States are merged by `canonical.key`. Two reductions, both sound: equal sequences are interchangeable (their names carry
no order in the core), and a fence record runs as soon as it is first in its lane (it moves no bytes and only enables
others, so each run in which it comes later is matched by one in which it comes at once). Everything that depends on a
state alone is asserted once for each distinct state; that a refused wish changes nothing is asserted each time.
"""

import gc
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from swapkv.fsm.ledger import PageState
from tests.prove import progress
from tests.prove.actions import ADVERSE, QUIET, actions, rude_actions
from tests.prove.audit import audit
from tests.prove.canonical import key
from tests.prove.scenario import Action, Scenario
from tests.prove.violation import Violation
from tests.prove.world import World


@attrs.frozen(kw_only=True)
class Found:
    """A broken promise: what it was, and the shortest way there."""

    scenario: Scenario
    error: BaseException
    trace: tuple[Action, ...]

    def __str__(self) -> str:
        """Readable events, then a test to paste."""
        what = f"{type(self.error).__name__}: {self.error}" if str(self.error) else type(self.error).__name__
        lines = [f"{self.scenario.name}: {what}", *(f"  {describe(action)}" for action in self.trace), "", *self.test()]
        return "\n".join(lines)

    def test(self) -> Iterator[str]:
        """A regression test that fails as this does."""
        name = self.scenario.name.replace(" ", "_").replace("-", "_")
        yield f"def test_core_{name}_keeps_its_promises() -> None:"
        yield f'    World(WORLDS["{self.scenario.name}"]).replay('
        yield from (f"        {action!r}," for action in self.trace)
        yield "    )"


@attrs.frozen(kw_only=True)
class Outcome:
    """What an exploration met. `whole`: every state within the bounds, that is, no limit cut it short."""

    scenario: Scenario
    states: int
    transitions: int
    depth: int
    seconds: float
    whole: bool
    found: Found | None


def describe(action: Action) -> str:
    """One event in words."""
    verb, *about = action
    return " ".join([str(verb).replace("_", " "), *map(str, about)])


def advance(world: World, action: Action) -> bool:
    """Let `action` happen at the expense of its budget. False: refused."""
    if not world.apply(action):
        return False
    budget = ADVERSE.get(str(action[0]))
    if budget is not None:
        world.left[budget] -= 1
    return True


def explore(scenario: Scenario, *, limit: int | None = None, alive: bool = True) -> Outcome:
    """Meet every state of `scenario`, at most `limit`; with `alive`, show that each leads to the end of every request."""
    with _without_collector():
        return _Search(scenario).run(limit, alive=alive)


@attrs.define
class _Search:
    scenario: Scenario
    ids: dict[bytes, int] = attrs.field(factory=dict)
    parents: "array[int]" = attrs.field(factory=lambda: array("q"))
    ways: list[Action] = attrs.field(factory=list)
    edges: progress.Edges = attrs.field(factory=progress.Edges)
    over: list[int] = attrs.field(factory=list)
    transitions: int = 0
    depth: int = 0
    whole: bool = True

    def run(self, limit: int | None, *, alive: bool) -> Outcome:
        begin_s = time.perf_counter()
        found = self._breadth_first(limit)
        if found is None and self.whole and alive:
            found = self._check_progress()
        return Outcome(
            scenario=self.scenario,
            states=len(self.ids),
            transitions=self.transitions,
            depth=self.depth,
            seconds=time.perf_counter() - begin_s,
            whole=self.whole,
            found=found,
        )

    def trace(self, state: int) -> tuple[Action, ...]:
        """The way from the first state to `state`, one of the shortest."""
        way: list[Action] = []
        while state > 0:
            way.append(self.ways[state])
            state = self.parents[state]
        return tuple(reversed(way))

    def _breadth_first(self, limit: int | None) -> Found | None:
        try:
            first = World(self.scenario)
            audit(first)
        except Exception as error:
            return Found(scenario=self.scenario, error=error, trace=())
        here = key(first)
        self._add(here, first, 0, ())
        frontier = [(0, here, first)]
        while frontier:
            reached: list[tuple[int, bytes, World]] = []
            for state, here, world in frontier:
                found = self._expand(state, here, world, reached)
                if found is not None:
                    return found
                if limit is not None and len(self.ids) >= limit:
                    self.whole = False
                    return None
            self.depth += bool(reached)
            frontier = reached
        return None

    def _expand(self, state: int, here: bytes, world: World, reached: list[tuple[int, bytes, World]]) -> Found | None:
        """Take every action from `world`; it is used up."""
        rude, polite = list(rude_actions(world)), list(actions(world))
        for at, action in enumerate(rude + polite):
            last = at == len(rude) + len(polite) - 1
            child = world if last else world.clone()
            try:
                accepted = child.apply(action) if at < len(rude) else advance(child, action)
                there = key(child)
                if there != here and (at < len(rude) or not accepted):
                    raise Violation(f"{describe(action)} should change nothing")
                if there not in self.ids:
                    audit(child)
            except Exception as error:
                return Found(scenario=self.scenario, error=error, trace=(*self.trace(state), action))
            self.transitions += 1
            if there == here:
                continue
            target = self.ids.get(there)
            if target is None:
                target = self._add(there, child, state, action)
                reached.append((target, there, child))
            self.edges.add(state, target, fair=action[0] not in ADVERSE, quiet=action[0] in QUIET)
        return None

    def _add(self, there: bytes, world: World, parent: int, action: Action) -> int:
        state = self.ids[there] = len(self.ids)
        self.parents.append(parent)
        self.ways.append(action)
        if is_over(world):
            self.over.append(state)
        return state

    def _check_progress(self) -> Found | None:
        """Nothing goes round in circles by itself, and from every state each request can still come to its end."""
        circle = progress.circle(self.edges, len(self.ids))
        if circle is not None:
            error = Violation("copies go on for ever, without any wish in between")
            return Found(scenario=self.scenario, error=error, trace=self.trace(circle))
        for state in progress.lost(self.edges, len(self.ids), self.over, self._patient):
            error = Violation("some request can never end from here")
            return Found(scenario=self.scenario, error=error, trace=self.trace(state))
        return None

    def _patient(self, state: int) -> bool:
        """Whether a fair scheduler, with preempts to spare, ends every request from `state`."""
        world = World(self.scenario)
        for action in self.trace(state):
            advance(world, action)
        return progress.finishes(world)


def is_over(world: World) -> bool:
    """Whether all requests have ended and nothing is under way, or a rank is lost, and the pool with it.

    Raises `Violation` if something is left behind then.
    """
    core = world.core
    if world.lost:
        return True
    if core.sequences or world.unborn or any(any(device.lanes) for device in world.ranks) or world.reports:
        return False
    if core.chunks or core.ops or core.steps or core.host.used or core.stuck_slots:
        raise Violation("all requests have ended and something is left in the core")
    if (core.ledger._state != PageState.FREE).any():
        raise Violation("all requests have ended and pages are missing")
    return True


@contextmanager
def _without_collector() -> Iterator[None]:
    """Worlds have no cycles: counting references is enough."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
