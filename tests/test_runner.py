"""The reference loop: every request ends with the tokens that it would have alone, whatever happens to its KV."""

import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

from swapkv import (
    HostDevice,
    HostFull,
    HostTierFull,
    NeverFits,
    PagesExhausted,
    Pool,
    PoolBroken,
    PoolClosed,
    ProtocolError,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
    open_pool,
)
from swapkv.schedulers import Handover, Phase, Plan, Request, RequestView, RoundRobin, Runner, VictimOrder
from swapkv.schedulers.tasks import plain_task_group
from swapkv.streams.host import Operation, Work
from tests.kit.fake_model import FakeModel, fake_generate, fake_layout
from tests.kit.sweep import Outcome, cancel_at, sweep

pytestmark = pytest.mark.anyio

PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17])


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class FaultyDevice(HostDevice):
    """A host device whose copies do what `fault` says before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Callable[[Operation], None] = lambda operation: None

    def execute(self, operation: Operation) -> None:
        if operation.work in (Work.GATHER, Work.SCATTER):
            self.fault(operation)
        super().execute(operation)


def held_by(let_go: threading.Event) -> None:
    let_go.wait(30)


def requests_of(*lengths: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    """One request for each number of new tokens."""
    return [
        Request(name=f"r{n}", prompt=prompts[n % len(prompts)], max_new_tokens=length)
        for n, length in enumerate(lengths)
    ]


@asynccontextmanager
async def pool_of(
    pages: int = 64,
    *,
    page_size: int = 4,
    host_chunks: int = 64,
    config: SwapConfig | None = None,
    device: HostDevice | None = None,
) -> AsyncIterator[Pool]:
    """A pool that must be empty in the end."""
    layout = fake_layout(page_size, chunk_tokens=max(8, page_size))
    chunk_bytes = layout.chunk_bytes(0)  # type: ignore[arg-type]
    async with open_pool(
        layout, num_pages=pages, host_bytes=host_chunks * chunk_bytes, config=config, device=device
    ) as pool:
        yield pool
        assert_empty(pool)


def assert_empty(pool: Pool) -> None:
    pool._core.check()
    statistics = pool.statistics()
    assert statistics.sequences == {}
    assert statistics.host_bytes_used == 0
    counts = statistics.pages[0]
    assert counts.free + counts.fenced + counts.quarantined == counts.total


def assert_right(requests: Sequence[Request]) -> None:
    """Every request has ended, with the tokens that it must have."""
    for request in requests:
        assert request.phase is Phase.DONE
        assert request.output == fake_generate(request.prompt, request.max_new_tokens), request.name


def round_robin(slots: int = 2, quantum: int = 3, swaps: int = 1) -> RoundRobin:
    return RoundRobin(slots=slots, quantum_tokens=quantum, concurrent_swaps=swaps)


@pytest.mark.parametrize("page_size", [1, 16, 256])
async def test_runner_more_requests_than_slots_all_get_their_tokens(page_size: int) -> None:
    async with pool_of(page_size=page_size, config=SwapConfig(verify=Verify.CRC32)) as pool:
        runner = Runner(pool, round_robin(), FakeModel(pool))
        await runner.run(requests := requests_of(12, 15, 9, 20, 11))
        assert_right(requests)
        counters = pool.statistics().counters
        assert sum(request.preemptions for request in requests) == counters["preemptions"] >= 5
        assert sum(len(request.restores_ns) for request in requests) == counters["restores"]
        assert sum(request.recomputed_tokens for request in requests) == 0
        assert runner.steps >= 20


async def test_runner_never_runs_more_than_the_slots() -> None:
    async with pool_of() as pool:
        model = FakeModel(pool)
        await Runner(pool, round_robin(slots=3, quantum=1, swaps=3), model).run(requests := requests_of(*[9] * 8))
        assert_right(requests)
        assert max(map(len, model.batches)) == 3


@pytest.mark.parametrize("new_tokens", [1, 2, 9])
async def test_runner_prompts_of_one_token(new_tokens: int) -> None:
    async with pool_of() as pool:
        await Runner(pool, round_robin(slots=1, quantum=1), FakeModel(pool)).run(
            requests := requests_of(*[new_tokens] * 4, prompts=[[5], [6]])
        )
        assert_right(requests)


async def test_runner_requests_end_while_others_leave_and_come() -> None:
    lengths = [1, 2, 3, 5, 8, 13, 21, 4, 4, 4]
    async with pool_of() as pool:
        for victims in VictimOrder:
            scheduler = RoundRobin(slots=3, quantum_tokens=2, concurrent_swaps=2, victims=victims)
            await Runner(pool, scheduler, FakeModel(pool)).run(requests := requests_of(*lengths))
            assert_right(requests)


@pytest.mark.parametrize("host_chunks", [0, 1, 3, 5])
async def test_runner_full_host_tier_replays_what_was_dropped(host_chunks: int) -> None:
    async with pool_of(host_chunks=host_chunks) as pool:
        await Runner(pool, round_robin(), FakeModel(pool)).run(requests := requests_of(*[16] * 5))
        assert_right(requests)
        assert sum(request.recomputed_tokens for request in requests) > 0
        if host_chunks == 0:
            assert pool.statistics().counters.get("bytes_out", 0) == 0


async def test_runner_full_host_tier_that_refuses_ends_the_run() -> None:
    device = FaultyDevice()
    config = SwapConfig(host_full=HostFull.REFUSE)
    async with pool_of(host_chunks=4, config=config, device=device) as pool:
        with pytest.raises(HostTierFull):
            await Runner(pool, round_robin(slots=1), FakeModel(pool)).run(requests_of(*[16] * 5))


@pytest.mark.parametrize("handover", list(Handover))
async def test_runner_every_handover_gives_the_same_tokens(handover: Handover) -> None:
    async with pool_of() as pool:
        runner = Runner(pool, round_robin(), FakeModel(pool), handover=handover)
        await runner.run(requests := requests_of(12, 15, 9, 20, 11))
        assert_right(requests)
        recomputed = sum(request.recomputed_tokens for request in requests)
        assert (recomputed > 0) == (handover is Handover.RECOMPUTE)
        assert (pool.statistics().counters.get("bytes_out", 0) > 0) == (handover is not Handover.RECOMPUTE)


async def test_runner_stopped_world_runs_nothing_during_a_swap() -> None:
    device = FaultyDevice()
    async with pool_of(device=device) as pool:
        runner = Runner(pool, round_robin(), FakeModel(pool), handover=Handover.STOP_THE_WORLD)
        moving = (SequenceState.OFFLOADING, SequenceState.PREFETCHING)
        steps_in_swaps: list[int] = []

        def before_step() -> None:
            steps_in_swaps.append(
                sum(pool.state(r.name) in moving for r in runner.requests if r.phase is not Phase.DONE)
            )

        runner._model = FakeModel(pool, before_step)
        await runner.run(requests := requests_of(12, 15, 9, 20, 11))
        assert_right(requests)
        assert set(steps_in_swaps) == {0}
        assert runner.idle_ns > 0


async def test_runner_swaps_run_beside_the_steps() -> None:
    """Steps go on while a copy is held up: that is the difference to a stopped world."""
    device = FaultyDevice()
    let_go = threading.Event()
    async with pool_of(device=device) as pool:
        device.fault = lambda operation: held_by(let_go)

        def before_step() -> None:
            held = any(pool.state(r.name) is SequenceState.OFFLOADING for r in requests if r.phase is not Phase.DONE)
            steps_beside.append(held)
            if sum(steps_beside) == 4:
                let_go.set()

        steps_beside: list[bool] = []
        requests = requests_of(12, 12, 12)
        await Runner(pool, round_robin(), FakeModel(pool, before_step)).run(requests)
        assert sum(steps_beside) >= 4
        assert_right(requests)


@pytest.mark.parametrize("seed", range(10))
async def test_runner_pool_smaller_than_its_slots_still_ends_every_request(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(100) for _ in range(rng.randint(1, 20))] for _ in range(7)]
    requests = requests_of(*(rng.randint(1, 25) for _ in prompts), prompts=prompts)
    longest = max(-(-request.total_tokens // 4) for request in requests)
    scheduler = round_robin(slots=rng.randint(2, 5), quantum=rng.randint(1, 6), swaps=rng.randint(1, 3))
    host_chunks = rng.choice([0, 4, 64])
    async with pool_of(pages=longest + rng.randint(0, 4), host_chunks=host_chunks) as pool:
        await Runner(pool, scheduler, FakeModel(pool)).run(requests)
        assert_right(requests)


class _NeverCrowded:
    """In place of the runner's memory that pages have run out."""

    def __get__(self, instance: object, owner: type) -> bool:
        return False

    def __set__(self, instance: object, value: bool) -> None:
        pass


