"""Attributes that a script sets: numbers, words, and what is made of such."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

_ATOMS = frozenset({bool, int, float, str, type(None)})


def settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``attributes`` that are settings, as they are now."""
    return {name: _copied(value, {}) for name, value in attributes.items() if is_setting(value)}


def are_set(attributes: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Have ``attributes`` these ``values``, which :func:`settings` found?"""
    for name, value in values.items():
        attribute = attributes.get(name)
        if attribute is not value and not is_same(attribute, value):
            return False
    return True


def is_same(value: Any, other: Any) -> bool:
    """Is one the other, or a setting that equals it?"""
    if value is other:
        return True
    if not (is_setting(value) and is_setting(other)):
        return False
    try:
        return bool(value == other)
    except Exception:  # a class of the script's compares as it likes
        return False


def is_setting(value: Any) -> bool:
    """Is it a number, a word, or made of such, and so to be compared with another?"""
    if type(value) in _ATOMS:
        return True
    if isinstance(value, dict):
        return _are_settings(dict.values(value))
    if isinstance(value, list | tuple):
        return _are_settings(value)
    return isinstance(value, int | float | str | np.generic)


def _are_settings(values: Collection[Any]) -> bool:
    """Is each of ``values`` one? A vocabulary has many, and is looked at in every step."""
    return _ATOMS.issuperset(map(type, values)) or all(map(is_setting, values))


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a setting, of its class, which no code of that class makes.

    deepcopy asks a dict whose keys are attributes for a method, too, and gets what is under that
    key, or an error. ``copies`` are those made before, by the ids of what was copied, for an
    attribute of a part may be the whole.
    """
    if type(value) in _ATOMS or not isinstance(value, dict | list | tuple):
        return value  # it never changes
    if id(value) in copies:
        return copies[id(value)]
    copied: Any
    if isinstance(value, dict):
        base = next(kind for kind in (OrderedDict, defaultdict, dict) if isinstance(value, kind))
        copied = copies[id(value)] = base.__new__(type(value))
        if isinstance(value, defaultdict):
            copied.default_factory = value.default_factory
        for key, part in base.items(value):
            base.__setitem__(copied, key, _copied(part, copies))
    elif isinstance(value, list):
        copied = copies[id(value)] = list.__new__(type(value))
        list.extend(copied, [_copied(part, copies) for part in value])
    else:
        parts = [_copied(part, copies) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        copied = copies[id(value)] = tuple.__new__(type(value), parts)
    if type(value).__dictoffset__:
        own = object.__getattribute__(value, "__dict__")
        attributes = copied  # a dict may be that of its own attributes
        if own is not value:
            attributes = {n: _copied(v, copies) if is_setting(v) else v for n, v in own.items()}
        object.__setattr__(copied, "__dict__", attributes)
    return copied
