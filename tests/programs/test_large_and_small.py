"""Tensors of some bytes beside tensors of gigabytes, in a budget that is met to the byte.

Each of these budgets was once proved to be too little, or to cost more, by one of the programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from helpers.planning import NEVER_SECONDS
from memplan.programs.mirror_refinement import refine_flags
from memplan.programs.moment_program import MomentProgram
from memplan.programs.moments import Moments
from memplan.programs.proof import ProofOptions
from memplan.programs.solver import SOLVERS, Program
from memplan.programs.stage_program import StageProgram
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Problem
from memplan.strategies.spaces.flags import Flags
from memplan.util.stop import Stop
from oracles.flags import BruteForceFlags

GB = 10**9


def graph_of(ops: Sequence[Op], sizes: Sequence[int], *heads: int, nforward: int) -> TrainingGraph:
    """With tensors of these bytes, each element taking one."""
    tensors = tuple(Tensor(str(a), n, n) for a, n in enumerate(sizes))
    return TrainingGraph(tuple(ops), tensors, heads, nforward)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_moment_proves_nothing_that_is_wrong(solver: str) -> None:
    ops = (
        Op("f0", "op", (), (0,), 1.0),
        Op("f1", "op", (0,), (1, 2), 7.0),
        Op("f2", "op", (1,), (3, 4), 1.0),
        Op("f3", "op", (3, 2, 1), (5,), 7.0, False, handovers=(Handover(0, 0, alias=False),)),
        Op("b3", "op", (1, 5), (6, 7, 8), 2.0),
        Op("b2", "op", (6, 4), (9,)),
        Op("b1", "op", (8, 9, 7, 2), (10,), 7.0),
        Op("b0", "op", (10, 0), (11,), 1.0),
    )
    graph = graph_of(ops, (3, 3, 1, GB, GB, GB, GB, 1, 3, 3, 3, 0), 5, 11, nforward=4)
    schedule = Schedule.sequence(graph, (0, 1, 2, 3, 4, 5, 0, 6, 7))
    budget = simulate(schedule).peak_nbytes
    assert budget == 3 * GB + 8
    for t in range(len(ops)):
        with Program(solver) as program:
            bound = MomentProgram(Moments(graph), [t], budget, program).bound(
                Stop.after(NEVER_SECONDS)
            )
        assert bound.seconds <= schedule.seconds


@pytest.mark.parametrize("solver", SOLVERS)
def test_stages_prove_nothing_that_is_wrong(solver: str) -> None:
    ops = (
        Op("o0", "op", (), (0,), 7.0),
        Op("o1", "op", (0,), (1, 2), 3.0),
        Op("o2", "op", (0,), (3, 4), 1.0),
        Op("o3", "op", (), (5, 6), 1.0),
        Op("o4", "op", (5,), (7,), 1.0),
        Op("o5", "op", (7, 5), (8, 9), 1.0),
        Op("o6", "op", (0,), (10,), 3.0),
    )
    sizes = (128, 4, 2 * GB, 4, GB, GB // 10, GB, GB, GB // 10, GB // 10, 128)
    graph = graph_of(ops, sizes, 2, 3, 4, 8, 9, nforward=len(ops))
    schedule = Schedule.sequence(graph, (0, 1, 2, 3, 4, 5, 6, 2))
    budget = simulate(schedule).peak_nbytes
    assert budget == 3_300_000_128
    with Program(solver) as solver_program:
        program = StageProgram(graph, budget, solver_program, stop=Stop.after(NEVER_SECONDS))
        for t in range(program.first, program.last + 1):
            for k in range(t + 1):
                program.add_row(t, k)
        solved = solver_program.solve(Stop.after(NEVER_SECONDS))
    assert not solved.infeasible
    assert program.seconds(solved.bound) <= schedule.seconds


@pytest.mark.parametrize("solver", SOLVERS)
def test_flags_prove_nothing_that_is_wrong(solver: str) -> None:
    ops = (
        Op("f0", "op", (), (0,)),
        Op("f1", "op", (0,), (1, 2), 7.0),
        Op("f2", "op", (1,), (3, 4), 1.0),
        Op("f3", "op", (1, 2, 0), (5,), 1.0),
        Op("b3", "op", (5,), (6, 7, 8, 9), 2.0, False, 3, (), (Handover(0, 3, alias=True),)),
        Op("b2", "op", (), (10, 11), 0.0, True, 2, (2,)),
        Op("b1", "op", (6, 10, 7, 0, 1, 2), (12, 13), 3.0, False, 1, (), (Handover(3, 0, True),)),
        Op("b0", "op", (8, 12), (14,), 0.0, False, 0, (0,)),
    )
    many = 100 * GB
    sizes = (many, 4, 4, many, many, 10 * many, 4, 4, many, 0, 4, 0, many, 1, 1)
    graph = graph_of(ops, sizes, 4, 9, 11, 13, 14, nforward=4)
    budget = 13 * many + 8
    optimum = BruteForceFlags().solve(Problem(graph, budget, space=Flags())).schedule
    assert optimum is not None
    for fact in refine_flags(graph, budget, Stop.after(NEVER_SECONDS), ProofOptions(solver=solver)):
        assert fact.bound_seconds <= optimum.seconds
