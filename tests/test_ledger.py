"""The page ledger and the fence clock against a naive model that remembers everything that ever touched a page."""

import tracemalloc
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swapkv.fsm.fences import FenceClock
from swapkv.fsm.ledger import PageLedger, PageState, latest
from swapkv.ids import ChunkId, Fence, GroupId, Lane, PhysicalPages

SIZES = (5, 4)
GROUPS = [GroupId(0), GroupId(1)]
G0 = GROUPS[0]
LANES = st.sampled_from(Lane)


def array(pages: list[int]) -> PhysicalPages:
    return np.array(pages, dtype=np.int64)


class LedgerAgainstHistory(RuleBasedStateMachine):
    """`state[p]`, `owner[p]`, `until[p]`: what the model says of a page. `touched[p]`: every fence, and its kind."""

    @initialize()
    def begin(self) -> None:
        self.clock = FenceClock()
        self.ledger = PageLedger(SIZES, self.clock)
        total = sum(SIZES)
        self.state = [PageState.FREE] * total
        self.owner = [-1] * total
        self.until: list[set[Fence]] = [set() for _ in range(total)]
        self.touched: list[list[tuple[Fence, str]]] = [[] for _ in range(total)]
        self.issued: list[Fence] = []
        self.reported: set[Fence] = set()
        self.stuck: set[Fence] = set()
        self.chunks = 0

    def passed(self, fence: Fence) -> bool:
        return all(Fence(fence.lane, value) in self.reported for value in range(1, fence.value + 1))

    def behind_stuck(self, fences: set[Fence]) -> bool:
        stuck = [s for s in self.stuck if not self.passed(s)]
        return any(s.lane is f.lane and s.value <= f.value for s in stuck for f in fences)

    def before_stuck(self, fence: Fence) -> set[Fence]:
        """The fence itself, or the last one that its lane was given before it hung, if that is not over."""
        values = [s.value for s in self.stuck if s.lane is fence.lane and not self.passed(s) and s.value <= fence.value]
        before = Fence(fence.lane, min(values) - 1) if values else fence
        return set() if not before.value or self.passed(before) else {before}

    def pending(self, pages: list[int], kinds: str, apart_from: Lane | None = None) -> set[Fence]:
        fences = (f for page in pages for f, kind in self.touched[page] if kind in kinds)
        return {f for f in fences if f.lane is not apart_from and not self.passed(f)}

    def pages(self, *states: PageState) -> list[int]:
        return [page for page, state in enumerate(self.state) if state in states]

    def open(self) -> list[Fence]:
        return [fence for fence in self.issued if fence not in self.reported]

    @rule(group=st.sampled_from(GROUPS), share=st.floats(0, 1))
    def allocate(self, group: GroupId, share: float) -> None:
        available = self.ledger.available(group)
        count = round(share * available)
        free = self.ledger.free(group)
        self.chunks += 1
        pages = self.ledger.allocate(group, ChunkId(self.chunks), count)
        assert pages.flags.owndata
        taken = pages.tolist()
        assert len(set(taken)) == count
        base = self.ledger.base(group)
        assert all(base <= page < base + SIZES[group] for page in taken)
        assert sum(self.state[page] is PageState.FREE for page in taken) == min(count, free), "free pages go first"
        assert all(self.state[page] in (PageState.FREE, PageState.FENCED) for page in taken)
        for page in taken:
            self.state[page], self.owner[page], self.until[page] = PageState.OWNED, self.chunks, set()
        pages[:] = -7

    @precondition(lambda self: self.pages(PageState.OWNED))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted({o for o in self.owner if o >= 0})))
        owned = [page for page, o in enumerate(self.owner) if o == owner]
        pages = data.draw(st.lists(st.sampled_from(owned), unique=True))
        group = GROUPS[0] if owned[0] < SIZES[0] else GROUPS[1]
        mine = array(pages)
        self.ledger.release(group, mine)
        mine[:] = -7
        until = self.pending(pages, "rw")
        for page in pages:
            self.owner[page], self.until[page] = -1, set(until)
            self.state[page] = PageState.FENCED if until else PageState.FREE
            if self.behind_stuck(until):
                self.state[page] = PageState.QUARANTINED

    @precondition(lambda self: self.pages(PageState.OWNED))
    @rule(lane=LANES, kind=st.sampled_from("rw"), data=st.data())
    def submit(self, lane: Lane, kind: str, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.pages(PageState.OWNED)), unique=True, min_size=1))
        fence = self.clock.issue(lane)
        self.issued.append(fence)
        (self.ledger.note_read if kind == "r" else self.ledger.note_write)(fence, array(pages))
        for page in pages:
            self.touched[page].append((fence, kind))

    @precondition(lambda self: self.pages(PageState.OWNED))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted({o for o in self.owner if o >= 0})))
        pages = [page for page, o in enumerate(self.owner) if o == owner]
        self.chunks += 1
        self.ledger.hand_over(array(pages), ChunkId(self.chunks))
        for page in pages:
            self.owner[page] = self.chunks

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(self.open()))
        assert self.clock.complete(fence)
        self.ledger.pass_fence()
        self.reported.add(fence)
        for page, until in enumerate(self.until):
            if self.state[page] in (PageState.FENCED, PageState.QUARANTINED) and all(self.passed(f) for f in until):
                self.state[page] = PageState.FREE

    @precondition(lambda self: self.reported)
    @rule(data=st.data())
    def complete_again(self, data: st.DataObject) -> None:
        assert not self.clock.complete(data.draw(st.sampled_from(sorted(self.reported))))

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def mark_stuck(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(self.open()))
        self.ledger.mark_stuck(fence)
        self.stuck.add(fence)
        for page in self.pages(PageState.FENCED):
            if self.behind_stuck(self.until[page]):
                self.state[page] = PageState.QUARANTINED

    @rule(lane=LANES, pages=st.lists(st.integers(0, sum(SIZES) - 1), unique=True))
    def ask(self, lane: Lane, pages: list[int]) -> None:
        writers = self.pending(pages, "w", lane)
        assert set(self.ledger.before_read(array(pages), lane)) == set(latest(writers))
        waits_for = {*writers, *(before for f in self.pending(pages, "r", lane) for before in self.before_stuck(f))}
        assert set(self.ledger.before_write(array(pages), lane)) == set(latest(waits_for))

    @invariant()
    def states_owners_and_sums_agree(self) -> None:
        self.ledger.check()
        assert [self.ledger.state_of(page) for page in range(sum(SIZES))] == self.state
        assert self.ledger.owners().tolist() == self.owner
        for group in GROUPS:
            base = self.ledger.base(group)
            states = self.state[base : base + SIZES[group]]
            counts = [self.ledger.free(group), self.ledger.owned(group)]
            counts += [self.ledger.fenced(group), self.ledger.quarantined(group)]
            assert counts == [states.count(state) for state in PageState]
            assert sum(counts) == self.ledger.total(group) == SIZES[group]

    @invariant()
    def fences_pass_in_the_order_of_their_lane(self) -> None:
        assert all(self.clock.passed(fence) == self.passed(fence) for fence in self.issued)
        for lane in Lane:
            not_passed = [f for f in self.issued if f.lane is lane and not self.passed(f)]
            assert self.clock.open_fences(lane) == len(not_passed)


LedgerAgainstHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerAgainstHistory = LedgerAgainstHistory.TestCase


def owned_ledger(pages: int = 4) -> tuple[FenceClock, PageLedger, PhysicalPages]:
    clock = FenceClock()
    ledger = PageLedger([pages], clock)
    return clock, ledger, ledger.allocate(G0, ChunkId(0), pages)


def test_released_page_with_a_copy_under_way_is_handed_on_and_its_new_owner_waits() -> None:
    clock, ledger, pages = owned_ledger()
    fence = clock.issue(Lane.OUT)
    ledger.note_read(fence, pages[:2])
    ledger.release(G0, pages[:2])
    assert (ledger.free(G0), ledger.fenced(G0), ledger.available(G0)) == (0, 2, 2)
    again = ledger.allocate(G0, ChunkId(1), 2)
    assert sorted(again.tolist()) == sorted(pages[:2].tolist())
    assert ledger.before_write(again, Lane.IN) == (fence,)
    assert ledger.before_write(again, Lane.OUT) == (), "a lane works in order"
    assert ledger.before_read(again, Lane.IN) == (), "two readers do not wait for each other"


def test_quarantined_page_comes_free_once_the_work_that_hung_ends() -> None:
    clock, ledger, pages = owned_ledger()
    hung, behind = clock.issue(Lane.IN), clock.issue(Lane.IN)
    ledger.note_write(hung, pages[:1])
    ledger.note_write(behind, pages[1:2])
    ledger.release(G0, pages[:1])
    ledger.mark_stuck(hung)
    ledger.release(G0, pages[1:2])
    assert (ledger.quarantined(G0), ledger.available(G0)) == (2, 0)
    clock.complete(behind)
    ledger.pass_fence()
    assert ledger.quarantined(G0) == 2, "what is behind it has not passed either"
    clock.complete(hung)
    ledger.pass_fence()
    assert (ledger.quarantined(G0), ledger.free(G0)) == (0, 2)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda ledger, pages: ledger.release(G0, pages[:1]),
        lambda ledger, pages: ledger.hand_over(pages[:1], ChunkId(1)),
        lambda ledger, pages: ledger.allocate(G0, ChunkId(1), 2),
    ],
    ids=["release twice", "hand over a free page", "allocate too many"],
)
def test_ledger_misused_fails_an_assertion(misuse: Callable[[PageLedger, PhysicalPages], object]) -> None:
    _, ledger, pages = owned_ledger()
    ledger.release(G0, pages[:1])
    with pytest.raises(AssertionError):
        misuse(ledger, pages)


