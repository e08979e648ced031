"""Attributes that a script sets: numbers, words, and what is made of such."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

_ATOMS = frozenset({bool, int, float, str, type(None)})


def settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``attributes`` that are settings, as they are now."""
    return {
        name: value if type(value) in _ATOMS else copy.deepcopy(value)
        for name, value in attributes.items()
        if is_setting(value)
    }


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
    return is_setting(value) and is_setting(other) and bool(value == other)


def is_setting(value: Any) -> bool:
    """Is it a number, a word, or made of such, and so to be compared with another?"""
    if type(value) in _ATOMS:
        return True
    if isinstance(value, dict):
        return all(map(is_setting, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_setting, value))
    return isinstance(value, int | float | str | np.generic)
