"""`python -m tests.prove`: explore every world, fly every canary, run many seeds, cancel every call; say what came of it.

Exits with 1 if anything was found. The last line is made to be read by a program.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import anyio
import attrs
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from tests.faults.index import summary
from tests.prove.canaries import CANARIES, fly
from tests.prove.cancelling import SWEEPS, When, cancel_everywhere
from tests.prove.explore import explore
from tests.prove.seeds import Seeds, run_seeds
from tests.prove.worlds import LONG, SHORT, WORLDS

S = TypeVar("S")
T = TypeVar("T")

SEEDS_AT_ONCE = 50
BACKENDS = ("asyncio", "trio")


@attrs.define
class Verdict:
    """What the last line says."""

    states: int = 0
    violations: int = 0
    caught: int = 0
    canaries: int = 0
    seeds: int = 0
    failures: int = 0
    cancel_points: int = 0

    @property
    def good(self) -> bool:
        return not self.violations and not self.failures and self.caught == self.canaries

    def __str__(self) -> str:
        return (
            f"states={self.states} violations={self.violations} canaries={self.caught}/{self.canaries} "
            f"seeds={self.seeds} failures={self.failures} cancel_points={self.cancel_points}"
        )


@attrs.frozen
class Explored:
    """A world, in words and numbers."""

    states: int
    transitions: int
    depth: int
    seconds: float
    end: str
    violation: str | None


def _explore(world: tuple[str, int | None]) -> Explored:
    name, limit = world
    outcome = explore(WORLDS[name], limit=limit)
    violation = None if outcome.found is None else str(outcome.found)
    end = "VIOLATED" if violation else "whole" if outcome.whole else "in part"
    return Explored(outcome.states, outcome.transitions, outcome.depth, outcome.seconds, end, violation)


def _fly(name: str) -> tuple[bool, str, float]:
    flight = fly(CANARIES[name])
    return flight.error is not None, flight.words, flight.seconds


def _cancel(case: tuple[str, When]) -> tuple[int, str | None]:
    """How many places of cancellation a call has on all backends; what was found, if something was."""
    call, when = case
    points = 0
    try:
        for backend in BACKENDS:
            points += anyio.run(cancel_everywhere, SWEEPS[call], when, backend=backend)
    except Exception as error:
        return points, f"{call}, cancelled {when.value}: {type(error).__name__}: {error}"
    return points, None


class Proof:
    """Runs the parts on several processes and prints a table of each."""

    def __init__(self, console: Console, workers: ProcessPoolExecutor) -> None:
        self.verdict = Verdict()
        self._console = console
        self._workers = workers

    def worlds(self, names: Sequence[str], limit: int | None) -> None:
        """Explore, at most `limit` states of each; one row a world."""
        table = Table("world", "what is in it", *map(_right, ("states", "transitions", "depth", "s")), "")
        found = []
        for name, world in self._each("exploring", _explore, names, [(name, limit) for name in names]):
            self.verdict.states += world.states
            found += [] if world.violation is None else [world.violation]
            sizes = (f"{world.states:,}", f"{world.transitions:,}", str(world.depth), f"{world.seconds:.1f}")
            table.add_row(name, WORLDS[name].about, *sizes, world.end)
        self.verdict.violations += len(found)
        self._print(f"Every interleaving of {len(names)} worlds", table, found)

    def canaries(self) -> None:
        """Take out each guard; one row a guard."""
        table = Table("canary", "the guard that it lacks", "caught by", "which found", _right("s"))
        names = list(CANARIES)
        for name, (caught, words, seconds) in self._each("flying canaries", _fly, names, names):
            self.verdict.canaries += 1
            self.verdict.caught += caught
            canary = CANARIES[name]
            table.add_row(name, canary.guard, canary.catcher, words if caught else "SURVIVED", f"{seconds:.1f}")
        self._print("Guards taken out one by one", table, [])

    def seeds(self, first: int, count: int) -> None:
        """Run simulations, each against its twin."""
        total = Seeds()
        blocks = [
            range(at, min(at + SEEDS_AT_ONCE, first + count)) for at in range(first, first + count, SEEDS_AT_ONCE)
        ]
        for _, part in self._each("simulating", run_seeds, blocks, blocks):
            total.ran += part.ran
            total.failures += part.failures
            total.happened += part.happened
            total.first_failure = total.first_failure or part.first_failure
        self.verdict.seeds, self.verdict.failures = total.ran, total.failures
        table = Table("what happened", _right("times"))
        for what, times in sorted(total.happened.items()):
            table.add_row(what.replace("_", " "), f"{times:,}")
        self._print(f"{total.ran:,} simulations with faults", table, list(filter(None, [total.first_failure])))

    def cancels(self) -> None:
        """Cancel every call of the pool, wherever it can be."""
        table = Table("call", *(_right(when.value) for when in When))
        cases = [(call, when) for call in SWEEPS for when in When]
        tried = dict(self._each("cancelling", _cancel, cases, cases))
        found = [failure for _, failure in tried.values() if failure is not None]
        self.verdict.cancel_points = sum(points for points, _ in tried.values())
        self.verdict.violations += len(found)
        for call in SWEEPS:
            table.add_row(call, *(str(tried[call, when][0]) for when in When))
        self._print(f"Places of cancellation, on {' and '.join(BACKENDS)}", table, found)

    def _each(
        self, doing: str, work: Callable[[S], T], keys: Sequence[object], items: Sequence[S]
    ) -> Iterator[tuple[object, T]]:
        """What became of each item, in their order."""
        futures = [self._workers.submit(work, item) for item in items]
        shown = track(futures, description=doing, console=self._console, transient=True)
        for key, future in zip(keys, shown, strict=True):
            yield key, future.result()

    def _print(self, title: str, table: Table, found: list[str]) -> None:
        table.title = title
        self._console.print(table)
        for what in found:
            self._console.print(what, style="red", markup=False, highlight=False)
        self._console.print()


def _right(name: str) -> Column:
    return Column(name, justify="right")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=2_000, help="how many simulations (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the number of the first (default: %(default)s)")
    parser.add_argument("--only-seeds", action="store_true", help="run simulations and nothing else")
    parser.add_argument("--long", action="store_true", help="explore larger worlds too, in part")
    parser.add_argument("--limit", type=int, default=100_000, help="states of each larger world (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    with ProcessPoolExecutor(options.workers) as workers:
        proof = Proof(console, workers)
        if not options.only_seeds:
            proof.worlds(list(SHORT), None)
            if options.long:
                proof.worlds(list(LONG), options.limit)
            proof.canaries()
        proof.seeds(options.first_seed, options.seeds)
        if not options.only_seeds:
            proof.cancels()
    covered, cases = summary()
    console.print(f"Faults that real systems had: {covered} of {cases} shown or impossible (see tests/faults/index.py)")
    print(proof.verdict)
    return 0 if proof.verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
