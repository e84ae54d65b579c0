"""The life of a sequence apart from moving: register, fork, copy on write, truncate, windows, evict, reset, finish."""

from collections.abc import Callable

import pytest

from swapkv.errors import KVEvicted, ProtocolError, UnknownSequence
from swapkv.fsm import commands, edit, events
from swapkv.fsm.queries import SequenceState
from swapkv.ids import GroupId, SeqId
from swapkv.layout import KVLayout
from tests.kit.scenes import copies, news, table, trip, with_tokens
from tests.kit.stage import GROUP, PLAIN, Stage

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")


def windowed(window: int = 4, slack: int = 0, pages: int = 12) -> Stage:
    """Pages of two tokens, two a chunk; layer 0 looks back `window` tokens, layer 1 at everything."""
    layout = KVLayout.dense(
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        page_size=2,
        chunk_tokens=4,
        windows=[window, None],
        truncate_slack=slack,
    )
    stage = Stage(pages=pages, host_chunks=60, layout=layout)
    stage.register("a", max_tokens=16)
    return stage


def owned(stage: Stage, group: int = 0) -> int:
    return stage.core.ledger.owned(GroupId(group))


def test_registered_sequence_has_neither_tokens_nor_pages() -> None:
    stage = Stage()
    stage.register("a")
    assert (stage.state("a"), stage.length("a"), stage.free) == (SequenceState.REGISTERED, 0, 8)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (events.Register(A, 8), "'a' is registered already: finish it first or choose another name"),
        (events.Register(B, 0), "max_tokens=0 and step_tokens=0 must be at least 1"),
        (events.Register(B, 8, 0), "max_tokens=8 and step_tokens=0 must be at least 1"),
        (events.Fork(A, A, 8), "'a' is registered already"),
        (events.Fork(A, B, 2), "max_tokens=2 is less than the parent's 3 tokens"),
        (events.Truncate(A, 4), "tokens=4 is not within the 0 to 3 of 'a'"),
        (events.Truncate(A, -1), "tokens=-1 is not within the 0 to 3 of 'a'"),
        (events.Reset(A), r"has its KV \(3 tokens\): evict it before a reset"),
    ],
)
def test_wish_that_makes_no_sense_is_refused_with_value_and_remedy(event: events.Event, message: str) -> None:
    stage = with_tokens(3)
    with pytest.raises(ProtocolError, match=message):
        stage.core.handle(event, 0)
    assert list(stage.core.sequences) == [A]
    stage.reads("a")


@pytest.mark.parametrize(
    "event", [events.Fork(B, C, 8), events.Truncate(B, 0), events.Evict(B), events.Reset(B), events.Finish(B)]
)
def test_wish_about_an_unknown_sequence_is_refused(event: events.Event) -> None:
    with pytest.raises(UnknownSequence, match=r"'b' is not registered \(or has finished\): register it first"):
        with_tokens(3).core.handle(event, 0)


def in_a_forward(stage: Stage) -> None:
    stage.begin("a", 1)


def leaving(stage: Stage) -> None:
    assert stage.preempt("a")


def coming(stage: Stage) -> None:
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.restore("a")


def finishing(stage: Stage) -> None:
    assert stage.preempt("a")
    assert stage.finish("a")


def evicted(stage: Stage) -> None:
    assert stage.do(events.Evict(A))


WISHES = [(events.Fork(A, B, 8), "forked"), (events.Truncate(A, 1), "truncated"), (events.Evict(A), "evicted")]


@pytest.mark.parametrize(("event", "what"), WISHES)
@pytest.mark.parametrize(
    ("before", "error", "message"),
    [
        (in_a_forward, ProtocolError, "is in forward 2: it cannot be {what} now"),
        (leaving, ProtocolError, "is parking: await or cancel that, then it can be {what}"),
        (coming, ProtocolError, "is restoring: await or cancel that, then it can be {what}"),
        (finishing, ProtocolError, "is finishing: it cannot be {what} now"),
        (evicted, KVEvicted, "has no KV: reset it before it is {what}"),
    ],
)
def test_edit_of_a_sequence_that_is_not_settled_is_refused_with_the_remedy(
    before: Callable[[Stage], None], error: type[Exception], message: str, event: events.Event, what: str
) -> None:
    stage = with_tokens(3)
    before(stage)
    with pytest.raises(error, match=message.format(what=what)):
        stage.core.handle(event, stage.now_ns)


def test_forked_sequence_shares_every_page_and_takes_none() -> None:
    stage = with_tokens(7)
    stage.fork(A, B, 8)
    assert (table(stage, "a"), stage.free) == (table(stage, "b"), 4)
    stage.reads("b")


