"""Which restores get pages: no two that hold a part can ever block each other."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv.budget.grants import Grant, Waiting, effective_priority, plan

COUNTS = st.integers(0, 6)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[int], list[int]]:
    """Restores in their order, and the pages that are available and coming, by group."""
    groups = draw(st.integers(1, 3))
    pages = st.tuples(*[COUNTS] * groups)
    waiting = draw(st.lists(st.builds(Waiting, missing=pages, held=pages), max_size=6))
    return waiting, list(draw(pages)), list(draw(pages))


def head_lacks(head: Waiting, available: list[int], coming: list[int], given: list[int]) -> list[int]:
    """Pages by group that the head lacks, counting those that are given back to it."""
    sources = zip(head.missing, available, coming, given, strict=True)
    return [missing - have - more - back for missing, have, more, back in sources]


def given_back(waiting: list[Waiting], answers: list[Grant], behind: int = -1) -> list[int]:
    """Pages by group that are revoked from those behind one place in the queue."""
    back = [0] * len(waiting[0].held)
    for index, (other, answer) in enumerate(zip(waiting, answers, strict=True)):
        if answer is Grant.REVOKE and index > behind:
            back = [b + held for b, held in zip(back, other.held, strict=True)]
    return back


@given(situation=situations())
def test_plan_lets_only_the_head_hold_a_part(situation: tuple[list[Waiting], list[int], list[int]]) -> None:
    waiting, available, coming = situation
    answers = plan(waiting, available, coming)
    assert len(answers) == len(waiting)
    if waiting:
        fits = all(have >= missing for have, missing in zip(available, waiting[0].missing, strict=True))
        assert answers[0] is (Grant.ALL if fits else Grant.SOME)
        assert Grant.SOME not in answers[1:]


@given(situation=situations())
def test_plan_lets_everybody_take_what_it_grants_with_the_heads_need_untouched(
    situation: tuple[list[Waiting], list[int], list[int]],
) -> None:
    waiting, available, coming = situation
    answers = plan(waiting, available, coming)
    whole = [w for w, answer in zip(waiting, answers, strict=True) if answer is Grant.ALL]
    for group, have in enumerate(available):
        others = sum(w.missing[group] for w in whole if w is not waiting[0])
        assert others == 0 or others + waiting[0].missing[group] <= have


@given(situation=situations())
def test_plan_revokes_from_the_end_of_the_queue_as_long_as_the_head_lacks_pages(
    situation: tuple[list[Waiting], list[int], list[int]],
) -> None:
    waiting, available, coming = situation
    answers = plan(waiting, available, coming)
    for index, answer in enumerate(answers):
        if answer is Grant.REVOKE:
            lacks = head_lacks(waiting[0], available, coming, given_back(waiting, answers, behind=index))
            assert any(lack > 0 and held > 0 for lack, held in zip(lacks, waiting[index].held, strict=True))
    if waiting:
        lacks = head_lacks(waiting[0], available, coming, given_back(waiting, answers))
        kept = [w for w, answer in zip(waiting[1:], answers[1:], strict=True) if answer is not Grant.REVOKE]
        assert not any(lack > 0 and w.held[group] > 0 for w in kept for group, lack in enumerate(lacks))


def test_plan_of_nobody_is_empty() -> None:
    assert plan([], [3], [0]) == []


@pytest.mark.parametrize(("coming", "answer"), [(0, Grant.REVOKE), (2, Grant.NOTHING)])
def test_former_head_gives_its_part_back_unless_enough_is_coming(coming: int, answer: Grant) -> None:
    head, former = Waiting(missing=(4,), held=(0,)), Waiting(missing=(3,), held=(2,))
    assert plan([head, former], [2], [coming]) == [Grant.SOME, answer]


def test_last_in_the_queue_gives_back_first() -> None:
    head, second, last = (Waiting(missing=(m,), held=(h,)) for m, h in ((3, 0), (3, 2), (3, 3)))
    assert plan([head, second, last], [0], [0]) == [Grant.SOME, Grant.NOTHING, Grant.REVOKE]


def test_small_restore_passes_a_head_that_has_all_it_needs() -> None:
    head, small, large = (Waiting(missing=(m,), held=(0,)) for m in (3, 2, 4))
    assert plan([head, small, large], [6], [0]) == [Grant.ALL, Grant.ALL, Grant.NOTHING]


def test_restore_of_another_layer_group_passes_a_head_that_waits() -> None:
    head, other = Waiting(missing=(5, 1), held=(0, 0)), Waiting(missing=(0, 2), held=(0, 0))
    assert plan([head, other], [1, 3], [0, 0]) == [Grant.SOME, Grant.ALL]
    assert plan([head, other], [1, 2], [0, 0]) == [Grant.SOME, Grant.NOTHING]


def run_restores(seed: int) -> int:
    """Restores whose order changes at random take pages, which come free one by one, until all are done."""
    rng = Random(seed)
    total = rng.randint(6, 12)
    needs = {name: rng.randint(1, total) for name in range(rng.randint(2, 6))}
    held = dict.fromkeys(needs, 0)
    rounds, busy = 0, total
    while needs:
        rounds, busy = rounds + 1, max(0, busy - 1)
        assert rounds < 1000, "nobody gets on"
        queue = sorted(needs, key=lambda name: rng.random() if rounds < 20 else name)
        waiting = [Waiting(missing=(needs[n] - held[n],), held=(held[n],)) for n in queue]
        free = total - busy - sum(held.values())
        answers = plan(waiting, [free], [0])
        for name, answer in zip(queue, answers, strict=True):
            if answer is Grant.REVOKE:
                held[name] = 0
            elif answer is not Grant.NOTHING:
                more = min(free, needs[name] - held[name])
                assert more == needs[name] - held[name] or answer is Grant.SOME
                held[name], free = held[name] + more, free - more
        for name in [n for n in queue if held[n] == needs[n]]:
            del needs[name], held[name]
    return rounds


def test_restores_that_share_scarce_pages_all_complete_whatever_order_they_change_to() -> None:
    assert all(run_restores(seed) for seed in range(300))


def test_restores_that_never_give_back_can_block_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    as_planned = plan

    def keep(waiting: list[Waiting], available: list[int], coming: list[int]) -> list[Grant]:
        return [Grant.NOTHING if a is Grant.REVOKE else a for a in as_planned(waiting, available, coming)]

    monkeypatch.setitem(run_restores.__globals__, "plan", keep)
    with pytest.raises(AssertionError, match="nobody gets on"):
        test_restores_that_share_scarce_pages_all_complete_whatever_order_they_change_to()


@given(priority=st.integers(-5, 5), waited=st.integers(0, 10**6), aging_ns=st.integers(1, 1000), cap=st.integers(0, 9))
def test_priority_ages_a_step_at_a_time_up_to_its_cap(priority: int, waited: int, aging_ns: int, cap: int) -> None:
    now = effective_priority(priority, waited, aging_ns, cap)
    assert priority - cap <= now <= priority
    assert now - 1 <= effective_priority(priority, waited + aging_ns, aging_ns, cap) <= now
    assert effective_priority(priority, aging_ns * cap, aging_ns, cap) == priority - cap
    assert effective_priority(priority, aging_ns - 1, aging_ns, cap) == priority


def test_old_request_of_low_priority_passes_a_new_one_only_within_the_cap() -> None:
    old = effective_priority(5, 10**12, aging_ns=1000, aging_cap=3)
    assert old < effective_priority(3, 0, aging_ns=1000, aging_cap=3)
    assert old > effective_priority(1, 0, aging_ns=1000, aging_cap=3)
