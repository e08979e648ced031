"""What a function of the script's reads besides its arguments, and whether it is one."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import mxnet as mx

# What a block or a loss may be, or have as an attribute, and calls.
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)

# What is found under a name, and has attributes that do not count.
_WITHOUT_SETTINGS = (type, types.ModuleType, types.FunctionType, mx.nd.NDArray, mx.sym.Symbol)

# Folders of installed packages.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def is_mxnets(method: Any) -> bool:
    """Is it a function of MXNet's own code, which nobody has put another one in the place of?"""
    return package_of(method) == "mxnet"


def is_scripts(method: Any) -> bool:
    """Is it a function of neither MXNet's nor this package?"""
    return package_of(method) not in ("mxnet", "memplan")


def is_scripts_module(value: Any) -> bool:
    """Is it a module that belongs to neither Python nor a package that is installed?"""
    if not isinstance(value, types.ModuleType):
        return False
    path = PurePath(getattr(value, "__file__", None) or "")
    is_pythons = value.__name__.split(".")[0] in sys.stdlib_module_names
    return not is_pythons and _INSTALLED.isdisjoint(path.parts)


def function_of(method: Any) -> Any:
    """What ``method``, or a partial, calls; a function itself."""
    return getattr(method, "__func__", getattr(method, "func", method))


def package_of(method: Any) -> str:
    """The package in which ``method`` was written; of a partial what that calls."""
    while isinstance(method, functools.partial):
        method = method.func
    return str(getattr(method, "__globals__", {}).get("__name__", "")).split(".")[0]


def read_by(function: Any) -> dict[str, Any]:
    """What ``function`` would read now, by names: of what it closes over, and of global ones.

    And of the attributes of what it finds there those that it names; all of a Gluon block's. What
    the functions read that it calls is not known.
    """
    inner = function_of(function)
    if not isinstance(inner, types.FunctionType):
        return dict(vars(function)) if hasattr(function, "__dict__") else {}
    names = set(_names(inner.__code__))
    found = {name: inner.__globals__[name] for name in names & inner.__globals__.keys()}
    found |= dict(_closed_over(inner))
    found["self"] = found.get("self", getattr(function, "__self__", None))
    attributes = {
        f"{name}.{attribute}": value
        for name, owner in found.items()
        if not isinstance(owner, _WITHOUT_SETTINGS)
        for attribute, value in getattr(owner, "__dict__", {}).items()
        if attribute in names or isinstance(owner, mx.gluon.Block)
    }
    return found | attributes


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names and attributes in ``code``, and in functions within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue
