"""What holds for every strategy of the explicit realisation, on random graphs."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import training_graphs, unit_chain
from helpers.schedules import random_schedule
from helpers.small_graphs import small_graphs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import REALISATIONS, Status, Strategy, create, names
from memplan.strategies.base import Problem
from oracles.sequences import BruteForceSequences

# For the strategies that have these options: quick, and about the schedules and the memory that
# brute force knows.
OPTIONS = {
    "time_limit": 0.3,
    "patience": 20,
    "rounds": 20,
    "reorder": False,
    "solver": "HIGHS",
}

# They may run an op several times in one stage; strategies around Checkmate's program may not.
FREE = ("auto", "search")

FEW = examples(15, suppress_health_check=list(HealthCheck))


def quick(name: str) -> Strategy:
    known = {field.name for field in dataclasses.fields(create(name, realisation="explicit"))}
    options = {option: value for option, value in OPTIONS.items() if option in known}
    return create(name, realisation="explicit", **options)


def drawn_budget(data: st.DataObject, graph: TrainingGraph) -> int:
    """From below the least possible peak to the unplanned one."""
    lowest = BruteForceSequences().solve(Problem(graph, None)).schedule
    assert lowest is not None
    low = simulate(lowest).peak_nbytes
    high = simulate(Schedule.unplanned(graph)).peak_nbytes
    return data.draw(st.integers(max(0, low - 1), max(low, high)))


@pytest.mark.parametrize("name", names("explicit"))
@FEW
@given(st.data())
def test_every_strategy_is_valid_and_keeps_its_promises(name: str, data: st.DataObject) -> None:
    graph = data.draw(small_graphs(4))
    budget = drawn_budget(data, graph)
    exact = BruteForceSequences(any_order=name in FREE).solve(Problem(graph, budget))
    outcome = quick(name).solve(Problem(graph, budget))
    assert (outcome.schedule is None) == (
        outcome.status in (Status.INFEASIBLE, Status.NO_PLAN_FOUND)
    )
    if outcome.status is Status.INFEASIBLE:
        assert exact.schedule is None
    if outcome.lower_bound_seconds is not None and exact.schedule is not None:
        assert outcome.lower_bound_seconds <= exact.schedule.seconds + 1e-6
    if outcome.schedule is None:
        return
    verdict = validate(outcome.schedule, budget)
    assert verdict.valid, verdict.reason
    assert verdict.peak_nbytes == simulate(outcome.schedule).peak_nbytes
    assert (
        outcome.lower_bound_seconds is None
        or outcome.schedule.seconds >= outcome.lower_bound_seconds - 1e-6
    )
    assert exact.schedule is not None
    assert outcome.schedule.seconds >= exact.schedule.seconds
    if outcome.status is Status.OPTIMAL:
        assert outcome.schedule.seconds == exact.schedule.seconds


@pytest.mark.parametrize("name", names("explicit"))
@FEW
@given(training_graphs())
def test_without_a_budget_a_strategy_saves_what_it_can(name: str, graph: TrainingGraph) -> None:
    outcome = quick(name).solve(Problem(graph, None, max_overhead=math.inf))
    assert outcome.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert outcome.schedule is not None
    verdict = validate(outcome.schedule)
    assert verdict.valid, verdict.reason


@pytest.mark.parametrize("graph", [unit_chain(2), TrainingGraph((), (), (), 0)])
@pytest.mark.parametrize("name", names("explicit"))
def test_nothing_fits_in_less_than_no_bytes(name: str, graph: TrainingGraph) -> None:
    """As where the arguments alone take more than the budget; a graph may have no ops, too."""
    outcome = quick(name).solve(Problem(graph, -1))
    assert outcome.status in (Status.INFEASIBLE, Status.NO_PLAN_FOUND)


@pytest.mark.parametrize("realisation", ["mirror", "explicit"])
def test_the_least_memory_is_that_at_one_more_forward_pass(realisation: str) -> None:
    """Of every strategy, each of which could take less in more time, or finds nothing."""
    graph, space = unit_chain(16), REALISATIONS[realisation].space
    most = graph.seconds + graph.forward_seconds
    found = set()
    for name in names(realisation):
        schedule = quick(name).solve(Problem(graph, None, space=space)).schedule
        if schedule is not None:
            found.add(name)
            assert schedule.seconds <= most + 1e-6, name
    assert found == set(names(realisation)) - {"checkpoint_last"}


@given(st.one_of(training_graphs(), small_graphs(6)), st.integers(0, 10**6), st.floats(0, 1))
def test_the_simulator_agrees_with_the_naive_validator(
    graph: TrainingGraph, seed: int, repeated: float
) -> None:
    """On random orders of forward and backward ops, any share of which runs again."""
    schedule = random_schedule(graph, seed, repeated=repeated)
    verdict = validate(schedule)
    assert verdict.valid, verdict.reason
    assert verdict.peak_nbytes == simulate(schedule).peak_nbytes
    assert not validate(schedule, verdict.peak_nbytes - 1).valid


@pytest.mark.parametrize("budget", [3, 4, 5, 6])
def test_no_strategy_beats_brute_force_on_the_unit_chain(budget: int) -> None:
    graph = unit_chain(5)
    nbytes = budget * graph.tensors[0].nbytes
    exact = BruteForceSequences().solve(Problem(graph, nbytes)).schedule
    found = {name: quick(name).solve(Problem(graph, nbytes)).schedule for name in names("explicit")}
    assert exact is not None
    costs = {name: schedule.seconds for name, schedule in found.items() if schedule is not None}
    assert min(costs.values()) == exact.seconds
