"""The default strategy: proved where that is quick, never worse than another in the same time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, in_mxnets_order, mirrored_graphs, training_graphs, unit_chain
from helpers.planning import NEVER_SECONDS
from helpers.small_graphs import small_graphs
from memplan.errors import ArgumentError
from memplan.memory.blocks import allocate, best_allocation
from memplan.memory.memory import Blocks, Live, Memory, Packed
from memplan.memory.packing import ALIGNMENT
from memplan.programs.proof import Fact
from memplan.search.flag_annealing import mirrored_schedule
from memplan.step.graph import Tensor, TrainingGraph
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status, auto, auto_searches, auto_starts, create, names, quick
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.spaces import sequences, space
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Proving, SearchOptions
from memplan.util.stop import Stop
from oracles.sequences import BruteForceSequences


@examples(25)
@given(st.data())
def test_it_finds_what_brute_force_finds(data: st.DataObject) -> None:
    graph = data.draw(small_graphs(max_forward=4))
    least = BruteForceSequences(any_order=True).solve(Problem(graph, None)).schedule
    assert least is not None
    budget = simulate(least).peak_nbytes + data.draw(st.integers(0, 3))
    optimum = BruteForceSequences(any_order=True).solve(Problem(graph, budget)).schedule
    assert optimum is not None
    outcome = Auto(time_limit=NEVER_SECONDS, effort=0.2, reorder=False).solve(
        Problem(graph, budget)
    )
    assert outcome.schedule is not None
    assert validate(outcome.schedule).valid
    assert simulate(outcome.schedule).peak_nbytes <= budget
    assert outcome.lower_bound_seconds is not None
    assert outcome.lower_bound_seconds <= optimum.seconds + 1e-6 * graph.seconds
    assert outcome.schedule.seconds == pytest.approx(optimum.seconds)


MEMORIES: dict[str, Memory] = {"live": Live(), "blocks": Blocks(), "packed": Packed()}


def enlarged(graph: TrainingGraph) -> TrainingGraph:
    """``graph`` with tensors so much larger that they fill packed memory without gaps."""
    times = ALIGNMENT // UNIT
    tensors = [Tensor(t.name, times * t.nbytes, times * t.nelements) for t in graph.tensors]
    return dataclasses.replace(graph, tensors=tuple(tensors))


@pytest.mark.parametrize("memory", MEMORIES)
def test_no_other_strategy_is_better_in_the_same_time(memory: str) -> None:
    graph = enlarged(unit_chain(16))
    budget = 8 * ALIGNMENT
    problem = Problem(graph, budget, memory=MEMORIES[memory], time_limit=NEVER_SECONDS)
    auto = Auto(effort=0.02).solve(problem)
    assert auto.schedule is not None
    compared = []
    for name in set(names("explicit")) - {"auto"}:
        options = {"effort": 0.02} if name == "search" else {}
        schedule = create(name, realisation="explicit", **options).solve(problem).schedule
        if schedule is not None:
            assert problem.memory.nbytes(schedule) <= budget
            compared.append(name)
            assert auto.schedule.seconds <= schedule.seconds + 1e-9, name
    assert len(compared) >= 5


@pytest.mark.parametrize("memory", ["blocks", "packed"])
@taking(plan=1)
@examples(10)
@given(graph=training_graphs())
def test_what_is_placed_is_kept_within_the_budget(
    taken: Counter[str], memory: str, graph: TrainingGraph
) -> None:
    held = MEMORIES[memory]
    budget = max(1, held.nbytes(Schedule.unplanned(graph)) * 3 // 4)
    outcome = Auto(time_limit=NEVER_SECONDS, effort=0.02).solve(Problem(graph, budget, memory=held))
    if outcome.schedule is not None:
        taken["plan"] += 1
        assert validate(outcome.schedule).valid
        assert held.nbytes(outcome.schedule) <= budget


def test_what_one_moment_proves_is_optimal() -> None:
    graph = unit_chain(16)
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    assert Auto().solve(Problem(graph, peak - UNIT)).status is Status.OPTIMAL
    assert Auto().solve(Problem(graph, peak)).schedule == Schedule.unplanned(graph)
    assert Auto().solve(Problem(graph, 2 * UNIT)).status is Status.INFEASIBLE


def test_without_a_budget_the_least_memory() -> None:
    graph = unit_chain(8)
    least = Auto(time_limit=NEVER_SECONDS, effort=0.02).solve(Problem(graph, None))
    assert least.status is Status.FEASIBLE
    assert least.schedule is not None
    # Three tensors would do, at more than one extra forward pass.
    assert simulate(least.schedule).peak_nbytes == 4 * UNIT
    assert least.schedule.seconds <= graph.seconds + graph.nforward


def test_the_search_of_a_graph_of_one_op_ends() -> None:
    graph = unit_chain(0)
    assert Auto().solve(Problem(graph, None)).schedule == Schedule.unplanned(graph)


def test_an_interrupt_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memplan.strategies.spaces.sequences.search", interrupted)
    graph = unit_chain(16)
    for interrupted_part, most_ops in (("search", 0), ("refine_moments", 0), ("ExactSearch", 64)):
        monkeypatch.setattr(f"memplan.strategies.spaces.sequences.{interrupted_part}", interrupted)
        monkeypatch.setattr("memplan.strategies.spaces.sequences.MOST_OPS", most_ops)
        outcome = Auto(gap=0.0).solve(Problem(graph, 8 * UNIT))
        assert outcome.schedule is not None
        assert simulate(outcome.schedule).peak_nbytes <= 8 * UNIT
    monkeypatch.setattr("memplan.strategies.quick.quick_schedule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Auto().solve(Problem(graph, 8 * UNIT))


@pytest.mark.parametrize("memory", [Live(), Packed()], ids=["live", "packed"])
def test_a_large_graph_has_a_plan_in_little_memory(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = unit_chain(100, nelements=ALIGNMENT)
    for room in (auto_searches, sequences, space, quick):
        monkeypatch.setattr(room, "LARGE", len(graph.ops) - 1)
    budget = 16 * ALIGNMENT * UNIT
    problem = Problem(graph, budget, memory, time_limit=NEVER_SECONDS)
    schedule = Auto(effort=0.001).solve(problem).schedule
    assert schedule is not None
    assert memory.nbytes(schedule) <= budget
    assert schedule.overhead < 1.0


def test_wrong_options_are_said() -> None:
    with pytest.raises(ArgumentError, match="time_limit"):
        Auto(time_limit=-1)
    with pytest.raises(ArgumentError, match="CBC"):
        Auto(solver="")


@taking(plan=5)
@examples(20)
@given(mirrored_graphs())
def test_what_mirroring_could_recompute_is_a_schedule_like_others(
    taken: Counter[str], graph: TrainingGraph
) -> None:
    unplanned = allocate(Schedule.unplanned(graph), match_range=2).nbytes
    for budget in (None, unplanned * 3 // 4):
        schedule = mirrored_schedule(
            graph, budget, match_range=2, stop=Stop(math.inf), moves=50, seed=0
        )
        if schedule is not None:
            taken["plan"] += 1
            assert validate(schedule).valid
            assert set(schedule.recomputed) <= set(flaggable(graph))


def test_segments_are_found_where_annealing_has_no_time() -> None:
    graph = in_mxnets_order(unit_chain(64))
    budget = allocate(Schedule.unplanned(graph), match_range=2).nbytes // 2
    schedule = mirrored_schedule(graph, budget, match_range=2, stop=Stop(math.inf), moves=0, seed=0)
    assert schedule is None or best_allocation(schedule).nbytes <= budget


def test_the_least_is_no_dearer_than_a_forward_pass() -> None:
    graph = unit_chain(32)
    for memory in MEMORIES.values():
        least = (
            Auto(time_limit=NEVER_SECONDS, effort=0.02)
            .solve(Problem(graph, None, memory=memory))
            .schedule
        )
        assert least is not None
        assert least.seconds <= graph.seconds + graph.nforward  # every op takes a second


def test_the_schedule_of_the_least_memory_is_exchanged_for_a_cheaper_one_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = unit_chain(12)
    dear = Auto(effort=0.1).solve(Problem(graph, 5 * UNIT, time_limit=NEVER_SECONDS)).schedule
    assert dear is not None
    monkeypatch.setattr(auto_starts, "least", lambda *_: Schedule.unplanned(graph))
    monkeypatch.setattr(Sequences, "improve", lambda *_: dear)
    monkeypatch.setattr(Problem, "cheapest", lambda *arguments: arguments[1][-1])
    found = Auto(effort=0.1).solve(Problem(graph, None, time_limit=NEVER_SECONDS)).schedule
    assert found == Schedule.unplanned(graph)


def test_what_is_proved_already_ends_a_search() -> None:
    graph = unit_chain(12)
    problem = Problem(graph, 9 * UNIT, time_limit=NEVER_SECONDS)
    schedule = Auto(effort=0.1, gap=0.0).solve(problem).schedule
    assert schedule is not None
    known = dataclasses.replace(problem, start=schedule, bound_seconds=schedule.seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequences, "prove", None)  # and is not called
        again = Auto(effort=0.1).solve(known)
    assert again.status is Status.OPTIMAL
    assert again.schedule == schedule
    assert known.within(10 * UNIT).bound_seconds == known.within(None).bound_seconds == 0.0
    assert known.within(8 * UNIT).bound_seconds == schedule.seconds


@pytest.mark.parametrize(("effort", "asked"), [(1.0, [False, True]), (0.5, [False])])
def test_more_is_proved_in_the_end_where_the_best_is_far_from_its_bound(
    monkeypatch: pytest.MonkeyPatch, effort: float, asked: list[bool]
) -> None:
    only_bounds = []

    def prove(_: Sequences, proving: Proving) -> None:
        only_bounds.append(proving.options.enough_seconds is not None)
        assert bool(proving.options.candidates) is only_bounds[-1]
        proving.facts.append(Fact(None, 25.0 + len(only_bounds)))

    monkeypatch.setattr(Sequences, "prove", prove)
    monkeypatch.setattr(Sequences, "improve", lambda *arguments: arguments[2])
    problem = Problem(unit_chain(12), 5 * UNIT, time_limit=NEVER_SECONDS)
    outcome = Auto(effort=effort).solve(problem)
    assert only_bounds == asked
    assert outcome.lower_bound_seconds == 25.0 + len(asked)


def test_what_is_proved_in_the_end_may_be_that_there_is_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prove(_: Sequences, proving: Proving) -> None:
        bound = 25.0 if proving.options.enough_seconds is None else math.inf
        proving.facts.append(Fact(None, bound))

    monkeypatch.setattr(Sequences, "prove", prove)
    problem = Problem(unit_chain(12), 2 * UNIT, time_limit=NEVER_SECONDS)
    assert Auto(effort=1.0, rounds=1).solve(problem).status is Status.INFEASIBLE


def test_greedy_schedules_in_blocks_of_large_graphs_get_the_same_work_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first takes all there is, and is too large: with one for all there was no other."""
    graph = unit_chain(8)
    small = auto.Auto(effort=0.05).solve(Problem(graph, None)).schedule
    assert small is not None
    memory = Blocks((2,))
    problem = Problem(graph, memory.nbytes(Schedule.unplanned(graph)) - 1, memory=memory)
    assert memory.nbytes(small) < memory.nbytes(Schedule.unplanned(graph))
    given: list[float] = []

    def searched(problem: Problem, aim: int, start: None, stop: Stop, *_: Any, **__: Any) -> Any:
        del start
        given.append(stop.work_left)
        stop.spend(10 * stop.work_left)
        return Schedule.unplanned(graph) if aim == problem.budget_nbytes else small

    monkeypatch.setattr(sequences, "_search", searched)
    for large, schedules in ((8, []), (0, [small])):
        monkeypatch.setattr(space, "LARGE", large * len(graph.ops))
        stop = Stop.after(NEVER_SECONDS, work=1000.0)
        assert Sequences()._greedy(problem, stop, SearchOptions()) == schedules
    assert given[1:] == [sequences.GREEDY_WORK * 1000.0] * 2


