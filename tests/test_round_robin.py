"""Round robin decides from views alone, keeps its slots full and lets nobody starve."""

from collections import Counter, deque

import attrs
import pytest

from swapkv.errors import ProtocolError
from swapkv.schedulers import Phase, Plan, RequestView, RoundRobin, VictimOrder


def view(
    name: str, phase: Phase, *, slice_tokens: int = 0, since_ns: int = 0, score: float = float("-inf")
) -> RequestView:
    return RequestView(
        name=name,
        phase=phase,
        slice_tokens=slice_tokens,
        waiting_since_ns=since_ns,
        remaining_tokens=100,
        score=score,
    )


def running(name: str, slice_tokens: int, score: float = float("-inf")) -> RequestView:
    return view(name, Phase.RUNNING, slice_tokens=slice_tokens, score=score)


def off(name: str, since_ns: int) -> RequestView:
    return view(name, Phase.OFF, since_ns=since_ns)


@pytest.mark.parametrize("option", ["slots", "quantum_tokens", "min_run_tokens", "concurrent_swaps"])
def test_round_robin_of_values_below_one_is_refused(option: str) -> None:
    with pytest.raises(ProtocolError, match=f"{option}=0 must be at least 1"):
        RoundRobin(**{"slots": 1, "quantum_tokens": 1, option: 0})


def test_round_robin_fills_free_slots_at_once_with_who_waits_longest() -> None:
    requests = [off("young", 30), view("old", Phase.WAITING, since_ns=10), off("middle", 20), running("here", 1)]
    assert RoundRobin(slots=3, quantum_tokens=8).plan(requests) == Plan(come=("old", "middle"))


def test_round_robin_preempts_only_after_the_quantum() -> None:
    scheduler = RoundRobin(slots=1, quantum_tokens=4)
    assert scheduler.plan([running("a", 3), off("b", 1)]) == Plan()
    assert scheduler.plan([running("a", 4), off("b", 1)]) == Plan(leave=("a",), come=("b",))


def test_round_robin_minimum_run_outlasts_a_shorter_quantum() -> None:
    scheduler = RoundRobin(slots=1, quantum_tokens=2, min_run_tokens=5)
    assert scheduler.plan([running("a", 4), off("b", 1)]) == Plan()
    assert scheduler.plan([running("a", 5), off("b", 1)]) == Plan(leave=("a",), come=("b",))


def test_round_robin_preempts_nobody_when_nobody_waits() -> None:
    requests = [running("a", 99), view("b", Phase.DONE), view("c", Phase.LEAVING)]
    assert RoundRobin(slots=1, quantum_tokens=1).plan(requests) == Plan()


def test_round_robin_preempts_nobody_for_whom_there_is_a_free_slot() -> None:
    assert RoundRobin(slots=2, quantum_tokens=1).plan([running("a", 99), off("b", 1)]) == Plan(come=("b",))


@pytest.mark.parametrize(("swaps", "leave", "come"), [(1, ("c",), ("x",)), (2, ("c", "b"), ("x", "y"))])
def test_round_robin_exchanges_as_many_at_a_time_as_allowed(
    swaps: int, leave: tuple[str, ...], come: tuple[str, ...]
) -> None:
    requests = [running("a", 5), running("b", 6), running("c", 7), off("x", 1), off("y", 2)]
    scheduler = RoundRobin(slots=3, quantum_tokens=5, concurrent_swaps=swaps)
    assert scheduler.plan(requests) == Plan(leave=leave, come=come)


@pytest.mark.parametrize("moving", [[Phase.LEAVING, Phase.COMING], [Phase.COMING], [Phase.LEAVING]])
def test_round_robin_counts_an_exchange_once_until_both_sides_are_through(moving: list[Phase]) -> None:
    requests = [running("a", 9), running("b", 9), off("x", 1), off("y", 2)]
    requests += [view(f"m{n}", phase) for n, phase in enumerate(moving)]
    slots = 2 + moving.count(Phase.COMING)
    plans = {n: RoundRobin(slots=slots, quantum_tokens=5, concurrent_swaps=n).plan(requests) for n in (1, 2)}
    assert plans == {1: Plan(), 2: Plan(leave=("a",), come=("x",))}


def test_round_robin_ties_go_to_who_is_named_first() -> None:
    requests = [running("b", 5), running("a", 5), off("r10", 1), off("r9", 1)]
    plans = {RoundRobin(slots=2, quantum_tokens=5).plan(requests) for _ in range(3)}
    assert plans == {Plan(leave=("b",), come=("r10",))}