class _Unguarded(Runner):
    _crowded = _NeverCrowded()  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Runner, _Unguarded])
async def test_runner_requests_that_would_push_each_other_out_for_ever_end(kind: type[Runner]) -> None:
    """The guard is that nobody comes while pages have run out; without it the same run makes no progress."""

    class Impatient(RoundRobin):
        plans = 0

        def plan(self, requests: Sequence[RequestView]) -> Plan:
            Impatient.plans += 1
            if Impatient.plans > 500:
                raise TimeoutError
            return super().plan(requests)

    sizes = [(12, 24), (8, 1), (10, 15), (15, 16), (6, 1), (1, 16), (12, 23)]
    requests = requests_of(*(size[1] for size in sizes), prompts=[list(range(size[0])) for size in sizes])
    async with pool_of(pages=12, host_chunks=0) as pool:
        runner = kind(pool, Impatient(slots=2, quantum_tokens=4, concurrent_swaps=3), FakeModel(pool))
        if kind is Runner:
            await runner.run(requests)
            assert_right(requests)
        else:
            with pytest.raises(TimeoutError):
                await runner.run(requests)


async def test_runner_request_that_never_fits_is_refused_and_nothing_is_left_behind() -> None:
    async with pool_of(pages=4) as pool:
        pool.register("r1", max_tokens=8)
        with pytest.raises(NeverFits, match="has 4"):
            await Runner(pool, round_robin(), FakeModel(pool)).run(requests_of(3)[:1] + requests_of(9, 9, 99)[2:])
        with pytest.raises(ProtocolError, match="'r1' is registered already"):
            await Runner(pool, round_robin(), FakeModel(pool)).run(requests_of(3, 3))
        assert pool.statistics().sequences == {"REGISTERED": 1}
        await pool.finish("r1")


