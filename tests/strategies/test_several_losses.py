"""Networks with several losses: what one loss saves for its backward pass need not wait."""

from __future__ import annotations

import pytest

from helpers.special_networks import heads_of_trunk
from memplan.memory.memory import Blocks, Live, Memory, Packed
from memplan.planning.realisation import trace
from memplan.step.costs import with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.validate import validate
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.search import Search

PLENTY = 1e5
MEMORIES: dict[str, Memory] = {"live": Live(), "blocks": Blocks(), "packed": Packed()}


def network(realisation: str) -> TrainingGraph:
    symbol, shapes = heads_of_trunk()
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    return with_costs(traced.graph, "roofline:v100")


def problem(kind: str, percent: int) -> Problem:
    graph = network("explicit" if kind == "blocks" else "packed")
    memory = MEMORIES[kind]
    budget = memory.nbytes(Schedule.unplanned(graph)) * percent // 100
    return Problem(graph, budget, memory=memory, time_limit=PLENTY)


@pytest.mark.parametrize("kind", MEMORIES)
def test_nothing_is_recomputed_where_losses_can_take_turns(kind: str) -> None:
    asked = problem(kind, 60)
    schedule = Auto(effort=0.05).solve(asked).schedule
    assert schedule is not None
    assert validate(schedule).valid
    assert not schedule.recomputed
    assert schedule.overhead == 0.0


@pytest.mark.parametrize("kind", MEMORIES)
def test_in_less_memory_ops_are_recomputed_within_a_turn(kind: str) -> None:
    asked = problem(kind, 33)
    for strategy in (Auto(effort=0.05), Search(effort=0.05)):
        schedule = strategy.solve(asked).schedule
        assert schedule is not None
        assert validate(schedule).valid
        assert 0.0 < schedule.overhead < 0.3


def test_without_leave_losses_take_no_turns() -> None:
    schedule = Auto(effort=0.05, reorder=False).solve(problem("live", 60)).schedule
    assert schedule is not None
    first_runs = list(dict.fromkeys(schedule.ops))
    assert first_runs == sorted(first_runs)
    assert schedule.overhead > 0.0
