"""Page tables and pages that attention and writing take or refuse: absent, foreign, of another shape."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv.attention import write_pages
from swapkv.errors import ProtocolError
from swapkv.layout import PageOrder
from tests.kit.paged import Paged, random_query


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_attend_pages_behind_the_window_may_be_absent():
    kv = Paged(600).write()
    query = random_query(2)
    expected = kv.attend(query, 598, window=50)
    first_seen = (598 - 49) // 16
    kv.keys[kv.table[:first_seen]] = torch.nan
    kv.table[:first_seen] = -1
    assert torch.equal(kv.attend(query, 598, window=50), expected)
    with pytest.raises(ProtocolError, match="logical page 33 "):
        kv.attend(query, 598, window=60)


def test_attend_absent_or_foreign_page_is_refused_by_number():
    kv = Paged(100).write()
    for bad in (-1, 10):
        kv.table[3] = bad
        with pytest.raises(ProtocolError, match=f"logical page 3 .* maps to {bad}"):
            kv.attend(random_query(1), 99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "start=-1"),
        ({"window": 0}, "window=0"),
        ({"softcap": 0.0}, r"softcap=0\.0"),
        ({"split_tokens": 24}, "split_tokens=24 .*page_size=16; try 32"),
        ({"split_tokens": 0}, "split_tokens=0 .*try 16"),
        ({"query": random_query(1, 3)}, "does not fit keys"),
        ({"query": random_query(1, 4, 32)}, "does not fit keys"),
        ({"start": 200}, "page_table has 7 pages, tokens up to 208 of 16 a page need 13"),
    ],
)
def test_attend_numbers_that_do_not_fit_are_refused(options, message):
    kv = Paged(100).write()
    with pytest.raises(ProtocolError, match=message):
        kv.attend(**{"query": random_query(1), "start": 99, **options})


def test_attend_table_of_another_dtype_is_refused():
    kv = Paged(100).write()
    kv.table = kv.table.int()
    with pytest.raises(ProtocolError, match="int64"):
        kv.attend(random_query(1), 99)


def test_attend_values_of_another_shape_are_refused():
    kv = Paged(100).write()
    kv.values = kv.values[1:]
    with pytest.raises(ProtocolError, match="agree in all but the last"):
        kv.attend(random_query(1), 99)


def test_attend_no_query_gives_no_row():
    kv = Paged(100, value_dim=32).write()
    assert kv.attend(random_query(0), 99).shape == (0, 4, 32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    start=st.integers(0, 70),
    num_tokens=st.integers(0, 40),
    page_size=st.sampled_from([1, 4, 16]),
    order=st.sampled_from(PageOrder),
)
def test_write_pages_any_range_touches_these_tokens_only(start, num_tokens, page_size, order):
    kv = Paged(110, head_dim=4, page_size=page_size, order=order)
    new = torch.randn(num_tokens, 2, 4)
    write_pages(kv.keys, new, kv.table, start, order)
    by_token = kv.keys if order is PageOrder.NHD else kv.keys.transpose(1, 2)
    dense = by_token[kv.table].flatten(0, 1)
    assert torch.equal(dense[start : start + num_tokens], new)
    assert int((~kv.keys.isnan()).sum()) == new.numel()


def test_write_pages_absent_page_writes_nothing():
    kv = Paged(100)
    kv.table[2] = -1
    with pytest.raises(ProtocolError, match="logical page 2 "):
        kv.write()
    assert kv.keys.isnan().all()


def test_write_pages_shape_of_another_order_is_refused():
    kv = Paged(100)
    with pytest.raises(ProtocolError, match="does not fit a plane"):
        write_pages(kv.keys, kv.dense_keys, kv.table, 0, PageOrder.HND)
    with pytest.raises(ProtocolError, match="start=-1"):
        write_pages(kv.keys, kv.dense_keys, kv.table, -1, PageOrder.NHD)
