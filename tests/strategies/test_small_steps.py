"""Of small steps `auto` proves all there is to prove: the optimum, or that no schedule fits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers.graphs import UNIT, unit_chain
from helpers.planning import NEVER_SECONDS
from memplan.memory.memory import Blocks, Live, Memory, Packed
from memplan.memory.packing import ALIGNMENT
from memplan.programs.exact import ExactSearch
from memplan.programs.proof import Fact
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Status
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Proving


def chain() -> TrainingGraph:
    """Five ops, and as many backward ones, of tensors that a budget of 10 hardly holds."""
    sizes = [ALIGNMENT * size for size in (3, 4, 4, 4, 3, 1, 1, 1, 1, 1)]
    ops = [Op(f"f{t}", "op", (t - 1,) if t else (), (t,), 1.0) for t in range(5)]
    for number, t in enumerate(reversed(range(5))):
        above, below = (4 + number,) if number else (), (t - 1,) if t else ()
        ops.append(Op(f"b{t}", "op", (*above, t, *below), (5 + number,), 1.0))
    tensors = tuple(Tensor(f"t{a}", 4 * size, size) for a, size in enumerate(sizes))
    return TrainingGraph(tuple(ops), tensors, (9,), 5)


@pytest.mark.parametrize("memory", [Live(), Packed(), Blocks()], ids=["live", "packed", "blocks"])
def test_that_none_fits_is_proved(memory: Memory) -> None:
    problem = Problem(chain(), 9 * 4 * ALIGNMENT, memory, time_limit=NEVER_SECONDS)
    assert Auto().solve(problem).status is Status.INFEASIBLE


def test_the_cheapest_is_found_and_proved() -> None:
    problem = Problem(chain(), 10 * 4 * ALIGNMENT, Live(), time_limit=NEVER_SECONDS)
    outcome = Auto().solve(problem)
    assert outcome.status is Status.OPTIMAL
    assert outcome.schedule is not None
    assert outcome.schedule.seconds == 18.0
    assert outcome.lower_bound_seconds == pytest.approx(18.0)


def test_what_is_proved_for_live_bytes_bounds_other_memories() -> None:
    """And where the optimum does not fit them, programs and a search follow."""
    problem = Problem(chain(), 12 * 4 * ALIGNMENT, Packed(), time_limit=NEVER_SECONDS)
    outcome = Auto(rounds=1).solve(problem)
    assert outcome.lower_bound_seconds == pytest.approx(13.0)
    assert outcome.schedule is not None
    assert outcome.schedule.seconds >= 13.0


def test_little_effort_looks_at_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def run(self: ExactSearch, stop: Any, *, states: int) -> Any:
        del stop
        asked.append(states)
        yield Fact(None, self.graph.seconds)

    monkeypatch.setattr(ExactSearch, "run", run)
    monkeypatch.setattr("memplan.strategies.spaces.sequences.STATES", 1000)
    problem = Problem(chain(), 10 * 4 * ALIGNMENT, time_limit=NEVER_SECONDS)
    for effort in (0.01, 1.0, 4.0):
        Auto(effort=effort, rounds=1).solve(problem)
    assert asked == [10, 1000, 1000]


def branches() -> TrainingGraph:
    """Two branches whose large ends fit one after the other, in an order that is not the base's."""
    ops = (
        Op("source", "op", (), (0,), 1.0),
        Op("a", "op", (0,), (1,), 1.0, recomputable=False),
        Op("b", "op", (0,), (2,), 1.0, recomputable=False),
        Op("end a", "op", (1,), (3,), 1.0),
        Op("end b", "op", (2,), (4,), 1.0),
        Op("last", "op", (3, 4), (5,), 1.0),
    )
    sizes = (1, 6, 6, 1, 1, 1)
    tensors = tuple(Tensor(f"t{a}", size, size) for a, size in enumerate(sizes))
    return TrainingGraph(ops, tensors, (5,), len(ops))


@pytest.mark.parametrize("reorder", [True, False])
def test_the_order_of_the_ops_stays_if_that_is_asked(*, reorder: bool) -> None:
    graph = branches()
    assert simulate(Schedule.sequence(graph, (0, 1, 3, 2, 4, 5))).peak_nbytes == 8
    problem = Problem(graph, 8, time_limit=NEVER_SECONDS)
    outcome = Auto(reorder=reorder, rounds=1).solve(problem)
    assert (outcome.schedule is not None) == reorder
    assert outcome.lower_bound_seconds == pytest.approx(graph.seconds)


def test_what_is_proved_optimal_was_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock has ended a part, and a later one proved the rest."""
    known = Schedule.sequence(chain(), (*range(10), 0))

    def prove(self: Any, proving: Proving) -> None:
        del self
        proving.stop.cut()
        proving.facts.append(Fact(known, known.seconds))

    monkeypatch.setattr(Sequences, "prove", prove)
    monkeypatch.setattr(Problem, "cheapest", lambda *_, **__: known)
    outcome = Auto().solve(Problem(chain(), 12 * 4 * ALIGNMENT, time_limit=NEVER_SECONDS))
    assert outcome.status is Status.OPTIMAL
    assert not outcome.cut_by_clock


def test_a_larger_step_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = unit_chain(16)
    monkeypatch.setattr("memplan.strategies.spaces.sequences.MOST_OPS", len(graph.ops) - 1)
    monkeypatch.setattr("memplan.strategies.spaces.sequences.ExactSearch", None)
    outcome = Auto(rounds=1).solve(Problem(graph, 8 * UNIT, time_limit=NEVER_SECONDS))
    assert outcome.lower_bound_seconds is not None
    assert math.isfinite(outcome.lower_bound_seconds)
