"""The token bucket against exact arithmetic: nothing is lost, nothing is let through too early."""

from copy import deepcopy
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv.budget.bucket import TokenBucket
from swapkv.config import SECOND_NS

SCHEDULES = range(1_000)


class ExactBucket:
    """What a bucket holds, in fractions of a byte."""

    def __init__(self, rate: int, burst: int) -> None:
        self.rate, self.burst, self.level, self.now_ns = rate, burst, Fraction(burst), 0

    def fill(self, now_ns: int) -> None:
        self.level = min(self.level + Fraction((now_ns - self.now_ns) * self.rate, SECOND_NS), Fraction(self.burst))
        self.now_ns = now_ns

    def take(self, num_bytes: int, now_ns: int) -> bool:
        self.fill(now_ns)
        if self.level < min(num_bytes, self.burst):
            return False
        self.level -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self.level = min(self.level + num_bytes, Fraction(self.burst))


def run_schedule(seed: int) -> None:
    """Takes, returns and waits at random; after each, what was sent is what was taken, and never too much."""
    rng = Random(seed)
    rate, burst = rng.choice([1, 7, 1000, 10**9, 123_456_789]), rng.randint(1, 5000)
    bucket, exact = TokenBucket(rate, burst), ExactBucket(rate, burst)
    now_ns, largest, out, taken, returned = 0, 0, [], 0, 0
    for _ in range(40):
        now_ns += rng.choice([0, 1, rng.randint(0, 2 * burst * SECOND_NS // rate)])
        num_bytes = rng.choice([0, 1, rng.randint(0, burst), rng.randint(0, 3 * burst)])
        if out and rng.random() < 0.2:
            back = out.pop(rng.randrange(len(out)))
            exact.fill(now_ns)
            bucket.fill_share(now_ns)
            bucket.give_back(back)
            exact.give_back(back)
            returned += back
        else:
            answer = bucket.take(num_bytes, now_ns)
            assert answer == exact.take(num_bytes, now_ns)
            if answer:
                out.append(num_bytes)
                taken, largest = taken + num_bytes, max(largest, num_bytes)
            else:
                assert_ready_is_exact(bucket, num_bytes, now_ns)
        assert bucket.sent_bytes == taken - returned == sum(out)
        assert bucket.sent_bytes <= Fraction(rate * now_ns, SECOND_NS) + max(burst, largest)


def assert_ready_is_exact(bucket: TokenBucket, num_bytes: int, now_ns: int) -> None:
    ready = bucket.ready_ns(num_bytes, now_ns)
    assert ready > now_ns
    assert not deepcopy(bucket).take(num_bytes, ready - 1), "the bucket was ready earlier than it said"
    assert deepcopy(bucket).take(num_bytes, ready), "the bucket was not ready when it said"


def test_bucket_over_a_thousand_random_schedules_conserves_tokens_and_keeps_its_rate() -> None:
    for seed in SCHEDULES:
        run_schedule(seed)


def test_bucket_that_forgets_what_is_given_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenBucket, "give_back", lambda self, num_bytes: None)
    with pytest.raises(AssertionError):
        test_bucket_over_a_thousand_random_schedules_conserves_tokens_and_keeps_its_rate()


@given(
    rate=st.integers(1, 10**6),
    burst=st.integers(1, 1000),
    takes=st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 1000)), max_size=25),
)
def test_bucket_in_every_window_lets_through_no_more_than_rate_and_burst(
    rate: int, burst: int, takes: list[tuple[int, int]]
) -> None:
    bucket, now_ns, sent = TokenBucket(rate, burst), 0, []
    for wait_ns, num_bytes in takes:
        now_ns += wait_ns
        size = min(num_bytes, burst)
        if bucket.take(size, now_ns):
            sent.append((now_ns, size))
    for first, (begin_ns, _) in enumerate(sent):
        for last in range(first, len(sent)):
            in_window = sum(size for _, size in sent[first : last + 1])
            assert in_window <= burst + Fraction(rate * (sent[last][0] - begin_ns), SECOND_NS)


def test_take_larger_than_the_burst_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = TokenBucket(rate=100, burst=10)
    assert bucket.take(1, 0)
    assert not bucket.take(50, 0), "the bucket is not full"
    assert bucket.ready_ns(50, 0) == SECOND_NS // 100
    assert bucket.take(50, SECOND_NS // 100)
    assert bucket.fill_share(SECOND_NS // 100) == 0
    assert bucket.ready_ns(0, SECOND_NS // 100) == SECOND_NS // 100 + 40 * SECOND_NS // 100, "40 bytes are owed"
    assert bucket.ready_ns(10, SECOND_NS // 100) == SECOND_NS // 100 + 50 * SECOND_NS // 100


def test_bucket_given_back_more_than_its_burst_holds_no_more_than_its_burst() -> None:
    bucket = TokenBucket(rate=100, burst=10)
    assert bucket.take(10, 0)
    bucket.fill_share(10 * SECOND_NS)
    bucket.give_back(10)
    assert bucket.take(10, 10 * SECOND_NS)
    assert not bucket.take(1, 10 * SECOND_NS)


def test_bucket_given_back_what_was_never_taken_fails_an_assertion() -> None:
    bucket = TokenBucket(rate=100, burst=10)
    assert bucket.take(3, 0)
    with pytest.raises(AssertionError):
        bucket.give_back(4)


def test_bucket_without_a_rate_lets_everything_through_and_counts_it() -> None:
    bucket = TokenBucket(rate=None, burst=1)
    assert all(bucket.take(10**12, 0) for _ in range(3))
    bucket.give_back(10**12)
    assert bucket.sent_bytes == 2 * 10**12
    assert bucket.ready_ns(10**15, 7) == 7
    assert bucket.fill_share(7) is None
