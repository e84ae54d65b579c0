"""KV that would be thrown away before it is safe elsewhere."""

import pytest

from swapkv.config import HostFull, SwapConfig
from swapkv.errors import TransferError
from swapkv.fsm import commands, offload
from swapkv.fsm.queries import SequenceState
from swapkv.ids import Lane
from tests.kit.stage import PLAIN, SMALL_COPIES, WINDOWED, Stage


def preempt_with_no_room_for_all() -> None:
    stage = Stage(host_chunks=3, config=SwapConfig(segment_bytes=1, host_full=HostFull.REFUSE))
    stage.parked("a", 7)
    stage.register("b")
    stage.append("b", 7)
    stage.come_to_rest()
    free, used = stage.free, stage.core.host.used
    assert not stage.preempt("b")
    assert (stage.free, stage.core.host.used) == (free, used)
    assert stage.state("b") is SequenceState.GPU_RESIDENT
    assert stage.core.counters["host_full_refusals"] == 1
    stage.reads("b")


def test_preempt_with_room_for_one_of_two_chunks_moves_nothing_and_is_refused() -> None:
    """KF-13: it never counts as off the device with less than all of it saved."""
    preempt_with_no_room_for_all()


def test_preempt_that_ignores_what_was_reserved_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-13, without its guard."""
    monkeypatch.setattr(offload, "_reserve", lambda core, leaving: True)
    with pytest.raises(AssertionError):
        preempt_with_no_room_for_all()


@pytest.mark.parametrize("fate", ["fail", "reject"])
@pytest.mark.parametrize("nth", range(4))
def test_preempt_with_one_copy_failing_frees_no_page(nth: int, fate: str) -> None:
    """KF-13: device pages are freed only when every one of them is saved."""
    stage = Stage()
    stage.register("a")
    stage.append("a", 7)
    stage.come_to_rest()
    fates = iter([*["ok"] * nth, fate])
    stage.fate = lambda copy: next(fates, "ok")
    assert stage.preempt("a")
    stage.come_to_rest()
    undone = [news for news in stage.news if isinstance(news, commands.ParkUndone)]
    assert [type(news.cause) for news in undone] == [TransferError]
    assert stage.state("a") is SequenceState.GPU_RESIDENT
    assert stage.free == 4
    stage.reads("a")
    assert stage.preempt("a")
    stage.come_to_rest()
    assert stage.restore("a")
    stage.come_to_rest()
    stage.reads("a")


@pytest.mark.parametrize("lost", range(2))
def test_restore_with_one_layer_group_missing_is_undone_whole(lost: int) -> None:
    """KF-16: a sequence is back with all its groups or not at all, and nothing of it is computed again."""
    stage = Stage(layout=WINDOWED, config=SMALL_COPIES)
    stage.parked("a", 7)
    stage.fate = lambda copy: "fail" if copy.lane is Lane.IN and copy.group == lost else "ok"
    assert stage.restore("a")
    stage.come_to_rest()
    assert stage.state("a") is SequenceState.OFFLOADED
    assert not stage.told(commands.Restored, "a")
    stage.fate = lambda copy: "ok"
    assert stage.restore("a")
    stage.come_to_rest()
    assert stage.core.sequences["a"].tokens == len(stage.tokens["a"]) == 7  # type: ignore[index]
    stage.reads("a")


@pytest.mark.parametrize("host_chunks", [2, 0])
def test_requests_with_a_host_tier_for_one_or_none_all_finish(host_chunks: int) -> None:
    """KF-54: eight take turns on the pages of five; where the tier has no room, what was dropped is computed again."""
    stage = Stage(pages=20, host_chunks=host_chunks, layout=PLAIN)
    names = [f"r{n}" for n in range(8)]
    stage.register(*names)
    recomputed = 0
    for name in [name for _ in range(3) for name in names]:
        if stage.state(name) is SequenceState.OFFLOADED:
            assert stage.restore(name)
            stage.come_to_rest()
        if stage.state(name) is SequenceState.EVICTED:
            recomputed += 1
            assert stage.recompute(name)
        stage.append(name, 2)
        stage.reads(name)
        on_device = [n for n in names if stage.state(n) in (SequenceState.GPU_RESIDENT, SequenceState.GPU_READY)]
        if len(on_device) >= 5:
            assert stage.preempt(on_device[0] if on_device[0] != name else on_device[1])
            stage.come_to_rest()
        assert stage.core.host.used <= stage.core.host.total
    assert recomputed == sum(news.outcome is commands.PreemptOutcome.RECOMPUTE for news in parked(stage)) - dropped(
        stage
    )
    assert all(stage.length(name) == 6 for name in names)
    for name in names:
        assert stage.finish(name)
    stage.come_to_rest()
    assert stage.free == 20


def parked(stage: Stage) -> list[commands.Parked]:
    return [news for news in stage.news if isinstance(news, commands.Parked)]


def dropped(stage: Stage) -> int:
    """Sequences whose KV is gone at present."""
    return sum(stage.state(name) is SequenceState.EVICTED for name in stage.core.sequences)


def test_host_tier_offered_more_than_it_holds_never_holds_more() -> None:
    """KF-47, for the host tier: its cap holds, and what is dropped for it is counted."""
    stage = Stage(pages=50, host_chunks=5)
    names = [f"r{n}" for n in range(12)]
    for name in names:
        stage.register(name)
        stage.append(name, 3)
    stage.come_to_rest()
    for name in names:
        assert stage.preempt(name)
        stage.come_to_rest()
        assert stage.core.host.used <= stage.core.host.total
    assert stage.core.host.used == stage.core.host.total
    assert stage.core.counters["evictions"] == dropped(stage) == 7
