"""What a sequence needs at its peak: refused by number if it can never fit, and never in want if it fits exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv.budget.admission import Need, need_while_shared, peak_need, refuse_what_never_fits
from swapkv.config import HostFull, SwapConfig
from swapkv.errors import NeverFits
from swapkv.fsm import edit, events
from swapkv.fsm.core import SwapCore
from swapkv.ids import Lane, SeqId
from swapkv.layout import KVLayout
from tests.kit.stage import Stage

A = SeqId("a")
MAX_TOKENS = 14


def layout(window: int, slack: int, page_size: int = 2) -> KVLayout:
    return KVLayout.dense(
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        page_size=page_size,
        chunk_tokens=4,
        windows=[window, None],
        truncate_slack=slack,
    )


class ExactStage(Stage):
    """A stage with exactly the pages and host bytes that one sequence needs."""

    def __init__(self, layout: KVLayout, step_tokens: int, max_tokens: int = MAX_TOKENS) -> None:
        need = peak_need(layout, max_tokens, step_tokens)
        super().__init__(layout=layout)
        config = SwapConfig(segment_bytes=1, host_full=HostFull.REFUSE)
        self.core = SwapCore(layout, need.pages, need.host_bytes, config)
        self.device.core = self.core
        assert self.do(events.Register(A, max_tokens, step_tokens))
        self.tokens[A] = []

    def grow(self, how: str, count: int) -> None:
        """Add tokens: at once, after a trip to the host and back, or while the way back is not over."""
        count = min(count, MAX_TOKENS - self.length("a"))
        if how != "stay":
            assert self.preempt("a")
            self.come_to_rest()
            assert self.restore("a")
        if how == "trip":
            self.come_to_rest()
        self.append("a", count)
        self.come_to_rest()


HOW = st.sampled_from(["stay", "trip", "gated"])


@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(1, 8),
    slack=st.integers(0, 3),
    step_tokens=st.integers(1, 6),
    moves=st.lists(st.tuples(HOW, st.integers(1, 6)), min_size=8, max_size=16),
)
def test_sequence_alone_in_a_pool_of_its_exact_need_always_gets_its_pages(
    window: int, slack: int, step_tokens: int, moves: list[tuple[str, int]]
) -> None:
    stage = ExactStage(layout(window, slack), step_tokens)
    for how, count in moves:
        stage.grow(how, min(count, step_tokens))
    assert stage.preempt("a")


def append_to_what_a_fork_left_behind() -> None:
    """The chunk that the fork shared is longer than the sequence: its last page has to go first."""
    stage = Stage(pages=2)
    stage.register("a", max_tokens=4)
    stage.append("a", 4)
    stage.fork(A, SeqId("b"), 4)
    stage.truncate(A, 1)
    assert stage.finish("b")
    stage.append("a", 2)
    stage.come_to_rest()


def test_sequence_that_shared_a_longer_chunk_gets_its_pages() -> None:
    append_to_what_a_fork_left_behind()


def test_sequence_that_does_not_tidy_up_first_is_refused_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "tidy", lambda core, sequence: None)
    with pytest.raises(AssertionError, match="no forward of a"):
        append_to_what_a_fork_left_behind()


def test_peak_need_counts_pages_by_group_and_host_slots_for_whole_chunks() -> None:
    need = peak_need(layout(window=3, slack=1), max_tokens=50, step_tokens=2)
    assert need.pages == (4, 25), "a window of 3, 1 of slack and 2 new tokens touch 4 pages; 50 tokens take 25"
    slot = layout(window=3, slack=1).chunk_bytes
    assert need.host_bytes == 3 * slot(0) + 13 * slot(1)  # type: ignore[arg-type]


def test_need_while_shared_keeps_the_rest_of_a_chunk_in_windowed_groups_only() -> None:
    need = Need(pages=(4, 25), host_bytes=77)
    assert need_while_shared(layout(window=3, slack=1), need) == Need(pages=(5, 25), host_bytes=77)


@pytest.mark.parametrize(("pages", "group", "total"), [((3, 25), 0, 3), ((4, 24), 1, 24)])
def test_sequence_that_lacks_one_page_of_a_group_is_refused_by_name_and_number(
    pages: tuple[int, int], group: int, total: int
) -> None:
    need = Need(pages=(4, 25), host_bytes=0)
    message = f"sequence 'a' needs {need.pages[group]} pages of layer group {group} at its peak, the pool has {total}"
    with pytest.raises(NeverFits, match=message):
        refuse_what_never_fits(A, need, pages, 0, HostFull.RECOMPUTE)
    refuse_what_never_fits(A, need, need.pages, 0, HostFull.RECOMPUTE)


def test_sequence_that_exceeds_the_host_tier_is_refused_only_if_recompute_is_not_allowed() -> None:
    need = Need(pages=(1,), host_bytes=100)
    with pytest.raises(
        NeverFits, match="needs 100 bytes of host memory when preempted, the tier has 99: raise host_bytes"
    ):
        refuse_what_never_fits(A, need, [1], 99, HostFull.REFUSE)
    refuse_what_never_fits(A, need, [1], 100, HostFull.REFUSE)
    refuse_what_never_fits(A, need, [1], 99, HostFull.RECOMPUTE)


def test_registering_what_never_fits_changes_nothing() -> None:
    stage = Stage(pages=3)
    with pytest.raises(NeverFits, match="'a' needs 4 pages"):
        stage.core.handle(events.Register(A, 8), 0)
    assert not stage.core.sequences
    stage.register("a", max_tokens=6)


def test_pages_in_quarantine_do_not_count_at_admission() -> None:
    stage = Stage(pages=4, config=SwapConfig(segment_bytes=1, copy_deadline_ns=10))
    stage.parked("a", 4)
    stage.fate = lambda copy: "hang"
    assert stage.restore("a")
    stage.now_ns = 10
    assert stage.do(events.Tick())
    assert stage.core.ledger.quarantined(0) == 2  # type: ignore[arg-type]
    with pytest.raises(NeverFits, match="the pool has 2"):
        stage.core.handle(events.Register(SeqId("b"), 6), 10)
    stage.unhang()
    stage.run_eagerly(Lane.IN)
    stage.come_to_rest()
    stage.register("b", max_tokens=6)


def test_fork_takes_the_step_size_of_its_parent() -> None:
    """Else a windowed model's fork would be refused where its parent was not."""
    stage = Stage(pages=20, layout=layout(window=3, slack=0))
    stage.core = SwapCore(stage.core.layout, [6, 20], 10**6)
    stage.device.core = stage.core
    assert stage.do(events.Register(A, 40, 2))
    stage.tokens[A] = []
    stage.append("a", 2)
    stage.fork(A, SeqId("b"), 40)
    assert stage.core.sequences[SeqId("b")].step_tokens == 2
    stage.finish("b")
    assert not stage.do(events.Fork(A, SeqId("b"), 41)), "41 tokens take 21 pages"


def test_fork_of_a_parent_that_may_add_everything_at_once_may_do_so_too() -> None:
    stage = Stage(pages=20)
    stage.register("a", max_tokens=8)
    stage.fork(A, SeqId("b"), 12)
    assert stage.core.sequences[SeqId("b")].step_tokens == 12
