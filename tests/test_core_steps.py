"""Forward passes: pages, pins, fences, waiting for pages that are on their way, and gates."""

from collections.abc import Callable

import pytest

from swapkv.config import SwapConfig
from swapkv.errors import KVEvicted, PagesExhausted, ProtocolError, TransferError
from swapkv.fsm import commands, copies, events, restore
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState
from swapkv.fsm.records import Chunk
from swapkv.fsm.transitions import ChunkState
from swapkv.ids import Fence, Lane, LayerId, SeqId, StepId
from tests.kit.scenes import copies as copies_of
from tests.kit.scenes import news, states, table, trip, with_tokens
from tests.kit.stage import GROUP, PLAIN, Stage

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")
LAYER_BYTES = PLAIN.layer_bytes[0]


def test_forward_gets_its_pages_before_it_runs_and_its_tokens_count_when_it_ends() -> None:
    stage = Stage()
    stage.register("a")
    step = stage.begin("a", 3)
    assert (len(table(stage)), stage.length("a")) == (2, 0)
    stage.end_step(step)
    assert stage.length("a") == 3
    assert news(stage, commands.RecordFence) == [commands.RecordFence(step, Fence(Lane.COMPUTE, 1))]


def test_voided_forward_leaves_neither_tokens_nor_pages() -> None:
    stage = with_tokens(3)
    stage.void_step(stage.begin("a", 5))
    assert (stage.length("a"), len(table(stage)), stage.core.ledger.owned(GROUP)) == (3, 2, 2)
    stage.come_to_rest()
    assert stage.free == 6
    stage.reads("a")


def test_forward_without_new_tokens_takes_no_page() -> None:
    stage = with_tokens(3)
    stage.append("a", 0)
    assert (stage.length("a"), stage.free) == (3, 6)


def test_forward_does_not_wait_for_a_copy_that_hangs_on_the_tail_it_writes() -> None:
    """What that copy stores is used by nobody, and it may hang for ever."""
    stage = with_tokens(3, Stage(config=SwapConfig(segment_bytes=1, copy_deadline_ns=10)))
    stage.fate = lambda copy: "hang"
    assert stage.preempt("a")
    stage.now_ns += 10
    assert stage.do(events.Tick())
    stage.begin("a", 1)
    (granted,) = news(stage, commands.StepGranted)[-1:]
    assert granted.after == ()


def test_forward_that_needs_pages_of_a_restore_that_drains_waits_for_the_drain() -> None:
    stage = Stage(pages=4)
    stage.parked("a", 8)
    stage.register("b")
    assert stage.restore("a")
    assert stage.do(events.CancelRestore(A))
    assert stage.begin_step(StepId(900), {B: 8}), "the pages are on their way"
    assert StepId(900) in stage.waiting
    stage.come_to_rest()
    stage.end_step(StepId(900))
    stage.come_to_rest()
    stage.reads("b")


def test_forward_waits_for_pages_that_are_on_their_way_and_gets_them_in_turn() -> None:
    stage = with_tokens(8, Stage(pages=6))
    stage.register("b", "c")
    assert stage.preempt("a")
    assert stage.begin_step(StepId(900), {B: 8})
    assert stage.begin_step(StepId(901), {C: 2}), "its page is there, but it is behind the other"
    assert list(stage.waiting) == [900, 901]
    stage.come_to_rest()
    assert not stage.waiting
    assert [granted.step for granted in news(stage, commands.StepGranted)][-2:] == [900, 901]


def test_forward_whose_pages_are_not_on_their_way_is_refused_by_number() -> None:
    stage = with_tokens(8, Stage(pages=5))
    stage.register("b")
    message = r"over \['b'\] lacks pages \(1 of layer group 0\) and none are on their way: preempt or finish"
    with pytest.raises(PagesExhausted, match=message):
        stage.core.handle(events.BeginStep(StepId(900), {B: 4}), 0)
    assert stage.core.counters["pages_exhausted"] == 1
    assert not stage.core.steps
    stage.append("b", 2)


def test_forward_that_waits_is_refused_when_its_pages_stop_coming() -> None:
    stage = with_tokens(8, Stage(pages=4))
    stage.register("b")
    assert stage.preempt("a")
    assert stage.begin_step(StepId(900), {B: 2})
    assert stage.do(events.CancelPreempt(A))
    stage.come_to_rest()
    (refused,) = news(stage, commands.StepRefused)
    assert isinstance(refused.cause, PagesExhausted)
    stage.reads("a")


