"""Attending to some pages only: bounds that hold, the page that matters found, all pages the same as exact."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapkv import ProtocolError
from swapkv.attention import KeyBounds, StepRow, attend, only_pages, relative_error, select_pages
from swapkv.attention.streaming import Step
from swapkv.layout import PageOrder
from tests.test_attention_streaming import Scattered, Shape, bench_of

SHAPE = Shape(page_size=16, num_kv_heads=2, group=2, head_dim=64)


def scattered(tokens: int = 1000, share: float = 0.6, seed: int = 0) -> Scattered:
    rng = Random(seed)
    torch.manual_seed(seed)
    return Scattered(SHAPE, "s", tokens, lambda page: rng.random() < share, rng)


def bounds_of(kv: Scattered) -> KeyBounds:
    return KeyBounds.of(kv.whole[0][kv.table], SHAPE.order, kv.tokens)


@given(seed=st.integers(0, 1000), order=st.sampled_from(PageOrder), tokens=st.integers(1, 40))
def test_bound_of_a_page_is_above_every_score_in_it(seed: int, order: PageOrder, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pages = -(-tokens // 8)
    keys = torch.randn(pages, 8, 2, 16, generator=generator)
    keys.view(-1, 2, 16)[tokens:] = float("nan")
    query = torch.randn(6, 16, generator=generator)
    given_keys = keys if order is PageOrder.NHD else keys.transpose(1, 2)
    bounds = KeyBounds.of(given_keys, order, tokens).scores(query)
    for head in range(6):
        scores = keys.view(-1, 2, 16)[:tokens, head // 3] @ query[head]
        for page in range(pages):
            assert bool((scores[page * 8 : (page + 1) * 8] <= bounds[head, page] + 1e-4).all())


def test_bounds_that_grow_page_by_page_are_those_of_the_whole() -> None:
    keys = torch.randn(5, 8, 2, 16)
    whole = KeyBounds.of(keys, PageOrder.NHD, 37)
    grown = KeyBounds.of(keys[:2], PageOrder.NHD, 12)
    grown.drop_last()
    grown.extend(keys[1:4], PageOrder.NHD, 24)
    grown.extend(keys[4:], PageOrder.NHD, 5)
    assert torch.equal(grown.lowest, whole.lowest)
    assert torch.equal(grown.highest, whole.highest)


def test_page_that_a_head_looks_for_is_selected() -> None:
    kv = scattered()
    query = torch.randn(1, 4, 64)
    for head in range(4):
        kv.whole[0][kv.table[7 + 9 * head], 3, head // 2] = 3 * query[0, head]
    selected = select_pages(query, bounds_of(kv), 8).tolist()
    assert {0, 7, 16, 25, 34, 62} <= set(selected)
    assert len(selected) == 8
    assert selected == sorted(selected)


def test_all_pages_selected_are_exact_to_the_bit() -> None:
    kv = scattered()
    query = torch.randn(1, 4, 64)
    selected = select_pages(query, bounds_of(kv), 63)
    assert torch.equal(selected, torch.arange(63))
    out = attend(query, *kv.whole, kv.table[selected], 999, order=SHAPE.order)
    assert torch.equal(out, kv.expected(query))


@pytest.mark.parametrize("k", [4, 20, 50])
def test_selected_pages_stream_with_the_bits_that_they_have_on_the_device(k: int) -> None:
    kv = scattered()
    query = torch.randn(1, 4, 64)
    selected = select_pages(query, bounds_of(kv), k)
    start = (k - 1) * SHAPE.page_size + (kv.tokens - 1) % SHAPE.page_size
    expected = attend(query, *kv.whole, kv.table[selected], start, order=SHAPE.order)
    with bench_of(SHAPE, kv) as bench:
        row = StepRow(start=start, num_tokens=1, kv=lambda layer: only_pages(kv.kv(layer), selected))
        step = Step(bench.streamer, [row], 1, lambda layer: SHAPE.rules)
        out = bench.run(step, [[query]])[0][0]
        moved = bench.streamer.counts.bytes_streamed
    assert torch.equal(out, expected)
    away = int((kv.partly[selected] < 0).sum())
    assert moved == away * 2 * kv.whole[0][0].numel() * 4, "only what was selected crosses the link"


def test_error_falls_as_more_pages_are_seen() -> None:
    kv = scattered(tokens=2000)
    kv.whole[0].mul_(2)
    errors = []
    for k in (4, 16, 64, 125):
        some = []
        for seed in range(8):
            query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(seed))
            selected = select_pages(query, bounds_of(kv), k)
            start = (k - 1) * 16 + 1999 % 16
            out = attend(query, *kv.whole, kv.table[selected], start, order=SHAPE.order)
            some.append(relative_error(out, kv.expected(query)))
        errors.append(sum(some) / len(some))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0.0


def test_selections_that_do_not_fit_are_refused() -> None:
    kv = scattered()
    bounds = bounds_of(kv)
    with pytest.raises(ProtocolError, match="k=1 pages must hold the first 1 and the newest 1"):
        select_pages(torch.randn(1, 4, 64), bounds, 1)
    with pytest.raises(ProtocolError, match="selected for one token"):
        select_pages(torch.randn(2, 4, 64), bounds, 4)
    with pytest.raises(ProtocolError, match="newest page 62 must be selected"):
        only_pages(kv.kv(0), torch.tensor([0, 1]))
    with pytest.raises(ProtocolError, match="do not end in the last of 5 pages"):
        KeyBounds.of(torch.randn(5, 8, 2, 16), PageOrder.NHD, 10)
