"""Code in which a function asks whether it gets arrays or Symbols."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx

# How a script writes what F is, and of which class an input is: with arrays, and with Symbols.
_MODULES = frozenset({"nd", "ndarray", "sym", "symbol"})
_CLASSES = frozenset({"NDArray", "Symbol"})

# What returns a list of arrays, and one Symbol of several outputs.
_LISTS = frozenset({"split", "split_v2", "SliceChannel"})


def asks(code: types.CodeType) -> bool:
    """Does ``code`` compare what F is, or ask what only one of arrays and Symbols is or has?"""
    names = set(code.co_names)
    if "isinstance" in names and not _CLASSES.isdisjoint(names):
        return True
    steps = list(dis.get_instructions(code))
    of_lists = set(_LISTS)
    for place, step in enumerate(steps):
        expression = _expression(steps, place)
        if _compares(step) and not _names(expression).isdisjoint(_MODULES | _CLASSES):
            return True
        if step.opname.startswith("CALL") and _is_question(expression, of_lists):
            return True
        if step.opname == "STORE_FAST" and _is_list(_expression(steps, place - 1)):
            of_lists.add(step.argval)
    return any(asks(value) for value in code.co_consts if isinstance(value, types.CodeType))


def _compares(step: dis.Instruction) -> bool:
    is_of_equals = step.opname == "COMPARE_OP" and step.argval in ("==", "!=")
    return is_of_equals or step.opname in ("IS_OP", "CONTAINS_OP")


def _expression(steps: Sequence[dis.Instruction], last: int) -> list[dis.Instruction]:
    """The steps that compute the value which that at place ``last`` leaves on Python's stack."""
    first, missing = last + 1, 1
    while first > 0 and missing > 0:
        first -= 1
        missing -= dis.stack_effect(steps[first].opcode, steps[first].arg, jump=False)
    return list(steps[first : last + 1])


def _names(expression: Sequence[dis.Instruction]) -> set[str]:
    """What it names, and the last parts of the strings in it: of "mxnet.ndarray", "ndarray"."""
    return {text.rpartition(".")[2] for step in expression for text in _strings(step.argval)}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from _strings(part)


def _is_list(expression: Sequence[dis.Instruction]) -> bool:
    is_call = bool(expression) and expression[-1].opname.startswith("CALL")
    return is_call and not _LISTS.isdisjoint(_names(expression))


def _is_question(call: Sequence[dis.Instruction], of_lists: set[str]) -> bool:
    """Does it ask what is a list of arrays, what only a Symbol has, or for a part of a name?"""
    function, names = call[0].argval, _names(call)
    if function == "isinstance":
        return "list" in names and not of_lists.isdisjoint(names)
    if function in ("hasattr", "getattr"):
        return not names.isdisjoint(_of_symbols())
    return "__name__" in names and not names.isdisjoint(_MODULES | _CLASSES)


@functools.cache
def _of_symbols() -> frozenset[str]:
    others = (mx.nd.NDArray, mx.gluon.HybridBlock(prefix=""), mx.gluon.Parameter("any"))
    names = (name for name in dir(mx.sym.Symbol) if not name.startswith("_"))
    return frozenset(name for name in names if not any(hasattr(other, name) for other in others))