def waiting_forward_of_b() -> Stage:
    stage = with_tokens(4, Stage(pages=4))
    stage.register("b")
    stage.append("b", 3)
    stage.come_to_rest()
    assert stage.preempt("a")
    assert stage.begin_step(StepId(900), {B: 4})
    assert StepId(900) in stage.waiting
    return stage


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (events.Preempt(B), "was preempted while its forward waited for pages"),
        (events.Evict(B), "was evicted while its forward waited for pages"),
        (events.Finish(B), "was finished while its forward waited for pages"),
        (events.Truncate(B, 1), "was truncated while its forward waited for pages"),
    ],
)
def test_forward_that_waits_is_refused_when_its_sequence_is_moved(what: events.Event, why: str) -> None:
    stage = waiting_forward_of_b()
    stage.tokens[B] = stage.tokens[B][: 1 if isinstance(what, events.Truncate) else None]
    assert stage.do(what)
    (refused,) = news(stage, commands.StepRefused)
    assert why in str(refused.cause)
    stage.come_to_rest()
    assert not stage.core.steps


def test_cancelled_forward_that_waits_is_forgotten() -> None:
    stage = waiting_forward_of_b()
    assert stage.do(events.CancelStep(StepId(900)))
    del stage.waiting[StepId(900)]
    assert stage.do(events.CancelStep(StepId(900)))
    assert stage.core.counters["late_cancels"] == 1
    stage.come_to_rest()
    stage.append("b", 1)


def test_cancel_of_a_granted_forward_is_refused_with_the_remedy() -> None:
    stage = with_tokens(3)
    step = stage.begin("a", 1)
    with pytest.raises(ProtocolError, match=f"forward {step} has its pages: end it or void it"):
        stage.core.handle(events.CancelStep(step), 0)


@pytest.mark.parametrize("event", [events.EndStep, events.VoidStep])
def test_end_of_a_forward_that_is_not_under_way_is_refused(event: Callable[[StepId], events.Event]) -> None:
    stage = waiting_forward_of_b()
    for step in (StepId(900), StepId(901)):
        with pytest.raises(ProtocolError, match=f"forward {step} is not under way: begin it and await its pages first"):
            stage.core.handle(event(step), 0)


def in_a_forward(stage: Stage) -> None:
    stage.begin("a", 1)


def parked(stage: Stage) -> None:
    assert stage.preempt("a")
    stage.come_to_rest()


def finishing(stage: Stage) -> None:
    assert stage.preempt("a")
    assert stage.finish("a")


def evicted(stage: Stage) -> None:
    assert stage.do(events.Evict(A))


@pytest.mark.parametrize(
    ("before", "appends", "error", "message"),
    [
        (in_a_forward, {A: 1}, ProtocolError, "is in a forward already: end that one first"),
        (parked, {A: 1}, ProtocolError, "is parked: restore it before the forward"),
        (finishing, {A: 1}, ProtocolError, "is finishing: it takes part in no forward"),
        (evicted, {A: 1}, KVEvicted, r"has no KV \(3 tokens were dropped\): reset it, run them again"),
        (lambda stage: None, {A: -1}, ProtocolError, "appending -1 tokens to sequence 'a': give 0 or more"),
        (lambda stage: None, {A: 6}, ProtocolError, "has 3 tokens, 6 more exceed its max_tokens=8: register it"),
        (lambda stage: None, {}, ProtocolError, "needs at least one sequence"),
    ],
)
def test_forward_that_the_state_does_not_allow_is_refused_with_the_remedy(
    before: Callable[[Stage], None], appends: dict[SeqId, int], error: type[Exception], message: str
) -> None:
    stage = with_tokens(3)
    before(stage)
    with pytest.raises(error, match=message):
        stage.core.handle(events.BeginStep(StepId(900), appends), 0)


def test_forward_of_a_number_that_is_under_way_is_refused() -> None:
    stage = with_tokens(3)
    with_tokens(3, stage, "b")
    step = stage.begin("a", 1)
    with pytest.raises(
        ProtocolError, match=f"forward {step} is under way already: give every forward an id of its own"
    ):
        stage.core.handle(events.BeginStep(step, {B: 1}), 0)


def test_first_forward_after_a_restore_makes_its_chunks_resident() -> None:
    stage = with_tokens(8)
    trip(stage)
    assert states(stage) == {ChunkState.GPU_READY}
    stage.append("a", 0)
    assert states(stage) == {ChunkState.GPU_RESIDENT}


def test_forward_that_lacks_pages_takes_those_of_a_partial_restore() -> None:
    stage = Stage(pages=6)
    stage.parked("a", 8)
    with_tokens(8, stage, "b")
    assert stage.restore("a")
    stage.come_to_rest()
    assert (stage.free, stage.state("a")) == (0, SequenceState.PREFETCHING)
    stage.register("c")
    stage.append("c", 4)
    assert stage.core.counters["revoked_restores"] == 1
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.PREFETCHING
    for name in "bc":
        assert stage.finish(name)
    stage.come_to_rest()
    stage.reads("a")


def gated(more: int = 1, config: SwapConfig | None = None) -> tuple[Stage, StepId]:
    """A forward of A begins while its restore of 7 tokens is under way."""
    stage = Stage(config=config or SwapConfig(segment_bytes=1))
    stage.parked("a", 7)
    assert stage.restore("a")
    return stage, stage.begin("a", more)


