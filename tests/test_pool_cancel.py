"""Every public async call, cancelled wherever it can be: afterwards things are as before, or it has succeeded."""

import asyncio

import pytest

from swapkv import PreemptOutcome, SequenceState
from tests.prove.cancelling import SWEEPS, When, cancel_everywhere, written_pool

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("call", SWEEPS)
async def test_call_cancelled_anywhere_is_done_or_undone(call: str, when: When) -> None:
    assert await cancel_everywhere(SWEEPS[call], when) >= 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_preempt_with_a_plain_task_cancel_in_the_moment_of_success_succeeds_first(anyio_backend: str) -> None:
    """A plain `Task.cancel()` strikes once only: the call that has just succeeded returns, the next await raises."""
    async with written_pool() as (pool, _writer, device):
        device.open.clear()
        reached: list[str] = []

        async def victim() -> None:
            assert await pool.preempt("a") is PreemptOutcome.OFFLOADED
            reached.append("returned")
            await asyncio.sleep(10)
            reached.append("slept")

        task = asyncio.get_running_loop().create_task(victim())
        await asyncio.sleep(0)
        end = pool._driver.waiters.end

        def end_and_cancel(kind: str, key: str, value: object = None, error: BaseException | None = None) -> None:
            end(kind, key, value, error)
            if kind == "park":
                task.cancel()

        pool._driver.waiters.end = end_and_cancel  # type: ignore[method-assign, assignment]
        device.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reached == ["returned"]
        assert pool.state("a") is SequenceState.OFFLOADED
