"""What the reference runner is given: plans and requests, good and senseless, and the errors of others."""

from collections.abc import Sequence

import anyio
import pytest

from swapkv import (
    PoolBroken,
    PoolClosed,
    ProtocolError,
    open_pool,
)
from swapkv.schedulers import Handover, Plan, Request, RequestView, Runner
from swapkv.schedulers.tasks import plain_task_group
from tests.kit.fake_model import FakeModel, fake_layout
from tests.kit.fake_runs import assert_right, pool_of, requests_of, round_robin

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Scripted:
    """A scheduler that says what it is told to."""

    wants_scores = False

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)

    def plan(self, requests: Sequence[RequestView]) -> Plan:
        return self.plans.pop(0) if self.plans else Plan()


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        (
            [Plan(come=("nobody",))],
            "moves 'nobody', which is not a request of this run: plan only what is waiting or off",
        ),
        ([Plan(come=("r0",)), Plan(come=("r0",))], "moves 'r0', which is running: plan only what is waiting or off"),
        ([Plan(come=("r0",)), Plan(leave=("r1",))], "moves 'r1', which is waiting: plan only what is running"),
        ([], "the plan lets nobody come: let one"),
        ([Plan(come=("r0",)), Plan(leave=("r0",))], "the plan lets nobody come: let one"),
    ],
)
async def test_runner_plan_that_makes_no_sense_is_refused(plans: list[Plan], message: str) -> None:
    async with pool_of() as pool:
        with pytest.raises(ProtocolError, match=message):
            await Runner(pool, Scripted(*plans), FakeModel(pool)).run(requests_of(9, 9))


@pytest.mark.parametrize("handover", list(Handover))
async def test_runner_request_sent_away_before_its_first_token_begins_later(handover: Handover) -> None:
    plans = [Plan(come=("r0", "r1")), Plan(leave=("r0",)), Plan(), Plan(), Plan(come=("r0",))]
    async with pool_of(pages=3) as pool:
        runner = Runner(pool, Scripted(*plans), FakeModel(pool), handover=handover)
        await runner.run(requests := requests_of(2, 7, prompts=[[1, 2, 3, 4, 5, 6, 7, 8, 9], [3]]))
        assert_right(requests)


async def test_runner_passes_on_what_model_and_on_finish_raise() -> None:
    async def on_finish(request: Request) -> None:
        raise ZeroDivisionError

    def before_step() -> None:
        raise LookupError

    async with pool_of() as pool:
        with pytest.raises(ZeroDivisionError):
            await Runner(pool, round_robin(), FakeModel(pool), on_finish=on_finish).run(requests_of(3, 9, 9))
        with pytest.raises(LookupError):
            await Runner(pool, round_robin(), FakeModel(pool, before_step)).run(requests_of(3, 9, 9))


async def test_runner_on_finish_sees_the_kv_on_the_device() -> None:
    async with pool_of() as pool:
        seen: dict[str, int] = {}

        async def on_finish(request: Request) -> None:
            async with pool.forward({request.name: 0}) as forward:
                seen[request.name] = forward.tokens(request.name)

        await Runner(pool, round_robin(), FakeModel(pool), on_finish=on_finish).run(requests := requests_of(3, 9, 5))
        assert seen == {request.name: request.total_tokens for request in requests}


async def test_runner_closed_pool_ends_the_run() -> None:
    async with open_pool(fake_layout(), num_pages=64, host_bytes=1 << 16) as pool:
        model = FakeModel(pool, lambda: pool._driver.stop(PoolClosed("closed")) if len(model.batches) == 7 else None)
        with pytest.raises(PoolClosed):
            await Runner(pool, round_robin(), model).run(requests_of(*[16] * 5))


async def test_runner_broken_pool_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise AssertionError("an invariant does not hold")

    async with open_pool(fake_layout(), num_pages=64, host_bytes=1 << 16) as pool:
        monkeypatch.setattr("swapkv.fsm.offload._now_clean", break_down)
        with pytest.raises(PoolBroken, match="an invariant does not hold"):
            await Runner(pool, round_robin(), FakeModel(pool)).run(requests_of(*[16] * 5))


async def test_plain_task_group_raises_the_first_error_and_keeps_the_others_as_its_cause() -> None:
    async def fail(error: Exception, wait: anyio.Event) -> None:
        try:
            await wait.wait()
        finally:
            raise error

    first, second, event = LookupError("first"), OSError("second"), anyio.Event()

    async def fail_both() -> None:
        async with plain_task_group() as group:
            group.start_soon(fail, first, event)
            group.start_soon(fail, second, event)
            event.set()

    with pytest.raises((LookupError, OSError)) as caught:
        await fail_both()
    assert isinstance(caught.value.__cause__, BaseExceptionGroup)
    assert set(caught.value.__cause__.exceptions) == {first, second}
    with pytest.raises(ZeroDivisionError):
        async with plain_task_group():
            raise ZeroDivisionError


@pytest.mark.parametrize(("options", "message"), [({"prompt": []}, "empty prompt"), ({"max_new_tokens": 0}, "=0 must")])
async def test_request_that_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Request(**{"name": "r", "prompt": [1], "max_new_tokens": 1} | options)  # type: ignore[arg-type]