def append_to_both_forks() -> Stage:
    stage = with_tokens(3)
    stage.fork(A, B, 8)
    for name in "ba":
        stage.append(name, 1)
    stage.come_to_rest()
    stage.reads("a")
    stage.reads("b")
    return stage


def test_fork_that_appends_first_gets_a_tail_of_its_own() -> None:
    stage = append_to_both_forks()
    assert not set(table(stage, "a")) & set(table(stage, "b"))
    assert stage.core.counters["tails_copied_on_write"] == 1


def test_fork_that_writes_to_a_shared_tail_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapkv.fsm.steps._make_writable", lambda core, sequence, tail: ())
    monkeypatch.setattr("swapkv.fsm.steps.needed", lambda core, appends, group: 0)
    with pytest.raises(AssertionError):
        append_to_both_forks()


def test_fork_of_full_chunks_copies_nothing_on_write() -> None:
    stage = with_tokens(4)
    stage.fork(A, B, 8)
    stage.append("b", 1)
    stage.come_to_rest()
    assert table(stage, "b")[:2] == table(stage, "a")
    assert stage.core.counters["tails_copied_on_write"] == 0


def test_tail_that_only_parked_siblings_share_goes_to_the_writer_without_a_copy() -> None:
    stage = with_tokens(3, Stage(pages=4))
    stage.fork(A, B, 8)
    for name in "ab":
        assert stage.preempt(name)
        stage.come_to_rest()
    assert stage.restore("a")
    stage.come_to_rest()
    pages = table(stage)
    stage.append("a", 5)
    stage.come_to_rest()
    assert table(stage)[:2] == pages
    assert stage.core.counters["tails_copied_on_write"] == 0
    stage.reads("a")
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.restore("b")
    stage.come_to_rest()
    stage.reads("b")


def test_fork_of_a_parked_sequence_is_parked_and_comes_back_alone() -> None:
    stage = Stage()
    stage.parked("a", 7)
    stage.fork(A, B, 8)
    assert stage.state("b") is SequenceState.OFFLOADED
    assert stage.restore("b")
    stage.come_to_rest()
    stage.reads("b")
    assert stage.state("a") is SequenceState.OFFLOADED


def test_finished_fork_leaves_the_shared_chunks_to_the_other() -> None:
    stage = with_tokens(7)
    stage.fork(A, B, 8)
    assert stage.finish("a")
    assert stage.free == 4
    stage.reads("b")
    assert stage.finish("b")
    stage.come_to_rest()
    assert stage.free == 8


@pytest.mark.parametrize(("tokens", "pages"), [(7, 4), (6, 3), (4, 2), (1, 1), (0, 0)])
def test_truncated_sequence_keeps_the_pages_of_its_tokens_only(tokens: int, pages: int) -> None:
    stage = with_tokens(7)
    stage.truncate(A, tokens)
    assert (len(table(stage)), owned(stage)) == (pages, pages)
    stage.reads("a")
    stage.append("a", 8 - tokens)
    stage.come_to_rest()
    stage.reads("a")


def test_truncated_fork_leaves_the_shared_tail_as_it_is() -> None:
    stage = with_tokens(7)
    stage.fork(A, B, 8)
    stage.truncate(A, 5)
    stage.append("a", 1)
    stage.come_to_rest()
    stage.reads("a")
    stage.reads("b")


def test_sequence_truncated_while_parked_comes_back_shorter() -> None:
    stage = Stage()
    stage.parked("a", 7)
    stage.truncate(A, 5)
    assert stage.restore("a")
    stage.come_to_rest()
    assert len(table(stage)) == 3
    stage.append("a", 2)
    stage.come_to_rest()
    trip(stage)
    stage.reads("a")


def chunk_left_to_a_shorter_sequence() -> None:
    stage = with_tokens(4)
    stage.fork(A, B, 8)
    stage.truncate(A, 1)
    assert owned(stage) == 2
    assert stage.finish("b")
    assert owned(stage) == 1, "the page beyond its token is of no use"


def test_chunk_is_cut_to_the_last_sequence_that_shares_it() -> None:
    chunk_left_to_a_shorter_sequence()


def test_chunk_that_is_not_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "tidy", lambda core, sequence: None)
    with pytest.raises(AssertionError, match="of no use"):
        chunk_left_to_a_shorter_sequence()


def test_pages_behind_the_window_are_let_go_and_the_table_shows_it() -> None:
    stage = windowed(window=4)
    stage.append("a", 8)
    stage.append("a", 1)
    stage.come_to_rest()
    assert table(stage)[:2] == [-1, -1]
    assert all(page >= 0 for page in table(stage)[2:])
    assert (owned(stage, 0), owned(stage, 1)) == (3, 5)
    trip(stage)
    stage.reads("a")
    moved = [copy for copy in copies(stage) if copy.group == 0]
    assert sum(len(item.pages) for copy in moved for item in copy.items) == 3, "what is behind is not moved"


