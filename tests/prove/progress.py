"""Whether what was explored comes to an end: no circles without a wish, no state from which a request cannot finish."""

from array import array
from collections.abc import Callable, Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from swapkv.fsm import queries
from swapkv.fsm.records import Goal
from tests.prove.world import World

ROUNDS_MAX = 60


@attrs.define
class Edges:
    """Transitions between states. `fair`: no fault, cancel or preempt. `quiet`: no wish of the caller."""

    sources: "array[int]" = attrs.field(factory=lambda: array("q"))
    targets: "array[int]" = attrs.field(factory=lambda: array("q"))
    flags: bytearray = attrs.field(factory=bytearray)

    def add(self, source: int, target: int, *, fair: bool, quiet: bool) -> None:
        self.sources.append(source)
        self.targets.append(target)
        self.flags.append(fair + 2 * quiet)

    def of(self, flag: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sources and targets of the edges that have `flag`."""
        chosen = (np.frombuffer(bytes(self.flags), dtype=np.uint8) & flag) > 0
        return np.array(self.sources, dtype=np.int64)[chosen], np.array(self.targets, dtype=np.int64)[chosen]


def circle(edges: Edges, states: int) -> int | None:
    """A state from which quiet edges lead back to it, or into such a circle; None: there is none."""
    if not len(edges.flags):
        return None
    sources, targets = edges.of(2)
    outgoing = np.bincount(sources, minlength=states)
    starts, order = _by(targets, states)
    done = [int(state) for state in np.flatnonzero(outgoing == 0)]
    left = states
    while done:
        state = done.pop()
        left -= 1
        for edge in order[starts[state] : starts[state + 1]].tolist():
            source = int(sources[edge])
            outgoing[source] -= 1
            if outgoing[source] == 0:
                done.append(source)
    return int(np.flatnonzero(outgoing > 0)[0]) if left else None


def lost(edges: Edges, states: int, over: list[int], patient: Callable[[int], bool]) -> Iterator[int]:
    """States from which no fair edges lead to the end, and `patient` finds no way either.

    `patient` costs much, so it is asked for the last states first: what leads to them is then known as well.
    """
    sources, targets = edges.of(1) if len(edges.flags) else (np.zeros(0, np.int64), np.zeros(0, np.int64))
    starts, order = _by(targets, states)
    good = np.zeros(states, dtype=bool)

    def spread(begin: list[int]) -> None:
        good[begin] = True
        while begin:
            state = begin.pop()
            for edge in order[starts[state] : starts[state + 1]].tolist():
                source = int(sources[edge])
                if not good[source]:
                    good[source] = True
                    begin.append(source)

    spread(list(over))
    for state in range(states - 1, -1, -1):
        if good[state]:
            continue
        if patient(state):
            spread([state])
        else:
            yield state


def finishes(world: World) -> bool:
    """Let a fair scheduler run `world` to its end: everything completes, and who lacks pages gets another's."""
    for _ in range(ROUNDS_MAX):
        world.settle()
        for step in list(world.open):
            world.end(step)
        world.settle()
        if not world.core.sequences and not world.unborn:
            return True
        _take_turns(world)
    return False


def _take_turns(world: World) -> None:
    """Who is on the device goes on; if nobody can, one of several leaves, or one that is away comes back."""
    for name in list(world.unborn):
        world.register(name)
    active = [str(n) for n, s in world.core.sequences.items() if s.goal is Goal.ACTIVE and not s.finishing]
    if any(_go_on(world, name) for name in active):
        return
    victims = [str(victim.sequence) for victim in queries.victims(world.core) if victim.freed_bytes]
    if len(victims) > 1 or (victims and victims[0] not in active):
        world.preempt(next((name for name in victims if name not in active), victims[-1]))
        return
    for name, sequence in list(world.core.sequences.items()):
        if sequence.goal is Goal.EVICTED and world.reset(str(name)):
            return
        if sequence.goal is Goal.PARKED and world.restore(str(name)):
            return


def _go_on(world: World, name: str) -> bool:
    """Whether there was something that the sequence could do."""
    if any(name in appends for appends in world.waiting.values()):
        return True
    return world.finish(name) if world.next_target(name) is None else world.step(name)


def _by(ends: NDArray[np.int64], states: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Edges sorted by one end: where each state's begin, and their numbers."""
    order = np.argsort(ends, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(ends, minlength=states))))
    return starts, order
