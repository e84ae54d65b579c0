"""Paged attention against a dense float64 reference, and the merging of partial results."""

from collections.abc import Iterator
from itertools import pairwise
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv.attention import LogBase, Partial, attend, empty, merge
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder
from tests.kit.paged import ERROR_MAX, Paged, error, random_query


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 700])
def test_decode_any_page_size_order_and_length_equals_dense(order, page_size, tokens):
    kv = Paged(tokens, page_size=page_size, order=order).write()
    query = random_query(1)
    assert error(kv.attend(query, tokens - 1), kv.reference(query, tokens - 1)) < ERROR_MAX


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_grouped_query_any_group_and_head_dim_equals_dense(group, head_dim):
    kv = Paged(300, head_dim=head_dim).write()
    for num_tokens in (1, 5):
        query = random_query(num_tokens, 2 * group, head_dim)
        start = 300 - num_tokens
        assert error(kv.attend(query, start), kv.reference(query, start)) < ERROR_MAX


@pytest.mark.parametrize("window", [1, 5, 16, 100, 256, 300, 5000])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (599, 1), (0, 600), (250, 20), (511, 2), (130, 470)])
def test_window_any_width_equals_dense(window, start, num_tokens):
    kv = Paged(start + num_tokens).write()
    query = random_query(num_tokens)
    for split_tokens in (256, 64, 8):
        out = kv.attend(query, start, window=window, split_tokens=split_tokens)
        assert error(out, kv.reference(query, start, window=window)) < ERROR_MAX


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    start=st.integers(0, 150),
    num_tokens=st.integers(1, 60),
    page_size=st.sampled_from([1, 4, 16]),
    split_tokens=st.sampled_from([2, 4, 16, 32]),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.just(2.0),
    scale=st.none() | st.just(0.3),
    order=st.sampled_from(PageOrder),
)
def test_attend_any_geometry_equals_dense(start, num_tokens, page_size, split_tokens, window, softcap, scale, order):
    if split_tokens % page_size and page_size % split_tokens:
        split_tokens = page_size
    kv = Paged(start + num_tokens, head_dim=8, value_dim=6, page_size=page_size, order=order).write()
    query = random_query(num_tokens, 6, 8)
    out = kv.attend(query, start, window=window, softcap=softcap, scale=scale, split_tokens=split_tokens)
    reference = kv.reference(query, start, window=window, softcap=softcap, scale=scale)
    assert out.shape == (num_tokens, 6, 6)
    assert error(out, reference) < ERROR_MAX


def test_decode_more_splits_than_one_batch_equals_dense():
    kv = Paged(1000, page_size=4).write()
    query = random_query(1)
    for window in (None, 777):
        out = kv.attend(query, 999, window=window, split_tokens=4)
        assert error(out, kv.reference(query, 999, window=window)) < ERROR_MAX


@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_softcap_ragged_tail_equals_dense(softcap):
    kv = Paged(523).write()
    for num_tokens in (1, 300):
        query, start = random_query(num_tokens), 523 - num_tokens
        assert error(kv.attend(query, start, softcap=softcap), kv.reference(query, start, softcap=softcap)) < ERROR_MAX


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_kv_loses_only_the_rounding_of_the_output(order, dtype):
    kv = Paged(600, dtype=dtype, order=order).write()
    query = random_query(3, dtype=dtype)
    out, reference = kv.attend(query, 597), kv.reference(query, 597)
    assert out.dtype is dtype
    half_step = torch.finfo(dtype).eps / 2
    assert error(out, reference) < reference.abs().max().item() * half_step + ERROR_MAX


def test_scores_of_a_thousand_do_not_overflow():
    kv = Paged(600).write()
    query = random_query(2) * 400
    assert error(kv.attend(query, 598), kv.reference(query, 598)) < 1e-3


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("window", [None, 90])
def test_attend_pages_placed_elsewhere_gives_equal_bits(order, page_size, window):
    outs = []
    for placement, spare in ((0, 3), (1, 3), (2, 70)):
        kv = Paged(700, page_size=page_size, order=order, placement=placement, spare=spare).write()
        one, many = random_query(1), random_query(400)
        outs.append((kv.attend(one, 699, window=window), kv.attend(many, 300, window=window)))
    for one, many in outs[1:]:
        assert torch.equal(one, outs[0][0])
        assert torch.equal(many, outs[0][1])


