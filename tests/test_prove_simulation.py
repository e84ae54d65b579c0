"""Seeded runs in virtual time with faults: every request ends with the tokens of its twin."""

import pytest

from tests.prove.seeds import REGRESSIONS, run_seed, run_seeds
from tests.prove.simulation import Simulation, StampMemory

SEEDS = range(150)
MANY_SEEDS = range(10_000, 12_000)


def test_simulation_of_many_seeds_finds_nothing_and_injects_every_fault() -> None:
    result = run_seeds(SEEDS)
    assert result.first_failure is None
    struck = ["io_error", "torn", "bit_flip", "lie", "hung_copies", "late_completions", "evictions", "revoked_restores"]
    assert all(
        result.happened[what] for what in [*struck, "reclaimed_copies", "host_full_refusals", "clean_bytes_kept"]
    )


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_simulation_of_a_seed_that_once_failed_finds_nothing(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("seed", [0, 7, 540])
def test_simulation_of_the_same_seed_is_the_same_to_the_byte(seed: int) -> None:
    first, second = Simulation(seed), Simulation(seed)
    first.run()
    second.run()
    assert "\n".join(first.trace).encode() == "\n".join(second.trace).encode()
    assert len(first.trace) > 10


def test_simulation_without_verification_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: if what comes back is not checked, some seed ends with other tokens."""
    monkeypatch.setattr(StampMemory, "_verify", lambda *_: None)
    assert run_seeds(SEEDS).failures


@pytest.mark.long
def test_simulation_of_thousands_of_seeds_finds_nothing() -> None:
    assert run_seeds(MANY_SEEDS).first_failure is None
