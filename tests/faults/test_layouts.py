"""KV tensors as engines lay them out: every declared layout comes back byte for byte, others are refused."""

from collections.abc import Mapping

import pytest
import torch

from swapkv import (
    KVDtype,
    KVLayout,
    LayerGroup,
    PagedMemory,
    PageOrder,
    Plane,
    PlaneSplit,
    ProtocolError,
    SwapConfig,
    Verify,
    open_pool,
)
from swapkv.ids import LayerId
from swapkv.streams.memory import torch_dtype

PAGES, LAYERS, PAGE_SIZE, HEADS, DIM = 12, 2, 4, 2, 6
Tensors = Mapping[tuple[LayerId, str], torch.Tensor]


def dense(**options: object) -> KVLayout:
    shape = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "page_size": PAGE_SIZE, "chunk_tokens": 8}
    return KVLayout.dense(**(shape | {"dtype": KVDtype.BFLOAT16} | options))  # type: ignore[arg-type]


def apart(layout: KVLayout) -> Tensors:
    """Each plane an allocation of its own."""
    return {
        (plane.layer, plane.name): torch.zeros(PAGES, *plane.page_shape, dtype=torch_dtype(plane))
        for planes in layout.planes
        for plane in planes
    }


def kv_first(layout: KVLayout) -> Tensors:
    """`[2, N, …]`: K and V are halves of one tensor; V begins at an offset of its storage."""
    tensors = {}
    for k, _ in layout.planes:
        both = torch.zeros(2, PAGES, *k.page_shape, dtype=torch_dtype(k))
        tensors[k.layer, "k"], tensors[k.layer, "v"] = both[0], both[1]
    return tensors


def pages_first(layout: KVLayout) -> Tensors:
    """`[N, 2, …]`, seen as two planes: a page's stride is twice its bytes."""
    tensors = {}
    for k, _ in layout.planes:
        both = torch.zeros(PAGES, 2, *k.page_shape, dtype=torch_dtype(k))
        tensors[k.layer, "k"], tensors[k.layer, "v"] = both[:, 0], both[:, 1]
    return tensors


def layers_packed(layout: KVLayout) -> Tensors:
    """`[N, layers, 2, …]` behind 7 other elements: all layers of a page lie together."""
    shape = layout.planes[0][0].page_shape
    size = torch.Size((PAGES, LAYERS, 2, *shape)).numel()
    packed = torch.zeros(7 + size, dtype=torch_dtype(layout.planes[0][0]))[7:].view(PAGES, LAYERS, 2, *shape)
    return {
        (LayerId(layer), name): packed[:, layer, at] for layer in range(LAYERS) for at, name in enumerate(("k", "v"))
    }


def with_scales() -> KVLayout:
    """FP8 with a scale for each token and head, as planes of their own."""

    def planes(layer: LayerId) -> tuple[Plane, ...]:
        page, scales = (PAGE_SIZE, HEADS, DIM), (PAGE_SIZE, HEADS)
        fp8, f32 = KVDtype.FLOAT8_E4M3, KVDtype.FLOAT32
        shapes = {"k": (page, fp8), "v": (page, fp8), "k_scale": (scales, f32), "v_scale": (scales, f32)}
        return tuple(Plane(name=n, layer=layer, page_shape=s, dtype=d) for n, (s, d) in shapes.items())

    layers = tuple(LayerId(layer) for layer in range(LAYERS))
    return KVLayout(
        page_size=PAGE_SIZE, chunk_tokens=8, groups=(LayerGroup(layers=layers),), planes=tuple(map(planes, layers))
    )


