"""Which sequence leaves: the score, its ties, and just enough of them."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv.budget.victims import Victim, choose, rank, score
from swapkv.ids import SeqId

OUT, IN = 0.1, 0.05
RATES = {"out_ns_per_byte": OUT, "in_ns_per_byte": IN}
MIB = 1 << 20


def victim(name: str, freed: int, dirty: int | None = None, **more: float) -> Victim:
    dirty = freed if dirty is None else dirty
    return Victim(sequence=SeqId(name), freed_bytes=freed, dirty_bytes=dirty, restore_bytes=freed, **more)  # type: ignore[arg-type]


SIX = {
    "clean": victim("clean", 40 * MIB, dirty=0),
    "tail": victim("tail", 40 * MIB, dirty=MIB),
    "dirty": victim("dirty", 40 * MIB),
    "just restored": victim("just restored", 40 * MIB, dirty=0, fairness_ns=60_000_000),
    "shared": victim("shared", 2 * MIB, dirty=0, reuse_loss_ns=5_000_000),
    "done soon": victim("done soon", 40 * MIB, resume_probability=0.1),
}


def just_enough(victims: Iterable[Victim], needed_bytes: int) -> list[Victim]:
    return choose(rank(victims, **RATES), lambda chosen: sum(v.freed_bytes for v in chosen) >= needed_bytes)


def names(victims: list[Victim]) -> list[str]:
    return [str(v.sequence) for v in victims]


def test_rank_of_six_victims_puts_the_cheapest_per_freed_byte_first() -> None:
    """KF-53."""
    ranked = rank(SIX.values(), **RATES)
    assert names(ranked) == ["clean", "tail", "done soon", "dirty", "just restored", "shared"]


def test_choose_of_six_victims_takes_the_cheapest_that_free_enough() -> None:
    """KF-53."""
    assert names(just_enough(SIX.values(), 40 * MIB)) == ["clean"]
    assert names(just_enough(SIX.values(), 41 * MIB)) == ["clean", "tail"]
    assert names(just_enough(SIX.values(), 10**12)) == names(rank(SIX.values(), **RATES))
    assert just_enough(SIX.values(), 0) == []


def test_score_of_a_clean_copy_costs_no_write() -> None:
    """KF-53."""
    clean = SIX["clean"]
    assert score(clean, out_ns_per_byte=10**9, in_ns_per_byte=IN) == score(clean, **RATES)
    assert score(clean, **RATES) == pytest.approx(clean.freed_bytes / (clean.freed_bytes * IN + 1000))


def test_score_counts_each_cost_of_the_formula() -> None:
    v = victim("v", 1000, dirty=200, resume_probability=0.5, fairness_ns=7.0, reuse_loss_ns=3.0)
    assert score(v, **RATES) == pytest.approx(1000 / (200 * OUT + 0.5 * 1000 * IN + 7 + 3 + 1000))


def test_score_without_any_cost_is_finite() -> None:
    assert score(victim("v", 1000, dirty=0, resume_probability=0.0), **RATES) == 1.0


@given(order=st.permutations(["a", "b", "c", "d"]))
def test_rank_of_equal_scores_follows_the_names_whatever_the_order(order: list[str]) -> None:
    assert names(rank([victim(name, 1000) for name in order], **RATES)) == ["a", "b", "c", "d"]


def test_victim_that_frees_nothing_is_never_chosen() -> None:
    assert just_enough([victim("none", 0, dirty=0), victim("some", 10)], 100) == [victim("some", 10)]


def test_victim_that_a_later_one_makes_superfluous_is_spared() -> None:
    small, large = victim("small", MIB, dirty=0), victim("large", 40 * MIB)
    assert names(rank([small, large], **RATES)) == ["small", "large"]
    assert names(just_enough([small, large], 40 * MIB)) == ["large"]
    assert names(just_enough([small, large], 41 * MIB)) == ["small", "large"]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=7),
    needed=st.integers(0, 200),
)
def test_choose_frees_enough_and_none_of_the_chosen_could_be_spared(sizes: list[tuple[int, int]], needed: int) -> None:
    victims = [victim(f"v{i}", freed, dirty=dirty) for i, (freed, dirty) in enumerate(sizes)]
    chosen = just_enough(victims, needed)
    freed = sum(v.freed_bytes for v in chosen)
    everything = sum(v.freed_bytes for v in victims)
    assert freed >= min(needed, everything)
    if freed >= needed:
        assert all(freed - v.freed_bytes < needed for v in chosen)
    ranked = rank(victims, **RATES)
    assert chosen == [v for v in ranked if v in chosen], "best first"
