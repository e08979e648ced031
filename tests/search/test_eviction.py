"""Dropping tensors where the peak is: valid, within the budget, better with time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, training_graphs, unit_chain
from helpers.small_graphs import small_graphs
from memplan.search.buffers import carried_tensors
from memplan.search.evicted_least import evicted_least
from memplan.search.eviction import ROOM, Evictions
from memplan.search.kernels.greedy import ONCE, TWICE, drop_arrays, drop_state, run
from memplan.search.rematerialize import repeatable
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status, Strategy, name_of
from memplan.strategies.base import Problem
from memplan.strategies.checkmate_lp import CheckmateLP
from memplan.strategies.evict import Evict
from memplan.util.stop import Stop


def test_without_drops_nothing_is_recomputed() -> None:
    graph = unit_chain(8)
    search = Evictions(graph, 100 * UNIT)
    stages = search.stages(set())
    assert stages == [[t] for t in range(len(graph.ops))]
    fit = search.fit((), Stop(math.inf))
    assert fit is not None
    assert fit.schedule == Schedule.unplanned(graph)
    assert not fit.drops


def test_what_is_dropped_is_recomputed_for_its_reader() -> None:
    graph = unit_chain(3)  # f0 f1 f2 loss b2 b1 b0
    stages = Evictions(graph, 100 * UNIT).stages({(1, 5)})
    assert stages == [[0], [1], [2], [3], [4], [1, 5], [6]]


def test_what_is_recomputed_on_the_way_stays_unless_it_is_dropped_again() -> None:
    graph = unit_chain(3)
    search = Evictions(graph, 100 * UNIT)
    assert search.stages({(1, 5), (0, 6)})[5:] == [[0, 1, 5], [6]]
    assert search.stages({(1, 5), (0, 6), (0, -6)})[5:] == [[0, 1, 5], [0, 6]]


def test_drops_are_read_off_what_is_carried() -> None:
    graph = unit_chain(3)
    search = Evictions(graph, 100 * UNIT)
    drops = {(1, 5), (0, 6)}
    ops = [op for stage in search.stages(drops) for op in stage]
    assert search.drops_in(Schedule.sequence(graph, ops)) == drops


@taking(drops=5)
@examples(100)
@given(small_graphs(6), st.lists(st.floats(0.6, 1.0), min_size=3, max_size=3))
def test_drops_of_a_schedule_are_those_of_what_it_carries(
    taken: Counter[str], graph: TrainingGraph, shares: list[float]
) -> None:
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    for share in shares:
        search = Evictions(graph, int(share * peak), recompute_backward=True)
        fit = search.fit((), Stop(math.inf))
        if fit is not None:
            carried = carried_tensors(fit.schedule)
            taken["drops"] += bool(search.drops_in(fit.schedule))
            assert search.drops_in(fit.schedule) == search.drops_of(carried)


def test_what_is_cheapest_per_byte_is_dropped() -> None:
    """f0 and f1 wait for the last op; f1 is as large, but cheaper to compute again."""
    ops = (
        Op("f0", "op", (), (0,), 5.0),
        Op("f1", "op", (), (1,), 1.0),
        Op("f2", "op", (), (2,), 9.0),
        Op("f3", "op", (2,), (3,), 9.0),
        Op("last", "op", (0, 1, 3), (4,), 1.0),
    )
    sizes = (2, 2, 3, 1, 1)
    tensors = tuple(Tensor(str(i), n, n) for i, n in enumerate(sizes))
    fit = Evictions(TrainingGraph(ops, tensors, (4,), 5), 6).fit((), Stop(math.inf))
    assert fit is not None
    assert fit.schedule.ops == (0, 1, 2, 3, 1, 4)


def test_room_is_made_for_long_sequences() -> None:
    """Within three tensors a chain runs its first ops many times more than there is room for."""
    graph = unit_chain(24)
    fit = Evictions(graph, 3 * UNIT).fit((), Stop(math.inf))
    assert fit is not None
    assert len(fit.schedule.ops) > ROOM * len(graph.ops)
    assert simulate(fit.schedule).peak_nbytes <= 3 * UNIT


@pytest.mark.parametrize("budget", [6 * UNIT, None])
@pytest.mark.parametrize("strategy", [Evict(), CheckmateLP(thresholds=2)], ids=name_of)
def test_an_interrupt_gives_the_best_so_far(
    strategy: Strategy, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(unit_chain(8), budget)
    fit = Evictions._fit
    for count in (2, 12):
        calls = 0

        def interrupted(*arguments: Any, last: int = count) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                raise KeyboardInterrupt
            assert calls < last  # no other search begins
            return fit(*arguments)

        monkeypatch.setattr(Evictions, "_fit", interrupted)
        outcome = strategy.solve(problem)
        assert calls == count
        assert outcome.cut_by_clock
        assert outcome.schedule is not None
        assert validate(outcome.schedule, budget).valid


def test_an_interrupt_before_anything_is_found_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evictions, "first", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Evict().solve(Problem(unit_chain(8), 6 * UNIT))
    monkeypatch.setattr("memplan.strategies.checkmate_lp.relaxation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CheckmateLP().solve(Problem(unit_chain(8), 6 * UNIT))


def wide_chain(nlayers: int, noutputs: int) -> TrainingGraph:
    """A chain whose forward ops write this many tensors each, which their backward ops read."""
    ops = []
    for k in range(nlayers):
        outputs = tuple(range(k * noutputs, (k + 1) * noutputs))
        ops.append(Op(f"f{k}", "op", (outputs[0] - noutputs,) if k else (), outputs))
    gradient: tuple[int, ...] = ()
    for k in reversed(range(nlayers)):
        written = (nlayers * noutputs + nlayers - 1 - k,)
        ops.append(Op(f"b{k}", "op", (*ops[k].outputs, *gradient), written))
        gradient = written
    ntensors = nlayers * (noutputs + 1)
    tensors = tuple(Tensor(f"t{a}", UNIT, 1) for a in range(ntensors))
    return TrainingGraph(tuple(ops), tensors, gradient, nlayers)


def test_what_goes_was_written_before_and_has_room() -> None:
    """Tensors that are made again together may go later: compiled code looks at no index."""
    nlayers, kept, guard = 12, 4, 1000
    graph = wide_chain(nlayers, 40)
    arrays = drop_arrays(graph, repeatable(graph))
    state = drop_state(arrays, ROOM * len(graph.ops) + 1)
    size = state.events.size
    memory = np.full(size + guard, -77)
    state = state._replace(events=memory[:size].reshape(state.events.shape))
    for a, producer in enumerate(graph.producer[: nlayers * 40]):
        for place in range(arrays.first_read[a], arrays.first_read[a + 1]):
            if arrays.reads[place] >= nlayers:
                state.dropped[place] = ONCE if producer < kept else ONCE | TWICE
    assert run(arrays, state) == -1
    assert (memory[size:] == -77).all()


def test_unit_chain_at_four_tensors() -> None:
    outcome = Evict().solve(Problem(unit_chain(8), 4 * UNIT))
    assert outcome.status is Status.FEASIBLE
    assert outcome.schedule is not None
    assert outcome.schedule.seconds == 26.0
    assert Evict().solve(Problem(unit_chain(8), 2 * UNIT)).status is Status.NO_PLAN_FOUND


@taking(plan=5)
@examples(60)
@given(st.data())
def test_evictions_are_valid_and_within_the_budget(
    taken: Counter[str], data: st.DataObject
) -> None:
    graph = data.draw(st.one_of(training_graphs(), small_graphs(6)))
    backward = data.draw(st.booleans())
    high = simulate(Schedule.unplanned(graph)).peak_nbytes
    low = simulate(evicted_least(graph, Stop(math.inf))).peak_nbytes
    budget = data.draw(st.integers(max(0, low - 2), high))
    outcome = Evict(patience=10, recompute_backward=backward).solve(Problem(graph, budget))
    assert outcome.status is not Status.INFEASIBLE
    if outcome.schedule is not None:
        taken["plan"] += 1
        assert validate(outcome.schedule, budget).valid
        assert backward or all(op < graph.nforward for op in outcome.schedule.recomputed)


@examples(30)
@given(st.one_of(training_graphs(), small_graphs(6)))
def test_the_least_memory_costs_at_most_a_forward_pass(graph: TrainingGraph) -> None:
    schedule = evicted_least(graph, Stop(math.inf))
    assert validate(schedule).valid
    forward = sum(op.seconds for op in graph.ops[: graph.nforward])
    assert schedule.seconds <= graph.seconds + forward
    assert simulate(schedule).peak_nbytes <= simulate(Schedule.unplanned(graph)).peak_nbytes
