"""The core against a naive model, under random traffic: no token is ever lost, mixed up or read too early."""

from collections import Counter
from typing import Any

import pytest

from swapkv.config import HostFull, RestoreOrder, SwapConfig
from swapkv.layout import KVLayout
from tests.kit.chaos import Chaos

PLAIN = KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4)
WINDOWED = KVLayout.dense(
    num_layers=3, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4, windows=[3, None, 3], truncate_slack=2
)
UNEVEN = KVLayout.dense(
    num_layers=4, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4, windows=[3, None, None, None]
)
ONE_TOKEN_PAGES = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=4, page_size=1, chunk_tokens=4)
ONE_PAGE_CHUNKS = KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=1, chunk_tokens=1)
LONG_WINDOW = KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=1, chunk_tokens=2, windows=[None, 5])

FORKS = {"fork": 8, "truncate": 3, "register": 1, "finish": 1.5}
STAY = {"finish": 0.05, "evict": 0, "cancel": 0.1, "anything": 0.1, "truncate": 0.1}
RUSH = {"rush": 10, "grow": 12, "restore": 0, "preempt": 12, "end_step": 14, **STAY}
SPILL = {"spill": 10, "restore_in_part": 6, "begin_step": 14, "end_step": 16, "finish": 0.4, "evict": 0.1}
FAST_AGING = SwapConfig(segment_bytes=1, aging_ns=1_000_000)
SHORT_DEADLINE = SwapConfig(segment_bytes=1, copy_deadline_ns=100_000_000)

CASES: dict[str, tuple[KVLayout, list[int], int, SwapConfig]] = {
    "plain": (PLAIN, [12], 30, SwapConfig()),
    "scarce pages and host": (PLAIN, [7], 4, SwapConfig(segment_bytes=1)),
    "host refuses": (PLAIN, [8], 6, SwapConfig(host_full=HostFull.REFUSE, segment_bytes=1)),
    "windowed": (WINDOWED, [14, 14], 30, SwapConfig(segment_bytes=64)),
    "one token a page": (ONE_TOKEN_PAGES, [20], 12, SwapConfig(segment_bytes=1)),
    "slow bucket": (
        PLAIN,
        [10],
        30,
        SwapConfig(restore_bytes_per_s=4000, offload_bytes_per_s=4000, segment_bytes=1, ops_per_lane=2),
    ),
    "chunk major": (PLAIN, [9], 30, SwapConfig(restore_order=RestoreOrder.CHUNK_MAJOR, inflight_bytes_per_sequence=1)),
    "layer major": (PLAIN, [9], 30, SwapConfig(restore_order=RestoreOrder.LAYER_MAJOR, segment_bytes=1)),
}
BIASED_CASES: dict[str, dict[str, Any]] = {
    "forks": {"layout": PLAIN, "pages": [10], "config": SwapConfig(segment_bytes=1), "bias": FORKS},
    "windowed forks": {"layout": WINDOWED, "pages": [12, 12], "config": SwapConfig(segment_bytes=64), "bias": FORKS},
    "forks, scarce host": {"layout": PLAIN, "pages": [10], "host_chunks": 4, "config": SwapConfig(), "bias": FORKS},
    "forks that hang": {"layout": PLAIN, "pages": [10], "config": SHORT_DEADLINE, "bias": FORKS, "hangs": 0.05},
    "rush": {"layout": PLAIN, "pages": [8], "config": FAST_AGING, "bias": RUSH},
    "rush of many chunks": {"layout": ONE_PAGE_CHUNKS, "pages": [10], "config": FAST_AGING, "bias": RUSH},
    "windowed rush": {"layout": LONG_WINDOW, "pages": [9, 8], "config": FAST_AGING, "bias": RUSH},
    "rush of forks": {"layout": PLAIN, "pages": [8], "config": FAST_AGING, "bias": {**RUSH, "fork": 4}},
    "host room in pieces": {
        "layout": UNEVEN,
        "pages": [24, 24],
        "host_chunks": 8,
        "config": SwapConfig(host_full=HostFull.REFUSE),
        "bias": {"preempt": 12, "restore": 16, "grow": 4, "end_step": 16, **STAY},
    },
    "one copy at a time, which hangs": {
        "layout": PLAIN,
        "pages": [10],
        "config": SwapConfig(segment_bytes=1, copy_deadline_ns=100_000_000, ops_per_lane=1),
        "hangs": 0.05,
    },
    "spills": {"layout": PLAIN, "pages": [10], "config": SwapConfig(segment_bytes=1), "bias": SPILL},
    "spills, scarce host": {"layout": PLAIN, "pages": [8], "host_chunks": 5, "config": SwapConfig(), "bias": SPILL},
    "spills, windowed": {
        "layout": WINDOWED,
        "pages": [12, 12],
        "config": SwapConfig(segment_bytes=64),
        "bias": {**SPILL, "fork": 3},
    },
    "spills of forks": {
        "layout": ONE_PAGE_CHUNKS,
        "pages": [10],
        "host_chunks": 12,
        "config": SwapConfig(segment_bytes=1),
        "bias": {**SPILL, "fork": 8, "truncate": 3},
    },
    "spills that hang": {"layout": PLAIN, "pages": [9], "config": SHORT_DEADLINE, "bias": SPILL, "hangs": 0.05},
    "spills, slow link": {
        "layout": PLAIN,
        "pages": [8],
        "config": SwapConfig(restore_bytes_per_s=4000, offload_bytes_per_s=8000, segment_bytes=1),
        "bias": {**SPILL, "pass_time": 8},
    },
    "bucket and small in-flight cap": {
        "layout": PLAIN,
        "pages": [12],
        "config": SwapConfig(restore_bytes_per_s=400_000, segment_bytes=64, inflight_bytes_per_sequence=1),
        "bias": {"pass_time": 8},
    },
}
MAX_CHUNKS = {"rush of many chunks": 8, "windowed rush": 4}


