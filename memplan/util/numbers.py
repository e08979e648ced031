"""What counts as a number here: no truth value, no NaN, nothing too large to compute with."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable
from typing import Any, TypeGuard


def is_whole(value: Any) -> TypeGuard[int]:
    """Is ``value`` an int from 0 (not a bool, not a float)?"""
    return type(value) is int and value >= 0


def is_finite(value: Any) -> TypeGuard[float]:
    """Is ``value`` an int or float from 0 that a float can hold?"""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return bool(0 <= value <= sys.float_info.max)


def is_amount(value: Any) -> TypeGuard[float]:
    """Is ``value`` a number from 0, which may be infinite?"""
    return is_finite(value) or (isinstance(value, float) and value == math.inf)


def plain(value: Any) -> Any:
    """``value`` as an int or a float of Python's if it is a number of another type.

    Such as one of NumPy's, which JSON does not take. Anything else is given back as it is.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:
        return value


def total(values: Iterable[float]) -> float:
    """The sum of ``values``, the same in whatever order they come; infinite if it is too large."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def shown(value: Any) -> str:
    """``value`` in a line of a message: what would fill pages is cut, a huge int has no text."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no int of more than 4300 digits
        if not isinstance(value, int):
            return f"a {type(value).__name__} with an integer that fills pages"
        return f"an integer of {value.bit_length()} bits"
    if "\n" in text:  # as in that of an array
        text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:60]}..."
