"""The built-in decoder: what it generates depends on its seed and its own KV, and on nothing else."""

from collections.abc import Iterator
from math import ceil

import pytest
import torch

from swapkv.demo.decoder import Row
from swapkv.demo.tiny_llama import BOS, TinyLlama
from swapkv.errors import ProtocolError
from swapkv.streams.memory import PagedMemory

PROMPT = "The quick brown fox jumps over the lazy dog."
SMALL = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poisoned_memory(layout, tokens):
    """Pages for `tokens` tokens in every group, all NaN."""
    pages = ceil(tokens / layout.page_size)
    planes = [plane for planes in layout.planes for plane in planes]
    return PagedMemory(
        layout, {(plane.layer, plane.name): torch.full((pages, *plane.page_shape), torch.nan) for plane in planes}
    )


class Sequence:
    """One sequence on pages of a memory; `first_page` and `placement` choose which."""

    def __init__(self, model, memory, text, *, tokens, first_page=0, placement=None):
        self.model, self.memory = model, memory
        self.pending, self.length, self.generated = model.encode(text), 0, []
        pages = ceil(tokens / model.layout.page_size)
        table = torch.arange(pages)
        if placement is not None:
            table = torch.randperm(pages, generator=torch.Generator().manual_seed(placement))
        self.tables = [table + first_page for _ in model.layout.groups]

    def row(self, **options):
        return Row(tokens=self.pending, start=self.length, page_tables=self.tables, **options)

    def take(self, token):
        self.length += len(self.pending)
        self.pending = [token]
        self.generated.append(token)

    def run(self, steps):
        for _ in range(steps):
            self.take(self.model.forward([self.row()], self.memory)[0])
        return self.generated

    def kv(self):
        """The KV of all its tokens, in order."""
        return [
            self.memory.plane(plane.layer, plane.name)[self.tables[self.model.layout.group_of_layer[plane.layer]]]
            .flatten(0, 1)[: self.length]
            .clone()
            for planes in self.model.layout.planes
            for plane in planes
        ]


def alone(model, text, steps, *, tokens=512, placement=None):
    sequence = Sequence(model, poisoned_memory(model.layout, tokens), text, tokens=tokens, placement=placement)
    sequence.run(steps)
    return sequence


def assert_same_kv(left, right):
    for ours, theirs in zip(left.kv(), right.kv(), strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)


def test_generate_same_seed_gives_same_tokens_and_another_seed_does_not():
    first, again, other = (alone(TinyLlama(seed=seed, **SMALL), PROMPT, 20) for seed in (5, 5, 6))
    assert first.generated == again.generated != other.generated
    assert_same_kv(first, again)


@pytest.mark.parametrize("seed", [0, 1])
def test_generate_default_model_does_not_collapse(seed):
    model = TinyLlama(seed=seed)
    tokens = [alone(model, PROMPT + last, 120).generated for last in "ab"]
    for generated in tokens:
        assert len(set(generated)) > 30
        assert len(set(generated[-40:])) > 10
        assert model.decode(generated).isprintable()
    assert sum(a != b for a, b in zip(*tokens, strict=True)) > 80


def test_forward_rows_side_by_side_equal_rows_alone_bit_for_bit():
    model = TinyLlama(**SMALL)
    texts = ["a", PROMPT, PROMPT * 7]
    memory = poisoned_memory(model.layout, 3 * 512)
    pages = 512 // model.layout.page_size
    together = [Sequence(model, memory, text, tokens=512, first_page=n * pages) for n, text in enumerate(texts)]
    for _ in range(6):
        for sequence, token in zip(
            together, model.forward([sequence.row() for sequence in together], memory), strict=True
        ):
            sequence.take(token)
    for sequence, text in zip(together, texts, strict=True):
        single = alone(model, text, 6)
        assert sequence.generated == single.generated
        assert_same_kv(sequence, single)


@pytest.mark.parametrize("windows", [None, [24, None]])
def test_forward_pages_placed_elsewhere_give_equal_bits(windows):
    model = TinyLlama(windows=windows, **SMALL)
    ordered, shuffled = (alone(model, PROMPT * 7, 10, placement=placement) for placement in (None, 3))
    assert ordered.generated == shuffled.generated
    assert_same_kv(ordered, shuffled)


