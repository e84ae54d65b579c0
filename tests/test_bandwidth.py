"""The measured rate of a link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv.budget.bandwidth import Bandwidth
from swapkv.config import SECOND_NS


def test_bandwidth_before_the_first_copy_is_unknown_and_costs_follow_the_assumption() -> None:
    link = Bandwidth()
    assert link.bytes_per_s is None
    assert link.cost_ns(500, assumed_bytes_per_s=1000) == SECOND_NS / 2


def test_bandwidth_after_one_copy_is_its_rate() -> None:
    link = Bandwidth()
    link.observe(3000, SECOND_NS)
    assert link.bytes_per_s == pytest.approx(3000)
    assert link.cost_ns(6000, assumed_bytes_per_s=1) == pytest.approx(2 * SECOND_NS)


def test_copy_of_the_half_life_pulls_the_mean_time_a_byte_halfway() -> None:
    link = Bandwidth(half_life_bytes=1000)
    link.observe(1, 10)
    link.observe(1000, 1000 * 20)
    assert link.cost_ns(1, assumed_bytes_per_s=1) == pytest.approx(15)


@given(pieces=st.lists(st.integers(1, 5000), min_size=1, max_size=30), ns_per_byte=st.integers(1, 50))
def test_many_small_copies_weigh_as_much_as_one_large_copy_of_as_many_bytes(
    pieces: list[int], ns_per_byte: int
) -> None:
    small, large = Bandwidth(half_life_bytes=4096), Bandwidth(half_life_bytes=4096)
    for link in (small, large):
        link.observe(1000, 1000 * 100)
    for piece in pieces:
        small.observe(piece, piece * ns_per_byte)
    large.observe(sum(pieces), sum(pieces) * ns_per_byte)
    assert small.bytes_per_s == pytest.approx(large.bytes_per_s)


@given(samples=st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 100)), min_size=1))
def test_bandwidth_stays_within_the_rates_that_were_seen(samples: list[tuple[int, int]]) -> None:
    link = Bandwidth(half_life_bytes=4096)
    for num_bytes, ns_per_byte in samples:
        link.observe(num_bytes, num_bytes * ns_per_byte)
    rates = [SECOND_NS / ns_per_byte for _, ns_per_byte in samples]
    assert link.bytes_per_s is not None
    assert min(rates) * 0.999 <= link.bytes_per_s <= max(rates) * 1.001


@pytest.mark.parametrize(("num_bytes", "elapsed_ns"), [(0, 5), (5, 0), (-1, 5), (5, -1)])
def test_copy_that_was_not_measured_changes_nothing(num_bytes: int, elapsed_ns: int) -> None:
    link = Bandwidth()
    link.observe(num_bytes, elapsed_ns)
    assert link.bytes_per_s is None
