"""The search over sequences: exact in what it counts, valid, in the budget, near the optimum."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.clock import TickingClock
from helpers.graphs import UNIT, training_graphs, unit_chain
from helpers.replays import replayed
from helpers.schedules import random_schedule
from helpers.small_graphs import small_graphs
from memplan.errors import ArgumentError
from memplan.memory.blocks import allocate
from memplan.memory.memory import Blocks, Live, Memory
from memplan.search import rounds
from memplan.search.kernels.annealing import expand
from memplan.search.kernels.model import sequence_model
from memplan.search.kernels.moves import propose
from memplan.search.kernels.sequence import load, undo
from memplan.search.kernels.state import CHANGES, EXCESS, LENGTH, OP, sequence_state
from memplan.search.rematerialize import repeatable
from memplan.search.sequence_search import compile_search
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status
from memplan.strategies.base import Problem
from memplan.strategies.search import Search
from memplan.util import stop
from oracles.sequences import BruteForceSequences

GRAPHS = st.one_of(training_graphs(), small_graphs(6))


@examples(200)
@given(GRAPHS, st.integers(0, 10**6), st.sampled_from((0, 1, 2, 4, 16)))
def test_the_compiled_replay_is_that_of_simulator_and_allocator(
    graph: TrainingGraph, seed: int, match_range: int
) -> None:
    schedule = random_schedule(graph, seed)
    cost = replayed(graph, schedule.ops, match_range)
    assert cost.peak_nbytes == simulate(schedule).peak_nbytes
    assert cost.allocated_nbytes == allocate(schedule, match_range=match_range).nbytes


def walked(graph: TrainingGraph, seed: int, nmoves: int, *, reorder: bool = True) -> Any:
    """Model and state after random moves, of which every third is taken back."""
    model = sequence_model(graph, repeatable(graph, backward=True), reorder=reorder)
    capacity = 4 * len(graph.ops) + 100
    state = sequence_state(model, capacity, seed)
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * 2 // 3
    load(model, state, np.arange(len(model.seconds)), len(model.seconds), budget)
    for move in range(nmoves):
        state.totals[CHANGES] = 0
        before = [array.copy() for array in state[:-3]]
        propose(model, state)
        if move % 3 == 0:
            length = state.totals[LENGTH]
            undo(model, state)
            length = min(length, state.totals[LENGTH])
            for was, now in zip(before, state[:-3], strict=True):
                assert np.allclose(was[..., :length], now[..., :length])
    room = np.zeros(capacity, dtype=np.int64)
    schedule = Schedule.sequence(graph, room[: expand(model, state, room)].tolist())
    return model, state, schedule


@examples(100)
@given(GRAPHS, st.integers(0, 10**6), st.booleans())
def test_the_state_after_moves_is_that_of_its_sequence(
    graph: TrainingGraph, seed: int, reorder: bool
) -> None:
    model, state, schedule = walked(graph, seed, 60, reorder=reorder)
    assert validate(schedule).valid
    other = sequence_state(model, len(state.live), 0)
    length = state.totals[LENGTH]
    load(model, other, state.steps[OP], length, state.totals[2])
    assert (other.steps[:, :length] == state.steps[:, :length]).all()
    assert (other.live[:length] == state.live[:length]).all()
    assert other.totals[EXCESS] == state.totals[EXCESS]
    assert other.seconds[0] == pytest.approx(state.seconds[0])
    assert state.seconds[0] == pytest.approx(schedule.seconds)


@examples(100)
@given(GRAPHS, st.integers(0, 10**6))
def test_the_live_bytes_are_those_of_the_simulator(graph: TrainingGraph, seed: int) -> None:
    _, state, schedule = walked(without_aliases(graph), seed, 40)
    length = state.totals[LENGTH] - 1
    assert tuple(state.live[:length]) == simulate(schedule).live_nbytes


def without_aliases(graph: TrainingGraph) -> TrainingGraph:
    ops = [
        dataclasses.replace(op, handovers=tuple(h._replace(alias=False) for h in op.handovers))
        for op in graph.ops
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


def test_an_alias_runs_with_the_op_that_it_follows() -> None:
    """A reshape of f0's output is read in the end: it shares the buffer, which is there once."""
    ops = (
        Op("f0", "op", (), (0,), 1.0),
        Op("reshape", "op", (0,), (1,), 0.0, handovers=(Handover(0, 0, True),)),
        Op("f1", "op", (0,), (2,), 1.0),
        Op("f2", "op", (1, 2), (3,), 1.0),
    )
    graph = TrainingGraph(ops, tuple(Tensor(str(i), UNIT, 1) for i in range(4)), (3,), 4)
    _, state, schedule = walked(graph, 1, 50)
    assert max(state.live) == simulate(schedule).peak_nbytes
    assert schedule.ops.count(1) == schedule.ops.count(0)


