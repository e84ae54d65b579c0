"""Who waits too long, and who is made to leave."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import anyio
import pytest

from swapkv import Forward, open_pool
from swapkv.budget.victims import Victim, choose, rank
from swapkv.config import SECOND_NS, SwapConfig
from swapkv.fsm import commands
from swapkv.fsm.queries import SequenceState, victims
from swapkv.ids import SeqId
from swapkv.schedulers import BatchRow, Phase, Request, RoundRobin, Runner
from swapkv.stepped import SteppedPool, open_stepped_pool
from tests.kit.deferred import DeferredDevice
from tests.kit.fake_model import FakeModel, fake_generate, fake_layout
from tests.kit.stage import Stage


def rounds_until_the_patient_one_comes(priority: int, aging_cap: int, most: int) -> int:
    """One sequence at a time fits. Each second another of priority 0 wants to come; one of `priority` waits on."""
    stage = Stage(pages=4, host_chunks=200, config=SwapConfig(aging_ns=SECOND_NS, aging_cap=aging_cap))
    names = [f"r{n}" for n in range(most + 1)]
    for name in ("patient", *names):
        stage.parked(name, 7)
    assert stage.restore(names[0])
    assert stage.restore("patient", priority=priority)
    for number, name in enumerate(names[1:], start=1):
        assert stage.restore(name)
        stage.now_ns += SECOND_NS
        stage.come_to_rest()
        (there,) = [n for n in stage.core.sequences if stage.state(n) is SequenceState.GPU_READY]
        if there == "patient":
            return number
        stage.reads(there)
        assert stage.finish(there)
        stage.come_to_rest()
    return most


@pytest.mark.parametrize("priority", [0, 1, 5, 7])
def test_restore_of_low_priority_comes_within_as_many_rounds_as_it_is_low(priority: int) -> None:
    """KF-28: the wait is bounded however many fresh ones of a better priority arrive."""
    assert rounds_until_the_patient_one_comes(priority, aging_cap=8, most=20) <= priority + 2


def test_restore_that_does_not_age_waits_for_ever() -> None:
    """KF-28, without its guard."""
    assert rounds_until_the_patient_one_comes(1, aging_cap=0, most=20) == 20


def test_restore_of_lowest_priority_does_not_shut_fresh_ones_out() -> None:
    """KF-28: aging is capped, so that those of a much better priority still come first."""
    assert rounds_until_the_patient_one_comes(20, aging_cap=8, most=20) == 20


def test_sequence_that_has_just_come_back_ranks_behind_one_that_has_not_been_preempted() -> None:
    """KF-28: the choice of victims remembers earlier preemptions."""
    stage = Stage(pages=8)
    stage.parked("again", 7)
    stage.register("never")
    stage.append("never", 7)
    stage.come_to_rest()
    assert stage.restore("again")
    stage.come_to_rest()
    stage.reads("again")
    ranked = rank(victims(stage.core), out_ns_per_byte=0.1, in_ns_per_byte=0.1)
    assert [victim.sequence for victim in ranked] == ["never", "again"]


def victim(name: str, freed: int, dirty: int | None = None, **others: float) -> Victim:
    dirty = freed if dirty is None else dirty
    return Victim(sequence=SeqId(name), freed_bytes=freed, dirty_bytes=dirty, restore_bytes=freed, **others)  # type: ignore[arg-type]


MIB = 1 << 20
RANKED = {
    "equal ones in the order of their names": ([victim("b", MIB), victim("a", MIB)], ["a", "b"]),
    "a clean copy costs no write": ([victim("a", MIB), victim("b", MIB, dirty=0)], ["b", "a"]),
    "half clean before dirty": ([victim("a", MIB), victim("b", MIB, dirty=MIB // 2)], ["b", "a"]),
    "one that will not come back": ([victim("a", MIB), victim("b", MIB, resume_probability=0.0)], ["b", "a"]),
    "one that has been preempted often": ([victim("a", MIB, fairness_ns=1e9), victim("b", MIB)], ["b", "a"]),
    "one whose chunks others reuse": ([victim("a", MIB, reuse_loss_ns=1e9), victim("b", MIB)], ["b", "a"]),
    "one that frees nothing is none": ([victim("a", 0), victim("b", MIB)], ["b"]),
}


@pytest.mark.parametrize("case", RANKED)
def test_victims_are_ranked_by_what_each_costs_to_bring_back(case: str) -> None:
    """KF-53."""
    candidates, expected = RANKED[case]
    for order in (candidates, candidates[::-1]):
        assert [v.sequence for v in rank(order, out_ns_per_byte=1.0, in_ns_per_byte=1.0)] == expected


def test_victims_chosen_are_just_enough() -> None:
    """KF-29 and KF-53: as many as free what is needed, and no more."""
    candidates = rank([victim(name, MIB) for name in "abcde"], out_ns_per_byte=1.0, in_ns_per_byte=1.0)
    for needed, expected in ((0, ""), (1, "a"), (MIB, "a"), (MIB + 1, "ab"), (3 * MIB, "abc"), (99 * MIB, "abcde")):
        chosen = choose(candidates, lambda some, needed=needed: sum(v.freed_bytes for v in some) >= needed)
        assert "".join(v.sequence for v in chosen) == expected


@contextmanager
def crowded_pool(device: DeferredDevice) -> Iterator[SteppedPool]:
    """Five sequences on five pages, three of which need one more for their next token."""
    with open_stepped_pool(fake_layout(4, 8), num_pages=5, host_bytes=1 << 16, device=device) as pool:
        for name, tokens in zip("abcde", (1, 1, 4, 4, 4), strict=True):
            pool.register(name, max_tokens=8)
            with pool.forward({name: tokens}):
                pass
        yield pool


def test_victims_for_a_forward_leave_nobody_stalled() -> None:
    """KF-29: one look names just enough victims; while they leave, a second look names no more."""
    device = DeferredDevice()
    with crowded_pool(device) as pool:
        everybody = dict.fromkeys("abcde", 1)
        victims = [str(victim.sequence) for victim in pool.victims_for(everybody)]
        assert len(victims) == 2
        for name in victims:
            pool.preempt(name)
        rest = {name: 1 for name in everybody if name not in victims}
        assert pool.victims_for(rest) == []
        while device.run_one(Random(0)):
            pool.poll()
        with pool.forward(rest):
            pass


def test_victims_for_a_forward_spare_those_named_if_others_suffice() -> None:
    with crowded_pool(DeferredDevice()) as pool:
        assert [v.sequence for v in pool.victims_for({"a": 1, "c": 1})] == ["a"]
        assert [v.sequence for v in pool.victims_for({"a": 1, "c": 1}, spare={"a"})] == ["c"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_runner_with_too_few_pages_stalls_nobody_unless_pages_are_on_their_way(backend: str) -> None:
    """KF-29: who has KV and no page for its next token waits only for pages that somebody is giving back."""
    requests = [
        Request(name=f"r{n}", prompt=list(range(1, prompt + 1)), max_new_tokens=4)
        for n, prompt in enumerate((1, 1, 4, 4, 4))
    ]

    async def run() -> list[tuple[set[str], set[Phase]]]:
        async with open_pool(fake_layout(4, 8), num_pages=5, host_bytes=1 << 16) as pool:
            model, stalled = FakeModel(pool), []

            def watched(forward: Forward, rows: Sequence[BatchRow]) -> Callable[[], list[int]]:
                there = {r.name for r in runner.requests if r.phase is Phase.RUNNING and pool.tokens(r.name)}
                stalled.append((there - {row.name for row in rows}, {r.phase for r in runner.requests}))
                return model(forward, rows)

            runner = Runner(pool, RoundRobin(slots=5, quantum_tokens=1000), watched)
            await runner.run(requests)
            return stalled

    for names, phases in anyio.run(run, backend=backend):
        assert not names or Phase.LEAVING in phases
    assert sum(request.preemptions for request in requests) > 0
    for request in requests:
        assert request.output == fake_generate(request.prompt, 4)


def test_preempt_of_a_clean_victim_copies_nothing() -> None:
    """KF-53: what has a clean copy leaves without a write."""
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")
    copied = sum(isinstance(news, commands.Copy) for news in stage.news)
    assert stage.preempt("a")
    assert stage.state("a") is SequenceState.OFFLOADED
    assert sum(isinstance(news, commands.Copy) for news in stage.news) == copied
