"""What counts as true or false in an argument."""

from __future__ import annotations

from typing import Any

from memplan.errors import ArgumentError
from memplan.util.numbers import shown


def flag(name: str, value: Any) -> bool:
    """Is ``value``, of the argument ``name``, true? ArgumentError where it is neither."""
    try:
        return bool(value)
    except Exception as error:  # of several elements, or none
        raise ArgumentError(f"{name} must be True or False, got {shown(value)}") from error