def reshaped_chain(nlayers: int) -> TrainingGraph:
    """A chain whose ops read reshapes of what the one before writes, which runs after the first op.

    Backward ops read what is reshaped, and not the reshapes.
    """
    ops: list[Op] = []
    for layer in range(nlayers):
        before = (2 * layer - 1,) if layer else ()
        ops.append(Op(f"f{layer}", "op", before, (2 * layer,), 1.0))
        reads, writes, alias = (2 * layer,), (2 * layer + 1,), (Handover(0, 0, True),)
        ops.append(Op(f"r{layer}", "op", reads, writes, 0.5, after=(0,), handovers=alias))
    for layer in reversed(range(nlayers)):
        new = len(ops)
        ops.append(Op(f"b{layer}", "op", (new - 1, 2 * layer), (new,), 1.0, recomputable=False))
    tensors = tuple(Tensor(op.name, UNIT, 1) for op in ops)
    return TrainingGraph(tuple(ops), tensors, (len(ops) - 1,), 2 * nlayers)


def test_an_alias_runs_again_only_where_it_is_read() -> None:
    """Then its model counts the bytes and seconds of the simulator, which counts unread ones."""
    graph = reshaped_chain(6)
    nfewer = nequal = 0
    for seed in range(30):
        model, state, schedule = walked(graph, seed, 60)
        assert len(model.seconds) == 6 + 6 + 1, "a reshape runs with the op that it follows"
        assert state.seconds[0] == pytest.approx(schedule.seconds)
        read = {step for steps in schedule.reads for step in steps}.union(schedule.heads)
        reshapes = [step for step, op in enumerate(schedule.ops) if graph.ops[op].handovers]
        assert all(
            step in read or schedule.first_run[schedule.ops[step]] == step for step in reshapes
        )
        nfewer += len(reshapes) < len(schedule.ops) - len(reshapes) - 6
        if read.issuperset(reshapes):
            nequal += 1
            peak = max(state.live[: state.totals[LENGTH]])
            assert peak == simulate(schedule).peak_nbytes
    assert min(nfewer, nequal) > 5


def test_there_is_room_for_all_ops_of_groups() -> None:
    """A reshape of a reshape runs with the op before: a step of a sequence is three ops here."""
    alias = (Handover(0, 0, True),)
    ops = (
        Op("f", "op", (), (0,), 1.0),
        Op("r", "reshape", (0,), (1,), handovers=alias),
        Op("s", "reshape", (1,), (2,), handovers=alias),
        Op("b", "op", (2,), (3,), 1.0),
    )
    graph = TrainingGraph(ops, tuple(Tensor(op.name, UNIT, 1) for op in ops), (3,), 3)
    search = rounds.Rounds(graph, rounds.Rules(True, True, ()), seed=0, stop=stop.Stop(math.inf))
    assert len(search.unplanned) == 3  # two groups and the end
    nruns = (search.capacity - 1) // 2
    sequence = np.array([0, 1] * nruns + [2])
    nsteps = 4 * nruns
    assert min(len(search.room), len(search.memory.live), len(search.memory.reads)) >= nsteps
    assert search.schedule(sequence).ops == (0, 1, 2, 3) * nruns
    assert search.live_peak(sequence) == 2 * UNIT


def test_the_seconds_of_an_alias_that_nothing_reads_count() -> None:
    ops = (
        Op("f", "op", (), (0,), 1.0),
        Op("r", "reshape", (0,), (1,), 0.5, handovers=(Handover(0, 0, True),)),
        Op("b", "op", (0,), (2,), 1.0),
    )
    graph = TrainingGraph(ops, tuple(Tensor(op.name, UNIT, 1) for op in ops), (2,), 2)
    search = rounds.Rounds(graph, rounds.Rules(True, True, ()), seed=0, stop=stop.Stop(math.inf))
    assert len(search.unplanned) == 3  # two groups and the end
    assert search.seconds(search.unplanned) == graph.seconds == 2.5


