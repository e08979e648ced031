"""The baselines of Checkmate's paper, as schedules of any training graph."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.clock import TickingClock
from helpers.graphs import UNIT, training_graphs, unit_chain
from helpers.planning import NEVER_SECONDS
from helpers.small_graphs import small_graphs
from memplan.search.revolve import forward_steps
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status, Strategy
from memplan.strategies.base import OneOf, Problem
from memplan.strategies.checkpoint_last import CheckpointLast
from memplan.strategies.chen import ChenGreedy, ChenSqrt
from memplan.strategies.griewank import Griewank
from memplan.strategies.memonger import Memonger
from memplan.strategies.store_all import StoreAll
from memplan.util import stop
from oracles.sequences import BruteForceSequences

BASELINES: list[Strategy] = [
    StoreAll(),
    CheckpointLast(),
    ChenSqrt(),
    ChenSqrt(linear=True),
    ChenGreedy(ntrial=12),
    ChenGreedy(linear=True, ntrial=12),
    Griewank(max_slots=6),
    Griewank(linear=True, max_slots=6),
]


@pytest.mark.parametrize("nlayers", [8, 9, 15, 24, 32, 33, 64])
def test_chen_sqrt_has_the_closed_form_on_the_unit_chain(nlayers: int) -> None:
    """Segments of k ops, m of them: peak m + k, and k - 1 ops of each segment run again."""
    graph = unit_chain(nlayers)
    schedule = ChenSqrt(linear=True).solve(Problem(graph, None)).schedule
    assert schedule is not None
    k = math.isqrt(nlayers)
    m = nlayers // k
    assert simulate(schedule).peak_nbytes == (m + k) * UNIT
    assert schedule.seconds == graph.seconds + m * (k - 1)


def test_chen_sqrt_on_32_layers() -> None:
    schedule = ChenSqrt(linear=True).solve(Problem(unit_chain(32), 11 * UNIT)).schedule
    assert schedule is not None
    assert (schedule.seconds, simulate(schedule).peak_nbytes) == (89.0, 11 * UNIT)
    assert ChenSqrt(linear=True).solve(Problem(unit_chain(32), 11 * UNIT - 1)).schedule is None


def test_chen_greedy_finds_a_way_between() -> None:
    graph = unit_chain(32)
    for budget in (12, 16, 24):
        schedule = ChenGreedy(linear=True).solve(Problem(graph, budget * UNIT)).schedule
        assert schedule is not None
        assert graph.seconds < schedule.seconds < graph.seconds + 32


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("nlayers", [1, 5, 8, 17, 32])
def test_griewank_has_the_closed_form_on_the_unit_chain(nlayers: int, slots: int) -> None:
    graph = unit_chain(nlayers)
    peak = min(slots, nlayers) + 2
    schedule = Griewank(linear=True).solve(Problem(graph, peak * UNIT)).schedule
    assert schedule is not None
    assert simulate(schedule).peak_nbytes <= peak * UNIT
    assert schedule.seconds == forward_steps(nlayers, slots) + 1 + nlayers


def test_forward_steps_are_the_optimum_of_the_recursion() -> None:
    """Advance m steps, store, visit what is right of it with a slot less, then what is left."""
    best = {(0, slots): 0 for slots in range(6)}
    for n in range(1, 30):
        best[n, 0] = 10**9
        for slots in range(1, 6):
            best[n, slots] = min(
                m + best[n - m, slots - 1] + best[m - 1, slots] for m in range(1, n + 1)
            )
            assert forward_steps(n, slots) == best[n, slots]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("nlayers", [3, 5, 6])
def test_griewank_is_optimal_on_the_unit_chain(nlayers: int, slots: int) -> None:
    budget = (slots + 2) * UNIT
    graph = unit_chain(nlayers)
    exact = BruteForceSequences(max_ops=13, any_order=True).solve(Problem(graph, budget))
    outcome = Griewank(linear=True).solve(Problem(graph, budget))
    assert exact.schedule is not None
    assert outcome.schedule is not None
    assert outcome.schedule.seconds == exact.schedule.seconds


@pytest.mark.parametrize("strategy", BASELINES, ids=repr)
def test_who_keeps_less_really_recomputes(strategy: Strategy) -> None:
    graph = unit_chain(32)
    schedule = strategy.solve(Problem(graph, None, max_overhead=math.inf)).schedule
    assert schedule is not None
    if isinstance(strategy, StoreAll):
        assert not schedule.recomputed
    else:
        assert schedule.recomputed
        assert simulate(schedule).peak_nbytes < 32 * UNIT


@taking(plan=3, none=1)
@examples(40)
@given(st.data())
def test_baselines_are_valid_within_the_budget_and_promise_little(
    taken: Counter[str], data: st.DataObject
) -> None:
    graph = data.draw(st.one_of(training_graphs(), small_graphs(6)))
    strategy = data.draw(st.sampled_from(BASELINES))
    lowest = strategy.solve(Problem(graph, None, max_overhead=math.inf)).schedule
    assert lowest is not None
    peak = simulate(lowest).peak_nbytes
    assert validate(lowest, peak).valid
    budget = data.draw(st.integers(max(0, peak - 2), peak + 8))
    outcome = strategy.solve(Problem(graph, budget))
    assert outcome.status is not Status.INFEASIBLE
    assert (outcome.schedule is None) == (outcome.status is Status.NO_PLAN_FOUND)
    if outcome.schedule is not None:
        taken["plan"] += 1
        assert validate(outcome.schedule, budget).valid
    else:
        taken["none"] += 1
        assert budget < peak


@pytest.mark.parametrize("strategy", [Memonger(), ChenGreedy(), Griewank()], ids=repr)
@pytest.mark.parametrize("budget", [None, 40 * UNIT])
def test_at_its_time_limit_a_strategy_gives_the_best_so_far(
    strategy: OneOf, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the clock when it begins, and before each schedule but the first."""
    problem = Problem(unit_chain(64), budget, max_overhead=math.inf)
    schedules = list(strategy.candidates(problem))
    whole = strategy.solve(problem)
    assert not whole.cut_by_clock
    for nmade in (3, len(schedules) - 1, len(schedules)):
        TickingClock(1.0).replaces_that_of(monkeypatch, stop)
        outcome = strategy.solve(dataclasses.replace(problem, time_limit=nmade - 0.5))
        best = problem.cheapest(schedules[:nmade])
        assert (outcome.schedule, outcome.cut_by_clock) == (best, nmade < len(schedules))
    assert outcome == whole


@dataclasses.dataclass(frozen=True)
class Interrupted(OneOf):
    """Memonger's search, which Ctrl-C ends behind this many schedules."""

    nmade: int

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        for number, schedule in enumerate(Memonger().candidates(problem)):
            if number == self.nmade:
                raise KeyboardInterrupt
            yield schedule


def test_an_interrupt_gives_the_best_so_far() -> None:
    problem = Problem(unit_chain(64), 40 * UNIT, time_limit=NEVER_SECONDS)
    outcome = Interrupted(8).solve(problem)
    assert outcome.schedule == problem.cheapest([*Memonger().candidates(problem)][:8])
    assert outcome.schedule is not None
    assert outcome.cut_by_clock
    for nmade in (0, 1):  # what is made first keeps all
        with pytest.raises(KeyboardInterrupt):
            Interrupted(nmade).solve(problem)
