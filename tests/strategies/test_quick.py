"""Schedules to begin with."""

from __future__ import annotations

import pytest

from helpers.graphs import unit_chain
from memplan.step.simulate import simulate
from memplan.strategies import quick
from memplan.strategies.base import Problem
from memplan.strategies.memonger import Memonger
from memplan.strategies.spaces import Flags, Sequences, Space
from memplan.util.stop import Stop


@pytest.mark.parametrize("space", [Flags(), Sequences()], ids=["flags", "sequences"])
def test_large_graphs_begin_with_a_few_cuts_of_memonger(
    monkeypatch: pytest.MonkeyPatch, space: Space
) -> None:
    graph = unit_chain(40)
    problem = Problem(graph, None, space=space)
    monkeypatch.setattr(quick, "LARGE", len(graph.ops) - 1)
    unplanned, *found = quick.candidates(problem, Stop.after(1e6))
    few = Memonger(quick.TRIALS_OF_LARGE).candidates(problem)
    assert [schedule.ops for schedule in found] == [schedule.ops for schedule in few]
    best = quick.quick_schedule(problem, Stop.after(1e6))
    assert simulate(best).peak_nbytes < 0.5 * simulate(unplanned).peak_nbytes
