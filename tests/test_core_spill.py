"""Scenarios of sequences that run with a part of their KV in the host tier."""

import pytest

from swapkv.config import HostFull, SwapConfig
from swapkv.errors import HostTierFull, ProtocolError
from swapkv.fsm import commands, events
from swapkv.fsm.queries import SequenceState, host_pages
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import GroupId, Lane, SeqId, StepId
from swapkv.layout import KVLayout
from tests.kit.scenes import copies, states, table, trip, with_tokens
from tests.kit.stage import GROUP, PLAIN, SMALL_COPIES, WINDOWED, Stage

A = SeqId("a")


def spill(stage: Stage, tokens: int | None = None, name: str = "a") -> None:
    assert stage.do(events.Spill(SeqId(name), tokens))
    stage.come_to_rest()


def spilled(tokens: int, config: SwapConfig = SMALL_COPIES, layout: KVLayout = PLAIN, pages: int = 8) -> Stage:
    stage = Stage(pages=pages, config=config, layout=layout)
    stage.register("a", max_tokens=16)
    stage.append("a", tokens)
    stage.come_to_rest()
    spill(stage)
    return stage


def test_spilled_sequence_runs_on_and_reads_every_token() -> None:
    stage = spilled(10)
    assert stage.state("a") is SequenceState.SPILLED
    assert table(stage)[:4] == [-1] * 4
    assert stage.free == 8 - 1, "all that stays is the page of the begun chunk"
    stage.append("a", 3)
    stage.reads("a")
    assert stage.length("a") == 13


def test_spill_of_a_part_takes_whole_chunks_and_never_the_begun_one() -> None:
    stage = Stage()
    stage.register("a", max_tokens=16)
    stage.append("a", 10)
    stage.come_to_rest()
    spill(stage, 7)
    assert [page < 0 for page in table(stage)] == [True, True, False, False, False]
    spill(stage, 3)
    assert [page < 0 for page in table(stage)] == [True, True, False, False, False], (
        "a shorter spill takes nothing back"
    )
    spill(stage)
    assert [page < 0 for page in table(stage)] == [True, True, True, True, False]


def test_spilled_again_moves_only_what_is_new() -> None:
    stage = spilled(8)
    moved = len(copies(stage))
    stage.append("a", 5)
    stage.come_to_rest()
    spill(stage)
    chunks = {chunk for copy in copies(stage)[moved:] for chunk in (item.chunk for item in copy.items)}
    assert len(chunks) == 1
    stage.reads("a")


def test_restored_in_full_it_is_resident_again() -> None:
    stage = spilled(10)
    assert stage.restore("a")
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.GPU_READY
    assert min(table(stage)) >= 0
    stage.reads("a")
    assert stage.state("a") is SequenceState.GPU_RESIDENT


def test_parked_sequence_comes_back_in_part_with_few_pages() -> None:
    stage = Stage(pages=8)
    stage.register("a", "b", max_tokens=12)
    stage.append("a", 10)
    stage.come_to_rest()
    assert stage.preempt("a")
    stage.come_to_rest()
    stage.append("b", 11)
    stage.come_to_rest()
    assert stage.free == 2, "too few for all of it"
    assert stage.do(events.BeginRestore(A, spilled=10))
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.SPILLED
    stage.append("a", 1)
    stage.reads("a")


def test_forward_on_a_restore_of_a_part_waits_for_its_end() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.do(events.BeginRestore(A, spilled=4))
    with pytest.raises(ProtocolError, match="restore it before the forward"):
        stage.core.handle(events.BeginStep(StepId(101), {A: 0}), 0)
    stage.come_to_rest()
    stage.reads("a")


def test_decodes_before_all_of_a_restore_is_back() -> None:
    stage = spilled(10)
    assert stage.restore("a")
    stage.run(Lane.IN, 1)
    stage.tell()
    stage.append("a", 1)
    stage.run_eagerly(Lane.COMPUTE)
    assert stage.length("a") == 11
    stage.come_to_rest()
    stage.reads("a")
    assert ChunkState.OFFLOADED not in states(stage)


