"""Checkmate's rounding, and the search that follows it in the strategy ``checkmate_lp``."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from helpers.graphs import unit_chain
from memplan.programs.solver import Program
from memplan.programs.stage_program import StageProgram
from memplan.programs.stage_rounding import relaxation, roundings
from memplan.search.rematerialize import rematerialize
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies.base import Problem, Status
from memplan.strategies.checkmate_lp import CheckmateLP
from memplan.util.stop import Stop

UNIT = 4
STOP = Stop(math.inf)


@pytest.mark.parametrize("within", [None, 10 * UNIT])
def test_the_lowest_threshold_that_fits_is_among_the_roundings(within: int | None) -> None:
    """Although only one threshold of the sweep is asked for."""
    graph = unit_chain(16)
    program = StageProgram(graph, 8 * UNIT, Program("HIGHS"), stop=STOP)
    solved = relaxation(program, STOP)
    assert solved is not None
    assert solved.values is not None
    made = list(roundings(program, solved.values, thresholds=1, stop=STOP, within_nbytes=within))
    limit = within or 8 * UNIT
    levels = sorted({round(value, 6) for value in program.carried_values(solved.values)})
    for low, high in pairwise(levels):
        retained = program.contents(solved.values, 0.5 * (low + high))
        schedule = rematerialize(graph, lambda t, a, kept=retained: a in kept[t])
        if simulate(schedule).peak_nbytes <= limit:
            break
    assert schedule.seconds == min(s.seconds for s in made if simulate(s).peak_nbytes <= limit)


def test_the_search_makes_what_is_rounded_cheaper() -> None:
    graph, budget = unit_chain(16), 6 * UNIT
    rounded = CheckmateLP(solver="HIGHS", patience=0).solve(Problem(graph, budget))
    searched = CheckmateLP(solver="HIGHS").solve(Problem(graph, budget))
    for outcome in (rounded, searched):
        assert outcome.status in (Status.FEASIBLE, Status.OPTIMAL)
        assert outcome.schedule is not None
        verdict = validate(outcome.schedule)
        assert verdict.valid
        assert verdict.peak_nbytes <= budget
        assert outcome.lower_bound_seconds is not None
        assert outcome.schedule.seconds >= outcome.lower_bound_seconds
    assert searched.schedule.seconds < rounded.schedule.seconds
    assert searched.lower_bound_seconds == pytest.approx(rounded.lower_bound_seconds)
