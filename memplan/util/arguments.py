"""What an argument is: true or false, one value or several."""

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


def several_of(values: Any) -> list[Any] | None:
    """``values`` as a list; None for text, and for whatever else is one value.

    Such as an array of NumPy's without axes, which is an Iterable by its class.
    """
    if isinstance(values, str | bytes | bytearray):
        return None
    try:
        iterator = iter(values)
    except TypeError:
        return None
    return list(iterator)
