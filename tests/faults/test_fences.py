"""Copies and forwards that touch the same page, in the order in which that goes wrong."""

from contextlib import ExitStack
from random import Random

import numpy as np
import pytest

from swapkv.config import HostFull, SwapConfig
from swapkv.errors import ProtocolError
from swapkv.executor import Executor
from swapkv.fsm import commands, events, offload, restore
from swapkv.fsm.fences import FenceClock
from swapkv.fsm.ledger import PageLedger, PageState
from swapkv.fsm.queries import SequenceState
from swapkv.ids import ChunkId, Lane, SeqId, StepId
from swapkv.stepped import open_stepped_pool
from tests.kit.deferred import DeferredDevice
from tests.kit.late_writing import LateWriter
from tests.kit.stage import GROUP, PLAIN, Stage, careless
from tests.test_pool import small_layout

A, B = SeqId("a"), SeqId("b")


def offload_before_its_forward_has_run() -> None:
    stage = Stage()
    stage.register("a")
    stage.append("a", 7)
    assert stage.preempt("a")
    stage.run_eagerly(Lane.OUT)
    stage.come_to_rest()
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_offload_before_its_forward_has_run_waits_for_it() -> None:
    """KF-01."""
    offload_before_its_forward_has_run()


def test_offload_without_the_wait_for_the_writer_stores_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-01, without its guard."""
    monkeypatch.setattr(PageLedger, "before_read", lambda self, pages, lane: ())
    with pytest.raises(AssertionError, match="reads"):
        offload_before_its_forward_has_run()


def restore_into_pages_that_are_still_read() -> None:
    stage = Stage(pages=4)
    stage.parked("b", 7)
    stage.register("a")
    stage.append("a", 7)
    stage.come_to_rest()
    stage.append("a", 0)
    assert stage.finish("a")
    assert stage.restore("b")
    assert stage.told(commands.PagesReady, "b"), "the pages are handed on before they are read"
    stage.run_eagerly(Lane.IN)
    stage.come_to_rest()
    stage.reads("b")


def test_restore_into_pages_that_are_still_read_waits_for_the_reader() -> None:
    """KF-02."""
    restore_into_pages_that_are_still_read()


def test_restore_without_the_wait_for_the_reader_overwrites_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-02, without its guard."""
    monkeypatch.setattr(PageLedger, "before_write", lambda self, pages, lane: ())
    with pytest.raises(AssertionError, match="reads"):
        restore_into_pages_that_are_still_read()


def test_copies_with_nothing_under_way_wait_for_nothing() -> None:
    """KF-02: both directions carry a wait, and it is none when nothing moves."""
    stage = Stage()
    stage.parked("a", 7)
    assert stage.restore("a")
    stage.come_to_rest()
    moved = [news for news in stage.news if isinstance(news, commands.Copy)]
    assert {copy.lane for copy in moved} == {Lane.OUT, Lane.IN}
    assert all(copy.after == () for copy in moved)


def pages_of_a_preempt_that_is_half_done() -> None:
    stage = Stage(pages=8)
    stage.register("a", "b", max_tokens=16)
    stage.append("a", 16)
    stage.come_to_rest()
    assert stage.preempt("a")
    stage.run(Lane.OUT, 3)
    for _ in range(3):
        stage.tell()
    assert stage.free == 0
    step = stage.begin("b", 16)
    assert step in stage.waiting
    stage.come_to_rest()
    assert step in stage.forwards
    stage.end_step(step)
    stage.come_to_rest()
    assert stage.preempt("b")
    stage.come_to_rest()
    for name in ("a", "b"):
        assert stage.restore(name)
        stage.come_to_rest()
        stage.reads(name)
        assert stage.preempt(name)
        stage.come_to_rest()


def test_pages_of_a_preempt_that_is_half_done_are_nobody_elses() -> None:
    """KF-03: 3 of 8 copies are done."""
    pages_of_a_preempt_that_is_half_done()


