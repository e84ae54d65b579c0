"""Layouts: shapes, bytes, groups, offsets, and how many pages a growing sequence holds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv.errors import ProtocolError
from swapkv.ids import GroupId, LayerId
from swapkv.layout import KVDtype, KVLayout, LayerGroup, PageOrder, Plane, PlaneSplit

G0, G1 = GroupId(0), GroupId(1)


def dense(**changes: object) -> KVLayout:
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "chunk_tokens": 8}
    return KVLayout.dense(**(sizes | changes))  # type: ignore[arg-type]


def plane(name: str = "k", layer: int = 0, shape: tuple[int, ...] = (4, 2)) -> Plane:
    return Plane(name=name, layer=LayerId(layer), page_shape=shape, dtype=KVDtype.FLOAT32)


@pytest.mark.parametrize(("order", "shape"), [(PageOrder.NHD, (4, 2, 8)), (PageOrder.HND, (2, 4, 8))])
def test_dense_split_has_k_and_v_planes_in_the_order_asked_for(order: PageOrder, shape: tuple[int, ...]) -> None:
    layout = dense(order=order)
    assert [[(p.name, p.page_shape) for p in planes] for planes in layout.planes] == [[("k", shape), ("v", shape)]] * 3
    assert layout.layer_bytes == (2 * 4 * 2 * 8 * 2,) * 3


@pytest.mark.parametrize(("order", "shape"), [(PageOrder.NHD, (2, 4, 2, 8)), (PageOrder.HND, (2, 2, 4, 8))])
def test_dense_fused_has_one_plane_with_a_leading_axis_of_two(order: PageOrder, shape: tuple[int, ...]) -> None:
    layout = dense(order=order, split=PlaneSplit.FUSED)
    assert [[(p.name, p.page_shape) for p in planes] for planes in layout.planes] == [[("kv", shape)]] * 3
    assert layout.layer_bytes == dense().layer_bytes


def test_dense_with_a_value_head_dim_has_planes_of_different_size() -> None:
    layout = dense(value_head_dim=3, dtype=KVDtype.FLOAT32)
    key, value = layout.planes[1]
    assert (key.page_bytes, value.page_bytes) == (4 * 2 * 8 * 4, 4 * 2 * 3 * 4)
    assert layout.bytes_per_token == 3 * 2 * (8 + 3) * 4


@pytest.mark.parametrize("dtype", KVDtype)
def test_plane_of_every_dtype_has_whole_bytes_and_a_torch_name(dtype: KVDtype) -> None:
    torch = pytest.importorskip("torch")
    assert getattr(torch, dtype.torch_name).itemsize * 8 == dtype.bits
    assert Plane(name="k", layer=LayerId(0), page_shape=(4, 2), dtype=dtype).page_bytes == dtype.bits


def test_mla_has_one_latent_plane_a_layer() -> None:
    layout = KVLayout.mla(num_layers=2, latent_dim=512, rope_dim=64)
    assert [[(p.name, p.layer, p.page_shape) for p in planes] for planes in layout.planes] == [
        [("latent", 0, (64, 576))],
        [("latent", 1, (64, 576))],
    ]
    assert layout.bytes_per_token == 2 * 576 * 2
    assert len(layout.groups) == 1


def test_windows_that_are_equal_form_a_group_in_order_of_first_use() -> None:
    layout = dense(num_layers=5, windows=[8, None, 8, 16, None])
    assert layout.groups == (
        LayerGroup(layers=(LayerId(0), LayerId(2)), window=8),
        LayerGroup(layers=(LayerId(1), LayerId(4))),
        LayerGroup(layers=(LayerId(3),), window=16),
    )
    assert layout.group_of_layer == (0, 1, 0, 2, 1)


def test_group_bytes_sum_up_to_those_of_the_whole_layout() -> None:
    layout = dense(num_layers=5, windows=[8, None, 8, 16, None], value_head_dim=3)
    groups = [GroupId(g) for g in range(3)]
    assert sum(layout.page_bytes(g) for g in groups) == layout.page_size * layout.bytes_per_token
    assert all(layout.chunk_bytes(g) == 2 * layout.page_bytes(g) for g in groups)


@pytest.mark.parametrize("split", PlaneSplit)
@pytest.mark.parametrize("windows", [None, [8, None, 8]])
def test_plane_offsets_are_layer_major_without_gap_or_overlap(
    split: PlaneSplit, windows: list[int | None] | None
) -> None:
    layout = dense(split=split, windows=windows)
    for index, group in enumerate(layout.groups):
        planes = [p for layer in group.layers for p in layout.planes[layer]]
        offsets = [layout.plane_offset(GroupId(index), p) for p in planes]
        sizes = [p.page_bytes * layout.chunk_pages for p in planes]
        assert offsets[0] == 0
        assert all(b - a == size for (a, b), size in zip(pairwise(offsets), sizes[:-1], strict=True))
        assert offsets[-1] + sizes[-1] == layout.chunk_bytes(GroupId(index))


def test_plane_range_counts_the_planes_of_a_groups_layers() -> None:
    planes = ((plane(layer=0), plane("v", 0)), (plane("kv", 1),), (plane(layer=2), plane("v", 2)))
    groups = (LayerGroup(layers=(LayerId(0), LayerId(2))), LayerGroup(layers=(LayerId(1),)))
    layout = KVLayout(page_size=4, chunk_tokens=8, groups=groups, planes=planes)
    assert layout.plane_range(G0, 0, 2) == slice(0, 4)
    assert layout.plane_range(G0, 1, 2) == slice(2, 4)
    assert layout.plane_range(G1, 0, 1) == slice(0, 1)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert dense().pages_for(tokens) == pages


def test_first_needed_page_without_a_window_is_the_first() -> None:
    assert dense().first_needed_page(G0, 1000) == 0


@given(window=st.integers(1, 30), slack=st.integers(0, 12), page_size=st.integers(1, 7), tokens=st.integers(0, 90))
def test_first_needed_page_holds_the_oldest_token_of_the_window_and_slack(
    window: int, slack: int, page_size: int, tokens: int
) -> None:
    layout = dense(num_layers=1, windows=[window], truncate_slack=slack, page_size=page_size, chunk_tokens=page_size)
    first = layout.first_needed_page(G0, tokens)
    oldest = max(0, tokens - window - slack)
    assert first * page_size <= oldest < (first + 1) * page_size


def pages_while_growing(layout: KVLayout, tokens: int, step_tokens: int) -> int:
    """The peak over every way to grow, page by page: grown before a forward, trimmed after it as `edit.trim_window`."""
    peak = 0
    for begin in range(tokens):
        held = set(range(layout.first_needed_page(G0, begin), layout.pages_for(begin)))
        for end in range(begin + 1, min(tokens, begin + step_tokens) + 1):
            new = set(range(layout.pages_for(begin), layout.pages_for(end)))
            peak = max(peak, len(held | new))
    return peak


@given(
    window=st.one_of(st.none(), st.integers(1, 20)),
    slack=st.integers(0, 6),
    page_size=st.integers(1, 5),
    tokens=st.integers(1, 60),
    step_tokens=st.integers(1, 25),
)
def test_peak_pages_is_exactly_the_most_that_a_growing_sequence_holds(
    window: int | None, slack: int, page_size: int, tokens: int, step_tokens: int
) -> None:
    layout = dense(num_layers=1, windows=[window], truncate_slack=slack, page_size=page_size, chunk_tokens=page_size)
    assert layout.peak_pages(G0, tokens, step_tokens) == pages_while_growing(layout, tokens, step_tokens)


ONE_PLANE = ((plane(),),)
ONE_GROUP = (LayerGroup(layers=(LayerId(0),)),)
SIZES = {"page_size": 4, "chunk_tokens": 8, "groups": ONE_GROUP, "planes": ONE_PLANE}
TWICE = (LayerGroup(layers=(LayerId(0), LayerId(0))),)
NO_WINDOW = (LayerGroup(layers=(LayerId(0),), window=0),)


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        ({"page_size": 0}, "page_size=0", "at least 1"),
        ({"page_size": 1.5}, "page_size=1.5", "whole number"),
        ({"chunk_tokens": -8}, "chunk_tokens=-8", "at least 1"),
        ({"chunk_tokens": 9}, "chunk_tokens=9 must be a multiple of page_size=4", "try 12"),
        ({"groups": TWICE}, r"groups name layers \[0, 0\], planes describe 1", "each layer goes once"),
        ({"groups": ()}, r"groups name layers \[\]", "each layer goes once"),
        ({"groups": NO_WINDOW}, "window=0", "at least 1 token, or None for full attention"),
        ({"truncate_slack": -1}, "truncate_slack=-1", "0 tokens or more"),
        ({"planes": ((),)}, r"layer 0 has the planes \[\]", "give it at least one"),
        ({"planes": ((plane(layer=3),),)}, "'k' of layer 3", "each of layer 0"),
        ({"planes": ((plane(shape=(4, 0)),),)}, "pages of 0 bytes", "at least 1 byte"),
        ({"planes": ((plane(), plane()),)}, r"\['k', 'k'\]", "a name of its own"),
    ],
)
def test_layout_of_values_that_do_not_fit_names_value_and_remedy(
    changes: dict[str, object], value: str, remedy: str
) -> None:
    with pytest.raises(ProtocolError, match=value) as caught:
        KVLayout(**(SIZES | changes))  # type: ignore[arg-type]
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "value", "remedy"),
    [
        ({"num_layers": 0}, "num_layers=0", "at least 1"),
        ({"num_kv_heads": -2}, "num_kv_heads=-2", "at least 1"),
        ({"head_dim": 0}, "head_dim=0", "at least 1"),
        ({"value_head_dim": 0}, "value_head_dim=0", "at least 1"),
        ({"split": PlaneSplit.FUSED, "value_head_dim": 4}, "value_head_dim=4 to equal head_dim=8", "use SPLIT"),
        ({"windows": [None]}, "windows has 1 entries for num_layers=3", "one a layer"),
    ],
)
def test_dense_of_values_that_do_not_fit_names_value_and_remedy(
    changes: dict[str, object], value: str, remedy: str
) -> None:
    with pytest.raises(ProtocolError, match=value) as caught:
        dense(**changes)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "value"), [((0, 8, 4), "num_layers=0"), ((1, 0, 4), "latent_dim=0"), ((1, 8, -1), "rope_dim=-1")]
)
def test_mla_of_values_that_do_not_fit_names_the_value(sizes: tuple[int, int, int], value: str) -> None:
    with pytest.raises(ProtocolError, match=f"{value} must be"):
        KVLayout.mla(num_layers=sizes[0], latent_dim=sizes[1], rope_dim=sizes[2])


def test_plane_offset_of_a_foreign_plane_names_plane_group_and_remedy() -> None:
    layout = dense(windows=[8, None, 8])
    with pytest.raises(ProtocolError, match="'k' of layer 1 is not in group 0: ask for it with the group"):
        layout.plane_offset(G0, layout.planes[1][0])
