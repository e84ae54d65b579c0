"""transformers' own `generate` over a pool, against itself with its own cache."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swapkv.integrations.transformers import CACHE_ATTENTION_NAME, SwapKVCache
from swapkv.stepped import open_stepped_pool
from tests.kit.small_models import (
    BOUND,
    CONFIGS,
    ROWS,
    free_pages,
    generate,
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
def test_generate_single_row_tokens_equal_stock(kind: str) -> None:
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model(kind), ids, 24)
    model = swapped_model(kind)
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        got = generate(model, ids, 24, cache)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=BOUND)


def test_generate_single_row_tokens_equal_stock_sdpa() -> None:
    ids = torch.tensor(ROWS[:1])
    expected = generate(stock_model("gemma3", "sdpa"), ids, 24)
    model = swapped_model("gemma3")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        assert torch.equal(generate(model, ids, 24, cache).sequences, expected.sequences)


@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_left_padded_batch_rows_equal_stock_and_rows_alone(kind: str) -> None:
    stock, model = stock_model(kind), swapped_model(kind)
    ids, mask = left_padded(ROWS)
    expected = generate(stock, ids, 20, attention_mask=mask)
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
        got = generate(model, ids, 20, cache, attention_mask=mask)
        assert [pool.tokens(name) for name in cache.names] == [len(row) + 19 for row in ROWS]
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=BOUND)
    for row, tokens in enumerate(ROWS):
        alone = generate(stock, torch.tensor([tokens]), 20)
        assert torch.equal(got.sequences[row, -20:], alone.sequences[0, -20:])


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
@torch.no_grad()
def test_forward_right_padded_batch_rows_equal_rows_alone(kind: str) -> None:
    """Padding then lies in the middle of the columns; a window counts tokens, not columns."""
    stock, model = stock_model(kind), swapped_model(kind)
    ids, mask = (part.flip(1) for part in left_padded([row[::-1] for row in ROWS]))
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        last = torch.stack([logits[row, len(tokens) - 1] for row, tokens in enumerate(ROWS)])
        steps = [last]
        for _ in range(15):
            mask = longer(mask, 1)
            out = model(
                steps[-1].argmax(-1, keepdim=True),
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
            )
            steps.append(out.logits[:, -1])
    for row, tokens in enumerate(ROWS):
        alone = generate(stock, torch.tensor([tokens]), 16)
        mine = torch.stack([step[row] for step in steps])
        assert mine.argmax(-1).tolist() == alone.sequences[0, -16:].tolist()
        torch.testing.assert_close(mine, torch.cat(alone.logits), rtol=0, atol=BOUND)


def test_generate_prefill_in_chunks_tokens_equal_stock() -> None:
    model = swapped_model("gemma3")
    ids, mask = left_padded(ROWS)
    expected = generate(stock_model("gemma3"), ids, 10, attention_mask=mask).sequences
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64, step_tokens=7) as cache:
        got = generate(model, ids, 10, cache, attention_mask=mask, prefill_chunk_size=7)
    assert torch.equal(got.sequences, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3"])
def test_beam_search_tokens_equal_stock(kind: str) -> None:
    model = swapped_model(kind)
    ids, mask = left_padded(ROWS[:2])
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    expected = generate(stock_model(kind), ids, 12, **options).sequences
    with pool_of(model) as pool:
        with SwapKVCache(pool, list("abcdef"), max_tokens=64) as cache:
            assert torch.equal(generate(model, ids, 12, cache, **options).sequences, expected)
            assert len(set(cache.names)) == 6
        assert free_pages(pool) == [64] * len(pool.layout.groups)


def test_assisted_decoding_tokens_equal_greedy() -> None:
    model = swapped_model("gemma3")
    ids = torch.tensor([[5, 6, 7, 8, 9] * 6])
    expected = generate(stock_model("gemma3"), ids, 24).sequences
    with pool_of(model, slack=8) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        got = generate(model, ids, 24, cache, prompt_lookup_num_tokens=4)
        assert torch.equal(got.sequences, expected)


def test_repeated_rows_share_the_prompt_and_part_where_their_tokens_do() -> None:
    model, stock = swapped_model("gemma3"), stock_model("gemma3")
    prompt = ROWS[0]
    questions = [[*prompt, 5, 6, 7], [*prompt, 8, 9, 10]]
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        generate(model, torch.tensor([prompt]), 1, cache)
        free = free_pages(pool)
        cache.batch_repeat_interleave(2)
        assert free_pages(pool) == free
        got = generate(model, torch.tensor(questions), 10, cache).sequences
        cache.batch_select_indices(torch.tensor([False, True]))
        assert cache.names == ("a~1",)
    for row, question in zip(got, questions, strict=True):
        assert torch.equal(row, generate(stock, torch.tensor([question]), 10).sequences[0])


@torch.no_grad()
def test_forward_rows_without_new_tokens_are_left_as_they_are() -> None:
    model, stock = swapped_model("gemma3"), stock_model("gemma3")
    ids, mask = left_padded(ROWS[:2])
    more = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b"], max_tokens=64) as cache:
        model(ids, attention_mask=mask, past_key_values=cache)
        positions = (mask.sum(1, keepdim=True) + torch.arange(3)).clamp(max=40)
        both = torch.cat([mask, more], 1)
        out = model(torch.full((2, 3), 7), attention_mask=both, position_ids=positions, past_key_values=cache)
        assert (pool.tokens("a"), pool.tokens("b")) == (33, 17)
    alone = stock(torch.tensor([[*ROWS[0], 7, 7, 7]])).logits[0, -3:]
    torch.testing.assert_close(out.logits[0], alone, rtol=0, atol=BOUND)


@pytest.mark.model
def test_gemma_writes_the_same_text_with_a_swap_in_the_middle() -> None:
    from swapkv.demo.gemma import load_gemma

    decoder = load_gemma(page_size=16, chunk_tokens=256)
    model = decoder.model
    model.set_attn_implementation("sdpa")
    prompts = [decoder.encode(text) for text in ("The capital of France is", "Once upon a time there was a")]
    ids, mask = left_padded(prompts)
    expected = generate(model, ids, 16, attention_mask=mask).sequences
    model.set_attn_implementation(CACHE_ATTENTION_NAME)
    with (
        open_stepped_pool(decoder.layout, num_pages=16, host_bytes=64 << 20) as pool,
        SwapKVCache(pool, ["a", "b"], max_tokens=64) as cache,
    ):
        first = generate(model, ids, 8, cache, attention_mask=mask).sequences
        cache.preempt()
        poison(pool)
        cache.restore()
        got = generate(model, first, 8, cache, attention_mask=longer(mask, 8)).sequences
    assert torch.equal(got, expected)
    assert "France" in decoder.decode(got[0, -16:].tolist())