def test_fence_that_was_never_issued_fails_an_assertion() -> None:
    with pytest.raises(AssertionError):
        FenceClock().complete(Fence(Lane.IN, 1))


def test_latest_keeps_the_last_fence_of_each_lane() -> None:
    fences = [Fence(Lane.IN, 2), Fence(Lane.OUT, 9), Fence(Lane.IN, 4), Fence(Lane.IN, 3)]
    assert set(latest(fences)) == {Fence(Lane.IN, 4), Fence(Lane.OUT, 9)}


def keep_some_pages_of_many(cycles: int) -> int:
    """Bytes that are still allocated after cycles of which one in a hundred keeps what `allocate` gave it."""
    clock, ledger, pages = owned_ledger(300)
    rng, kept = Random(1), []
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for cycle in range(cycles):
        if fenced := bool(rng.getrandbits(1)):
            ledger.note_read(clock.issue(Lane.OUT), pages)
        ledger.release(G0, pages)
        one = ledger.allocate(G0, ChunkId(cycle), 1)
        if cycle % 100 == 0:
            kept.append(one)
        pages = np.concatenate((one, ledger.allocate(G0, ChunkId(cycle), 299)))
        if fenced:
            clock.complete(Fence(Lane.OUT, clock._issued[Lane.OUT]))
            ledger.pass_fence()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def test_ledger_over_ten_thousand_cycles_keeps_memory_flat() -> None:
    """KF-31: what `allocate` answers is its own array, not a view that keeps the whole free list alive."""
    assert keep_some_pages_of_many(10_000) < 60_000


def test_ledger_that_answers_with_views_does_not_keep_memory_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """KF-31, without its guard."""

    def take_view(self: PageLedger, group: GroupId, count: int) -> PhysicalPages:
        end = self._num_free[group]
        self._num_free[group] = end - count
        self._free[group] = self._free[group].copy()
        return self._free[group][end - count : end]

    monkeypatch.setattr(PageLedger, "_take_free", take_view)
    assert keep_some_pages_of_many(10_000) > 100_000