def test_attend_planes_with_a_page_stride_gives_equal_bits():
    kv = Paged(300, order=PageOrder.HND).write()
    query = random_query(1)
    fused = torch.stack([kv.keys, kv.values], 1)
    out = attend(query, fused[:, 0], fused[:, 1], kv.table, 299, order=kv.order)
    assert torch.equal(out, kv.attend(query, 299))


def test_prefill_cut_at_split_boundaries_gives_equal_bits():
    whole = Paged(700).write()
    query = random_query(700)
    expected = whole.attend(query, 0)
    pieces, kv = [], Paged(700, placement=5)
    for lo, hi in ((0, 256), (256, 512), (512, 700)):
        kv.write(lo, hi)
        pieces.append(kv.attend(query[lo:hi], lo))
    assert torch.equal(torch.cat(pieces), expected)


def test_prefill_cut_anywhere_equals_dense():
    kv, query = Paged(700), random_query(700)
    reference = kv.reference(query, 0)
    bounds = [0, 1, 2, 100, 255, 257, 513, 699, 700]
    for lo, hi in pairwise(bounds):
        kv.write(lo, hi)
        assert error(kv.attend(query[lo:hi], lo), reference[lo:hi]) < ERROR_MAX


def part_of(query, keys, values, dtype=torch.float32):
    """The partial of every query over all of the given keys, `[S, H, D]`."""
    scores = torch.einsum("thd,shd->ths", query, keys) * query.shape[2] ** -0.5
    out = torch.einsum("ths,shd->thd", scores.softmax(-1), values)
    count = torch.full((len(query),), len(keys))
    return Partial(out=out.to(dtype), lse=scores.logsumexp(-1).to(dtype), count=count, base=LogBase.NATURAL)


def random_part(seed=0, num_tokens=3, dtype=torch.float32):
    torch.manual_seed(seed)
    return part_of(torch.randn(num_tokens, 4, 8), torch.randn(20, 4, 8), torch.randn(20, 4, 8), dtype)


def empty_as(lse, out=0.0, num_tokens=3):
    """An empty part as some kernel may leave it."""
    return Partial(
        out=torch.full((num_tokens, 4, 8), out),
        lse=torch.full((num_tokens, 4), lse),
        count=torch.zeros(num_tokens, dtype=torch.int64),
        base=LogBase.NATURAL,
    )


def bits(partial):
    return partial.out.view(torch.int32), partial.lse.view(torch.int32), partial.count


def assert_same_bits(left, right):
    for ours, theirs in zip(bits(left), bits(right), strict=True):
        assert torch.equal(ours, theirs)


EMPTIES = [
    empty(3, 4, 8),
    empty_as(0.0),
    empty_as(torch.inf),
    empty_as(-torch.inf, out=torch.nan),
    empty_as(torch.nan, out=torch.inf),
]


@pytest.mark.parametrize("other", EMPTIES)
def test_merge_empty_parts_gives_the_neutral_element(other):
    for parts in ([other], [other, other], [other, EMPTIES[0], other]):
        assert_same_bits(merge(parts), empty(3, 4, 8))


