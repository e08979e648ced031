"""What is given to HiGHS beside python-mip."""

from __future__ import annotations

import pytest

from helpers.planning import NEVER_SECONDS
from memplan.programs.solver import SOLVERS, Program
from memplan.util.stop import Stop


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_that_come_between_solves_count(solver: str) -> None:
    """Some at a time, one or none; and python-mip knows for how many HiGHS has values."""
    program = Program(solver)
    x, y = (program.variable(-1.0, upper=9.0) for _ in range(2))
    for values, rows in (
        ((9.0, 9.0), []),
        ((4.0, 9.0), [({x: 1.0}, 5.0), ({x: 2.0}, 8.0)]),
        ((4.0, 9.0), []),
        ((4.0, 2.0), [({x: 1.0, y: 1.0}, 6.0), ({x: -1.0}, -4.0)]),
    ):
        for terms, limit in rows:
            program.at_most(terms, limit)
        assert program.solve(Stop.after(NEVER_SECONDS), relax=True).values == pytest.approx(values)
    assert program.model.solver.num_rows() == 4
