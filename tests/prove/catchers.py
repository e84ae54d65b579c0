"""What catches a driver without one of its guards. Each raises what it finds."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import anyio
import pytest

from tests.kit.late_traffic import run_late_async, run_late_stepped
from tests.prove.cancelling import SWEEPS, When, cancel_everywhere
from tests.prove.seeds import run_seed
from tests.prove.violation import Violation

SEEDS = range(60)
LATE_SEEDS = range(20)


def catcher(name: str) -> Callable[[], None]:
    """A run by its name: of `CATCHERS`, or a test as `file::function`, below `tests/`."""
    return CATCHERS[name] if name in CATCHERS else lambda: _test(name)


def _each(run: Callable[[int], object], seeds: range) -> Callable[[], None]:
    def run_all() -> None:
        for seed in seeds:
            run(seed)

    return run_all


def _cancelled(call: str) -> Callable[[], None]:
    def run_all() -> None:
        for when in When:
            anyio.run(cancel_everywhere, SWEEPS[call], when)

    return run_all


def _test(name: str) -> None:
    here = Path(__file__).parent.parent / name
    with redirect_stdout(StringIO()):
        status = pytest.main([str(here), "-q", "-x", "-p", "no:cacheprovider"])
    if status is pytest.ExitCode.TESTS_FAILED:
        raise Violation(name)
    assert status is pytest.ExitCode.OK, status


CATCHERS: dict[str, Callable[[], None]] = {
    "simulation": _each(run_seed, SEEDS),
    "late streams, stepped": _each(run_late_stepped, LATE_SEEDS),
    "late streams, async": _each(run_late_async, LATE_SEEDS),
    **{f"cancel: {call}": _cancelled(call) for call in SWEEPS},
}
