"""Columns stand under each other, whatever the cells hold."""

from __future__ import annotations

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
