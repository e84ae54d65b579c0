"""transformers' own way to have more KV than memory, a cache whose layers come and go at every token, beside swapkv's.

The two do not compete at the same point: the offloaded cache pays for all KV at every token, a preempted sequence once a
turn. So what is compared is milliseconds a token with those of a turn, and after how many tokens the turn is paid for.
`SwapKVCache` itself runs where streams run Python, which those of CUDA do not: it is tried, and its refusal is shown.
"""

from collections.abc import Generator, Iterator
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import attrs
import torch

from benchmarks.gpu.rows import MakeDevice, Row, wait_for_torch
from swapkv.errors import ProtocolError
from swapkv.ids import GroupId
from swapkv.layout import KVLayout
from swapkv.stepped import SteppedPool, open_stepped_pool

PART = "offloaded cache"
TIMEOUT_S = 30.0
TURNS = 5


@attrs.frozen(kw_only=True)
class Case:
    """A small model like Llama, of random weights, and how far its sequence has come."""

    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    context: int = 8192
    tokens: int = 16

    def config(self) -> Any:
        import transformers

        hidden = self.heads * self.head_dim
        return transformers.LlamaConfig(
            vocab_size=1024,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.head_dim,
            max_position_embeddings=2 * self.context,
        )

    def model(self, attention: str) -> Any:
        """On the GPU, or the CPU where there is none."""
        import transformers

        torch.manual_seed(0)
        maker: Any = transformers.AutoModelForCausalLM
        return maker.from_config(self.config(), attn_implementation=attention).to(_where(), torch.bfloat16).eval()


def offloaded_cache(make: MakeDevice, case: Case | None = None) -> Iterator[Row]:
    """Decode with transformers' caches, and preempts and restores of as much KV."""
    if find_spec("transformers") is None:
        yield Row(PART, "transformers is not installed: pip install 'swapkv[transformers]'", "skipped")
        return
    case = case or Case()
    resident = _decode_ms(case, offloading=False)
    yield Row(PART, f"DynamicCache, {case.context} tokens: a token", resident, "ms")
    turn = yield from _turns(make, case)
    if not torch.cuda.is_available():
        yield Row(PART, "DynamicCache(offloading=True): torch is not built for CUDA, or sees no device", "skipped")
    else:
        offloaded = _decode_ms(case, offloading=True)
        yield Row(PART, f"DynamicCache(offloading=True), {case.context} tokens: a token", offloaded, "ms")
        if offloaded > resident:
            yield Row(PART, "tokens after which a turn costs less than offloading", turn / (offloaded - resident), "")
    yield _swapkv_cache(make, case)


def _where() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _decode_ms(case: Case, *, offloading: bool) -> float:
    """Milliseconds a token, the median."""
    import transformers

    model, where = case.model("sdpa"), _where()
    cache = transformers.DynamicCache(config=model.config, offloading=offloading)
    ids = torch.randint(0, 1024, (1, case.context), device=where)
    taken_ms = []
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(case.tokens):
            wait_for_torch()
            begin_s = perf_counter()
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            wait_for_torch()
            taken_ms.append((perf_counter() - begin_s) * 1e3)
    return median(taken_ms)


def _turns(make: MakeDevice, case: Case) -> Generator[Row, None, float]:
    """Preempts and restores of the same KV by a pool. Returns milliseconds of a turn, which is one of each."""
    layout = _layout(case)
    taken_ms: dict[str, list[float]] = {"preempt": [], "restore": []}
    with open_stepped_pool(layout, device=make(), **_sizes(layout, case)) as pool:
        for turn in range(1 + TURNS):
            name = f"turn-{turn}"  # a new sequence each, so that no preempt finds clean copies
            pool.register(name, max_tokens=case.context)
            with pool.forward({name: case.context}):
                pass
            for call, taken in taken_ms.items():
                taken.append(_timed_ms(pool, call, name))
            pool.finish(name)
            pool.drain(TIMEOUT_S)
    preempt, restore = (median(taken[1:]) for taken in taken_ms.values())
    num_mib = layout.pages_for(case.context) * layout.page_bytes(GroupId(0)) >> 20
    yield Row(PART, f"swapkv, {num_mib} MiB of KV: a preempt that copies all", preempt, "ms")
    yield Row(PART, f"swapkv, {num_mib} MiB of KV: a restore", restore, "ms")
    return preempt + restore


def _timed_ms(pool: SteppedPool, call: str, name: str) -> float:
    begin_s = perf_counter()
    getattr(pool, call)(name)
    pool.drain(TIMEOUT_S)
    return (perf_counter() - begin_s) * 1e3


def _swapkv_cache(make: MakeDevice, case: Case) -> Row:
    """Whether `SwapKVCache` works over a pool on this device: a few tokens of a short sequence."""
    from swapkv.integrations.transformers import CACHE_ATTENTION_NAME, SwapKVCache

    model, layout = case.model(CACHE_ATTENTION_NAME), _layout(case)
    try:
        with (
            open_stepped_pool(layout, device=make(), **_sizes(layout, case)) as pool,
            SwapKVCache(pool, ["a"], max_tokens=64) as cache,
            torch.no_grad(),
        ):
            model(torch.zeros(1, 4, dtype=torch.int64, device=_where()), past_key_values=cache, use_cache=True)
    except ProtocolError as error:
        return Row(PART, f"SwapKVCache over this device: {error}", "refused")
    return Row(PART, "SwapKVCache over this device", "works")


def _layout(case: Case) -> KVLayout:
    from swapkv.integrations.transformers import layout_of

    return layout_of(case.config(), torch.bfloat16, page_size=16, chunk_tokens=256)


def _sizes(layout: KVLayout, case: Case) -> dict[str, Any]:
    """Room for one sequence on either side."""
    chunks = -(-case.context // layout.chunk_tokens)
    return {
        "num_pages": layout.pages_for(case.context) + 16,
        "host_bytes": (chunks + 1) * layout.chunk_bytes(GroupId(0)),
    }
