"""Attributes that a script sets: numbers, words, and what is made of such."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

_ATOMS = frozenset({bool, int, float, str, type(None)})
# What is made of parts, and of no class of the script's.
_PARTS = frozenset({dict, list, tuple})


def settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``attributes`` that are settings, as they are now."""
    result = {}
    for name, value in attributes.items():
        if type(value) in _ATOMS:
            result[name] = value
        elif type(value) is dict and _ATOMS.issuperset(map(type, value.values())):
            result[name] = value.copy()
        elif is_setting(value):
            result[name] = _copied(value, {})
    return result


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
    """A copy of a setting, of its class.

    deepcopy asks a dict whose keys are attributes for a method, too, and gets what is under that
    key, one that is made for it, or an error. So no code of such a class copies it.
    """
    if type(value) in _ATOMS or isinstance(value, np.number):
        return value
    if type(value) not in _PARTS and not _answers(value):
        try:
            return copy.deepcopy(value)
        except Exception:  # a class of the script's may take no items, or no copies
            pass
    return _rebuilt(value, copies)


def _answers(value: Any) -> bool:
    """Does a setting, or a part of it, say itself what attributes it has, or is it these?"""
    if hasattr(type(value), "__getattr__") or _attributes(value) is value:
        return True
    if isinstance(value, dict):
        return any(map(_answers, dict.values(value)))
    return isinstance(value, list | tuple) and any(map(_answers, value))


def _attributes(value: Any) -> Any:
    """The attributes of an object; None if it has none."""
    return object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else None


def _rebuilt(value: Any, copies: dict[int, Any]) -> Any:
    """A dict, list or tuple made of copies of its parts, by Python's own code; else the value.

    ``copies`` are those made before, by the ids of what was copied, for an attribute of a part may
    be the whole.
    """
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
        list.extend(copied, [_copied(part, copies) for part in list.__iter__(value)])
    elif isinstance(value, tuple):
        parts = [_copied(part, copies) for part in tuple.__iter__(value)]
        copied = copies[id(value)] = tuple.__new__(type(value), parts)
    else:
        return value
    own = _attributes(value)
    if own is not None:
        attributes = copied  # a dict may be that of its own attributes
        if own is not value:
            items = dict.items(own)
            attributes = {n: _copied(v, copies) if is_setting(v) else v for n, v in items}
        with contextlib.suppress(AttributeError):  # a property, made of what the copy has
            object.__setattr__(copied, "__dict__", attributes)
    return copied
