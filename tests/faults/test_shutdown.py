"""It is time to go: the end comes within its time, and nothing stays behind."""

import threading
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import pytest

from swapkv import (
    DrainTimeout,
    Pool,
    PoolClosed,
    open_pool,
)
from swapkv.stepped import open_stepped_pool
from swapkv.streams.host import HostDevice
from tests.faults.pools import LONG_S, SMALL, Faulty, one_on_the_device, raises
from tests.test_pool import small_layout

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def threads_left(before: set[threading.Thread]) -> list[str]:
    return [t.name for t in threading.enumerate() if t not in before and t.name.startswith("swapkv-")]


async def stay(pool: Pool, device: Faulty) -> None:
    await one_on_the_device(pool)


async def leave(pool: Pool, device: Faulty) -> None:
    await one_on_the_device(pool)
    await pool.preempt("a")


async def in_a_forward(pool: Pool, device: Faulty) -> None:
    await one_on_the_device(pool)
    async with pool.forward({"a": 1}):
        await pool.close()


async def in_a_restore(pool: Pool, device: Faulty) -> None:
    await leave(pool, device)
    device.go.clear()
    threading.Thread(target=lambda: device.begun.wait(LONG_S) and device.go.set(), daemon=True).start()
    device.begun.clear()
    async with pool.restoring("a"):
        await pool.close()


@pytest.mark.parametrize("reach", [stay, leave, in_a_forward, in_a_restore])
async def test_close_in_any_state_ends_and_leaves_no_thread(reach: Callable[[Pool, Faulty], object]) -> None:
    """KF-63: and twice is as good as once."""
    before, device = set(threading.enumerate()), Faulty()
    device.go.set()
    with anyio.fail_after(LONG_S):
        async with open_pool(small_layout(), **SMALL, device=device) as pool:
            try:
                await reach(pool, device)  # type: ignore[misc]
            except PoolClosed:
                assert reach in (in_a_forward, in_a_restore)
            await pool.close()
            await pool.close()
    assert threads_left(before) == []


async def test_close_asked_for_by_two_tasks_is_over_for_both_when_it_is_over() -> None:
    """KF-63: the second does not go on while the first one's threads still run."""
    before, device = set(threading.enumerate()), Faulty()
    left: list[list[str]] = []
    async with open_pool(small_layout(), **SMALL, device=device) as pool:
        await one_on_the_device(pool)

        async def close() -> None:
            await pool.close()
            left.append(threads_left(before))

        with anyio.fail_after(LONG_S):
            async with anyio.create_task_group() as group:
                group.start_soon(raises, PoolClosed, partial(pool.preempt, "a"))
                await anyio.to_thread.run_sync(device.begun.wait)
                group.start_soon(close)
                group.start_soon(close)
                await anyio.wait_all_tasks_blocked()
                assert left == []
                device.go.set()
    assert left == [[], []]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_pool_opened_twenty_times_in_a_process_is_as_new() -> None:
    """KF-63."""
    before = set(threading.enumerate())
    for _ in range(20):
        async with open_pool(small_layout(), **SMALL) as pool:
            writer = await one_on_the_device(pool)
            await pool.preempt("a")
            await pool.resume("a")
            await writer.check("a")
        assert threads_left(before) == []


class HangingClose(HostDevice):
    """Its own close does not come back before `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def close(self, timeout_s: float) -> list[str]:
        self.release.wait(LONG_S)
        return super().close(timeout_s)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapkv.closing.GRACE_S", 0.0)


@pytest.mark.usefixtures("no_grace")
async def test_close_of_a_device_that_hangs_names_it_and_ends() -> None:
    """KF-63: what does not come back is left behind and reported."""
    device = HangingClose()
    with anyio.fail_after(LONG_S), pytest.raises(DrainTimeout, match="close of device 'host'"):  # noqa: PT012
        async with open_pool(small_layout(), **SMALL, device=device) as pool:
            await one_on_the_device(pool)
            await pool.close(timeout_s=0.01)
    device.release.set()


@pytest.mark.usefixtures("no_grace")
def test_close_of_a_stepped_pool_whose_device_hangs_names_it_and_ends() -> None:
    """KF-63."""
    device = HangingClose()
    with (
        pytest.raises(DrainTimeout, match="close of device 'host'"),
        open_stepped_pool(small_layout(), **SMALL, device=device) as pool,
    ):
        pool.close(timeout_s=0.01)
    device.release.set()


async def test_close_of_a_device_that_raises_leaves_no_thread_of_the_pool() -> None:
    """KF-63: the cause reaches the caller."""
    before = set(threading.enumerate())

    class Raising(HostDevice):
        def close(self, timeout_s: float) -> list[str]:
            super().close(timeout_s)
            raise OSError("cannot unpin")

    with pytest.raises(OSError, match="cannot unpin"):
        async with open_pool(small_layout(), **SMALL, device=Raising()):
            pass
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith("swapkv-"):
            thread.join(LONG_S)
    assert threads_left(before) == []


async def test_close_with_every_worker_thread_of_the_program_blocked_ends() -> None:
    """KF-64: it takes no thread of a limiter that others can use up."""
    release = threading.Event()
    limiter = anyio.to_thread.current_default_thread_limiter()
    tokens, limiter.total_tokens = limiter.total_tokens, 1
    try:
        with anyio.fail_after(LONG_S):
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, release.wait)
                await anyio.wait_all_tasks_blocked()
                async with open_pool(small_layout(), **SMALL) as pool:
                    await one_on_the_device(pool)
                release.set()
    finally:
        limiter.total_tokens = tokens


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
def test_copy_that_blocks_for_ever_does_not_hold_up_the_end_of_the_loop(backend: str, anyio_backend: str) -> None:
    """KF-64: the close ends within its time, names the stream, and so does the loop."""
    device = Faulty()

    async def main() -> None:
        async with open_pool(small_layout(), **SMALL, device=device) as pool:
            await one_on_the_device(pool)
            async with anyio.create_task_group() as group:
                group.start_soon(raises, PoolClosed, partial(pool.preempt, "a"))
                await anyio.to_thread.run_sync(device.begun.wait)
                await pool.close(timeout_s=0.01)

    with pytest.raises(Exception) as caught:  # noqa: PT011
        anyio.run(main, backend=backend)
    group = caught.value
    error = group.exceptions[0] if isinstance(group, BaseExceptionGroup) else group
    assert isinstance(error, DrainTimeout)
    assert "copy-out" in str(error)
    device.go.set()
