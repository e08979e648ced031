"""Checkmate's linear relaxation, and the two-phase rounding of its solution.

Jain et al. 2020 (arXiv:1910.02653), section 5 and appendix D: S is rounded by a threshold, R is
the least recomputation that S allows. Which threshold (and how much of the budget the relaxation
is given) is best is not known beforehand: a sweep tries several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from memplan.programs.solver import Solved
from memplan.programs.stage_program import StageProgram
from memplan.search.rematerialize import Keep, rematerialize, retaining
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# The relaxation is solved at most this often, times the effort, each time with more memory rows.
RELAXATIONS = 60


def relaxation(program: StageProgram, stop: Stop, *, effort: float = 1.0) -> Solved | None:
    """The optimum of the linear relaxation with all its memory rows; None if it is not reached.

    The program keeps the rows.
    """
    solves = 0
    while solves < effort * RELAXATIONS and not stop.is_over():
        solves += 1
        answer = program.program.solve(stop, relax=True, effort=effort)
        if answer.infeasible:
            return answer
        if answer.values is None or not answer.optimal:
            return None
        if not program.add_violated(answer.values):
            return answer
    return None


def roundings(
    program: StageProgram,
    values: Sequence[float],
    *,
    thresholds: int,
    stop: Stop,
    within_nbytes: int | None = None,
) -> Iterator[Schedule]:
    """Schedules from values of S: ``thresholds`` different ones, each rounded in two ways.

    Either what is to be carried is there, recomputed if need be; or it is carried only if some op
    has needed it and recomputed when the next one does. The lower the threshold, the more is
    carried and the less recomputed: so, in the second way, the lowest threshold whose peak is
    ``within_nbytes`` (None: the program's budget) is then sought by bisection.
    """
    graph = program.graph
    distinct = sorted({round(value, 6) for value in program.carried_values(values)})
    cuts = [0.5 * (a + b) for a, b in pairwise(distinct)] or [0.5]
    step = max(1.0, len(cuts) / thresholds)
    for index in range(min(thresholds, len(cuts))):
        if stop.is_over():
            return
        contents = program.contents(values, cuts[int(index * step)])
        yield retaining(graph, contents)
        yield rematerialize(graph, _member(contents))
    limit = program.budget_nbytes if within_nbytes is None else within_nbytes
    low, high = 0, len(cuts)
    while low < high and not stop.is_over():
        middle = (low + high) // 2
        schedule = rematerialize(graph, _member(program.contents(values, cuts[middle])))
        yield schedule
        if simulate(schedule).peak_nbytes <= limit:
            high = middle
        else:
            low = middle + 1


def _member(contents: Sequence[AbstractSet[int]]) -> Keep:
    return lambda t, a: a in contents[t]