@pytest.mark.parametrize("other", EMPTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_full_with_empty_passes_through_bit_for_bit(other, dtype):
    full = random_part(dtype=dtype)
    full.out[0, 0] = -0.0
    assert full.out.dtype == full.lse.dtype == torch.float32
    for parts in ([full], [other, full], [full, other], [other, full, other, other]):
        assert_same_bits(merge(parts), full)


@pytest.mark.parametrize("other", EMPTIES)
def test_merge_three_with_empty_middle_equals_merge_of_two(other):
    left, right = random_part(1), random_part(2)
    assert_same_bits(merge([left, other, right]), merge([left, right]))


def test_merge_decides_row_by_row():
    left, right = random_part(1), random_part(2)
    left.count[0], left.lse[0], left.out[0] = 0, torch.inf, torch.nan
    right.count[1], right.lse[1] = 0, 0.0
    merged = merge([left, right])
    assert torch.equal(merged.out[0], right.out[0])
    assert torch.equal(merged.lse[0], right.lse[0])
    assert torch.equal(merged.out[1], left.out[1])
    assert torch.equal(merged.lse[1], left.lse[1])
    assert merged.count.tolist() == [20, 20, 40]
    assert torch.isfinite(merged.out).all()


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_merge_parts_of_very_different_weight_stays_finite(far):
    near, other = random_part(1), random_part(2)
    other.lse.add_(far)
    heavy = other if far > 0 else near
    for parts in ([near, other], [other, near]):
        merged = merge(parts)
        assert torch.equal(merged.out, heavy.out)
        assert torch.equal(merged.lse, heavy.lse)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), seed=st.integers(0, 5))
def test_merge_any_cut_of_the_keys_equals_one_softmax(sizes, seed):
    torch.manual_seed(seed)
    total = sum(sizes)
    query, keys, values = torch.randn(3, 4, 8), torch.randn(total, 4, 8), torch.randn(total, 4, 8)
    parts = [
        part_of(query, k, v) if len(k) else EMPTIES[size % len(EMPTIES)]
        for size, (k, v) in enumerate(zip(keys.split(sizes), values.split(sizes), strict=True))
    ]
    merged, whole = merge(parts), part_of(query.double(), keys.double(), values.double())
    assert error(merged.out, whole.out.double()) < ERROR_MAX
    assert error(merged.lse, whole.lse.double()) < ERROR_MAX
    assert merged.count.tolist() == [total] * 3


def lopsided():
    """The parts of 3072 keys and of 64 more, and the softmax over all of them."""
    torch.manual_seed(3)
    query, keys, values = torch.randn(3, 4, 8), torch.randn(3136, 4, 8), torch.randn(3136, 4, 8)
    values[3072:] += 4  # the small part pulls another way, so a wrong weight shows
    large, small = part_of(query, keys[:3072], values[:3072]), part_of(query, keys[3072:], values[3072:])
    return large, small, part_of(query, keys, values)


def test_merge_base_2_part_with_natural_part_equals_one_softmax():
    large, small, whole = lopsided()
    converted = Partial.from_base2(out=small.out, lse=small.lse / log(2), count=small.count)
    assert (merge([large, converted]).out - whole.out).abs().max() < 1e-3
    assert (merge([large, small]).out - whole.out).abs().max() < 1e-3


def test_merge_base_2_part_taken_for_natural_is_far_off():
    large, small, whole = lopsided()
    mistaken = Partial(out=small.out, lse=small.lse / log(2), count=small.count, base=LogBase.NATURAL)
    assert (merge([large, mistaken]).out - whole.out).abs().max() > 1e-2


def test_partial_base_undeclared_or_not_natural_is_refused():
    part = random_part()
    with pytest.raises(ProtocolError, match="not declared"):
        Partial(out=part.out, lse=part.lse, count=part.count)
    with pytest.raises(ProtocolError, match="from_base2"):
        Partial(out=part.out, lse=part.lse, count=part.count, base=LogBase.TWO)


def test_partial_shapes_that_do_not_fit_are_refused():
    part = random_part()
    for changed in ({"lse": part.lse.T}, {"count": part.count[1:]}, {"out": part.out[0]}):
        with pytest.raises(ProtocolError, match="do not fit"):
            Partial(**{"out": part.out, "lse": part.lse, "count": part.count, "base": LogBase.NATURAL, **changed})
    with pytest.raises(ProtocolError, match="int64"):
        Partial(out=part.out, lse=part.lse, count=part.count.int(), base=LogBase.NATURAL)


def test_merge_nothing_or_different_shapes_is_refused():
    with pytest.raises(ProtocolError, match="at least one"):
        merge([])
    with pytest.raises(ProtocolError, match="cannot merge"):
        merge([random_part(), random_part(num_tokens=2)])