def test_round_robin_victims_by_score_are_the_best_of_those_whose_slice_is_used_up() -> None:
    requests = [running("long", 9, -2.0), running("best", 5, -1.0), running("fresh", 4, 0.0), off("x", 1), off("y", 2)]
    by_score = RoundRobin(slots=3, quantum_tokens=5, concurrent_swaps=3, victims=VictimOrder.SCORE)
    assert by_score.plan(requests) == Plan(leave=("best", "long"), come=("x", "y"))
    by_slice = attrs.evolve(by_score, victims=VictimOrder.LONGEST_SLICE)
    assert by_slice.plan(requests) == Plan(leave=("long", "best"), come=("x", "y"))
    assert (by_score.wants_scores, by_slice.wants_scores) == (True, False)


@attrs.define
class Simulated:
    """A request of the simulation. `through_at`: when its swap ends."""

    name: str
    phase: Phase = Phase.WAITING
    slice_tokens: int = 0
    waiting_since: int = 0
    tokens: int = 0
    through_at: int = 0
    progressed_at: int = 0
    longest_pause: int = 0


class Simulation:
    """Ticks: who runs gets a token, a swap takes `swap_ticks` each way. Nobody ever ends; more can arrive."""

    def __init__(self, scheduler: RoundRobin, requests: int, swap_ticks: int) -> None:
        self.scheduler = scheduler
        self.swap_ticks = swap_ticks
        self.requests = [Simulated(f"r{n}") for n in range(requests)]
        self.runs: deque[int] = deque()

    def tick(self, now: int) -> None:
        for request in self.requests:
            if request.phase in (Phase.LEAVING, Phase.COMING) and now >= request.through_at:
                self._through(request, now)
        plan = self.scheduler.plan([self._view(request) for request in self.requests])
        by_name = {request.name: request for request in self.requests}
        for name, phase in [*((n, Phase.LEAVING) for n in plan.leave), *((n, Phase.COMING) for n in plan.come)]:
            by_name[name].phase, by_name[name].through_at = phase, now + self.swap_ticks
        for request in self.requests:
            if request.phase is Phase.RUNNING:
                request.tokens += 1
                request.slice_tokens += 1
                request.progressed_at = now
            request.longest_pause = max(request.longest_pause, now - request.progressed_at)
        counts = Counter(request.phase for request in self.requests)
        assert counts[Phase.RUNNING] + counts[Phase.COMING] <= self.scheduler.slots

    def arrive(self, name: str, now: int) -> None:
        self.requests.append(Simulated(name, waiting_since=now, progressed_at=now))

    def _through(self, request: Simulated, now: int) -> None:
        if request.phase is Phase.COMING:
            request.phase, request.slice_tokens = Phase.RUNNING, 0
        else:
            request.phase, request.waiting_since = Phase.OFF, now
            self.runs.append(request.slice_tokens)

    def _view(self, request: Simulated) -> RequestView:
        return view(request.name, request.phase, slice_tokens=request.slice_tokens, since_ns=request.waiting_since)


@pytest.mark.parametrize("quantum", [1, 4])
@pytest.mark.parametrize("swap_ticks", [1, 3])
@pytest.mark.parametrize("swaps", [1, 3])
def test_round_robin_eight_equal_requests_on_five_slots_all_progress(quantum: int, swap_ticks: int, swaps: int) -> None:
    scheduler = RoundRobin(slots=5, quantum_tokens=quantum, concurrent_swaps=swaps)
    simulation = Simulation(scheduler, requests=8, swap_ticks=swap_ticks)
    for now in range(200):
        simulation.tick(now)
    exchanges_ahead = -(-3 // swaps)
    bound = exchanges_ahead * (quantum + swap_ticks + 1) + swap_ticks
    assert max(request.longest_pause for request in simulation.requests) <= bound
    tokens = [request.tokens for request in simulation.requests]
    assert max(tokens) <= 2 * min(tokens)
    assert min(simulation.runs) >= quantum


def test_round_robin_arrivals_neither_starve_nor_overtake_who_waits() -> None:
    simulation = Simulation(RoundRobin(slots=5, quantum_tokens=4), requests=8, swap_ticks=1)
    for now in range(200):
        if now % 40 == 39 and now < 160:
            simulation.arrive(f"late{now}", now)
        simulation.tick(now)
    assert max(request.longest_pause for request in simulation.requests) <= 7 * (4 + 1 + 1) + 1
    assert all(request.tokens > 0 for request in simulation.requests)
