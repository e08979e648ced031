"""A step in halves: all outputs before the first backward op."""

from __future__ import annotations

import pytest

from memplan.errors import ScheduleError
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.halves import in_halves, second_half
from memplan.step.schedule import Schedule


def two_branches() -> TrainingGraph:
    """Each output has a branch of its own, whose gradient needs nothing of the other."""
    tensors = tuple(Tensor(f"t{i}", 4, 1) for i in range(6))
    ops = (
        Op("body", "op", (), (0,)),
        Op("one", "op", (0,), (1,)),
        Op("two", "op", (0,), (2,)),
        Op("d one", "op", (0,), (3,), after=(1,)),
        Op("d two", "op", (0,), (4,), after=(2,)),
        Op("sum", "op", (3, 4), (5,)),
    )
    return TrainingGraph(ops, tensors, heads=(1, 2, 5), nforward=3, fixed_nbytes=100)


def test_no_backward_op_runs_in_the_first_half() -> None:
    graph = two_branches()
    early = [0, 1, 3, 2, 4, 5]
    assert Schedule.sequence(graph, early).ops == tuple(early)
    with pytest.raises(ScheduleError, match="'d one' must run after 'two'"):
        Schedule.sequence(in_halves(graph), early)


def test_outputs_run_once_and_are_counted_as_handed_over() -> None:
    graph = in_halves(two_branches())
    assert [op.recomputable for op in graph.ops] == [True, False, False, True, True, True]
    assert graph.fixed_nbytes == 108
    assert graph.ops[5].after == ()


def test_the_second_half_begins_when_all_outputs_are_there() -> None:
    graph = in_halves(two_branches())
    assert second_half(Schedule.unplanned(graph)) == 3
    assert second_half(Schedule.sequence(graph, [0, 2, 0, 1, 0, 3, 4, 5])) == 4