def test_preempt_that_does_not_wait_for_its_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-03, without its guard."""
    monkeypatch.setattr(offload, "settle", careless(offload.settle, "offload"))
    with pytest.raises(AssertionError, match="without a clean copy"):
        pages_of_a_preempt_that_is_half_done()


def sequence_dropped_while_its_offload_is_queued() -> None:
    stage = Stage(pages=4)
    stage.register("a", "b")
    stage.append("a", 7)
    stage.come_to_rest()
    assert stage.preempt("a")
    assert not stage.do(events.Evict(A)), "a sequence on its way is not dropped"
    assert stage.finish("a")
    assert not stage.told(commands.Gone, "a"), "gone before its copies have ended"
    assert stage.free == 0
    assert stage.core.host.used > 0
    stage.come_to_rest()
    assert stage.told(commands.Gone, "a")
    assert stage.core.host.used == 0
    stage.append("b", 7)
    stage.reads("b")


def test_sequence_dropped_while_its_offload_is_queued_keeps_its_pages_until_then() -> None:
    """KF-04."""
    sequence_dropped_while_its_offload_is_queued()


def test_sequence_dropped_without_the_wait_for_its_offload_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-04, without its guard."""
    monkeypatch.setattr(offload, "settle", careless(offload.settle, "offload"))
    with pytest.raises(AssertionError, match="gone before"):
        sequence_dropped_while_its_offload_is_queued()


def slowest_copy_of_a_preempt_is_told_last(slowest: int, *, remembered: int | None = None) -> None:
    """`remembered`: how many copies the preempt knows of at a time; None: all of its own."""
    stage = Stage()
    stage.register("a")
    stage.append("a", 7)
    stage.come_to_rest()
    assert stage.preempt("a")
    stage.run(Lane.OUT, 4)
    work = stage.core.offloads[A].offload
    assert work is not None
    while len(stage.reports) > 1:
        if remembered is not None:
            work.ops.intersection_update(sorted(work.ops)[:remembered])
        stage.tell(1 if slowest == 0 else 0)
        slowest -= slowest > 0
        assert not stage.told(commands.Parked, "a")
        assert stage.free == 4
    stage.tell()
    assert stage.told(commands.Parked, "a")
    assert stage.free == 8


@pytest.mark.parametrize("slowest", range(4))
def test_preempt_with_any_copy_told_last_ends_with_that_one(slowest: int) -> None:
    """KF-05: the fence covers every copy of the sequence, not the newest."""
    slowest_copy_of_a_preempt_is_told_last(slowest)


def test_preempt_that_remembers_one_copy_only_is_caught() -> None:
    """KF-05, without its guard: the end of one is taken for the end of all."""
    with pytest.raises(AssertionError, match="without a clean copy"):
        slowest_copy_of_a_preempt_is_told_last(3, remembered=1)


def hazards_of_a_slot_with_a_new_owner() -> None:
    clock = FenceClock()
    ledger = PageLedger([3], clock)
    (page, *_) = ledger.allocate(GROUP, ChunkId(10), 1).tolist()
    slot = np.array([page])
    reading = clock.issue(Lane.OUT)
    ledger.note_read(reading, slot)
    ledger.release(GROUP, slot)
    assert ledger.state_of(page) is PageState.FENCED, "free while it is read"
    rest = ledger.allocate(GROUP, ChunkId(44), 3)
    assert page in rest.tolist()
    assert ledger.before_write(slot, Lane.IN) == (reading,)
    assert ledger.before_read(slot, Lane.COMPUTE) == (), "a reader does not wait for a reader"
    clock.complete(reading)
    assert ledger.before_write(slot, Lane.IN) == ()


def test_hazards_of_a_slot_follow_the_slot_and_not_its_owner() -> None:
    """KF-06: keyed by the physical page, reads and writes apart."""
    hazards_of_a_slot_with_a_new_owner()