async def test_runner_without_pages_for_the_last_request_says_so() -> None:
    """A copy hangs: its pages are quarantined, and what is left is too little for one request."""
    device = FaultyDevice()
    let_go = threading.Event()
    config = SwapConfig(copy_deadline_ns=20_000_000)
    async with open_pool(fake_layout(), num_pages=8, host_bytes=1 << 12, config=config, device=device) as pool:
        pool.register("hung", max_tokens=20)
        async with pool.forward({"hung": 20}):
            pass
        device.fault = lambda operation: held_by(let_go)
        with pytest.raises(TransferError, match="quarantined"):
            await pool.preempt("hung")
        [request] = requests_of(24)
        with pytest.raises(PagesExhausted, match=r"\['r0'\] cannot go on.*lacks pages"):
            await Runner(pool, round_robin(), FakeModel(pool)).run([request])
        assert pool.statistics().sequences == {"GPU_RESIDENT": 1}
        let_go.set()


@pytest.mark.parametrize("handover", list(Handover))
async def test_runner_cancelled_anywhere_frees_everything(handover: Handover) -> None:
    async def trial(at: int) -> Outcome:
        async with pool_of(pages=12, host_chunks=8) as pool:
            runner = Runner(pool, round_robin(quantum=2), FakeModel(pool), handover=handover)
            return await cancel_at(lambda: runner.run(requests_of(5, 5, 5)), at)

    assert await sweep(trial, most=200) > 10


async def test_runner_failed_swap_reaches_the_caller_as_itself() -> None:
    for work in (Work.GATHER, Work.SCATTER):
        for nth in (1, 4):
            device = FaultyDevice()
            async with pool_of(device=device) as pool:
                seen: list[Operation] = []

                def fail(operation: Operation, work: Work = work, nth: int = nth, seen: list[Operation] = seen) -> None:
                    if operation.work is work:
                        seen.append(operation)
                        if len(seen) == nth:
                            raise OSError("the bus is on fire")

                device.fault = fail
                with pytest.raises(TransferError, match="the bus is on fire"):
                    await Runner(pool, round_robin(), FakeModel(pool)).run(requests_of(*[16] * 5))
                device.fault = lambda operation: None


async def test_runner_wrong_checksum_runs_the_tokens_again() -> None:
    device = FaultyDevice()
    flipped: list[Operation] = []

    def flip(operation: Operation) -> None:
        if operation.work is Work.SCATTER and not flipped:
            flipped.append(operation)
            operation.blocks[0].host[0][0, 0] ^= 1

    device.fault = flip
    async with pool_of(config=SwapConfig(verify=Verify.CRC32), device=device) as pool:
        await Runner(pool, round_robin(), FakeModel(pool)).run(requests := requests_of(*[16] * 5))
        assert_right(requests)
        assert [request.recomputed_tokens > 0 for request in requests].count(True) == 1


async def test_runner_flipped_byte_that_nobody_checks_changes_the_tokens() -> None:
    """The twin of the test above without its guard: the fake model does notice a wrong byte."""
    device = FaultyDevice()

    def flip(operation: Operation) -> None:
        if operation.work is Work.SCATTER:
            for host in operation.blocks[0].host:
                host[0].view(torch.int32)[:] += 1

    device.fault = flip
    async with pool_of(device=device) as pool:
        await Runner(pool, round_robin(), FakeModel(pool)).run(requests := requests_of(*[16] * 5))
        with pytest.raises(AssertionError):
            assert_right(requests)


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
