"""The core against a naive model, under random traffic: no token is ever lost, mixed up or read too early."""

import pytest

from swapkv.config import HostFull, RestoreOrder, SwapConfig
from swapkv.layout import KVLayout
from tests.kit.chaos import Chaos

PLAIN = KVLayout.dense(num_layers=2, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4)
WINDOWED = KVLayout.dense(
    num_layers=3, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4, windows=[3, None, 3], truncate_slack=2
)
ONE_TOKEN_PAGES = KVLayout.dense(num_layers=1, num_kv_heads=1, head_dim=4, page_size=1, chunk_tokens=4)

CASES = {
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(25))
def test_core_under_random_traffic_reads_what_was_written(case: str, seed: int) -> None:
    layout, pages, host_chunks, config = CASES[case]
    Chaos(seed, layout, pages, host_chunks, config).run(400)


@pytest.mark.parametrize("seed", range(40))
def test_core_with_hung_copies_quarantines_and_recovers(seed: int) -> None:
    config = SwapConfig(copy_deadline_ns=100_000_000, segment_bytes=1)
    Chaos(seed, PLAIN, [12], 30, config, hangs=0.05).run(400)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_core_under_long_random_traffic_reads_what_was_written(case: str, seed: int) -> None:
    layout, pages, host_chunks, config = CASES[case]
    Chaos(seed, layout, pages, host_chunks, config, hangs=0.01).run(3000)
