"""Columns stand under each other, whatever the cells hold."""

from __future__ import annotations

import builtins

import pytest

from helpers.script import printed_by
from memplan.util.tables import text_table


def test_columns_begin_or_end_at_one_place() -> None:
    rows = [("name", "bytes", "role"), ("a[0]", "12", "kept"), ("[bold]b", "1", ":warning:")]
    assert text_table(rows, left=(0, 2)) == [
        "name     bytes  role",
        "a[0]        12  kept",
        "[bold]b      1  :warning:",
    ]


def test_columns_may_be_wider_than_their_cells() -> None:
    assert text_table([("a", "1")], widths=(3, 4)) == ["a       1"]


def test_wide_characters_take_two_places() -> None:
    assert text_table([("層", "1"), ("ab", "2")]) == ["層  1", "ab  2"]


class ZMQInteractiveShell:
    """Named as that of Jupyter, by which rich knows it."""


def test_a_notebook_gets_the_table_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would display it beside the text that it belongs to."""
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert text_table([("a", "1")]) == ["a  1"]


def test_no_terminal_cuts_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert text_table([("a" * 100, "1")]) == ["a" * 100 + "  1"]


SHOWING = """
import random, sys
from memplan.util.tables import text_table
assert "rich" not in sys.modules
random.seed(0)
state = random.getstate()
text_table([("a", "1")])
assert "rich" in sys.modules
print(random.getstate() == state)
"""


def test_showing_a_table_leaves_the_random_numbers_as_they_are() -> None:
    """Or a script that prints a plan would train on other numbers than one that does not."""
    assert printed_by("-c", SHOWING) == "True\n"
