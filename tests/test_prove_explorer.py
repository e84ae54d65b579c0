"""Every interleaving of small worlds: nothing is lost, mixed up, leaked or stuck. `python -m tests.prove` has them all."""

from array import array

import pytest

from tests.prove import progress
from tests.prove.audit import audit
from tests.prove.canaries import CANARIES
from tests.prove.canonical import key
from tests.prove.explore import Found, explore
from tests.prove.mutation import applied
from tests.prove.scenario import Scenario
from tests.prove.world import World
from tests.prove.worlds import LONG, SHORT, WORLDS

QUICK = {
    *("faults", "fork", "fork without a copy", "branches", "reclaim", "gate void"),
    *("ranks, cancel, fault", "ranks, die", "abort", "refusals"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SHORT]
)
def test_world_explored_whole_keeps_its_promises(name: str) -> None:
    outcome = explore(WORLDS[name])
    assert outcome.found is None, str(outcome.found)
    assert outcome.whole
    assert outcome.states > 500
    assert outcome.depth > 10


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_larger_world_explored_for_a_while_keeps_its_promises(name: str) -> None:
    outcome = explore(WORLDS[name], limit=100_000)
    assert outcome.found is None, str(outcome.found)


def test_exploration_of_the_same_world_is_the_same() -> None:
    first, second = explore(WORLDS["fork"]), explore(WORLDS["fork"])
    assert (first.states, first.transitions, first.depth) == (second.states, second.transitions, second.depth)


def found_without(name: str) -> Found:
    canary = CANARIES[name]
    with applied(canary.edits):
        found = explore(WORLDS[canary.catcher]).found
    assert found is not None
    return found


def test_violation_prints_readable_events_and_a_test_that_fails_as_it_did() -> None:
    found = found_without("clean-before-all-layers")
    told = str(found)
    assert "position 0 of layer 1 is poison in the host tier" in told
    assert "\n  preempt a\n  run OUT 0\n  tear OUT 0\n" in told
    scope: dict[str, object] = {"World": World, "WORLDS": WORLDS}
    exec("\n".join(found.test()), scope)
    test = scope["test_core_layer_by_layer_keeps_its_promises"]
    assert callable(test)
    test()
    with applied(CANARIES["clean-before-all-layers"].edits), pytest.raises(type(found.error), match="poison"):
        test()


def test_violation_has_no_shorter_trace() -> None:
    """Breadth first: no prefix of fewer events breaks a promise already."""
    found = found_without("clean-before-all-layers")
    with applied(CANARIES["clean-before-all-layers"].edits):
        World(found.scenario).replay(*found.trace[:-1])


def test_worlds_with_sequences_exchanged_are_one_state() -> None:
    """Equal sequences are interchangeable: exploring both orders would tell nothing new."""
    one, other = World(WORLDS["hang"]), World(WORLDS["hang"])
    for world, names in ((one, "ab"), (other, "ba")):
        for name in names:
            world.apply(("abort", name))
        world.apply(("settle",))
    assert key(one) == key(other)


def test_clone_of_a_world_shares_nothing_that_changes() -> None:
    world = World(WORLDS["faults"])
    before, twin = key(world), world.clone()
    twin.apply(("preempt", "a"))
    twin.settle()
    assert key(world) == before != key(twin)
    audit(world)


def test_circle_without_a_wish_is_found() -> None:
    edges = progress.Edges()
    for source, target in ((0, 1), (1, 2), (2, 1)):
        edges.add(source, target, fair=True, quiet=True)
    assert progress.circle(edges, 3) is not None
    straight = progress.Edges(array("q", [0, 1]), array("q", [1, 2]), bytearray([3, 3]))
    assert progress.circle(straight, 3) is None


def test_state_without_a_way_to_the_end_is_lost() -> None:
    edges = progress.Edges()
    edges.add(0, 1, fair=True, quiet=False)
    edges.add(0, 2, fair=False, quiet=False)
    assert list(progress.lost(edges, 3, [1], lambda state: False)) == [2]
    assert list(progress.lost(edges, 3, [1], lambda state: True)) == []


def test_scenario_with_an_unknown_budget_is_refused() -> None:
    scenario = WORLDS["fork"]
    with pytest.raises(AssertionError, match="luck"):
        Scenario(
            name="x",
            about="",
            layout=scenario.layout,
            pages=(4,),
            host_chunks=1,
            targets={"a": (1,)},
            budget={"luck": 1},
        )