def test_forward_any_page_size_gives_equal_tokens():
    runs = [alone(TinyLlama(page_size=page_size, **SMALL), PROMPT * 7, 20) for page_size in (16, 1, 256)]
    for run in runs[1:]:
        assert run.generated == runs[0].generated


def test_forward_prompt_cut_at_multiples_of_256_gives_equal_bits():
    model = TinyLlama(**SMALL)
    whole = alone(model, PROMPT * 14, 3, tokens=1024)
    cut = Sequence(model, poisoned_memory(model.layout, 1024), PROMPT * 14, tokens=1024, placement=1)
    prompt = cut.pending
    for lo in range(0, len(prompt), 256):
        cut.pending, cut.length = prompt[lo : lo + 256], lo
        token = model.forward([cut.row()], cut.memory)[0]
    cut.take(token)
    cut.run(2)
    assert cut.generated == whole.generated
    assert_same_kv(cut, whole)


def test_forward_decoded_kv_is_close_to_prefilled_kv():
    model = TinyLlama(**SMALL)
    decoded = alone(model, PROMPT, 30)
    text = PROMPT + "".join(map(chr, decoded.generated[:-1]))
    prefilled = alone(model, text, 1)
    assert prefilled.length == decoded.length
    for ours, theirs in zip(decoded.kv(), prefilled.kv(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_forward_pages_behind_the_window_are_not_needed():
    model = TinyLlama(windows=[24, None], **SMALL)
    kept, dropped = alone(model, PROMPT * 7, 1), alone(model, PROMPT * 7, 1)
    gone = model.layout.first_needed_page(model.layout.group_of_layer[0], dropped.length)
    assert gone > 10
    dropped.memory.plane(0, "k")[dropped.tables[0][:gone]] = torch.nan
    dropped.memory.plane(0, "v")[dropped.tables[0][:gone]] = torch.nan
    dropped.tables[0][:gone] = -1
    assert kept.run(20) == dropped.run(20)


def test_forward_missing_page_is_refused():
    model = TinyLlama(**SMALL)
    sequence = alone(model, PROMPT, 1)
    sequence.tables[0][0] = -1
    with pytest.raises(ProtocolError, match="logical page 0 "):
        sequence.run(1)


@pytest.mark.parametrize("text", [PROMPT, PROMPT * 14])
def test_forward_waits_for_each_layer_once_before_touching_it(text):
    model = TinyLlama(**SMALL)
    sequence = Sequence(model, poisoned_memory(model.layout, 1024), text, tokens=1024)
    calls = []

    def wait_layer(layer):
        assert sequence.memory.plane(layer, "k").isnan().all()
        assert sequence.memory.plane(layer, "v").isnan().all()
        calls.append(layer)

    model.forward([sequence.row(wait_layer=wait_layer)], sequence.memory)
    assert calls == [0, 1]


def test_forward_kv_that_arrives_while_waiting_is_what_is_read():
    model = TinyLlama(**SMALL)
    expected = alone(model, PROMPT, 2).generated
    late = alone(model, PROMPT, 1)
    held = {}
    for layer in (0, 1):
        for name in "kv":
            plane = late.memory.plane(layer, name)
            held[layer, name] = plane.clone()
            plane.fill_(torch.nan)

    def wait_layer(layer):
        for name in "kv":
            late.memory.plane(layer, name).copy_(held[layer, name])

    late.take(model.forward([late.row(wait_layer=wait_layer)], late.memory)[0])
    assert late.generated == expected


def test_encode_then_decode_gives_the_text_back():
    model = TinyLlama(**SMALL)
    for text in ("", "plain", "naïve — 日本\n\ttab"):
        tokens = model.encode(text)
        assert tokens[0] == BOS
        assert model.decode(tokens) == text


def test_decode_invalid_bytes_and_terminal_controls_are_replaced():
    assert TinyLlama(**SMALL).decode([0x41, 0xFF, 0x1B, 0x5B, BOS, 0x42]) == "A\ufffd\ufffd[B"


def test_forward_row_without_tokens_is_refused():
    model = TinyLlama(**SMALL)
    sequence = alone(model, PROMPT, 1)
    sequence.pending = []
    with pytest.raises(ProtocolError, match="0 tokens"):
        sequence.run(1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 .*num_kv_heads=2"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"vocab": 256}, "vocab=256 must be at least 257"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"windows": [None]}, "windows has 1 entries"),
    ],
)
def test_create_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ProtocolError, match=message):
        TinyLlama(**{**SMALL, **sizes})
