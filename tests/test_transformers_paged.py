"""transformers models over pages against the same models with their own attention."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
import transformers

from swapkv.demo.decoder import Row
from swapkv.errors import ProtocolError
from swapkv.ids import GroupId
from swapkv.integrations.transformers import ATTENTION_NAME, PagedKV, PagedTransformer, layout_of, paged_attention
from swapkv.layout import KVLayout, PageOrder
from swapkv.streams.memory import PagedMemory, torch_dtype

WINDOW = 24
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, sliding_window=WINDOW, layer_types=ALTERNATING),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, sliding_window=WINDOW, layer_types=ALTERNATING, query_pre_attn_scalar=16
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=WINDOW, pad_token_id=0, eos_token_id=1),
}
PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(300)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and the number of threads is part of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode()


def stock_model(kind: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").eval()


def paged(model: Any, page_size: int = 4) -> PagedTransformer:
    return PagedTransformer(copy.deepcopy(model), ByteTokenizer(), page_size=page_size, chunk_tokens=page_size * 4)


class Scattered:
    """A sequence whose pages lie in random rows of a memory full of NaN."""

    def __init__(self, layout: KVLayout, tokens_max: int, seed: int) -> None:
        pages = layout.pages_for(tokens_max)
        tensors = {
            (plane.layer, plane.name): torch.full((pages + 5, *plane.page_shape), torch.nan, dtype=torch_dtype(plane))
            for planes in layout.planes
            for plane in planes
        }
        self.memory = PagedMemory(layout, tensors)
        generator = torch.Generator().manual_seed(seed)
        self.tables = [torch.randperm(pages + 5, generator=generator)[:pages] for _ in layout.groups]

    def row(self, tokens: Sequence[int], start: int) -> Row:
        pages = self.memory.layout.pages_for(start + len(tokens))
        return Row(tokens=tokens, start=start, page_tables=[table[:pages] for table in self.tables])

    def row_behind_window(self, tokens: Sequence[int], start: int) -> Row:
        """The same row without the pages that no token of it sees; what they held is lost."""
        row, layout = self.row(tokens, start), self.memory.layout
        tables = [table.clone() for table in row.page_tables]
        for group, table in enumerate(tables):
            behind = layout.first_needed_page(GroupId(group), start)
            for layer in layout.groups[group].layers:
                for name in ("k", "v"):
                    self.memory.plane(layer, name)[table[:behind]] = torch.nan
            table[:behind] = -1
        return attrs.evolve(row, page_tables=tables)

    def kv(self, num_tokens: int) -> list[torch.Tensor]:
        """Every plane's KV in token order."""
        layout = self.memory.layout
        return [
            self.memory.plane(plane.layer, plane.name)[self.tables[layout.group_of_layer[plane.layer]]]
            .flatten(0, 1)[:num_tokens]
            .clone()
            for planes in layout.planes
            for plane in planes
        ]


def generate(decoder: PagedTransformer, place: Scattered, prompt: Sequence[int], steps: int) -> list[torch.Tensor]:
    """Prefill, then greedy steps: the logits of each."""
    logits = [decoder.logits(place.row(prompt, 0), place.memory)]
    for step in range(steps):
        logits.append(decoder.logits(place.row([int(logits[-1].argmax())], len(prompt) + step), place.memory))
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_prompt_beyond_window_and_piece_match_stock(kind: str) -> None:
    """Bound: 3e-5 absolute, where logits reach about 4 and sums of float32 are taken in another order."""
    stock = stock_model(kind)
    decoder = paged(stock)
    logits = generate(decoder, Scattered(decoder.layout, 400, seed=1), PROMPT, steps=12)
    tokens = [*PROMPT, *(int(step.argmax()) for step in logits[:-1])]
    with torch.inference_mode():
        expected = stock(torch.tensor([tokens]), use_cache=False).logits[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=3e-5)
    assert [int(step.argmax()) for step in logits] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_greedy_equal_those_of_stock_generate(kind: str) -> None:
    stock = stock_model(kind)
    decoder = paged(stock)
    ours = [int(step.argmax()) for step in generate(decoder, Scattered(decoder.layout, 400, seed=2), PROMPT, steps=15)]
    stock.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT])
    theirs = stock.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    assert ours == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("page_size", [4, 16, 48])
