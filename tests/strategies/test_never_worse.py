"""`auto` is never worse than another strategy; `evict` gives no plan that nobody would run."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from helpers.amounts import long_except
from helpers.graphs import UNIT, unit_chain
from helpers.held_out import Wiring, cells, held_out, shortcuts, training_step, tree
from helpers.networks import residual_net
from helpers.special_networks import attention_layers, unet_of_few_tensors
from memplan.memory.memory import Blocks, Packed
from memplan.planning.realisation import trace
from memplan.step.costs import with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status, Strategy, create, names
from memplan.strategies.auto import COSTLY, Auto
from memplan.strategies.auto_searches import FEW
from memplan.strategies.base import MOST_OVERHEAD, Problem
from memplan.strategies.checkmate import Checkmate
from memplan.strategies.evict import Evict
from memplan.strategies.quick import quick_schedule
from memplan.strategies.search import Search
from memplan.strategies.spaces.flags import Flags
from memplan.strategies.spaces.space import SearchOptions
from memplan.util.stop import Stop

PLENTY = 1e5
EFFORT = 0.1
GRAPHS = dict(held_out())
QUICK = ("chain", "cells")


def others() -> dict[str, Strategy]:
    """All the other strategies, those that search with the same effort."""
    found = {
        name: create(name) for name in names("explicit") if name not in ("auto", "checkmate_lp")
    }
    return found | {"search": Search(effort=EFFORT), "checkmate": Checkmate(effort=EFFORT, gap=0.0)}


@pytest.mark.parametrize("name", long_except(GRAPHS, QUICK))
def test_no_other_strategy_is_better(name: str) -> None:
    graph = GRAPHS[name]
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    compared = 0
    for percent in (75, 55):
        problem = Problem(graph, peak * percent // 100, time_limit=PLENTY)
        auto = Auto(effort=EFFORT, gap=0.0).solve(problem)
        assert not auto.cut_by_clock
        for other, strategy in others().items():
            schedule = strategy.solve(problem).schedule
            if schedule is None:
                continue
            compared += 1
            assert auto.schedule is not None, (percent, other)
            assert validate(auto.schedule, problem.budget_nbytes).valid
            assert auto.schedule.seconds <= schedule.seconds * (1 + 1e-9), (percent, other)
    assert compared >= 2


@pytest.mark.parametrize("seed", [2, 20, 36, 41, 60])
def test_small_graphs_are_searched_more_than_once(seed: int) -> None:
    """One search for all of its work ends without a schedule there, or far from the best."""
    graph, memory = training_step(tree(5), seed), Packed()
    budget = memory.nbytes(Schedule.unplanned(graph)) * 60 // 100
    problem = Problem(graph, budget, memory=memory, time_limit=PLENTY)
    auto = Auto(effort=EFFORT).solve(problem).schedule
    assert auto is not None
    assert memory.nbytes(auto) <= budget
    for reorder in (True, False):
        schedule = Search(effort=EFFORT, reorder=reorder).solve(problem).schedule
        assert schedule is None or auto.seconds <= schedule.seconds * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 5, 7, 10])
def test_in_blocks_the_usual_order_is_searched_from_nothing_too(seed: int) -> None:
    graph = training_step(cells(15), seed)
    memory = Blocks((graph.match_range,))
    budget = memory.nbytes(Schedule.unplanned(graph)) * 60 // 100
    problem = Problem(graph, budget, memory=memory, time_limit=PLENTY)
    auto = Auto(effort=EFFORT, gap=0.0).solve(problem).schedule
    schedule = Search(effort=EFFORT, reorder=False).solve(problem).schedule
    assert auto is not None
    assert schedule is not None
    assert auto.seconds <= schedule.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("wiring", "seed", "percent"),
    [(cells(12), 1, 45), (shortcuts(30), 2, 45), (shortcuts(70), 1, 45), (shortcuts(70), 1, 60)],
    ids=["least memory", "few ops", "start", "cheap"],
)
def test_in_blocks_other_schedules_are_searched_from_too(
    wiring: Wiring, seed: int, percent: int
) -> None:
    """From nothing, or from a start that runs all again and again, a search ends far above."""
    graph = training_step(wiring, seed)
    memory = Blocks((graph.match_range,))
    budget = memory.nbytes(Schedule.unplanned(graph)) * percent // 100
    problem = Problem(graph, budget, memory=memory, time_limit=PLENTY)
    start = quick_schedule(problem, Stop.after(PLENTY))
    auto = Auto(effort=EFFORT, gap=0.0, start=start).solve(problem).schedule
    assert auto is not None
    assert memory.nbytes(auto) <= budget
    assert auto.overhead <= 0.4
    for other in (Search(effort=EFFORT, start=start), Evict()):
        schedule = other.solve(problem).schedule
        assert schedule is None or auto.seconds <= schedule.seconds * (1 + 1e-9)


def test_an_interrupt_of_evictions_ends_the_other_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_step(shortcuts(30), 2)
    memory = Blocks((graph.match_range,))
    budget = memory.nbytes(Schedule.unplanned(graph)) * 45 // 100
    monkeypatch.setattr(Evict, "within", lambda _, problem, stop: stop.end())
    others = "memplan.strategies.auto.within_a_pass"
    monkeypatch.setattr(others, lambda *_: pytest.fail("a search goes on"))
    problem = Problem(graph, budget, memory=memory, time_limit=PLENTY)
    outcome = Auto(effort=EFFORT, gap=0.0).solve(problem)
    assert outcome.schedule is not None
    assert outcome.schedule.overhead > COSTLY
    assert outcome.cut_by_clock


@pytest.mark.parametrize(("count", "percent"), [(2, 69), (2, 72), (6, 63), (6, 72), (6, 80)])
def test_flags_are_annealed_from_nothing_too(count: int, percent: int) -> None:
    """From the flags of the proof annealing stays near them, or finds none that fit."""
    symbol, shapes = attention_layers(count)
    graph = with_costs(trace(symbol, shapes=shapes).graph, "roofline:v100")
    assert (len(graph.ops) > FEW) is (count > 2)
    memory = Blocks((graph.match_range,))
    budget = memory.nbytes(Schedule.unplanned(graph)) * percent // 100
    problem = Problem(graph, budget, memory=memory, space=Flags(), time_limit=PLENTY)
    auto = Auto(effort=EFFORT).solve(problem).schedule
    schedule = Search(effort=EFFORT).solve(problem).schedule
    assert auto is not None
    assert schedule is not None
    assert auto.seconds <= schedule.seconds * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("percent", "overhead"), [(75, 0.195), (84, 0.135)])
def test_flags_of_few_ops_are_annealed_from_the_fewest_bytes_too(
    percent: int, overhead: float
) -> None:
    """Nothing fits there but what recomputes many large tensors at once."""
    symbol, shapes = unet_of_few_tensors()
    graph = with_costs(trace(symbol, shapes=shapes).graph, "roofline:v100")
    memory = Blocks((graph.match_range,))
    budget = memory.nbytes(Schedule.unplanned(graph)) * percent // 100
    problem = Problem(graph, budget, memory=memory, space=Flags(), time_limit=PLENTY)
    auto = Auto().solve(problem).schedule
    assert auto is not None
    assert memory.nbytes(auto) <= budget
    assert auto.overhead <= overhead  # as with six times the work


@pytest.mark.parametrize(
    ("percent", "seed", "overhead"),
    [(62, 0, 0.24), (89, 1, 0.13)],
    ids=["the fewest bytes", "nothing"],
)
def test_flags_of_few_ops_are_annealed_from_other_starts_too(
    percent: int, seed: int, overhead: float
) -> None:
    """In little work that from the known schedule ends at +32% and +22%."""
    symbol, shapes = residual_net(units=2)
    graph = with_costs(trace(symbol, shapes=shapes).graph, "roofline:v100")
    memory = Blocks((graph.match_range,))
    budget = memory.nbytes(Schedule.unplanned(graph)) * percent // 100
    problem = Problem(graph, budget, memory=memory, space=Flags(), time_limit=PLENTY)
    start = quick_schedule(problem, Stop.after(PLENTY))
    auto = Auto(effort=0.15, seed=seed, start=start).solve(problem).schedule
    assert auto is not None
    assert memory.nbytes(auto) <= budget
    assert auto.overhead <= overhead


def test_flags_are_annealed_from_what_search_starts_with() -> None:
    """A plan gives both the schedule of quick strategies, from which other flags are reached."""
    symbol, shapes = attention_layers(6)
    graph = with_costs(trace(symbol, shapes=shapes).graph, "roofline:v100")
    memory, start = Blocks((graph.match_range,)), mirror(graph, frozenset(flaggable(graph)))
    budget = memory.nbytes(Schedule.unplanned(graph)) * 66 // 100
    calls: list[tuple[Any, ...]] = []

    class Noting(Flags):
        def improve(self, problem: Problem, start: Any, stop: Stop, moves: SearchOptions) -> Any:
            calls.append((start, stop.work_left, moves.seed))
            return super().improve(problem, start, stop, moves)

    problem = Problem(graph, budget, memory=memory, space=Noting(), time_limit=PLENTY)
    Search(effort=EFFORT, seed=3, start=start).solve(problem)
    [alone] = calls
    Auto(effort=EFFORT, seed=3, start=start).solve(problem)
    assert alone in calls[1:]


@pytest.mark.parametrize("classes", [10, 100])
def test_without_a_budget_drops_at_the_peaks_are_no_lower_and_no_cheaper(classes: int) -> None:
    """Steps down from other schedules ended 14% above, or at the same bytes and dearer."""
    symbol, shapes = pictures(classes)
    graph = with_costs(trace(symbol, shapes=shapes).graph, "roofline:v100")
    memory = Blocks((graph.match_range,))
    problem = Problem(graph, None, memory=memory, time_limit=PLENTY)
    schedule, other = (strategy.solve(problem).schedule for strategy in (Auto(), Evict()))
    assert schedule is not None
    assert other is not None
    assert schedule.seconds <= problem.most_seconds
    assert memory.nbytes(schedule) <= memory.nbytes(other)
    if memory.nbytes(schedule) == memory.nbytes(other):
        assert schedule.seconds <= other.seconds


def pictures(classes: int) -> tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]:
    """Five convolutions of the same size, each normalized."""
    body = mx.sym.Variable("data")
    for number in range(5):
        body = mx.sym.Convolution(
            body, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{number}"
        )
        body = mx.sym.Activation(mx.sym.BatchNorm(body, name=f"bn{number}"), act_type="relu")
    head = mx.sym.FullyConnected(body, num_hidden=classes, name="dense")
    return mx.sym.SoftmaxOutput(head, name="softmax"), {"data": (8, 3, 32, 32)}


def test_what_runs_everything_again_and_again_is_no_plan() -> None:
    """A chain in three tensors runs its ops as often as it is long: in square time."""
    graph: TrainingGraph = unit_chain(40)
    outcome = Evict().solve(Problem(graph, 3 * UNIT, time_limit=PLENTY))
    assert outcome.status is Status.NO_PLAN_FOUND
    wider = Evict().solve(Problem(graph, 8 * UNIT, time_limit=PLENTY)).schedule
    assert wider is not None
    assert wider.overhead <= MOST_OVERHEAD