def biased(case: str, seed: int) -> Chaos:
    return Chaos(seed, **{"host_chunks": 90, "max_chunks": MAX_CHUNKS.get(case, 3), **BIASED_CASES[case]})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(12))
def test_core_under_random_traffic_reads_what_was_written(case: str, seed: int) -> None:
    layout, pages, host_chunks, config = CASES[case]
    Chaos(seed, layout, pages, host_chunks, config).run(400)


@pytest.mark.parametrize("case", BIASED_CASES)
@pytest.mark.parametrize("seed", range(6))
def test_core_under_biased_traffic_reads_what_was_written(case: str, seed: int) -> None:
    biased(case, seed).run(400)


@pytest.mark.parametrize("seed", range(15))
def test_core_with_hung_copies_quarantines_and_recovers(seed: int) -> None:
    Chaos(seed, PLAIN, [12], 30, SHORT_DEADLINE, hangs=0.05).run(400)


def test_chaos_over_its_cases_hits_every_rare_path() -> None:
    counters: Counter[str] = Counter()
    for case in BIASED_CASES:
        for seed in range(100, 104):
            chaos = biased(case, seed)
            chaos.run(300)
            counters.update(chaos.core.counters)
    often = ("tails_copied_on_write", "revoked_restores", "reclaimed_copies", "failed_restores", "hung_copies")
    assert all(counters[name] >= 5 for name in (*often, "late_cancels", "evictions", "late_completions")), counters


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_core_under_long_random_traffic_reads_what_was_written(case: str, seed: int) -> None:
    layout, pages, host_chunks, config = CASES[case]
    Chaos(seed, layout, pages, host_chunks, config, hangs=0.01).run(3000)


@pytest.mark.long
@pytest.mark.parametrize("case", BIASED_CASES)
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_core_under_long_biased_traffic_reads_what_was_written(case: str, seed: int) -> None:
    biased(case, seed).run(2000)
