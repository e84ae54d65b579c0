"""Every guard is needed: without it, something is found."""

import pytest

from tests.prove.canaries import CANARIES, fly
from tests.prove.explore import explore
from tests.prove.mutation import Edit, applied
from tests.prove.worlds import WORLDS

SLOW = {
    *("wanted-ignores-forwards", "never-revoked", "steps-revoke-nobody"),
    *("aborting-chunk-lands", "aborting-for-ever"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in CANARIES]
)
def test_canary_without_its_guard_is_caught(name: str) -> None:
    flight = fly(CANARIES[name])
    assert flight.error is not None, f"{name} survived in {flight.canary.catcher!r}: {flight.canary.guard}"


def test_canary_whose_guard_has_moved_fails_loudly() -> None:
    moved = Edit("fsm.copies:_submit", "after = somewhere_else", "after = ()")
    with pytest.raises(AssertionError, match="adapt the canary"), applied((moved,)):
        pass


def test_core_after_a_canary_has_its_guard_again() -> None:
    canary = CANARIES["fork-without-reference"]
    assert fly(canary).error is not None
    assert explore(WORLDS[canary.catcher], limit=500).found is None