@taking(least=2, plan=5)
@examples(60)
@given(st.data())
def test_plans_are_valid_and_within_the_budget(taken: Counter[str], data: st.DataObject) -> None:
    graph = data.draw(GRAPHS)
    backward, reorder = data.draw(st.booleans()), data.draw(st.booleans())
    memory = data.draw(st.sampled_from((Live(), Blocks())))
    strategy = Search(rounds=2, reorder=reorder, recompute_backward=backward)
    unplanned = Schedule.unplanned(graph)
    high = memory.nbytes(unplanned)
    budget = data.draw(st.one_of(st.none(), st.integers(high // 2, high)))
    outcome = strategy.solve(Problem(graph, budget, memory=memory, max_overhead=math.inf))
    assert outcome.status is not Status.INFEASIBLE
    if budget is None:
        taken["least"] += 1
        assert outcome.schedule is not None
        assert memory.nbytes(outcome.schedule) <= high
    if outcome.schedule is not None:
        taken["plan"] += 1
        assert validate(outcome.schedule).valid
        assert budget is None or memory.nbytes(outcome.schedule) <= budget
        assert backward or all(op < graph.nforward for op in outcome.schedule.recomputed)
        first = list(dict.fromkeys(outcome.schedule.ops))
        assert reorder or first == sorted(first)
        once = [op for op in first if op < graph.nforward and not graph.ops[op].recomputable]
        assert once == sorted(once)


@taking(plan=6, recomputes=1)
@examples(25)
@given(small_graphs(), st.floats(0.0, 1.0))
def test_nearly_optimal_on_small_graphs(
    taken: Counter[str], graph: TrainingGraph, share: float
) -> None:
    least = BruteForceSequences().solve(Problem(graph, None)).schedule
    assert least is not None
    low, high = (simulate(s).peak_nbytes for s in (least, Schedule.unplanned(graph)))
    budget = low + int(share * (high - low))
    exact = BruteForceSequences().solve(Problem(graph, budget))
    outcome = Search(rounds=3, reorder=False).solve(Problem(graph, budget))
    assert exact.schedule is not None
    taken["recomputes"] += bool(exact.schedule.recomputed)
    if outcome.schedule is not None:
        taken["plan"] += 1
        assert outcome.schedule.seconds <= 1.1 * exact.schedule.seconds + 1e-9


def test_unit_chain_at_four_tensors() -> None:
    outcome = Search(rounds=3).solve(Problem(unit_chain(8), 4 * UNIT))
    assert outcome.schedule is not None
    assert outcome.schedule.seconds == 26.0


def test_least_memory_of_the_unit_chain() -> None:
    anything = Problem(unit_chain(8), None, max_overhead=math.inf)
    schedule = Search(rounds=3).solve(anything).schedule
    assert schedule is not None
    assert simulate(schedule).peak_nbytes == 3 * UNIT


@pytest.mark.parametrize("memory", [Live(), Blocks()], ids=["live", "blocks"])
def test_the_same_seed_gives_the_same_schedule(memory: Memory) -> None:
    strategy = Search(rounds=2, seed=3)
    problem = Problem(unit_chain(12), 8 * UNIT, memory=memory, time_limit=1000)
    first = strategy.solve(problem)
    assert first.schedule is not None
    assert not first.cut_by_clock
    assert first == strategy.solve(problem)


@pytest.mark.parametrize("match_ranges", [(), (-1,), ("2",)])
def test_match_ranges_are_whole_numbers(match_ranges: Any) -> None:
    with pytest.raises(ArgumentError, match="match_ranges"):
        Blocks(match_ranges)


def test_never_worse_than_its_start() -> None:
    """One short round does not find the optimum: but it was given."""
    graph = unit_chain(30)
    best = Search(rounds=3).solve(Problem(graph, 8 * UNIT)).schedule
    assert best is not None
    schedule = Search(rounds=1, start=best).solve(Problem(graph, 8 * UNIT)).schedule
    assert schedule is not None
    assert schedule.seconds <= best.seconds


def test_an_interrupt_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_search()  # which anneals, too
    calls = 0
    anneal = rounds.anneal

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        anneal(*arguments)

    monkeypatch.setattr(rounds, "anneal", interrupted)
    outcome = Search(rounds=100).solve(Problem(unit_chain(8), 6 * UNIT))
    assert calls == 3
    assert outcome.status is Status.FEASIBLE


def test_the_time_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_search()  # which looks at the clock, too
    clock = TickingClock(0.01)
    clock.replaces_that_of(monkeypatch, rounds, stop)
    Search(time_limit=0.5).solve(Problem(unit_chain(40), 6 * UNIT))
    assert 40 < clock.looks < 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": -1}, "time_limit"),
        ({"time_limit": math.nan}, "time_limit"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Search(**options)
