"""Many seeds of the simulation, each against its twin."""

from collections import Counter
from collections.abc import Iterable

import attrs

from tests.prove.simulation import Simulation

REGRESSIONS = {
    540: "a bit that flipped in the host tier between two delta offloads was blessed by the second one's checksum",
    2287: "copies queued behind others on a slow link were given up although the link was moving",
}
"""Seeds that once failed, and what they found."""


@attrs.define
class Seeds:
    """What running them found: the first seed that failed, and what was injected and happened over all."""

    ran: int = 0
    failures: int = 0
    first_failure: str | None = None
    happened: Counter[str] = attrs.field(factory=Counter)


def run_seed(seed: int) -> Counter[str]:
    """One seed and its twin; raises `AssertionError` for an invariant that breaks or a token that differs."""
    run, twin = Simulation(seed), Simulation(seed, twin=True)
    tokens, expected = run.run(), twin.run()
    refused = {job.name for job in run.jobs if job.refused}
    for job in run.jobs:
        if job.name not in refused:
            found, wanted = tokens[job.name], expected[job.name]
            length = min(len(found), len(wanted))
            assert found[:length] == wanted[:length], f"seed {seed}: {job.name} differs from its twin"
            assert job.aborts_at is not None or len(found) == len(wanted), f"seed {seed}: {job.name} is not complete"
    return run.core.counters + run.memory.injected


def run_seeds(seeds: Iterable[int]) -> Seeds:
    """Run them all; the first failure is kept in words."""
    result = Seeds()
    for seed in seeds:
        result.ran += 1
        try:
            result.happened += run_seed(seed)
        except Exception as error:
            result.failures += 1
            result.first_failure = result.first_failure or f"seed {seed}: {type(error).__name__}: {error}"
    return result