def test_kv_and_logits_other_places_equal_bits(kind: str, page_size: int) -> None:
    decoder = paged(stock_model(kind), page_size)
    first, second = (Scattered(decoder.layout, 320, seed) for seed in (3, 4))
    assert not torch.equal(first.tables[0], second.tables[0])
    logits = [generate(decoder, place, PROMPT, steps=4) for place in (first, second)]
    assert all(map(torch.equal, *logits))
    assert all(map(torch.equal, first.kv(304), second.kv(304)))


def test_kv_pages_behind_window_lost_equal_bits() -> None:
    decoder = paged(stock_model("gemma3"))
    whole, cut = (Scattered(decoder.layout, 320, seed=5) for _ in range(2))
    for place in (whole, cut):
        decoder.logits(place.row(PROMPT, 0), place.memory)
    expected = decoder.logits(whole.row([5], 300), whole.memory)
    row = cut.row_behind_window([5], 300)
    assert int((row.page_tables[0] == -1).sum()) > 60
    assert torch.equal(decoder.logits(row, cut.memory), expected)


def test_forward_beside_other_rows_equal_bits() -> None:
    decoder = paged(stock_model("gemma3"))
    alone, beside = (Scattered(decoder.layout, 320, seed=6) for _ in range(2))
    shared = attrs.evolve(beside.row(PROMPT, 0), page_tables=[table.clone() for table in beside.tables])
    tokens = decoder.forward([alone.row(PROMPT, 0)], alone.memory)
    crowd = [Row(tokens=PROMPT[:n], start=0, page_tables=beside.tables) for n in (1, 7, 100)]
    assert decoder.forward([*crowd, shared], beside.memory)[3:] == tokens
    assert all(map(torch.equal, alone.kv(300), beside.kv(300)))


def test_prefill_split_at_piece_boundary_equal_bits() -> None:
    decoder = paged(stock_model("gemma3"))
    whole, split = (Scattered(decoder.layout, 320, seed=7) for _ in range(2))
    expected = decoder.logits(whole.row(PROMPT, 0), whole.memory)
    decoder.logits(split.row(PROMPT[:256], 0), split.memory)
    assert torch.equal(decoder.logits(split.row(PROMPT[256:], 256), split.memory), expected)
    assert all(map(torch.equal, whole.kv(300), split.kv(300)))


def gated_logits(decoder: PagedTransformer, waits: Callable[[Row, Callable[[int], None]], Row]) -> torch.Tensor:
    """One decode step over KV that reaches each layer only when that layer waits for it."""
    place = Scattered(decoder.layout, 320, seed=8)
    decoder.logits(place.row(PROMPT, 0), place.memory)
    planes = [[place.memory.plane(layer, name) for name in ("k", "v")] for layer in range(decoder.layout.num_layers)]
    saved = [[plane.clone() for plane in layer] for layer in planes]
    for layer in planes:
        for plane in layer:
            plane.fill_(torch.nan)

    def restore(index: int) -> None:
        for plane, bytes_ in zip(planes[index], saved[index], strict=True):
            plane.copy_(bytes_)

    return decoder.logits(waits(place.row([5], 300), restore), place.memory)


def test_wait_layer_kv_arrives_late_equal_bits() -> None:
    decoder = paged(stock_model("gemma3"))
    place = Scattered(decoder.layout, 320, seed=9)
    decoder.logits(place.row(PROMPT, 0), place.memory)
    expected = decoder.logits(place.row([5], 300), place.memory)
    late = gated_logits(decoder, lambda row, restore: attrs.evolve(row, wait_layer=restore))
    assert torch.equal(late, expected)


def test_wait_layer_left_out_reads_poison() -> None:
    """The twin of the test above: without the guard the step must not get through unharmed."""
    assert gated_logits(paged(stock_model("gemma3")), lambda row, restore: row).isnan().all()


