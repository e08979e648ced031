"""How often a script has written into an array, while somebody wants to know.

MXNet counts that for its engine, and tells nobody: the engine's count goes up, too, where inference
lays the weight of a convolution out anew for oneDNN, which changes no value. So it is counted where
Python code asks for it: ``p.set_data(x)`` and ``load_parameters``, ``p.data()[:] = x``, and every
operator that gets the array as its ``out``, as ``p.data() += x`` and those of optimizers do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mxnet.ndarray import register

from memplan.mxnet.train.nesting import leaves

NDArray = Any


class Writes:
    """What was written since this was made, of ``arrays`` by name, until :meth:`end`."""

    def __init__(self, arrays: Mapping[str, NDArray]) -> None:
        _count_outs()
        self._arrays = dict(arrays)
        for array in arrays.values():
            if not hasattr(type(array), "_nwatchers"):
                array.__class__ = _counting(type(array))
            type(array)._nwatchers += 1
        self._before = {name: type(array)._nwrites for name, array in arrays.items()}

    def written(self) -> set[str]:
        """The names of those that were written."""
        return {n for n, array in self._arrays.items() if type(array)._nwrites != self._before[n]}

    def end(self) -> None:
        """Let the arrays be what they were, if nobody else counts."""
        for array in self._arrays.values():
            kind = type(array)
            kind._nwatchers -= 1
            if not kind._nwatchers:
                array.__class__ = kind.__base__
        self._arrays = {}


def _counting(base: type) -> Any:
    """A class for one array, which counts what is written into that."""
    own: dict[str, Any] = {"__slots__": (), "__module__": base.__module__}
    own |= {"_nwatchers": 0, "_nwrites": 0, "__setitem__": _set_item}
    return type(base)(base.__name__, (base,), own)


def _set_item(array: NDArray, key: Any, value: Any) -> None:
    """Count an assignment, which writes through a view of the array, or past all operators."""
    kind: Any = type(array)
    kind._nwrites += 1
    kind.__base__.__setitem__(array, key, value)


@functools.cache
def _count_outs() -> None:
    """Have MXNet's functions of operators count for every array that they get as ``out``."""
    invoke = register._imperative_invoke

    def counted(op: Any, inputs: Any, names: Any, values: Any, out: Any, *rest: Any) -> Any:
        for array in leaves(out):
            if hasattr(type(array), "_nwrites"):
                type(array)._nwrites += 1
        return invoke(op, inputs, names, values, out, *rest)

    register._imperative_invoke = counted
