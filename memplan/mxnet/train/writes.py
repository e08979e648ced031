"""How often a script has written into an array, while somebody wants to know.

MXNet counts that for its engine, and tells nobody. What goes through the array's Python object is
counted here: ``p.set_data(x)`` and ``load_parameters``, ``p.data()[:] = x``, ``p.data() += x``. An
operator that gets the array as its ``out``, as those of optimizers do, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NDArray = Any

_OF_SCRIPTS = ("setitem", "iadd", "isub", "imul", "idiv", "itruediv", "imod")
_OF_MXNET = frozenset({"_full", "_sync_copyfrom"})
_METHODS = frozenset(f"__{name}__" for name in _OF_SCRIPTS) | _OF_MXNET


class Writes:
    """What was written since this was made, of ``arrays`` by name, until :meth:`end`."""

    def __init__(self, arrays: Mapping[str, NDArray]) -> None:
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
    own |= {"_nwatchers": 0, "_nwrites": 0}
    own |= {n: _counted(getattr(base, n)) for n in _METHODS if hasattr(base, n)}
    return type(base)(base.__name__, (base,), own)


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    def counted(array: NDArray, *args: Any) -> Any:
        type(array)._nwrites += 1
        return method(array, *args)

    return counted