def test_a_step_to_the_least_memory_ends_where_its_schedule_is_cheap_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that made it cheaper still had no time left to go lower."""
    problem = Problem(unit_chain(32), None)
    enough, improve = [], Sequences.improve

    def noted(
        self: Sequences, part: Problem, start: Schedule, stop: Stop, moves: SearchOptions
    ) -> Any:
        enough.append(moves.enough_seconds)
        return improve(self, part, start, stop, moves)

    monkeypatch.setattr(Sequences, "improve", noted)
    Auto(time_limit=NEVER_SECONDS, effort=0.02).solve(problem)
    *steps, last = enough
    assert len(steps) > 1
    assert set(steps) == {problem.most_seconds}
    assert last == 0.0


@pytest.mark.parametrize(
    ("memory", "nops", "times"),
    [
        *(("blocks", 10, 6.0), ("packed", 10, 6.0), ("live", 10, 6.0)),
        *(("blocks", 130, 2.0), ("packed", 130, 4.0), ("live", 130, 4.0)),
    ],
)
def test_without_blocks_and_of_short_graphs_more_is_searched(
    memory: str, nops: int, times: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def stop(problem: Problem, time_limit: float | None, *, effort: float) -> Stop:
        asked.append(effort)
        return Stop.after(0.0)

    monkeypatch.setattr(Problem, "stop", stop)
    Auto(effort=0.5).solve(Problem(unit_chain(nops // 2), 3 * UNIT, memory=MEMORIES[memory]))
    assert asked[0] == times * 0.5


@pytest.mark.parametrize(
    ("memory", "most", "starts"),
    [("packed", 1000, [True, False]), ("live", 1000, [False, True, False]), ("packed", 0, [True])],
)
def test_short_graphs_are_searched_once_more_from_nothing(
    memory: str, most: int, starts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a good schedule a search may stay near it; of long graphs it has no work to spare."""
    graph, counted = unit_chain(64), MEMORIES[memory]
    budget = counted.nbytes(Schedule.unplanned(graph)) // 2
    searched, problem = [], Problem(graph, budget, memory=counted)
    best = create("chen_greedy").solve(problem).schedule
    assert best is not None

    def noted(
        _: Sequences, part: Problem, start: Schedule, stop: Stop, moves: SearchOptions
    ) -> Schedule:
        searched.append((start is not None, moves.seed))
        stop.spend(stop.work_left)
        return best

    monkeypatch.setattr(auto_searches, "MOST_ANEW", most)
    monkeypatch.setattr(Sequences, "improve", noted)
    monkeypatch.setattr(Sequences, "prove", lambda *_: None)
    Auto(time_limit=NEVER_SECONDS, start=best, gap=0.0).solve(problem)
    assert [is_begun for is_begun, _ in searched] == starts
    seeds = [seed for is_begun, seed in searched if not is_begun]
    assert len(set(seeds)) == len(seeds)


def test_after_a_proof_known_schedules_are_looked_at_roughly_where_time_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of graphs of 1,700 ops each look took a second, however little time there was."""
    now, asked = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Packed):
        def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
            now[0] += 0.0 if roughly else 100.0
            asked.append(roughly)
            return UNIT

    graph = unit_chain(16)
    schedules = [Schedule.sequence(graph, [*range(k), *range(33)]) for k in range(4)]
    problem = Problem(graph, 40 * UNIT, memory=Slow())
    stop = Stop.after(250.0, work=1e9)
    search = auto._Search(Auto(), problem, stop, SearchOptions(), [])
    search.known += [Fact(schedule, 0.0) for schedule in schedules]
    search._take()
    assert asked == [False, False, True, True]
    assert stop.cut_by_clock
    asked.clear()
    assert problem.cheapest(schedules) is None  # a caller without a stop has no such hurry
    assert not any(asked)
