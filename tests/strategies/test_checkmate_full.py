"""Checkmate over the whole step: golden values, and the oracle on small graphs."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, unit_chain
from helpers.paths import ROOT
from helpers.planning import NEVER_SECONDS
from helpers.small_graphs import small_graphs
from memplan.errors import ArgumentError
from memplan.programs.solver import SOLVERS, Program
from memplan.programs.stage_program import StageProgram
from memplan.search.buffers import carried_tensors
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status
from memplan.strategies.base import Problem
from memplan.strategies.checkmate import Checkmate
from memplan.strategies.checkmate_lp import CheckmateLP
from memplan.strategies.evict import Evict
from memplan.util.stop import Stop
from oracles.sequences import BruteForceSequences

sys.path.insert(0, str(ROOT / "benchmarks"))
import published_graphs

needs_published = pytest.mark.skipif(
    "unet_b32_train" not in published_graphs.names(),
    reason="the published graphs are not part of the project (../shared/graphs)",
)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_unit_chain_of_checkmates_paper(solver: str) -> None:
    """With free variables that may free what is not there, it would be 22."""
    graph = unit_chain(8)
    outcome = Checkmate(solver=solver, gap=0.0).solve(Problem(graph, 4 * UNIT))
    assert outcome.status is Status.OPTIMAL
    assert outcome.schedule is not None
    assert outcome.schedule.seconds == 26.0
    assert outcome.lower_bound_seconds == pytest.approx(26.0, abs=1e-3)
    assert validate(outcome.schedule, 4 * UNIT).valid


def test_three_tensors_are_the_least_for_the_unit_chain() -> None:
    graph = unit_chain(8)
    assert Checkmate().solve(Problem(graph, 3 * UNIT - 1)).status is Status.INFEASIBLE
    assert CheckmateLP().solve(Problem(graph, 2 * UNIT)).status is Status.INFEASIBLE
    assert Checkmate().solve(Problem(graph, 3 * UNIT)).schedule is not None


def test_without_a_budget_the_least_memory_for_one_more_forward_pass() -> None:
    graph = unit_chain(8)
    for strategy in (Checkmate(), Evict()):
        outcome = strategy.solve(Problem(graph, None))
        assert outcome.status is Status.FEASIBLE
        assert outcome.lower_bound_seconds is None
        assert outcome.schedule is not None
        assert simulate(outcome.schedule).peak_nbytes == 4 * UNIT
        assert outcome.schedule.seconds == 26.0


@needs_published
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("percent", "optimum"), [(80, 31620.0), (50, 33165.0)])
def test_unet(percent: int, optimum: float, solver: str) -> None:
    graph = published_graphs.load("unet_b32_train")
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * percent // 100
    outcome = Checkmate(time_limit=NEVER_SECONDS, solver=solver).solve(Problem(graph, budget))
    assert outcome.status is Status.OPTIMAL
    assert outcome.schedule is not None
    assert outcome.schedule.seconds == optimum
    assert validate(outcome.schedule, budget).valid


@needs_published
def test_unet_at_50_percent_rounded() -> None:
    graph = published_graphs.load("unet_b32_train")
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * 50 // 100
    outcome = CheckmateLP().solve(Problem(graph, budget))
    assert outcome.schedule is not None
    assert outcome.lower_bound_seconds is not None
    assert validate(outcome.schedule, budget).valid
    assert outcome.lower_bound_seconds <= 33165.0 <= outcome.schedule.seconds <= 1.06 * 33165.0


def test_without_pressure_nothing_is_recomputed() -> None:
    graph = unit_chain(8)
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes
    for strategy in (Checkmate(), CheckmateLP()):
        outcome = strategy.solve(Problem(graph, budget))
        assert outcome.status is Status.OPTIMAL
        assert outcome.schedule == Schedule.unplanned(graph)
        assert outcome.lower_bound_seconds == graph.seconds


def test_no_time_no_promise() -> None:
    graph = unit_chain(8)
    outcome = Checkmate(time_limit=0.0).solve(Problem(graph, 4 * UNIT))
    assert outcome.status in (Status.FEASIBLE, Status.NO_PLAN_FOUND)
    tight = CheckmateLP(time_limit=0.0).solve(Problem(graph, 4 * UNIT))
    assert tight.status is Status.NO_PLAN_FOUND


def test_a_start_is_used() -> None:
    graph = unit_chain(8)
    optimum = Checkmate().solve(Problem(graph, 4 * UNIT)).schedule
    outcome = Checkmate(time_limit=0.0, start=optimum).solve(Problem(graph, 4 * UNIT))
    assert outcome.schedule == optimum


def test_unknown_solvers_are_refused() -> None:
    for make in (Checkmate, CheckmateLP):
        with pytest.raises(ArgumentError, match="CBC"):
            make(solver="")


def test_an_interrupt_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memplan.programs.stage_refinement.refine_moments", interrupted)
    graph = unit_chain(8)
    outcome = Checkmate().solve(Problem(graph, 6 * UNIT))
    assert outcome.status is Status.FEASIBLE
    assert outcome.schedule is not None
    assert validate(outcome.schedule, 6 * UNIT).valid
    with pytest.raises(KeyboardInterrupt):
        Checkmate().solve(Problem(graph, 2 * UNIT))


def test_backward_ops_run_again_only_if_asked_to() -> None:
    """Ops f, b0, b1, b2: b2 reads b0; only b0 may be dropped while the large b1 is alive."""
    from helpers.graphs import tensors

    ops = (
        Op("f", "op", (), (0,), 1.0),
        Op("b0", "op", (0,), (1,), 1.0),
        Op("b1", "op", (0,), (2,), 1.0),
        Op("b2", "op", (0, 2), (3,), 1.0),
        Op("b3", "op", (1, 3), (4,), 1.0),
    )
    graph = TrainingGraph(ops, tensors(f=1, b0=4, b1=4, b2=1, b3=1), (4,), 1)
    budget = 9 * UNIT
    assert Checkmate().solve(Problem(graph, budget)).status is Status.INFEASIBLE
    outcome = Checkmate(recompute_backward=True).solve(Problem(graph, budget))
    assert outcome.status is Status.OPTIMAL
    assert outcome.schedule is not None
    assert outcome.schedule.recomputed == (1,)


def test_a_hand_over_saves_its_bytes() -> None:
    """A chain f0, f1, f2 in which f1 and f2 write in place: one buffer is enough."""
    from helpers.graphs import tensors

    ops = tuple(
        Op(
            f"f{i}",
            "op",
            (i - 1,) if i else (),
            (i,),
            1.0,
            handovers=(Handover(0, 0, False),) if i else (),
        )
        for i in range(3)
    )
    graph = TrainingGraph(ops, tensors(a=2, b=2, c=2), (2, 0), 3)
    # a is a head: it must be there at the end, so that either two are alive or a runs again.
    outcome = Checkmate().solve(Problem(graph, 4 * UNIT))
    assert outcome.status is Status.OPTIMAL
    assert Checkmate().solve(Problem(graph, 3 * UNIT)).status is Status.INFEASIBLE


def test_what_a_schedule_carries() -> None:
    graph = unit_chain(2)  # f0 f1 loss b1 b0
    assert carried_tensors(Schedule.unplanned(graph)) == [
        set(),
        {0},
        {0, 1},
        {0, 1, 2},
        {0, 3},
        {4},
    ]


def _near(graph: TrainingGraph, data: st.DataObject, backward: bool) -> int:
    """A budget between the lowest and the unplanned peak, or a little below."""
    oracle = BruteForceSequences(recompute_backward=backward)
    lowest = oracle.solve(Problem(graph, None)).schedule
    assert lowest is not None
    low = simulate(lowest).peak_nbytes
    high = simulate(Schedule.unplanned(graph)).peak_nbytes
    return data.draw(st.integers(max(0, low - 1), max(low, high - 1)))


SMALL = examples(60, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("solver", SOLVERS)
@taking(plan=3, none=1)
@SMALL
@given(st.data())
def test_checkmate_finds_what_brute_force_finds(
    taken: Counter[str], solver: str, data: st.DataObject
) -> None:
    graph = data.draw(small_graphs(4))
    backward = data.draw(st.booleans())
    budget = _near(graph, data, backward)
    exact = BruteForceSequences(recompute_backward=backward).solve(Problem(graph, budget))
    options = {"solver": solver, "recompute_backward": backward}
    outcome = Checkmate(time_limit=NEVER_SECONDS, **options).solve(Problem(graph, budget))
    assert outcome.status is exact.status
    taken["none"] += exact.schedule is None
    if exact.schedule is not None and outcome.schedule is not None:
        taken["plan"] += 1
        assert validate(exact.schedule, budget).valid
        assert validate(outcome.schedule, budget).valid
        assert outcome.schedule.seconds == exact.schedule.seconds
        assert outcome.lower_bound_seconds is not None
        assert outcome.lower_bound_seconds == pytest.approx(exact.schedule.seconds, abs=1e-3)


@taking(plan=3, none=1)
@SMALL
@given(st.data())
def test_the_relaxation_bounds_and_its_rounding_is_valid(
    taken: Counter[str], data: st.DataObject
) -> None:
    graph = data.draw(small_graphs(4))
    budget = _near(graph, data, False)
    exact = BruteForceSequences().solve(Problem(graph, budget))
    outcome = CheckmateLP(solver="HIGHS").solve(Problem(graph, budget))
    if exact.schedule is None:
        taken["none"] += 1
        assert outcome.status in (Status.INFEASIBLE, Status.NO_PLAN_FOUND)
        return
    assert outcome.status is not Status.INFEASIBLE
    assert outcome.lower_bound_seconds is not None
    assert outcome.lower_bound_seconds <= exact.schedule.seconds + 1e-9
    if outcome.schedule is not None:
        taken["plan"] += 1
        assert validate(outcome.schedule, budget).valid
        assert outcome.schedule.seconds >= exact.schedule.seconds
        assert outcome.status is not Status.OPTIMAL or (
            outcome.schedule.seconds == exact.schedule.seconds
        )


@SMALL
@given(st.data())
def test_order_within_a_stage_costs_little(data: st.DataObject) -> None:
    """Brute force in any order is never worse, and valid."""
    graph = data.draw(small_graphs(3))
    stages = BruteForceSequences().solve(Problem(graph, None)).schedule
    assert stages is not None
    budget = simulate(stages).peak_nbytes
    free = BruteForceSequences(any_order=True).solve(Problem(graph, budget))
    within = BruteForceSequences().solve(Problem(graph, budget)).schedule
    assume(within is not None)
    assert within is not None
    assert free.schedule is not None
    assert validate(free.schedule, budget).valid
    assert free.schedule.seconds <= within.seconds


def test_what_is_proved_in_order_says_nothing_of_another_order_within_a_stage() -> None:
    """Two chains of a large and a small tensor run again one after the other, where both at once
    are too large: the first runs keep their order, and in the last stage the ops do not.
    """
    ops = (
        Op("a1", "op", (), (0,), 1.0),
        Op("b1", "op", (), (1,), 1.0),
        Op("a2", "op", (0,), (2,), 1.0),
        Op("b2", "op", (1,), (3,), 1.0),
        Op("c", "op", (2, 3), (4,), 1.0, recomputable=False),
        Op("w", "op", (4,), (5,), 1.0, recomputable=False),
        Op("z", "op", (4, 2, 3), (6,), 1.0, recomputable=False),
    )
    sizes = (100, 100, 10, 10, 100, 120, 1)
    tensors = tuple(Tensor(str(a), size, size) for a, size in enumerate(sizes))
    graph = TrainingGraph(ops, tensors, (6,), len(ops))
    schedule = Schedule.sequence(graph, (0, 1, 2, 3, 4, 5, 0, 2, 1, 3, 6))
    assert validate(schedule, 225).valid
    outcome = Checkmate().solve(Problem(graph, 225))
    assert outcome.status is Status.INFEASIBLE
    assert outcome.in_order


def test_brute_force_refuses_large_graphs() -> None:
    with pytest.raises(ArgumentError, match="17"):
        BruteForceSequences().solve(Problem(unit_chain(8), 4 * UNIT))


def test_a_program_that_takes_too_long_to_build_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = unit_chain(100)
    with pytest.raises(TimeoutError):
        StageProgram(graph, 4 * UNIT, Program("CBC"), stop=Stop(0.0))
    monkeypatch.setattr(
        "memplan.programs.stage_refinement.refine_moments", lambda *_, **__: iter(())
    )
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes // 3
    outcome = Checkmate(time_limit=0.2).solve(Problem(graph, budget))
    assert outcome.status in (Status.FEASIBLE, Status.NO_PLAN_FOUND)


def test_the_rounding_proves_for_schedules_in_order_only() -> None:
    graph = unit_chain(8)
    assert CheckmateLP().solve(Problem(graph, 5 * UNIT)).in_order
    assert CheckmateLP().solve(Problem(graph, 2 * UNIT - 1)).in_order
    assert not Checkmate().solve(Problem(graph, 2 * UNIT - 1)).in_order  # the moments prove it


def test_a_small_program_is_solved_until_it_says_that_nothing_fits() -> None:
    """It takes more rows than a large one may add."""
    reads = ((), (0,), (1,), (2,), (3, 2), (4, 1), (6,), (8, 0))
    writes = ((0,), (1,), (2,), (3,), (4, 5), (6, 7), (8, 9), (10,))
    ops = tuple(
        Op(f"op{i}", "op", inputs, outputs, 1.0, recomputable=i in (5, 6))
        for i, (inputs, outputs) in enumerate(zip(reads, writes, strict=True))
    )
    shared = dataclasses.replace(ops[4], handovers=(Handover(0, 1, alias=True),))
    sizes = (2, 1, 1, 2, 1, 2, 1, 1, 2, 2, 1)
    tensors = tuple(Tensor(f"t{i}", nbytes, 1) for i, nbytes in enumerate(sizes))
    graph = TrainingGraph((*ops[:4], shared, *ops[5:]), tensors, (9, 10), 4)
    outcome = Checkmate(recompute_backward=True).solve(Problem(graph, 8))
    assert outcome.status is Status.INFEASIBLE
