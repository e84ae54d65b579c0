"""Bytes that did not come back, and must never be taken for KV."""

import anyio
import pytest
import torch

from swapkv import (
    ChecksumMismatch,
    HostDevice,
    Pool,
    PoolBroken,
    ProtocolError,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
    open_pool,
)
from swapkv.streams.host import Operation, Work
from tests.kit.writing import Writer
from tests.test_pool import small_layout

pytestmark = pytest.mark.anyio

POISON = 0xDB
TOKENS = 44
"""Six chunks of eight tokens, the last of them half full."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FaultyTier(HostDevice):
    """Copies to the device fail at the chunk number `failing`; `short`: after half of its bytes."""

    def __init__(self, *, short: bool = False) -> None:
        super().__init__()
        self.failing: int | None = None
        self.short = short
        self._chunks = 0

    def execute(self, operation: Operation) -> None:
        if operation.work is Work.SCATTER and self.failing is not None:
            self._chunks += 1
            if self._chunks == self.failing:
                if self.short:
                    block = operation.blocks[0]
                    block.regions[0].pages[block.pages] = block.host[0]
                raise OSError("short read" if self.short else "EIO")
        super().execute(operation)


async def restore_that_fails_at_chunk_3(*, short: bool) -> None:
    device = FaultyTier(short=short)
    async with open_pool(
        small_layout(), num_pages=16, host_bytes=1 << 20, device=device, config=SwapConfig(segment_bytes=1)
    ) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=TOKENS)
        await writer.append({"a": TOKENS})
        await pool.preempt("a")
        poison(pool)
        device.failing = 3
        with pytest.raises(TransferError, match="failed"):
            await pool.resume("a")
        assert pool.state("a") is SequenceState.OFFLOADED
        assert SequenceState.GPU_READY.value not in pool.statistics().sequences
        with pytest.raises(ProtocolError, match="restore it before the forward"):
            pool.forward_nowait({"a": 0})
        assert pool.statistics().counters["failed_in_copies"] >= 1
        assert pool.statistics().into.bytes_copied < pool.statistics().out.bytes_copied
        device.failing = None
        poison(pool)
        await pool.resume("a")
        await writer.check("a")


def poison(pool: Pool) -> None:
    for planes in pool.memory.regions:
        for region in planes:
            region.pages.fill_(POISON)


@pytest.mark.parametrize("short", [False, True])
async def test_restore_with_a_failing_chunk_never_shows_what_was_in_the_pages(short: bool) -> None:
    """KF-17: chunk 3 of 6 fails with EIO or is cut short; a later restore is whole, and only copied bytes count."""
    await restore_that_fails_at_chunk_3(short=short)


async def test_restore_whose_failure_is_taken_for_done_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-17, without its guard."""
    monkeypatch.setattr("swapkv.executor._require_over", lambda event: None)
    monkeypatch.setattr("swapkv.streams.host_events.HostEvent._raise_failure", lambda self: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await restore_that_fails_at_chunk_3(short=False)


async def test_copy_whose_wait_ran_out_of_time_is_not_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-05: a device that calls a copy over when it is not breaks the pool instead."""
    async with open_pool(small_layout(), num_pages=16, host_bytes=1 << 20) as pool:
        writer = Writer(pool)
        pool.register("a", max_tokens=16)
        await writer.append({"a": 16})
        monkeypatch.setattr("swapkv.streams.host_events.HostCopyEvent.wait", lambda self, timeout_s=None: False)
        with pytest.raises(PoolBroken, match="reported as over that is not"):
            await pool.preempt("a")
        monkeypatch.undo()


async def restore_from_a_damaged_copy(verify: Verify) -> None:
    config = SwapConfig(segment_bytes=1, verify=verify)
    async with open_pool(small_layout(), num_pages=32, host_bytes=1 << 20, config=config) as pool:
        writer = Writer(pool)
        for name in ("other", "a"):
            pool.register(name, max_tokens=TOKENS)
        await writer.append({"other": 21})
        await writer.append({"a": TOKENS})
        await pool.preempt("a")
        chunk = pool._core.sequences["a"].chunks[0][3]  # type: ignore[index]
        assert chunk is not None
        assert chunk.copy.offset is not None
        pool._transfers._arena._memory[chunk.copy.offset + 5] ^= 1
        before = snapshot(pool)
        with pytest.raises(ChecksumMismatch, match="recompute"):
            await pool.resume("a")
        assert snapshot(pool) == before
        await writer.check("other")
        pool.register("next", max_tokens=8)
        await writer.append({"next": 8, "other": 3})
        await pool.preempt("other")
        await pool.resume("other")
        for name in ("next", "other"):
            await writer.check(name)


def snapshot(pool: Pool) -> tuple[object, ...]:
    """Everything that a failed restore must leave as it was: who has what, and every byte of those on the device."""
    statistics = pool.statistics()
    held = pool._core.ledger.owners() >= 0
    memory = [region.pages[torch.from_numpy(held)].clone() for planes in pool.memory.regions for region in planes]
    assert all(not page_counts.fenced for page_counts in statistics.pages)
    return (
        statistics.pages,
        statistics.host_bytes_used,
        dict(statistics.sequences),
        [bytes(pages.numpy().tobytes()) for pages in memory],
    )


async def test_restore_from_a_damaged_copy_leaves_everybody_else_as_before() -> None:
    """KF-21: one byte of chunk 4 of 6 is flipped; the pool is used on."""
    await restore_from_a_damaged_copy(Verify.CRC32)


async def test_restore_from_a_damaged_copy_without_checksums_is_not_found() -> None:
    """KF-21, without its guard."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await restore_from_a_damaged_copy(Verify.NONE)


async def test_restore_from_a_damaged_copy_is_tried_once_a_call_and_others_go_on() -> None:
    """KF-26, for the host tier: no loop around a copy that never becomes good."""
    tried: list[str] = []

    class Counting(HostDevice):
        def execute(self, operation: Operation) -> None:
            if operation.work is Work.SCATTER:
                tried.append(operation.stream)
            super().execute(operation)

    config = SwapConfig(verify=Verify.CRC32)
    async with open_pool(small_layout(), num_pages=16, host_bytes=1 << 20, device=Counting(), config=config) as pool:
        writer = Writer(pool)
        for name in ("a", "b"):
            pool.register(name, max_tokens=16)
            await writer.append({name: 9})
            await pool.preempt(name)
        pool._transfers._arena._memory[5] ^= 1
        for attempt in range(1, 4):
            with pytest.raises(ChecksumMismatch):
                await pool.resume("a")
            assert len(tried) == attempt * pool.layout.num_layers
        with anyio.fail_after(60):
            await pool.resume("b")
        await writer.check("b")
        pool.evict("a")
        pool.reset("a")
        writer.written["a"].clear()
        await writer.append({"a": 9})
        await writer.check("a")
