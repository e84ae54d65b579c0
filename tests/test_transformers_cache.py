"""transformers' own `generate` over a pool, against itself with its own cache."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

import swapkv
from swapkv.errors import KVEvicted, NeverFits, PagesExhausted, ProtocolError, UnknownSequence
from swapkv.fsm.commands import PreemptOutcome
from swapkv.fsm.queries import SequenceState
from swapkv.integrations.transformers import CACHE_ATTENTION_NAME, SwapKVCache, layout_of
from swapkv.stepped import SteppedPool, open_stepped_pool
from swapkv.streams.host import HostDevice

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

WINDOW = 12
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=MIXED, query_pre_attn_scalar=16
    ),
}
BOUND = 3e-5
"""Absolute, where logits reach about 4 and sums of float32 are taken in another order."""

ROWS = [[(7 * i * i + 3 * i + row) % 95 + 2 for i in range(size)] for row, size in enumerate((30, 17, 4))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and the number of threads is part of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stock_model(kind: str, attention: str = "eager", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def swapped_model(kind: str, **changes: Any) -> Any:
    model = stock_model(kind, **changes)
    model.set_attn_implementation(CACHE_ATTENTION_NAME)
    return model


@contextmanager
def pool_of(
    model: Any, num_pages: int = 64, host_bytes: int = 8 << 20, slack: int = 0, **config: Any
) -> Iterator[SteppedPool]:
    layout = layout_of(model.config, torch.float32, page_size=4, chunk_tokens=16, truncate_slack=slack)
    with open_stepped_pool(
        layout, num_pages=num_pages, host_bytes=host_bytes, config=swapkv.SwapConfig(**config)
    ) as pool:
        yield pool


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, T]`."""
    size = max(map(len, rows))
    ids = torch.tensor([[0] * (size - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (size - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def generate(model: Any, ids: torch.Tensor, new: int, cache: SwapKVCache | None = None, **options: Any) -> Any:
    """Greedy: `sequences` and the `logits` of each new token."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    if cache is not None:
        options["past_key_values"] = cache
    return model.generate(
        ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


def longer(mask: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.cat([mask, torch.ones(len(mask), columns, dtype=mask.dtype)], 1)


def kv(pool: SteppedPool, name: str) -> list[torch.Tensor]:
    """The pages of each plane that the sequence still has, in order; slots beyond its last token are 0."""
    with pool.forward({name: 0}) as forward:
        tables = forward.page_tables(name)
    found = []
    for layer, planes in enumerate(pool.layout.planes):
        table = tables[pool.layout.group_of_layer[layer]]
        for plane in planes:
            pages = pool.memory.plane(layer, plane.name)[table.clamp(min=0)].clone()
            pages[table < 0] = 0
            pages.flatten(0, 1)[pool.tokens(name) :] = 0
            found.append(pages)
    return found


def poison(pool: SteppedPool) -> None:
    """Nothing that is on the device now may be read again."""
    for layer, planes in enumerate(pool.layout.planes):
        for plane in planes:
            pool.memory.plane(layer, plane.name).fill_(torch.nan)


def free_pages(pool: SteppedPool) -> list[int]:
    pool.drain(10.0)
    return [pages.free for pages in pool.statistics().pages]


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


def test_generate_prefill_in_chunks_tokens_equal_stock() -> None:
    model = swapped_model("gemma3")
    ids, mask = left_padded(ROWS)
    expected = generate(stock_model("gemma3"), ids, 10, attention_mask=mask).sequences
    with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64, step_tokens=7) as cache:
        got = generate(model, ids, 10, cache, attention_mask=mask, prefill_chunk_size=7)
    assert torch.equal(got.sequences, expected)


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