def test_slack_keeps_as_many_tokens_behind_the_window() -> None:
    stage = windowed(window=4, slack=4)
    stage.append("a", 9)
    assert owned(stage) == 5
    stage.append("a", 1)
    assert owned(stage) == 4
    stage.come_to_rest()
    stage.truncate(A, 6)
    stage.reads("a")


def test_truncate_that_would_read_behind_the_window_is_refused_with_the_remedy() -> None:
    stage = windowed(window=4)
    stage.append("a", 9)
    stage.come_to_rest()
    message = "cut to 7 tokens would read behind the window of 4 tokens, .* set truncate_slack=0 of the layout higher"
    with pytest.raises(ProtocolError, match=message):
        stage.core.handle(events.Truncate(A, 7), 0)
    stage.reads("a")


def test_window_moves_on_in_a_sequence_that_was_restored() -> None:
    stage = windowed(window=4)
    stage.append("a", 7)
    stage.come_to_rest()
    trip(stage)
    stage.append("a", 4)
    stage.come_to_rest()
    assert owned(stage) == 3
    stage.reads("a")


def test_window_of_a_shared_chunk_moves_on_once_the_other_is_gone() -> None:
    stage = windowed(window=4)
    stage.append("a", 4)
    stage.come_to_rest()
    stage.fork(A, B, 16)
    stage.append("a", 2)
    assert table(stage)[0] >= 0, "the other may still read it"
    stage.come_to_rest()
    assert stage.finish("b")
    assert table(stage)[0] == -1
    stage.reads("a")


def test_evicted_sequence_keeps_nothing_and_begins_anew_after_a_reset() -> None:
    stage = with_tokens(7)
    trip(stage)
    assert stage.do(events.Evict(A))
    assert (stage.state("a"), stage.free, stage.core.host.used) == (SequenceState.EVICTED, 8, 0)
    assert stage.core.counters["evicted_tokens"] == 7
    stage.tokens[A] = []
    assert stage.do(events.Reset(A))
    assert stage.state("a") is SequenceState.REGISTERED
    stage.append("a", 5)
    stage.come_to_rest()
    stage.reads("a")


def test_evicted_fork_leaves_the_kv_of_the_other() -> None:
    stage = with_tokens(7)
    stage.fork(A, B, 8)
    assert stage.do(events.Evict(A))
    stage.reads("b")


def test_finish_of_a_sequence_at_rest_gives_everything_back_at_once() -> None:
    stage = with_tokens(7)
    assert stage.finish("a")
    assert news(stage, commands.Gone) == [commands.Gone(A)]
    assert (stage.free, stage.core.chunks, stage.core.sequences) == (8, {}, {})


@pytest.mark.parametrize("before", [evicted, lambda stage: None])
def test_finish_of_a_sequence_without_kv_is_over_at_once(before: Callable[[Stage], None]) -> None:
    stage = Stage()
    stage.register("a")
    before(stage)
    assert stage.finish("a")
    assert stage.told(commands.Gone, "a")


def test_finish_of_a_parked_sequence_frees_its_host_copy() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.core.host.used == 2 * PLAIN.chunk_bytes(GROUP)
    assert stage.finish("a")
    assert stage.core.host.used == 0


def test_finish_in_a_forward_waits_for_its_end() -> None:
    stage = with_tokens(3)
    step = stage.begin("a", 1)
    assert stage.finish("a")
    assert not stage.told(commands.Gone, "a")
    stage.end_step(step)
    assert stage.told(commands.Gone, "a")
    stage.come_to_rest()
    assert stage.free == 8


def test_finish_in_a_gated_forward_waits_for_its_end_and_for_the_copies() -> None:
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    step = stage.begin("a", 1)
    assert stage.finish("a")
    stage.end_step(step)
    assert not stage.told(commands.Gone, "a")
    stage.come_to_rest()
    assert stage.told(commands.Gone, "a")
    assert (stage.free, stage.core.host.used) == (8, 0)


def test_sequence_that_is_truncated_and_forked_again_and_again_reads_what_it_wrote() -> None:
    stage = with_tokens(6, Stage(pages=16))
    for round_ in range(5):
        child = SeqId(f"child {round_}")
        stage.fork(A, child, 8)
        stage.truncate(A, 5 - round_ % 3)
        stage.append("a", 2)
        stage.come_to_rest()
        trip(stage)
        stage.reads(child)
        assert stage.finish(child)
    stage.reads("a")
