"""Values in messages stand in one line."""

from __future__ import annotations

from pathlib import Path

import mxnet as mx
import pytest

from memplan.errors import CostError
from memplan.step.costs import CostTable
from memplan.util.numbers import shown


def test_an_array_is_shown_in_the_line_of_the_message() -> None:
    assert shown(mx.nd.array([[1, 2], [3, 4]])) == "[[1. 2.] [3. 4.]] <NDArray 2x2 @cpu(0)>"
    assert shown("two  spaces\n") == repr("two  spaces\n")


def test_costs_that_cannot_be_written_say_why(tmp_path: Path) -> None:
    table = CostTable("cpu", {}, {})
    with pytest.raises(CostError, match=r"x.json': its folder is missing; make that first$"):
        table.save(tmp_path / "none" / "x.json")
