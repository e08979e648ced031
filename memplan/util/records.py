"""Dataclasses of plain values, read back from JSON that may be damaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

from memplan.util.nbytes import MAX_NBYTES
from memplan.util.numbers import is_finite, is_whole, shown


def plain_fields(kind: type, data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The values in ``data`` for the fields ``names`` of the dataclass ``kind``.

    The fields are whole numbers from 0, finite numbers from 0, truth values or strings, by their
    annotations. ValueError names the first that is missing or something else.
    """
    hints = get_type_hints(kind)
    values = {}
    for name in names:
        if name not in data:
            raise ValueError(f"it lacks {name!r}")
        types = get_args(hints[name]) or (hints[name],)
        if not any(_fits(data[name], expected) for expected in types):
            raise ValueError(f"{name!r} cannot be {shown(data[name])}")
        values[name] = data[name]
    return values


def _fits(value: Any, expected: type) -> bool:
    if expected is int:
        return is_whole(value) and value <= MAX_NBYTES
    if expected is float:
        return is_finite(value)
    if expected in (bool, str, NoneType):
        return type(value) is expected
    raise TypeError(f"a field of type {expected} is not plain")
