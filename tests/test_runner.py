"""The reference loop: every request ends with the tokens that it would have alone, whatever happens to its KV."""

import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from swapkv import (
    HostDevice,
    HostFull,
    HostTierFull,
    NeverFits,
    PagesExhausted,
    ProtocolError,
    SequenceState,
    SwapConfig,
    TransferError,
    Verify,
    open_pool,
)
from swapkv.schedulers import Handover, Phase, Plan, RequestView, RoundRobin, Runner, VictimOrder
from swapkv.streams.host import Operation, Work
from tests.kit.fake_model import FakeModel, fake_layout
from tests.kit.fake_runs import assert_right, pool_of, requests_of, round_robin
from tests.kit.sweep import Outcome, cancel_at, sweep

pytestmark = pytest.mark.anyio


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
