"""What transformers' `generate` over a pool refuses, and what an interrupted one leaves behind."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from swapkv.errors import ProtocolError, UnknownSequence
from swapkv.integrations.transformers import CACHE_ATTENTION_NAME, SwapKVCache, layout_of
from tests.kit.small_models import (
    CONFIGS,
    ROWS,
    free_pages,
    generate,
    kv,
    left_padded,
    longer,
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


class Failure(Exception):  # noqa: N818
    pass


def fail_once(module: torch.nn.Module) -> None:
    """The next call of `module` raises."""

    def fail(*_: object) -> None:
        handle.remove()
        raise Failure

    handle = module.register_forward_pre_hook(fail)


class Interrupting(transformers.LogitsProcessor):  # type: ignore[misc, no-any-unimported]
    """Ends a `generate` before its seventh token."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 7:
            raise Failure
        return scores


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_after_an_interrupted_one_is_refused_until_a_crop(kind: str, rows: int) -> None:
    """Padded or not: transformers drops a mask without padding, and the cache holds more than the ids then."""
    model = swapped_model(kind)
    ids, mask = left_padded(ROWS[:rows])
    expected = generate(stock_model(kind), ids, 12, attention_mask=mask).sequences
    with pool_of(model, slack=8) as pool, SwapKVCache(pool, ["a", "b"][:rows], max_tokens=80) as cache:
        with pytest.raises(Failure):
            generate(model, ids, 12, cache, attention_mask=mask, logits_processor=[Interrupting()])
        assert cache.columns == ids.shape[1] + 6
        with pytest.raises(ProtocolError, match="crop or reset the cache"):
            generate(model, ids, 12, cache, attention_mask=mask)
        cache.crop(ids.shape[1] - 1 - cache.columns)
        assert torch.equal(generate(model, ids, 12, cache, attention_mask=mask).sequences, expected)


@pytest.mark.parametrize("layer", [0, 2])
def test_forward_that_raises_between_layers_is_void_and_can_be_repeated(layer: int) -> None:
    model = swapped_model("gemma3")
    ids, mask = left_padded(ROWS)
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
        expected = generate(model, ids, 9, cache, attention_mask=mask)
        cache.reset()
        first = generate(model, ids, 4, cache, attention_mask=mask).sequences
        before = [kv(pool, name) for name in cache.names]
        fail_once(model.model.layers[layer].self_attn if layer else model.model.layers[0].mlp)
        with pytest.raises(Failure):
            generate(model, first, 5, cache, attention_mask=longer(mask, 4))
        assert cache.columns == ids.shape[1] + 3
        cache.void()
        for name, pages in zip(cache.names, before, strict=True):
            assert all(map(torch.equal, kv(pool, name), pages))
        again = generate(model, first, 5, cache, attention_mask=longer(mask, 4))
    assert torch.equal(again.sequences, expected.sequences)
    assert torch.equal(torch.stack(again.logits), torch.stack(expected.logits[4:]))


def test_forward_left_open_by_an_error_does_not_stand_in_the_way() -> None:
    """The cache gives it up by itself: before the next forward, a preempt, the end."""
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    with pool_of(model) as pool:
        with SwapKVCache(pool, ["a"], max_tokens=64) as cache:
            for act in (lambda: generate(model, ids, 1, cache), cache.preempt):
                fail_once(model.model.layers[1].mlp)
                with pytest.raises(Failure):
                    generate(model, torch.tensor(ROWS[:1]), 1, cache)
                act()
                cache.restore()
                cache.reset()
            fail_once(model.model.layers[1].mlp)
            with pytest.raises(Failure):
                generate(model, ids, 1, cache)
        assert free_pages(pool) == [64]


def test_crop_behind_a_window_is_refused_and_within_the_slack_goes_on() -> None:
    model = swapped_model("gemma3")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("gemma3"), ids, 8).sequences
    for slack in (0, 8):
        with pool_of(model, slack=slack) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
            generate(model, ids, 9, cache)
            if not slack:
                with pytest.raises(ProtocolError, match="truncate_slack"):
                    cache.crop(-8)
                continue
            cache.crop(-8)
            assert torch.equal(generate(model, expected[:, :31], 7, cache).sequences, expected)


@pytest.mark.parametrize("columns", [1, -99])
def test_crop_by_what_is_not_there_is_refused(columns: int) -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        generate(model, torch.tensor(ROWS[:1]), 2, cache)
        with pytest.raises(ProtocolError, match="minus the number of columns"):
            cache.crop(columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 34, dtype=torch.long)}, "must be"),
        ({"attention_mask": torch.tensor([[0] * 5 + [1] * 27])}, "than when they were run"),
        ({"attention_mask": torch.ones(1, 1, 1, 32)}, "pass the 2D one"),
        ({"input_ids": torch.tensor([[3], [4]])}, "a batch of 2 rows"),
    ],
)
@torch.no_grad()
def test_forward_that_does_not_fit_the_cache_is_refused_and_void(options: dict[str, Any], message: str) -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        generate(model, torch.tensor(ROWS[:1]), 2, cache)
        call: dict[str, Any] = {"input_ids": torch.tensor([[3]]), "past_key_values": cache}
        with pytest.raises(ProtocolError, match=message):
            model(**(call | options))
        assert (cache.columns, pool.tokens("a")) == (31, 31)
        model(**call)
        assert cache.columns == 32


