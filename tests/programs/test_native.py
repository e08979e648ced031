"""What native code of solvers does to the process."""

from __future__ import annotations

import io
import os
import sys

import pytest

from helpers.planning import NEVER_SECONDS
from memplan.programs.solver import Program
from memplan.util.stop import Stop


@pytest.mark.parametrize("stdout", ["none", "closed"])
def test_cbc_solves_where_the_standard_output_is_closed(
    stdout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a daemon, where there is nothing to keep what it prints off."""
    closed = io.StringIO()
    closed.close()
    program = Program("CBC")
    program.at_most({program.variable(-1.0): 1.0}, 0.5)
    stdout_copy = os.dup(1)
    monkeypatch.setattr(sys, "stdout", None if stdout == "none" else closed)
    os.close(1)
    try:
        value = program.solve(Stop.after(NEVER_SECONDS), relax=True).value
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
    assert value == pytest.approx(-0.5)