def test_forward_two_models_on_two_threads_equal_bits() -> None:
    """Nothing is global: each forward sees its own pages."""
    decoders = [paged(stock_model("gemma3")), paged(stock_model("llama"))]
    expected = [generate(decoder, Scattered(decoder.layout, 320, 10), PROMPT, steps=4) for decoder in decoders]
    got: list[list[torch.Tensor]] = [[], []]

    def run(index: int) -> None:
        torch.set_num_threads(1)
        decoder = decoders[index]
        got[index] = generate(decoder, Scattered(decoder.layout, 320, 11), PROMPT, steps=4)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, got[0] + got[1], expected[0] + expected[1]))


def test_layout_gemma3_groups_layers_by_window() -> None:
    layout = layout_of(CONFIGS["gemma3"](), torch.bfloat16, page_size=8, chunk_tokens=64)
    assert [(group.layers, group.window) for group in layout.groups] == [((0, 2), WINDOW), ((1, 3), None)]
    assert layout.planes[0][0].page_shape == (8, 2, 16)
    assert layout.bytes_per_token == 4 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
    ],
)
def test_layout_kv_of_another_kind_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    config = CONFIGS[kind]()
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ProtocolError, match=message):
        layout_of(config, torch.float32, page_size=8, chunk_tokens=64)


def test_layout_dtype_without_kv_refused() -> None:
    with pytest.raises(ProtocolError, match="float64"):
        layout_of(CONFIGS["llama"](), torch.float64, page_size=8, chunk_tokens=64)


def test_model_called_without_pages_refused() -> None:
    decoder = paged(stock_model("llama"))
    assert decoder.model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(ProtocolError, match="through PagedTransformer"):
        decoder.model(torch.tensor([PROMPT]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 4, 1, 16)}, "batch of 2"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "mask"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"sliding_window": WINDOW}, "window=None"),
    ],
)
def test_attention_what_pages_cannot_do_refused(changes: dict[str, Any], message: str) -> None:
    decoder = paged(stock_model("llama"))
    place = Scattered(decoder.layout, 8, seed=12)

    call: dict[str, Any] = {
        "query": torch.zeros(1, 4, 1, 16),
        "key": torch.zeros(1, 2, 1, 16),
        "value": torch.zeros(1, 2, 1, 16),
        "attention_mask": None,
        "swapkv_pages": PagedKV(memory=place.memory, page_tables=place.tables, start=0, split_tokens=256),
    }
    module = decoder.model.get_decoder().layers[0].self_attn
    assert paged_attention(module, **call)[0].shape == (1, 1, 4, 16)
    with pytest.raises(ProtocolError, match=message):
        paged_attention(module, **(call | changes))


def test_attention_bidirectional_layer_refused() -> None:
    config = CONFIGS["gemma3"]()
    config.use_bidirectional_attention = True
    decoder = paged(transformers.AutoModelForCausalLM.from_config(config))
    place = Scattered(decoder.layout, 8, seed=15)
    with pytest.raises(ProtocolError, match="not causal"):
        decoder.logits(place.row([1], 0), place.memory)


def test_logits_memory_of_another_layout_refused() -> None:
    decoder = paged(stock_model("llama"))
    hnd = KVLayout.dense(num_layers=4, num_kv_heads=2, head_dim=16, page_size=4, chunk_tokens=16, order=PageOrder.HND)
    place = Scattered(hnd, 8, seed=13)
    with pytest.raises(ProtocolError, match="this decoder's layout"):
        decoder.logits(place.row([1], 0), place.memory)


def test_logits_row_without_tokens_refused() -> None:
    decoder = paged(stock_model("llama"))
    place = Scattered(decoder.layout, 8, seed=14)
    with pytest.raises(ProtocolError, match="0 tokens"):
        decoder.logits(place.row([], 3), place.memory)


def test_encode_text_without_tokens_refused() -> None:
    decoder = paged(stock_model("llama"))
    assert decoder.decode(decoder.encode("swap")) == "swap"
    with pytest.raises(ProtocolError, match="pass some text"):
        decoder.encode("")