def test_cancelled_restore_leaves_it_running_spilled_with_the_tokens_of_meanwhile() -> None:
    stage = spilled(10)
    assert stage.restore("a")
    stage.run(Lane.IN, 1)
    stage.append("a", 1)
    assert stage.do(events.CancelRestore(A))
    stage.come_to_rest()
    assert (stage.state("a"), stage.length("a"), stage.free) == (SequenceState.SPILLED, 11, 6)
    undone = [news for news in stage.news if isinstance(news, commands.RestoreUndone)]
    assert [news.voided_tokens for news in undone] == [0]
    stage.reads("a")


def test_failed_copy_of_a_spill_changes_nothing() -> None:
    stage = Stage()
    stage.register("a", max_tokens=16)
    stage.append("a", 10)
    stage.come_to_rest()
    pages = table(stage)
    stage.fate = lambda copy: "fail" if copy.op == 2 else "ok"
    assert stage.do(events.Spill(A))
    stage.come_to_rest()
    assert stage.told(commands.ParkUndone, "a")
    assert (stage.state("a"), table(stage)) == (SequenceState.GPU_RESIDENT, pages)
    stage.reads("a")


@pytest.mark.parametrize("host_full", HostFull)
def test_spill_into_a_full_host_tier_is_refused_and_never_drops_kv(host_full: HostFull) -> None:
    stage = Stage(host_chunks=2, config=SwapConfig(segment_bytes=1, host_full=host_full))
    for name, tokens in (("a", 8), ("b", 4)):
        stage.register(name)
        stage.append(name, tokens)
    stage.come_to_rest()
    spill(stage)
    with pytest.raises(HostTierFull, match="finish a sequence, raise host_bytes"):
        stage.core.handle(events.Spill(SeqId("b")), 0)
    stage.reads("a")
    stage.reads("b")


def test_preempt_of_a_spilled_sequence_moves_its_last_pages_only() -> None:
    stage = spilled(10)
    moved = sum(copy.num_bytes for copy in copies(stage))
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.OFFLOADED
    assert sum(copy.num_bytes for copy in copies(stage)) - moved == PLAIN.page_bytes(GROUP)
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_cut_into_what_is_spilled_is_refused_with_the_remedy() -> None:
    stage = spilled(10)
    with pytest.raises(ProtocolError, match="the 8 that are spilled: restore"):
        stage.core.handle(events.Truncate(A, 7), 0)
    stage.truncate(A, 8)
    stage.append("a", 2)
    stage.reads("a")


def test_spill_of_a_parked_sequence_names_the_way_to_do_it() -> None:
    stage = Stage()
    stage.parked("a", 8)
    with pytest.raises(ProtocolError, match="restore it with its first tokens spilled"):
        stage.core.handle(events.Spill(A), 0)


def test_negative_tokens_are_refused() -> None:
    stage = with_tokens(8)
    with pytest.raises(ProtocolError, match="give 0 or more"):
        stage.core.handle(events.Spill(A, -1), 0)
    stage.preempt("a")
    stage.come_to_rest()
    with pytest.raises(ProtocolError, match="give 0 or more"):
        stage.core.handle(events.BeginRestore(A, None, -1), 0)


def test_host_copies_have_another_version_once_they_may_hold_other_bytes() -> None:
    stage = spilled(8)
    first = host_pages(stage.core, A, GROUP)
    assert [(run.first, run.count) for run in first] == [(0, 2), (2, 2)]
    assert stage.restore("a")
    stage.come_to_rest()
    stage.truncate(A, 4)
    stage.append("a", 4)
    stage.come_to_rest()
    spill(stage)
    again = host_pages(stage.core, A, GROUP)
    assert again[0] == first[0]
    assert again[1].version != first[1].version


def test_fork_of_a_spilled_sequence_is_spilled_too() -> None:
    stage = spilled(10)
    stage.fork(A, SeqId("x"), 16)
    stage.append("x", 1)
    stage.append("a", 2)
    stage.come_to_rest()
    assert stage.state("x") is SequenceState.SPILLED
    stage.finish("a")
    stage.come_to_rest()
    stage.reads("x")


