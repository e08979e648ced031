"""Arguments that are one value, or several."""

from __future__ import annotations

from typing import Any


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
