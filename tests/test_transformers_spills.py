"""transformers' `generate` over KV that is partly in host memory: the same bits, on fewer pages."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial, partialmethod

import pytest
import torch

from swapkv.errors import HostTierFull, ProtocolError, TransferError
from swapkv.fsm.ledger import PageState
from swapkv.fsm.queries import SequenceState
from swapkv.ids import GroupId
from swapkv.integrations.transformers import SwapKVCache
from swapkv.stepped import SteppedPool
from swapkv.streams.host import HostDevice, Operation, Work
from swapkv.transfers import Transfers
from tests.kit.small_models import (
    CONFIGS,
    ROWS,
    free_pages,
    generate,
    kv,
    left_padded,
    longer,
    pool_of,
    swapped_model,
)

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, and the number of threads is part of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poison_free_pages(pool: SteppedPool) -> None:
    """NaN wherever no sequence has a page: nothing may read there."""
    ledger = pool._core.ledger
    for layer, planes in enumerate(pool.layout.planes):
        group = GroupId(pool.layout.group_of_layer[layer])
        pages = range(pool.memory.num_pages(group))
        free = [page for page in pages if ledger.state_of(ledger.base(group) + page) is PageState.FREE]
        for plane in planes:
            pool.memory.plane(layer, plane.name)[free] = float("nan")


@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_over_spilled_rows_has_equal_bits(kind: str) -> None:
    model = swapped_model(kind)
    ids, mask = left_padded(ROWS)
    results = []
    for spills in (False, True):
        with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=64) as cache:
            out = generate(model, ids, 9, cache, attention_mask=mask)
            logits = list(out.logits)
            for more in (9, 7):
                if spills:
                    before = sum(free_pages(pool))
                    cache.spill()
                    full = any(group.window is None for group in pool.layout.groups)
                    assert (sum(free_pages(pool)) > before) == full
                    poison_free_pages(pool)
                out = generate(
                    model,
                    out.sequences,
                    more,
                    cache,
                    attention_mask=longer(mask, out.sequences.shape[1] - ids.shape[1]),
                )
                logits += out.logits
            cache.restore()
            results.append((torch.stack(logits), [kv(pool, name) for name in cache.names]))
    (logits_, bytes_), (spilled_logits, spilled_bytes) = results
    assert torch.equal(logits_, spilled_logits)
    for row, spilled_row in zip(bytes_, spilled_bytes, strict=True):
        assert all(map(torch.equal, row, spilled_row))


def test_wrong_bytes_in_host_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: host memory is what attention reads."""
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    texts = []
    for wrong in (False, True):
        with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
            first = generate(model, ids, 4, cache)
            cache.spill()
            if wrong:
                monkeypatch.setattr(Transfers, "host_pages", partialmethod(_zeros, Transfers.host_pages))
            texts.append(generate(model, first.sequences, 8, cache).sequences)
    assert not torch.equal(*texts)


def _zeros(transfers: Transfers, read: Callable[..., list[torch.Tensor]], *at: object) -> list[torch.Tensor]:
    return [plane.clone().zero_() for plane in read(transfers, *at)]


def _spill(cache: SwapKVCache, appends: Mapping[str, int]) -> None:
    cache.spill()


def test_generate_goes_on_with_fewer_pages_than_its_kv_needs() -> None:
    """Two rows that together need more than the 28 pages there are: one spills when the other lacks pages."""
    model = swapped_model("llama")
    ids = torch.tensor(ROWS[:1])
    expected = None
    for pages in (64, 28):
        with pool_of(model, num_pages=pages) as pool:
            other = SwapKVCache(pool, ["other"], max_tokens=64)
            room = partial(_spill, other)
            with other, SwapKVCache(pool, ["a"], max_tokens=100, make_room=room) as cache:
                generate(model, ids, 20, other)
                text = generate(model, ids, 40, cache).sequences
                assert (pool.state("other") is SequenceState.SPILLED) == (pages == 28)
                expected = text if expected is None else expected
                assert torch.equal(text, expected)


@torch.no_grad()
def test_beams_over_spilled_rows_are_those_of_resident_ones() -> None:
    model = swapped_model("qwen3")
    ids = torch.tensor(ROWS[:1])
    texts = []
    for spills in (False, True):
        with pool_of(model) as pool, SwapKVCache(pool, ["a", "b", "c"], max_tokens=90) as cache:
            first = model.generate(ids, past_key_values=cache, max_new_tokens=20, num_beams=3, do_sample=False)
            if spills:
                cache.spill(tokens=16)
            cache.crop(-1)
            mask = torch.ones(3, cache.columns + 1, dtype=torch.long)
            step = torch.full((3, 1), 5)
            texts.append(model(step, attention_mask=mask, past_key_values=cache).logits)
            assert first.shape[1] > 20
    assert torch.equal(*texts)


@torch.no_grad()
def test_failed_copy_of_a_step_raises_and_the_step_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
        twin = model(torch.tensor([[5]]), past_key_values=cache).logits
        cache.crop(-1)
        cache.spill()
        execute = HostDevice.execute

        def failing(self: HostDevice, operation: Operation) -> None:
            if operation.work is Work.SCATTER:
                raise OSError("link down")
            execute(self, operation)

        with monkeypatch.context() as faulty:
            faulty.setattr(HostDevice, "execute", failing)
            with pytest.raises(TransferError, match="link down"):
                model(torch.tensor([[5]]), past_key_values=cache)
        assert pool.tokens("a") == len(ROWS[0])
        assert torch.equal(model(torch.tensor([[5]]), past_key_values=cache).logits, twin)


@torch.no_grad()
def test_cut_into_spilled_tokens_is_refused_with_the_remedy() -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
        cache.spill()
        with pytest.raises(ProtocolError, match="restore it"):
            cache.crop(-20)
        cache.restore()
        cache.crop(-20)
        assert pool.tokens("a") == len(ROWS[0]) - 20


@torch.no_grad()
def test_spill_without_room_in_the_host_tier_changes_nothing() -> None:
    model = swapped_model("llama")
    with pool_of(model, host_bytes=0) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
        with pytest.raises(HostTierFull):
            cache.spill()
        assert pool.state("a") is SequenceState.GPU_RESIDENT
        model(torch.tensor([[5]]), past_key_values=cache)


@torch.no_grad()
def test_rows_that_the_pool_spilled_are_streamed_too() -> None:
    model = swapped_model("llama")
    with pool_of(model) as pool, SwapKVCache(pool, ["a"], max_tokens=64) as cache:
        model(torch.tensor(ROWS[:1]), past_key_values=cache)
        twin = model(torch.tensor([[5]]), past_key_values=cache).logits
        cache.crop(-1)
        pool.spill("a", tokens=16)
        pool.drain(10)
        poison_free_pages(pool)
        assert torch.equal(model(torch.tensor([[5]]), past_key_values=cache).logits, twin)