def test_forward_that_streams_waits_for_the_links_tokens() -> None:
    rate = SwapConfig(segment_bytes=1, restore_bytes_per_s=1_000, restore_burst_bytes=1)
    stage = spilled(10, config=rate)
    first, second = StepId(101), StepId(102)
    assert stage.begin_step(first, {A: 1})
    stage.end_step(first)
    assert stage.begin_step(second, {A: 1})
    assert second in stage.waiting, "the first one has used up the link for a while"
    while second in stage.waiting:
        assert stage.wake()
    chunk_bytes = PLAIN.page_bytes(GROUP) * 4
    assert stage.now_ns == pytest.approx(chunk_bytes * 1_000_000, rel=0.05)
    stage.end_step(second)
    stage.come_to_rest()


def test_window_pages_are_let_go_while_a_spilled_sequence_comes_back() -> None:
    stage = Stage(pages=16, layout=WINDOWED)
    assert stage.do(events.Register(A, 32, 1, 0))
    stage.tokens[A] = []
    for _ in range(10):
        stage.append("a", 1)
    stage.come_to_rest()
    spill(stage)
    assert stage.restore("a")
    for _ in range(10):
        stage.append("a", 1)
        stage.run_eagerly(Lane.COMPUTE)
    window = stage.core.sequences[A].tables[GroupId(0)].pages
    assert (window >= 0).sum() <= stage.core.layout.peak_pages(GroupId(0), 32, 1)
    stage.come_to_rest()
    stage.reads("a")


def leaving_while_a_fork_comes(pages: int, resident: int) -> Stage:
    """`c` waits for pages; `x` waits behind it, and for a chunk that its parent `a` is just leaving."""
    stage = Stage(pages=pages)
    stage.register("c", "d", max_tokens=12 if resident else 8)
    stage.append("c", 12 if resident else 8)
    stage.come_to_rest()
    stage.preempt("c")
    stage.come_to_rest()
    with_tokens(4, stage)
    stage.fork(A, SeqId("x"), 8)
    stage.append("x", 3)
    stage.come_to_rest()
    assert stage.preempt("x")
    stage.come_to_rest()
    if resident:
        stage.append("d", resident)
        stage.come_to_rest()
    assert stage.restore("c", priority=0)
    assert stage.preempt("a")
    assert stage.restore("x", priority=1)
    return stage


def test_chunk_that_others_have_left_to_a_waiting_restore_is_given_to_the_one_before_it() -> None:
    stage = leaving_while_a_fork_comes(pages=5, resident=0)
    stage.come_to_rest()
    assert stage.state("c") is SequenceState.GPU_READY
    stage.reads("c")
    stage.preempt("c")
    stage.come_to_rest()
    stage.reads("x")


def test_chunk_that_was_there_from_the_first_is_given_to_the_restore_before_it() -> None:
    stage = Stage(pages=5)
    stage.parked("c", 8)
    with_tokens(4, stage)
    trip(stage)
    stage.fork(A, SeqId("x"), 8)
    stage.append("x", 3)
    stage.come_to_rest()
    assert stage.preempt("x")
    stage.come_to_rest()
    assert stage.restore("c", priority=0)
    assert stage.restore("x", priority=1)
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.state("c") is SequenceState.GPU_READY
    stage.reads("c")


def test_restore_that_waits_for_a_chunk_that_leaves_is_not_asked_for_its_pages_for_ever() -> None:
    stage = leaving_while_a_fork_comes(pages=7, resident=4)
    assert stage.preempt("d")
    stage.come_to_rest()
    assert stage.state("c") is SequenceState.GPU_READY
    stage.reads("c")


def test_two_restores_that_wait_for_each_other_go_on_as_the_readme_says() -> None:
    """A chunk that never had a copy and that a sequence has left to a waiting restore: a limit, and the way out of it."""
    stage = Stage(pages=5)
    stage.parked("c", 8)
    with_tokens(4, stage)
    stage.fork(A, SeqId("x"), 8)
    stage.append("x", 3)
    stage.come_to_rest()
    assert stage.preempt("x")
    stage.come_to_rest()
    assert stage.restore("c", priority=0)
    assert stage.restore("x", priority=1)
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.state("c") is SequenceState.PREFETCHING, "if this no longer holds, README's limit can go"
    assert stage.do(events.CancelRestore(SeqId("x")))
    stage.come_to_rest()
    assert stage.preempt("x")
    stage.come_to_rest()
    assert stage.state("c") is SequenceState.GPU_READY
    stage.reads("c")
    assert stage.preempt("c")
    assert stage.restore("x")
    stage.come_to_rest()
    stage.reads("x")