@torch.no_grad()
def test_forward_without_a_mask_after_padding_is_refused() -> None:
    model = swapped_model("llama")
    ids, mask = left_padded(ROWS)
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
        model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ProtocolError, match="padding of earlier calls included"):
            model(ids[:, :1], past_key_values=cache)


def test_model_with_another_attention_is_refused_and_the_cache_unharmed() -> None:
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("llama"), ids, 3).sequences
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        for attention in ("sdpa", "eager"):
            model.set_attn_implementation(attention)
            with pytest.raises(ProtocolError, match=r"set_attn_implementation\('swapkv'\)"):
                generate(model, ids, 3, cache)
        model.set_attn_implementation(CACHE_ATTENTION_NAME)
        assert torch.equal(generate(model, ids, 3, cache).sequences, expected)


def test_model_with_another_cache_is_refused() -> None:
    with pytest.raises(ProtocolError, match="past_key_values=SwapKVCache"):
        generate(swapped_model("llama"), torch.tensor(ROWS[:1]), 3)


@torch.no_grad()
def test_model_that_skips_layers_is_refused() -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        whole, model.model.layers = model.model.layers, model.model.layers[::2]
        with pytest.raises(ProtocolError, match="layer 2 attends where layer 1 is due"):
            model(torch.tensor(ROWS[:1]), past_key_values=cache)
        model.model.layers = whole
        model(torch.tensor(ROWS[:1]), past_key_values=cache)


def test_model_that_is_not_causal_is_refused() -> None:
    model = swapped_model("gemma3", use_bidirectional_attention=True)
    with (
        pool_of(model) as pool,
        SwapKVCache(pool, ["a"], max_tokens=64) as cache,
        pytest.raises(ProtocolError, match="causal"),
    ):
        generate(model, torch.tensor(ROWS[:1]), 3, cache)


def test_model_with_another_window_than_the_layout_is_refused() -> None:
    model = swapped_model("mistral")
    with (
        pool_of(stock_model("llama")) as pool,
        SwapKVCache(pool, ["a"], max_tokens=64) as cache,
        pytest.raises(ProtocolError, match="window=None"),
    ):
        generate(model, torch.tensor(ROWS[:1]), 3, cache)


def test_model_with_gradients_is_refused() -> None:
    model = swapped_model("llama")
    with (
        pool_of(model) as pool,
        SwapKVCache(pool, ["a"], max_tokens=64) as cache,
        pytest.raises(ProtocolError, match="no_grad"),
    ):
        model(torch.tensor(ROWS[:1]), past_key_values=cache)


def test_generate_longer_than_max_tokens_is_refused() -> None:
    model = swapped_model("llama")
    with (
        pool_of(model) as pool,
        SwapKVCache(pool, ["a"], max_tokens=31) as cache,
        pytest.raises(ProtocolError, match="larger max_tokens"),
    ):
        generate(model, torch.tensor(ROWS[:1]), 9, cache)


def test_cache_of_a_name_that_is_taken_registers_nothing() -> None:
    with pool_of(stock_model("llama")) as pool:
        pool.register("b", max_tokens=4)
        with pytest.raises(ProtocolError, match="registered already"):
            SwapKVCache(pool, ["a", "b"], max_tokens=4)
        with pytest.raises(UnknownSequence):
            pool.state("a")
        assert pool.tokens("b") == 0
        with pytest.raises(ProtocolError, match="one name for each row"):
            SwapKVCache(pool, [], max_tokens=4)


def test_cache_copied_is_refused() -> None:
    with (
        pool_of(stock_model("llama")) as pool,
        SwapKVCache(pool, ["a"], max_tokens=4) as cache,
        pytest.raises(ProtocolError, match="cannot be copied"),
    ):
        copy.deepcopy(cache)


def test_close_frees_pages_and_may_follow_the_pools() -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool:
        cache = SwapKVCache(pool, ["a"], max_tokens=64)
        generate(model, torch.tensor(ROWS[:1]), 2, cache)
        cache.close()
        cache.close()
        assert free_pages(pool) == [64]
        late = SwapKVCache(pool, ["a"], max_tokens=64)
    late.close()


@pytest.mark.parametrize("shared", [0, 2])
def test_layout_of_layers_that_share_kv_is_refused(shared: int) -> None:
    config = CONFIGS["llama"]()
    config.num_kv_shared_layers = shared
    if not shared:
        assert layout_of(config, torch.float32, page_size=4, chunk_tokens=16).num_layers == 3
        return
    with pytest.raises(ProtocolError, match="2 layers share KV"):
        layout_of(config, torch.float32, page_size=4, chunk_tokens=16)