def test_hazards_that_are_not_noted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-06, without its guard."""
    monkeypatch.setattr(PageLedger, "note_read", lambda self, fence, pages: None)
    with pytest.raises(AssertionError, match="free while"):
        hazards_of_a_slot_with_a_new_owner()


def host_slot_that_a_restore_still_reads() -> None:
    stage = Stage(host_chunks=2, config=SwapConfig(segment_bytes=1, host_full=HostFull.REFUSE), pages=10)
    stage.register("a", "b", max_tokens=8)
    for name in ("a", "b"):
        stage.append(name, 7)
    stage.come_to_rest()
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.restore("a")
    assert stage.finish("a")
    assert not stage.preempt("b"), "the slots of a are read by its copies"
    stage.come_to_rest()
    assert stage.told(commands.Gone, "a")
    assert stage.preempt("b")
    stage.come_to_rest()
    assert stage.restore("b")
    stage.come_to_rest()
    stage.reads("b")


def test_host_slot_that_a_restore_still_reads_is_not_handed_on() -> None:
    """KF-08."""
    host_slot_that_a_restore_still_reads()


def test_host_slot_without_the_wait_for_its_readers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-08, without its guard."""
    monkeypatch.setattr(restore, "settle", careless(restore.settle, "restore"))
    with pytest.raises(AssertionError, match="slots of a"):
        host_slot_that_a_restore_still_reads()


def test_host_slot_that_nobody_has_is_not_given_back() -> None:
    """KF-08: an address that the tier does not know is an error, not ignored."""
    stage = Stage()
    stage.parked("a", 3)
    (offset,) = stage.core.host.taken()
    with pytest.raises(ProtocolError, match="not taken"):
        stage.core.host.free(offset + 1)
    assert stage.core.host.used == PLAIN.chunk_bytes(GROUP)


def host_tier_under_pressure_before_a_restore_begins() -> None:
    stage = Stage(host_chunks=2, pages=10)
    stage.parked("a", 7)
    stage.register("b")
    stage.append("b", 7)
    stage.come_to_rest()
    assert stage.preempt("b")
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.OFFLOADED
    assert stage.state("b") is SequenceState.EVICTED
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


def test_host_copy_that_is_the_only_one_survives_pressure_until_it_is_restored() -> None:
    """KF-11: nothing has to be pinned between a look-up and a restore."""
    host_tier_under_pressure_before_a_restore_begins()


def test_host_copy_that_anybody_may_reclaim_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-11, without its guard."""
    monkeypatch.setattr(offload, "_reclaimable", lambda core, chunk: True)
    with pytest.raises(AssertionError, match="without a clean copy"):
        host_tier_under_pressure_before_a_restore_begins()


def test_restore_of_what_was_dropped_is_a_typed_miss() -> None:
    """KF-11: never an assertion."""
    stage = Stage()
    stage.parked("a", 7)
    assert stage.do(events.Evict(A))
    assert not stage.restore("a")
    assert stage.state("a") is SequenceState.EVICTED
    assert stage.do(events.Reset(A))
    stage.tokens[A] = []
    assert stage.begin_step(StepId(99), {A: 7})


def forwards_on_two_streams_at_a_time() -> None:
    """One reads a sequence that is finished before it runs; the other is still open then, and its stream goes on."""
    device, layout = DeferredDevice(), small_layout()
    with open_stepped_pool(layout, num_pages=4, host_bytes=1 << 16, device=device) as pool:
        writer, second = LateWriter(pool), device.create_stream("compute-2")
        for name in ("a", "b"):
            writer.register(name, 16)
        with pool.forward({"a": 8}) as forward:
            writer.launch(forward, {"a": 8})
        device.run_one(Random(0))
        pool.poll()
        with ExitStack() as later, pool.forward({"a": 0}) as first:
            writer.launch(first, {"a": 0})
            other = later.enter_context(pool.forward({"b": 4}, stream=second))
            writer.launch(other, {"b": 4})
        pool.finish("a")
        with pool.forward({"b": 12}, stream=second) as forward:
            writer.launch(forward, {"b": 12})
        while second.runnable():
            second.run()
        while device.run_one(Random(0)):
            pool.poll()
        writer.verify()


def test_forwards_on_two_streams_at_a_time_keep_the_order_of_their_fences() -> None:
    """KF-02, between compute streams: pages that one stream still reads are not written by the other."""
    forwards_on_two_streams_at_a_time()


def test_forwards_on_two_streams_without_an_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-02, between compute streams, without its guard."""
    monkeypatch.setattr(Executor, "_join", lambda self, stream: None)
    with pytest.raises(AssertionError, match="reads"):
        forwards_on_two_streams_at_a_time()