LAYOUTS = {
    "K and V apart, NHD": (dense(), apart),
    "K and V apart, HND": (dense(order=PageOrder.HND), apart),
    "[2, N, ...]": (dense(), kv_first),
    "[N, 2, ...] as two planes": (dense(), pages_first),
    "[N, 2, ...] as one plane": (dense(split=PlaneSplit.FUSED), apart),
    "all layers of a page together": (dense(order=PageOrder.HND), layers_packed),
    "V narrower than K": (dense(value_head_dim=2), apart),
    "FP8 without scales": (dense(dtype=KVDtype.FLOAT8_E4M3), kv_first),
    "FP8 with scales": (with_scales(), apart),
    "MLA": (
        KVLayout.mla(num_layers=LAYERS, latent_dim=5, rope_dim=2, page_size=PAGE_SIZE, chunk_tokens=8),
        apart,
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("name", LAYOUTS)
async def test_memory_in_a_declared_layout_comes_back_byte_for_byte(
    name: str, verify: Verify, anyio_backend: str
) -> None:
    """KF-19: layouts, page strides, storage offsets, unequal K and V, and scales; and no byte beside them changes."""
    layout, tensors_of = LAYOUTS[name]
    tensors = tensors_of(layout)
    memory, config = PagedMemory(layout, tensors), SwapConfig(verify=verify)
    async with open_pool(layout, num_pages=PAGES, host_bytes=1 << 16, memory=memory, config=config) as pool:
        for other in ("first", "a"):
            pool.register(other, max_tokens=18)
            with pool.forward_nowait({other: 18}) as forward:
                rows = forward.page_tables(other)[0]
        written = fill(tensors, rows)
        await pool.preempt("a")
        clean = {place: tensor.clone() for place, tensor in tensors.items()}
        pool.register("b", max_tokens=5)
        with pool.forward_nowait({"b": 5}) as forward:
            taken = forward.page_tables("b")[0]
        for tensor in tensors.values():
            tensor.view(torch.uint8)[taken] = 0xDB
        await pool.resume("a")
        with pool.forward_nowait({"a": 0}) as forward:
            back = forward.page_tables("a")[0]
        assert not set(back.tolist()) & set(taken.tolist())
        for place, tensor in tensors.items():
            data = tensor.view(torch.uint8)
            assert torch.equal(data[back], written[place])
            untouched = [row for row in range(PAGES) if row not in {*back.tolist(), *taken.tolist()}]
            assert torch.equal(data[untouched], clean[place].view(torch.uint8)[untouched])


def fill(tensors: Tensors, rows: torch.Tensor) -> dict[tuple[LayerId, str], torch.Tensor]:
    """Random bytes in every row of every tensor; the answer is what `rows` hold."""
    generator = torch.Generator().manual_seed(1)
    written = {}
    for place, tensor in tensors.items():
        data = tensor.view(torch.uint8)
        data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8, generator=generator))
        written[place] = data[rows].clone()
    return written


def layer_0(tensor: torch.Tensor) -> Tensors:
    """The tensors of a dense layout, K of layer 0 replaced."""
    return {**apart(dense()), (LayerId(0), "k"): tensor}


def test_memory_in_an_undeclared_layout_is_refused_with_its_shape_and_strides() -> None:
    """KF-19."""
    nhd = (PAGES, PAGE_SIZE, HEADS, DIM)
    good = torch.zeros(nhd, dtype=torch.bfloat16)
    cases = {
        "does not match": torch.zeros(PAGES, HEADS, PAGE_SIZE, DIM, dtype=torch.bfloat16),
        "float16 with": good.to(torch.float16),
        "scatter a page": torch.zeros(PAGES, HEADS, PAGE_SIZE, DIM, dtype=torch.bfloat16).transpose(1, 2),
        "its pages overlap": good[:1].expand(PAGES, -1, -1, -1),
        "pages overlap": torch.zeros(1000, dtype=torch.bfloat16).as_strided(nhd, (24, HEADS * DIM, DIM, 1)),
        "tensor for plane 'k'": None,
    }
    for message, tensor in cases.items():
        tensors = dict(apart(dense())) if tensor is None else dict(layer_0(tensor))
        if tensor is None:
            del tensors[LayerId(0), "k"]
        with pytest.raises(ProtocolError, match=message) as caught:
            PagedMemory(dense(), tensors)
        assert (
            tensor is None or str(tuple(tensor.shape)) in str(caught.value) or str(tensor.stride()) in str(caught.value)
        )


def test_memory_given_twice_is_refused_by_the_names_of_both_planes() -> None:
    """KF-19: K passed for V as well."""
    tensors = dict(apart(dense()))
    tensors[LayerId(1), "v"] = tensors[LayerId(1), "k"]
    with pytest.raises(ProtocolError, match="plane 'v' of layer 1 is the memory of plane 'k' of layer 1"):
        PagedMemory(dense(), tensors)
