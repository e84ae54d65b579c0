"""What the core counts, and what it names as victims: exact, not only about right."""

import pytest

from swapkv.config import HostFull, SwapConfig
from swapkv.errors import HostTierFull, ProtocolError
from swapkv.fsm import events, queries
from swapkv.ids import SeqId
from swapkv.layout import KVLayout
from tests.kit.stage import GROUP, PLAIN, Stage


def names_of_victims(stage: Stage) -> list[str]:
    return [str(victim.sequence) for victim in queries.victims(stage.core)]


def test_victims_are_those_on_the_device_in_no_forward_and_not_about_to_end() -> None:
    stage = Stage(pages=20)
    for name in ("free", "forward", "leaving", "ending"):
        stage.register(name)
        stage.append(name, 3)
    stage.come_to_rest()
    assert names_of_victims(stage) == ["free", "forward", "leaving", "ending"]
    stage.begin("forward", 1)
    assert stage.preempt("leaving")
    step = stage.begin("ending", 1)
    assert stage.finish("ending")
    assert names_of_victims(stage) == ["free"]
    stage.end_step(step)


def test_victim_costs_what_is_dirty_and_frees_what_it_has() -> None:
    stage = Stage(pages=20)
    stage.parked("a", 5)
    assert stage.restore("a")
    stage.come_to_rest()
    page_bytes = PLAIN.page_bytes(GROUP)
    (victim,) = queries.victims(stage.core)
    assert (victim.freed_bytes, victim.dirty_bytes, victim.restore_bytes) == (3 * page_bytes, 0, 3 * page_bytes)
    stage.append("a", 2)
    (victim,) = queries.victims(stage.core)
    assert (victim.freed_bytes, victim.dirty_bytes, victim.restore_bytes) == (
        4 * page_bytes,
        2 * page_bytes,
        4 * page_bytes,
    )
    assert victim.fairness_ns == queries.FAIRNESS_NS_PER_PREEMPTION


@pytest.mark.parametrize("times", [1, 2, 3])
def test_preempts_that_find_the_host_tier_full_are_counted_as_often_as_they_happen(times: int) -> None:
    stage = Stage(pages=20, host_chunks=1, config=SwapConfig(host_full=HostFull.RECOMPUTE))
    stage.register("a", max_tokens=8)
    for _ in range(times):
        stage.append("a", 5)
        stage.come_to_rest()
        assert stage.preempt("a")
        assert stage.do(events.Reset(SeqId("a")))
        stage.tokens[SeqId("a")] = []
    assert stage.core.sequences[SeqId("a")].preemptions == times
    counted = {what: stage.core.counters[what] for what in ("preemptions", "evictions", "evicted_tokens")}
    assert counted == {"preemptions": times, "evictions": times, "evicted_tokens": 5 * times}


@pytest.mark.parametrize("times", [1, 2, 3])
def test_refusals_are_counted_as_often_as_they_happen(times: int) -> None:
    stage = Stage(pages=20, host_chunks=2, config=SwapConfig(host_full=HostFull.REFUSE))
    stage.parked("b", 5)
    stage.register("a")
    stage.append("a", 5)
    stage.come_to_rest()
    for _ in range(times):
        with pytest.raises(HostTierFull, match="bytes of host memory"):
            stage.core.handle(events.Preempt(SeqId("a")), stage.now_ns)
    assert stage.core.counters["host_full_refusals"] == times
    assert stage.core.counters["preemptions"] == 1, "that of b"


@pytest.mark.parametrize("window", [1, 3, 4, 7])
@pytest.mark.parametrize("slack", [0, 1, 3, 5])
@pytest.mark.parametrize("length", [1, 5, 8, 11, 16])
def test_truncate_behind_a_window_is_refused_exactly_where_pages_were_let_go(
    window: int, slack: int, length: int
) -> None:
    layout = KVLayout.dense(
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        page_size=2,
        chunk_tokens=4,
        windows=[None, window],
        truncate_slack=slack,
    )

    def grown() -> Stage:
        stage = Stage(pages=20, host_chunks=60, layout=layout)
        stage.register("a", max_tokens=20)
        for _ in range(length):
            stage.append("a", 1)
        stage.come_to_rest()
        return stage

    there = [page >= 0 for page in grown().core.sequences[SeqId("a")].tables[1].pages.tolist()]
    for tokens in range(length + 1):
        stage = grown()
        reads = range(max(0, tokens - window) // layout.page_size, layout.pages_for(max(tokens, 1)))
        if all(there[page] for page in reads):
            assert stage.do(events.Truncate(SeqId("a"), tokens)), (tokens, there)
            del stage.tokens[SeqId("a")][tokens:]
            stage.append("a", 1)
            stage.come_to_rest()
        else:
            with pytest.raises(ProtocolError, match="set truncate_slack"):
                stage.core.handle(events.Truncate(SeqId("a"), tokens), stage.now_ns)