def test_gated_forward_computes_each_layer_once_it_has_landed() -> None:
    stage, step = gated()
    assert not stage.can_run(Lane.COMPUTE)
    stage.run(Lane.IN, 4)
    stage.tell()
    stage.tell()
    assert news(stage, commands.LayerReady) == [commands.LayerReady(A, LayerId(0))]
    stage.run(Lane.COMPUTE)
    assert not stage.can_run(Lane.COMPUTE), "layer 1 has not been told"
    stage.end_step(step)
    stage.come_to_rest()
    assert stage.length("a") == 8
    stage.reads("a")


@pytest.mark.parametrize("ended", [False, True])
def test_gated_forward_whose_restore_fails_is_void_and_everything_else_as_before(ended: bool) -> None:
    stage, step = gated()
    cause = TransferError("bad link")
    if ended:
        stage.end_step(step)
    stage.device.lanes[Lane.IN].clear()
    for copy in copies_of(stage, Lane.IN):
        assert stage.do(events.CopyFailed(copy.op, cause))
    if not ended:
        assert not news(stage, commands.RestoreUndone), "the forward still pins it"
        stage.end_step(step)
    assert news(stage, commands.RestoreUndone) == [commands.RestoreUndone(A, cause, 1)]
    assert (stage.state("a"), stage.length("a")) == (SequenceState.OFFLOADED, 7)


def test_gated_forward_that_is_voided_leaves_the_restore_to_go_on() -> None:
    stage, step = gated(more=1)
    stage.void_step(step)
    stage.come_to_rest()
    assert (stage.state("a"), stage.length("a")) == (SequenceState.GPU_READY, 7)
    stage.reads("a")


def test_gated_forward_before_all_pages_are_granted_is_refused() -> None:
    stage = Stage(pages=4)
    stage.parked("a", 8)
    with_tokens(2, stage, "b")
    assert stage.restore("a")
    with pytest.raises(ProtocolError, match="is restoring: restore it before the forward"):
        stage.core.handle(events.BeginStep(StepId(900), {A: 0}), 0)


def test_gated_forward_that_appends_to_a_shared_tail_is_refused_one_that_reads_is_not() -> None:
    stage = with_tokens(3)
    stage.fork(A, B, 8)
    for name in "ab":
        assert stage.preempt(name)
        stage.come_to_rest()
    assert stage.restore("a")
    with pytest.raises(ProtocolError, match="shares its tail: await the whole restore before a forward appends to it"):
        stage.core.handle(events.BeginStep(StepId(900), {A: 1}), 0)
    stage.append("a", 0)
    stage.come_to_rest()


def forward_that_ends_before_its_copies_are_submitted() -> None:
    """The forward's own fence is on the pages that the copies still have to fill: they must not wait for it."""
    stage, step = gated(config=SwapConfig(segment_bytes=1, inflight_bytes_per_sequence=1))
    stage.end_step(step)
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.GPU_READY, "the copies and the forward wait for each other"
    stage.reads("a")


def test_copies_do_not_wait_for_the_forward_that_waits_for_them() -> None:
    forward_that_ends_before_its_copies_are_submitted()


def test_copies_that_wait_for_whoever_touched_the_pages_last_block_their_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def before_fill(core: SwapCore, chunks: list[Chunk]) -> tuple[Fence, ...]:
        return tuple(fence for chunk in chunks for fence in core.ledger.before_write(chunk.live_pages(), Lane.IN))

    monkeypatch.setattr(copies, "_before_fill", before_fill)
    with pytest.raises(AssertionError, match="wait for each other"):
        forward_that_ends_before_its_copies_are_submitted()


def forward_and_a_restore_into_pages_behind_it() -> None:
    """A's forward holds the compute lane until A's copies come; C's come first and wait for what is behind it."""
    stage = Stage(pages=10, config=SwapConfig(segment_bytes=1, inflight_bytes_per_sequence=1))
    for name in "ac":
        stage.parked(name, 8)
    with_tokens(8, stage, "b")
    assert stage.restore("a", priority=9)
    stage.append("a", 0)
    stage.append("b", 0)
    assert stage.finish("b")
    assert stage.restore("c", priority=0)
    stage.come_to_rest()
    for name in "ac":
        assert stage.state(name) is not SequenceState.PREFETCHING, "the copies of c hold up those of a"
        stage.reads(name)


def test_copies_that_a_forward_waits_for_go_before_all_others() -> None:
    forward_and_a_restore_into_pages_behind_it()


def test_copies_of_others_that_pass_those_of_a_gated_forward_block_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "gate", restore.fill_tables)
    with pytest.raises(AssertionError, match="hold up"):
        forward_and_a_restore_into_pages_behind_it()


def test_two_forks_in_one_forward_copy_their_shared_tail_once() -> None:
    stage = with_tokens(3, Stage(pages=4))
    stage.fork(A, B, 8)
    assert stage.begin_step(StepId(900), {A: 1, B: 1}), "2 pages for one of them are enough"
    stage.end_step(StepId(900))
    assert stage.core.counters["tails_copied_on_write"] == 1
    stage.come_to_rest()
    stage.reads("a")
    stage.reads("b")
