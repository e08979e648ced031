"""Greedy eviction while the step runs: valid, within the budget, at budgets where others fail."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, training_graphs, unit_chain
from memplan.search import online
from memplan.search.eviction import Evictions
from memplan.search.kernels.greedy import drop_arrays
from memplan.search.kernels.online import STALENESS, UNIONS, online_state, run_online
from memplan.search.online import KINDS, SLACKS, online_schedules
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies.base import Problem
from memplan.strategies.evict import Evict
from memplan.strategies.quick import quick_schedule
from memplan.strategies.search import Search
from memplan.util.stop import Stop

PLENTY = 1e5


def made(graph: TrainingGraph, budget_nbytes: int, *, backward: bool = False) -> list[Schedule]:
    stop = Stop.after(PLENTY)
    return list(online_schedules(graph, budget_nbytes, stop, recompute_backward=backward))


@taking(recomputes=10)
@examples(100)
@given(training_graphs(), st.floats(0.3, 1.0), st.booleans())
def test_schedules_are_valid(
    taken: Counter[str], graph: TrainingGraph, share: float, backward: bool
) -> None:
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    for schedule in made(graph, budget, backward=backward):
        taken["recomputes"] += bool(schedule.recomputed)
        verdict = validate(schedule, simulate(schedule).peak_nbytes)
        assert verdict.valid, verdict.reason
        if not backward:
            assert all(schedule.ops.count(op) == 1 for op in range(graph.nforward, len(graph.ops)))


def test_nothing_is_dropped_where_all_fits() -> None:
    graph = unit_chain(8)
    enough = 2 * sum(tensor.nbytes for tensor in graph.tensors)
    assert set(made(graph, enough)) == {Schedule.unplanned(graph)}


def test_ops_may_take_no_time() -> None:
    graph = unit_chain(12)
    timeless = graph.with_seconds([0.0] * len(graph.ops))
    assert made(timeless, 6 * UNIT)
    assert not any(schedule.seconds for schedule in made(timeless, 6 * UNIT))


def test_a_long_chain_in_the_root_of_its_memory() -> None:
    """Without the seconds of what was dropped around a tensor it is recomputed in square time."""
    graph = unit_chain(400)
    budget = 60 * UNIT
    fitting = [s for s in made(graph, budget) if simulate(s).peak_nbytes <= budget]
    assert min(schedule.overhead for schedule in fitting) < 1.0


def test_what_is_cheapest_per_byte_and_needed_last_is_dropped() -> None:
    """For what ``r0`` writes, ``late`` or ``costly`` must go."""
    names = ("soon", "late", "costly", "middle", "r0", "r1", "r2")
    inputs: tuple[tuple[int, ...], ...] = ((), (), (), (), (0, 3), (2, 4), (1, 5))
    seconds = (1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0)
    graph = TrainingGraph(
        tuple(
            Op(name, "op", read, (k,), time)
            for k, (name, read, time) in enumerate(zip(names, inputs, seconds, strict=True))
        ),
        tuple(Tensor(name, UNIT, 1) for name in names),
        heads=(6,),
        nforward=7,
    )
    assert made(graph, 4 * UNIT)[0].ops == (0, 1, 2, 3, 4, 5, 1, 6)


def test_an_op_of_many_outputs_drops_no_more_than_there_is_room_for() -> None:
    """Run for each of its readers, it drops all the others every time."""
    many, readers = 30, 40
    tensors = [Tensor(f"t{k}", UNIT, 1) for k in range(many + readers)]
    ops = [Op("split", "split", (), tuple(range(many)), seconds=0.0)]
    for k in range(readers):
        before = (many + k - 1,) if k else ()
        ops.append(Op(f"r{k}", "r", (k % many, *before), (many + k,), seconds=1.0))
    graph = TrainingGraph(tuple(ops), tuple(tensors), (many + readers - 1,), readers + 1)
    arrays = drop_arrays(graph, (True,) * len(ops))
    state = online_state(arrays, 10 * len(ops))
    run_online(arrays, state, 3 * UNIT, STALENESS, 1e6)
    assert many < state.counts[UNIONS] <= len(state.parent)


def test_every_slack_is_tried_and_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = unit_chain(40)
    stop = Stop.after(PLENTY, work=1e9)
    schedules = list(online_schedules(graph, 20 * UNIT, stop))
    assert len(schedules) == (len(KINDS) - 1) * len(SLACKS)  # without backward ops again
    assert stop.work_left < 1e9
    assert list(online_schedules(graph, 20 * UNIT, Stop.after(PLENTY, work=0.0))) == []
    monkeypatch.setattr(online, "MOST_WORK", 1.0)
    assert made(graph, 20 * UNIT) == schedules[:1]


def test_choosing_drops_begins_with_the_cheaper_of_the_two() -> None:
    graph = unit_chain(100)
    search = Evictions(graph, 14 * UNIT)
    alone = search.fit((), Stop.after(PLENTY))
    begun = search.cheapest_online(Stop.after(PLENTY))
    assert begun is not None
    first = search.first(begun, Stop.after(PLENTY))
    assert first is not None
    assert simulate(first.schedule).peak_nbytes <= 14 * UNIT
    assert alone is not None
    assert first.schedule.seconds < alone.schedule.seconds
    assert search.first(None, Stop.after(PLENTY)) == alone


def test_a_chain_in_little_memory_has_a_plan_that_somebody_would_run() -> None:
    graph = unit_chain(100)
    problem = Problem(graph, 14 * UNIT, time_limit=PLENTY)
    evicted = Evict(patience=10).solve(problem).schedule
    assert evicted is not None
    assert evicted.overhead < 1.0
    searched = Search(effort=0.003).solve(problem).schedule
    assert searched is not None
    assert searched.overhead < 1.0
    first = quick_schedule(problem, Stop.after(PLENTY))
    assert problem.cheapest([first]) is not None
    assert first.overhead < 1.0
