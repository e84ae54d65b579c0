"""The first copy fails, then the second, then the third, …: whichever it is, nothing is lost and nothing leaks."""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from swapkv import Pool, SequenceState, SwapConfig, TransferError, Verify, open_pool
from swapkv.fsm.commands import Copy
from swapkv.ids import Lane
from swapkv.streams.host import HostDevice, Operation, Work
from tests.kit.late_traffic import nothing_is_left
from tests.kit.writing import Writer
from tests.test_pool import small_layout

WAYS = {Lane.OUT: Work.GATHER, Lane.IN: Work.SCATTER}


class FailingDevice(HostDevice):
    """Fails the `nth` copy of one lane, counted from 1. `failed`: whether that has happened."""

    def __init__(self, lane: Lane, nth: int) -> None:
        super().__init__()
        self._work, self._left = WAYS[lane], nth
        self.failed = False

    def disarm(self) -> None:
        """Fail nothing any more."""
        self._left = 0

    def execute(self, operation: Operation) -> None:
        if operation.work is self._work:
            self._left -= 1
            if self._left == 0:
                self.failed = True
                raise OSError("link down")
        super().execute(operation)


class RefusingDevice(FailingDevice):
    """Takes every copy, but the pool is told that it did not take the `nth`."""

    def execute(self, operation: Operation) -> None:
        HostDevice.execute(self, operation)

    def install(self, pool: Pool) -> None:
        submit = pool._transfers.submit

        def submit_or_refuse(copy: Copy, after: object) -> object:
            if WAYS[copy.lane] is self._work:
                self._left -= 1
                if self._left == 0:
                    self.failed = True
                    raise OSError("the queue is gone")
            return submit(copy, after)  # type: ignore[arg-type]

        pool._transfers.submit = submit_or_refuse  # type: ignore[method-assign, assignment]


@asynccontextmanager
async def pool_on(device: FailingDevice, verify: Verify) -> AsyncIterator[tuple[Pool, Writer]]:
    config = SwapConfig(segment_bytes=1, verify=verify)
    async with open_pool(small_layout(), num_pages=16, host_bytes=1 << 16, device=device, config=config) as pool:
        if isinstance(device, RefusingDevice):
            device.install(pool)
        yield pool, Writer(pool)


async def scenario(pool: Pool, writer: Writer) -> None:
    """Three sequences come and go; a call whose copy fails has changed nothing, and succeeds when repeated."""
    for name, tokens in (("a", 13), ("b", 9), ("c", 5)):
        pool.register(name, max_tokens=40)
        await writer.append({name: tokens})
    await leave(pool, writer, "a")
    writer.fork("b", "d", max_tokens=40)
    await leave(pool, writer, "b")
    await come(pool, writer, "a")
    await writer.append({"a": 6, "d": 2})
    await leave(pool, writer, "d")
    await leave(pool, writer, "a")
    await come(pool, writer, "b")
    await come(pool, writer, "d")
    await pool.finish("b")
    await leave(pool, writer, "c")
    await leave(pool, writer, "d")
    await come(pool, writer, "c")
    await come(pool, writer, "a")
    await come(pool, writer, "d")


async def leave(pool: Pool, writer: Writer, name: str) -> None:
    await once_more(pool, writer, name, pool.preempt)


async def come(pool: Pool, writer: Writer, name: str) -> None:
    await once_more(pool, writer, name, pool.resume)
    await writer.check(name)


async def once_more(pool: Pool, writer: Writer, name: str, call: Callable[[str], Awaitable[object]]) -> None:
    before = pool.state(name), pool.chunk_states(name), pool.tokens(name)
    try:
        await call(name)
    except TransferError:
        assert (pool.state(name), pool.chunk_states(name), pool.tokens(name)) == before
        pool._core.check()
        for other in pool._core.sequences:
            if pool.state(other) is not SequenceState.OFFLOADED:
                await writer.check(other)
        await call(name)


async def run(device: FailingDevice, verify: Verify) -> None:
    """The scenario, then everybody's bytes, then the end of everybody."""
    async with pool_on(device, verify) as (pool, writer):
        await scenario(pool, writer)
        device.disarm()
        for name in list(pool._core.sequences):
            await pool.preempt(name)
            await pool.resume(name)
            await writer.check(name)
            await pool.preempt(name)
        for name in list(pool._core.sequences):
            await pool.finish(name)
        await pool._driver.reached(pool.compute.record())
        nothing_is_left(pool)
        assert not pool._driver.waiters._by_place
        assert not pool._driver.restores


@pytest.mark.parametrize(("kind", "verify"), [(FailingDevice, Verify.CRC32), (RefusingDevice, Verify.NONE)])
@pytest.mark.parametrize("lane", list(WAYS))
def test_pool_with_its_nth_copy_failing_loses_nothing_whichever_it_is(
    lane: Lane, kind: type[FailingDevice], verify: Verify
) -> None:
    threads = threading.active_count()
    for nth in range(1, 200):
        device = kind(lane, nth)
        anyio.run(partial(run, device, verify))
        if not device.failed:
            break
    assert nth > 10, "too few copies to show anything"
    assert not device.failed
    assert threading.active_count() <= threads + 1  # anyio keeps a worker for the next close
