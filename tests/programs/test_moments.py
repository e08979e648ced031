"""What holds for every schedule, against the brute-force search over all of them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, unit_chain
from helpers.small_graphs import small_graphs
from memplan.programs.moments import MomentProgram, Moments
from memplan.programs.refinement import refine
from memplan.programs.solver import Program
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status
from memplan.strategies.base import Problem
from oracles.sequences import BruteForceSequences


def in_line(moments: Moments, candidates: list[int]) -> list[int]:
    """Those of ``candidates`` that are ancestors of the next one."""
    chosen: list[int] = []
    for t in sorted(set(candidates)):
        ancestors, _ = moments.before_and_after(t)
        if not chosen or chosen[-1] in ancestors:
            chosen.append(t)
    return chosen


@taking(impossible=3, possible=10)
@examples(150)
@given(st.data())
def test_no_schedule_is_below_the_floor_or_the_bound(
    taken: Counter[str], data: st.DataObject
) -> None:
    backward = data.draw(st.booleans())
    graph = data.draw(small_graphs(max_forward=4))
    oracle = BruteForceSequences(any_order=True, recompute_backward=backward)
    least = oracle.solve(Problem(graph, None)).schedule
    assert least is not None
    lowest = simulate(least).peak_nbytes
    moments = Moments(graph, recompute_backward=backward)
    assert moments.floor.nbytes <= lowest
    budget = data.draw(st.integers(max(0, lowest - 2), lowest + 4))
    found = oracle.solve(Problem(graph, budget))
    chosen = in_line(
        moments, data.draw(st.lists(st.sampled_from(range(len(graph.ops))), min_size=1))
    )
    with Program("CBC") as program:
        several = MomentProgram(moments, chosen, budget, program).bound(60, relax=False)
    for bound in (moments.bound(budget, math.inf), several):
        if found.schedule is None:
            taken["impossible"] += 1
            assert found.status is Status.INFEASIBLE
        else:
            taken["possible"] += 1
            assert bound.seconds <= found.schedule.seconds + 1e-6 * graph.seconds


def test_the_floor_names_what_forces_it() -> None:
    graph = unit_chain(8)
    floor = Moments(graph).floor
    assert floor.op is not None
    op = graph.ops[floor.op]
    assert floor.nbytes == 3 * UNIT  # a backward op reads two tensors and writes one
    assert set(floor.tensors) == {*op.inputs, *op.outputs}


def test_below_the_floor_the_bound_is_infinite() -> None:
    graph = unit_chain(8)
    assert math.isinf(Moments(graph).bound(2 * UNIT - 1, math.inf).seconds)


def test_a_budget_for_everything_costs_nothing() -> None:
    graph = unit_chain(8)
    bound = Moments(graph).bound(simulate(Schedule.unplanned(graph)).peak_nbytes, math.inf)
    assert (bound.seconds, bound.ops) == (graph.seconds, ())


def test_one_moment_proves_the_optimum_of_a_chain_that_drops_one_tensor() -> None:
    graph = unit_chain(8)
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    bound = Moments(graph).bound(peak - UNIT, math.inf)
    optimum = BruteForceSequences(max_ops=20).solve(Problem(graph, peak - UNIT)).schedule
    assert optimum is not None
    assert bound.seconds == pytest.approx(optimum.seconds, rel=1e-5)
    assert bound.seconds > graph.seconds
    assert bound.exact
    assert len(bound.dropped[0]) == 1


@taking(refined=5)
@examples(60)
@given(st.data())
def test_refined_schedules_fit_and_cost_no_less_than_the_bound(
    taken: Counter[str], data: st.DataObject
) -> None:
    graph = data.draw(small_graphs(max_forward=4))
    least = BruteForceSequences().solve(Problem(graph, None)).schedule
    assert least is not None
    budget = simulate(least).peak_nbytes + data.draw(st.integers(0, 3))
    optimum = BruteForceSequences(any_order=True).solve(Problem(graph, budget)).schedule
    assert optimum is not None
    highest = 0.0
    for refined in refine(graph, budget, math.inf):
        assert highest <= refined.bound_seconds <= optimum.seconds + 1e-6 * graph.seconds
        highest = refined.bound_seconds
        if refined.schedule is not None:
            taken["refined"] += 1
            assert validate(refined.schedule).valid
            assert simulate(refined.schedule).peak_nbytes <= budget


def test_refinement_proves_that_nothing_fits() -> None:
    (refined,) = refine(unit_chain(8), 2 * UNIT - 1, math.inf)
    assert refined.schedule is None
    assert math.isinf(refined.bound_seconds)
