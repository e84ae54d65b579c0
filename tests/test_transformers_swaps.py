"""KV of transformers' `generate` that leaves the device and comes back, and pages that run out meanwhile."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers

import swapkv
from swapkv.errors import KVEvicted, NeverFits, PagesExhausted, ProtocolError
from swapkv.fsm.commands import PreemptOutcome
from swapkv.fsm.queries import SequenceState
from swapkv.integrations.transformers import SwapKVCache, layout_of
from swapkv.stepped import SteppedPool, open_stepped_pool
from swapkv.streams.host import HostDevice
from tests.kit.small_models import (
    BOUND,
    CONFIGS,
    ROWS,
    free_pages,
    generate,
    kv,
    left_padded,
    longer,
    poison,
    pool_of,
    stock_model,
    swapped_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and the number of threads is part of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_again_after_preempt_and_restore_equal_bits(kind: str) -> None:
    model = swapped_model(kind)
    ids, mask = left_padded(ROWS)
    results = []
    for swaps in (False, True):
        with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
            first = generate(model, ids, 9, cache, attention_mask=mask)
            if swaps:
                assert cache.preempt() is PreemptOutcome.OFFLOADED
                assert free_pages(pool) == [64] * len(pool.layout.groups)
                poison(pool)
                cache.restore()
            second = generate(model, first.sequences, 9, cache, attention_mask=longer(mask, 9))
            results.append((torch.stack(first.logits + second.logits), [kv(pool, name) for name in cache.names]))
    (logits, bytes_), (swapped_logits, swapped_bytes) = results
    assert torch.equal(logits, swapped_logits)
    for row, swapped_row in zip(bytes_, swapped_bytes, strict=True):
        assert all(map(torch.equal, row, swapped_row))


@torch.no_grad()
def test_forward_over_poison_shows_it() -> None:
    """The twin of the test above: pages are what attention reads, so bytes that do not come back are not overlooked."""
    model = swapped_model("gemma3")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
        poison(pool)
        assert model(torch.tensor([[5]]), past_key_values=cache).logits.isnan().all()


def test_generate_preempted_cache_is_refused_and_goes_on_when_restored() -> None:
    model = swapped_model("gemma3")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("gemma3"), ids, 12).sequences
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        first = generate(model, ids, 6, cache).sequences
        cache.preempt()
        with pytest.raises(ProtocolError, match="restore it before the forward"):
            generate(model, first, 6, cache)
        cache.restore()
        cache.restore()
        assert torch.equal(generate(model, first, 6, cache).sequences, expected)


def logits_while_a_restore_is_under_way(release_s: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a forward right after the pool was told to restore, and what they should be.

    The copies are held back for `release_s` seconds; None: until the forward is over.
    """
    model = swapped_model("gemma3")
    layout = layout_of(model.config, torch.float32, page_size=4, chunk_tokens=16)
    device = HeldDevice()
    with (
        open_stepped_pool(layout, num_pages=16, host_bytes=1 << 20, device=device) as pool,
        SwapKVCache(pool, ["a"], max_tokens=64) as cache,
    ):
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
        cache.preempt()
        poison(pool)
        gate = device.create_promise()
        for stream in device.made:
            if stream is not pool.compute:
                stream.wait(gate)
        pool.restore("a")
        timer = threading.Timer(release_s or 0.0, gate.set)
        if release_s is not None:
            timer.start()
        got = model(torch.tensor([[5]]), past_key_values=cache).logits
        gate.set()
    return got[0, 0], stock_model("gemma3")(torch.tensor([[*ROWS[0], 5]])).logits[0, -1]


class HeldDevice(HostDevice):
    """Remembers its streams, so that a test can make them wait."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def create_stream(self, name: str) -> Any:
        self.made.append(super().create_stream(name))
        return self.made[-1]


@torch.no_grad()
def test_forward_while_a_restore_is_under_way_waits_for_it() -> None:
    got, expected = logits_while_a_restore_is_under_way(release_s=0.1)
    torch.testing.assert_close(got, expected, rtol=0, atol=BOUND)


@torch.no_grad()
def test_forward_that_does_not_wait_for_a_restore_reads_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above, its guard removed."""
    monkeypatch.setattr(SwapKVCache, "_await_restores", lambda _: None)
    assert logits_while_a_restore_is_under_way(release_s=None)[0].isnan().all()


