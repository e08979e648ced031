"""Operators that are not MXNet's own: Custom ops of modules, and those of loaded libraries."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from collections.abc import Iterable, Iterator
from functools import cache

import mxnet as mx
from mxnet.base import _LIB, MXNetError, check_call

from memplan.mxnet.trace.nnvm import operator_handle

# How MXNet describes the inputs of what a library registers, and of no operator of its own: as one
# list of arrays (registerOperators in its c_api/c_api.cc).
_INPUTS_OF_LIBRARY = "NDArray[]"


def defining_modules() -> list[str]:
    """The modules that define Custom ops of this process, by name; "__main__" is the script."""
    modules = {cls.__module__ for cls in _subclasses(mx.operator.CustomOpProp)}
    return sorted(name for name in modules if name.partition(".")[0] != "mxnet")


def import_modules(names: Iterable[str]) -> None:
    """Import what defines Custom ops; an op that is still missing is an error of MXNet's later.

    The script of another process cannot be imported: it would run.
    """
    for name in names:
        if name != "__main__":
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def missing_operator(error: object) -> str | None:
    """The Custom op that MXNet does not know, if that is what ``error`` says."""
    match = re.search(r"Cannot find custom operator (\S+)", str(error))
    return None if match is None else match[1].rstrip(".")


def unregistered_operator(error: object) -> str | None:
    """The operator that MXNet does not have, if that is what ``error`` says."""
    match = re.search(r"Operator (\S+) is not registered", str(error))
    return None if match is None else match[1]


@cache
def is_of_library(op: str) -> bool:
    """Does ``op`` come from a library that ``mx.library.load`` has loaded?"""
    try:
        handle = operator_handle(op)
    except MXNetError:
        return False
    text = [ctypes.c_char_p() for _ in range(4)]
    name, description, variable_count, returned = map(ctypes.byref, text)
    count = ctypes.c_uint()
    lists = [ctypes.POINTER(ctypes.c_char_p)() for _ in range(3)]
    names, kinds, descriptions = map(ctypes.byref, lists)
    check_call(
        _LIB.MXSymbolGetAtomicSymbolInfo(
            handle,
            name,
            description,
            ctypes.byref(count),
            names,
            kinds,
            descriptions,
            variable_count,
            returned,
        )
    )
    return any(lists[1][k] == _INPUTS_OF_LIBRARY.encode() for k in range(count.value))


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)
