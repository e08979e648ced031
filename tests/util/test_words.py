"""Lists in messages."""

from __future__ import annotations

from memplan.util.words import first_of


def test_what_is_left_out_is_counted() -> None:
    assert first_of("abc", 3) == "a, b, c"
    assert first_of("abc", 2) == "a, b and 1 more"
    assert first_of(dict.fromkeys("abc"), 1) == "a and 2 more"