class Swapping(transformers.LogitsProcessor):  # type: ignore[misc, no-any-unimported]
    """Takes everything off the device and back between two forwards of one `generate`."""

    def __init__(self, pool: SteppedPool, cache: SwapKVCache) -> None:
        self.pool, self.cache = pool, cache

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.cache.preempt()
        poison(self.pool)
        self.cache.restore()
        return scores


def test_generate_preempted_and_restored_between_its_forwards_equal_bits() -> None:
    model = swapped_model("gemma3")
    ids, mask = left_padded(ROWS)
    logits = []
    for swaps in (False, True):
        with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
            processors = [Swapping(pool, cache)] if swaps else []
            out = generate(model, ids, 10, cache, attention_mask=mask, logits_processor=processors)
            logits.append(torch.stack(out.logits))
            assert pool.statistics().counters.get("preemptions", 0) == 30 * swaps
    assert torch.equal(*logits)


def test_generate_too_few_pages_raises_and_works_when_others_have_left() -> None:
    model = swapped_model("gemma3")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("gemma3"), ids, 12).sequences
    with (
        pool_of(model, num_pages=14) as pool,
        SwapKVCache(pool, ["a"], max_tokens=48) as first,
        SwapKVCache(pool, ["b"], max_tokens=48) as second,
    ):
        half = generate(model, ids, 6, first).sequences
        with pytest.raises(PagesExhausted, match="preempt or finish"):
            generate(model, ids, 12, second)
        assert (second.columns, pool.tokens("b")) == (0, 0)
        first.preempt()
        assert torch.equal(generate(model, ids, 12, second).sequences, expected)
        with pytest.raises(PagesExhausted, match="restore"):
            first.restore()
        assert pool.state("a") is SequenceState.OFFLOADED
        second.preempt()
        first.restore()
        assert torch.equal(generate(model, half, 6, first).sequences, expected)


def test_generate_out_of_pages_midway_make_room_is_called_and_it_goes_on() -> None:
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("llama"), ids, 12).sequences
    asked, told = [], []
    with pool_of(model, num_pages=12) as pool:

        def make_room(appends: Mapping[str, int]) -> None:
            asked.append(dict(appends))
            for victim in pool.victims_for({"a": 1, "other": 0}, spare=["a"]):
                pool.preempt(victim.sequence)

        with SwapKVCache(pool, ["a"], max_tokens=48, make_room=make_room, on_news=told.append) as cache:
            pool.register("other", max_tokens=12)
            with pool.forward({"other": 12}):
                pass
            assert torch.equal(generate(model, ids, 12, cache).sequences, expected)
            assert pool.state("other") is SequenceState.OFFLOADED
    assert asked == [{"a": 1}]
    assert [news.sequence for news in told if isinstance(news, swapkv.fsm.commands.Parked)] == ["other"]


def test_reorder_fork_that_never_fits_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b"], max_tokens=64) as cache:
        monkeypatch.setattr(SteppedPool, "fork", lambda *_, **__: (_ for _ in ()).throw(NeverFits("too large")))
        with pytest.raises(NeverFits):
            cache.reorder_cache(torch.tensor([1, 1]))
        assert cache.names == ("a", "b")
        assert pool.tokens("a") == 0


def test_host_tier_full_kv_is_dropped_and_a_reset_begins_anew() -> None:
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("llama"), ids, 6).sequences
    with pool_of(model, host_bytes=0) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        first = generate(model, ids, 3, cache).sequences
        assert cache.preempt() is PreemptOutcome.RECOMPUTE
        with pytest.raises(KVEvicted, match=r"reset\(\) the cache"):
            cache.restore()
        cache.reset()
        assert torch.equal(generate(model, first, 3, cache).sequences, expected)


def test_preempt_host_tier_full_and_refusing_raises_and_a_restore_puts_all_back() -> None:
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("llama"), ids, 12).sequences
    with (
        pool_of(model, host_bytes=49152, host_full=swapkv.HostFull.REFUSE) as pool,
        SwapKVCache(pool, ["a", "b"], max_tokens=64) as cache,
    ):
        first = generate(model, ids.repeat(2, 1), 8, cache).sequences
        with pytest.raises(swapkv.HostTierFull):
            cache.preempt()
        cache.restore()
        assert torch.equal(generate(model, first, 4, cache).sequences, expected.repeat(2, 1))
