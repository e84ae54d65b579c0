"""Preempts when the host tier is full, in pieces, or does not answer."""

import pytest

from swapkv.config import HostFull, SwapConfig
from swapkv.errors import DrainTimeout, HostTierFull, KVEvicted
from swapkv.fsm import commands, events
from swapkv.fsm.core import SwapCore
from swapkv.fsm.queries import SequenceState
from swapkv.ids import GroupId, SeqId
from swapkv.layout import KVLayout
from tests.kit.scenes import news, trip, with_tokens
from tests.kit.stage import GROUP, PLAIN, Stage

A, B = SeqId("a"), SeqId("b")


def test_spare_host_copies_are_reclaimed_before_anybody_is_refused() -> None:
    stage = with_tokens(7, Stage(pages=8, host_chunks=2))
    trip(stage)
    assert stage.core.host.used == stage.core.host.total, "a is on the device and has a copy too"
    with_tokens(4, stage, "b")
    assert stage.preempt("b")
    stage.come_to_rest()
    assert stage.core.counters["reclaimed_copies"] == 1
    assert stage.state("b") is SequenceState.OFFLOADED
    assert stage.preempt("a"), "it goes by recompute, as its copy is gone"
    assert stage.state("a") is SequenceState.EVICTED


def test_host_room_in_pieces_is_reclaimed_until_each_chunk_has_its_slot() -> None:
    """Two groups, of 1 and 3 layers: room for a large slot may be there only once small neighbours are given up."""
    layout = KVLayout.dense(
        num_layers=4, num_kv_heads=1, head_dim=4, page_size=2, chunk_tokens=4, windows=[64, None, None, None]
    )
    stage = Stage(pages=12, layout=layout)
    small, large = (layout.chunk_bytes(GroupId(g)) for g in range(2))
    assert large == 3 * small
    config = SwapConfig(segment_bytes=1, host_full=HostFull.REFUSE)
    stage.core = SwapCore(layout, [12, 12], 3 * (small + large), config)
    stage.device.core = stage.core
    for name in "abc":
        with_tokens(4, stage, name)
        trip(stage, name)
    host = stage.core.host
    assert host.used == host.total
    for chunk in [c for c in stage.core.copied.values() if c.group == 0]:
        stage.core.free_slot(chunk)
    assert host.total - host.used == large, "enough bytes, but in three pieces"
    with_tokens(4, stage, "d")
    assert stage.preempt("d")
    stage.come_to_rest()
    assert stage.state("d") is SequenceState.OFFLOADED


def test_full_host_that_may_recompute_drops_the_kv_and_says_so() -> None:
    stage = with_tokens(7, Stage(host_chunks=1))
    assert stage.preempt("a")
    assert news(stage, commands.Parked) == [commands.Parked(A, commands.PreemptOutcome.RECOMPUTE)]
    assert (stage.state("a"), stage.free) == (SequenceState.EVICTED, 8)
    assert stage.core.counters["evicted_tokens"] == 7
    with pytest.raises(KVEvicted, match="has no KV: reset it"):
        stage.core.handle(events.Preempt(A), 0)


def test_full_host_that_may_not_recompute_refuses_by_number_and_changes_nothing() -> None:
    stage = with_tokens(4, Stage(host_chunks=2, config=SwapConfig(segment_bytes=1, host_full=HostFull.REFUSE)))
    stage.parked("b", 8)
    with pytest.raises(
        HostTierFull, match=r"needs 128 bytes of host memory, 0 of 256 are free: .* host_full=RECOMPUTE"
    ):
        stage.core.handle(events.Preempt(A), 0)
    assert stage.state("a") is SequenceState.GPU_RESIDENT
    assert stage.core.counters["host_full_refusals"] == 1
    stage.reads("a")


def test_hung_offload_is_given_up_and_its_slot_is_kept_from_others_until_it_ends() -> None:
    stage = with_tokens(7, Stage(config=SwapConfig(segment_bytes=1, copy_deadline_ns=10)))
    stage.fate = lambda copy: "hang"
    assert stage.preempt("a")
    stage.now_ns += 10
    assert stage.do(events.Tick())
    (undone,) = news(stage, commands.ParkUndone)
    assert isinstance(undone.cause, DrainTimeout)
    assert (stage.state("a"), stage.core.host.used) == (SequenceState.GPU_RESIDENT, 2 * PLAIN.chunk_bytes(GROUP))
    assert stage.finish("a")
    assert stage.core.ledger.quarantined(GROUP) == 4, "the copy may still read them"
    stage.unhang()
    stage.come_to_rest()
    assert (stage.free, stage.core.host.used) == (8, 0)
    assert stage.core.counters["late_completions"] == 4


def test_preempt_behind_copies_that_hang_and_fill_the_lane_gives_up_at_once() -> None:
    stage = with_tokens(2, Stage(config=SwapConfig(segment_bytes=1, copy_deadline_ns=10, ops_per_lane=2)))
    with_tokens(2, stage, "b")
    stage.fate = lambda copy: "hang"
    assert stage.preempt("a")
    stage.now_ns += 10
    assert stage.do(events.Tick())
    assert stage.preempt("b")
    undone = news(stage, commands.ParkUndone)[-1]
    assert undone.sequence == B
    assert "2 copies hang on lane OUT" in str(undone.cause)
    assert not stage.core.offloads
