"""How often a script has written into an array, while somebody wants to know.

MXNet counts that for its engine, and tells nobody: the engine's count goes up, too, where inference
lays the weight of a convolution out anew for oneDNN, which changes no value. So it is counted where
Python code asks for it: ``p.set_data(x)`` and ``load_parameters``, ``p.data()[:] = x``, every
operator that gets the array as its ``out``, as ``p.data() += x`` and those of optimizers do, and
what a kvstore hands out. So it is for the arrays that are taken of it meanwhile: slices, and the
same array with or without NumPy semantics.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
from mxnet.ndarray import register

from memplan.mxnet.train.nesting import leaves

NDArray = Any


class Writes:
    """What was written since this was made, of ``arrays`` by name, until :meth:`end`."""

    def __init__(self, arrays: Mapping[str, NDArray]) -> None:
        _count_outs()
        _count_pulls()
        self._arrays = dict(arrays)
        for array in arrays.values():
            if not hasattr(type(array), "_nwatchers"):
                array.__class__ = _counting(type(array))
            type(array)._nwatchers += 1
        self._before = {name: type(array)._nwrites[0] for name, array in arrays.items()}

    def written(self) -> set[str]:
        """The names of those that were written."""
        return {
            n for n, array in self._arrays.items() if type(array)._nwrites[0] != self._before[n]
        }

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
    return _kind(base, {"_nwatchers": 0, "_nwrites": [0]})


def _kind(base: type, counts: Mapping[str, Any]) -> Any:
    """A class of arrays that count: slices of one are of its class, and so count with it."""
    own: dict[str, Any] = {"__slots__": (), "__module__": base.__module__, **counts}
    own |= {"__setitem__": _set_item, "_sync_copyfrom": _copy_from}
    own |= {name: _with_its_counts(name) for name in ("as_nd_ndarray", "as_np_ndarray")}
    return type(base)(base.__name__, (base,), own)


def _set_item(array: NDArray, key: Any, value: Any) -> None:
    """Count an assignment, which writes through a view of the array, or past all operators."""
    kind: Any = type(array)
    kind._nwrites[0] += 1
    kind.__base__.__setitem__(array, key, value)


def _copy_from(array: NDArray, values: Any) -> None:
    kind: Any = type(array)
    kind._nwrites[0] += 1
    kind.__base__._sync_copyfrom(array, values)


def _with_its_counts(name: str) -> Callable[[NDArray], NDArray]:
    """The method of this ``name``, which returns the same array as one of another class."""

    def method(array: NDArray) -> NDArray:
        kind: Any = type(array)
        other = getattr(kind.__base__, name)(array)
        if type(other) is not kind:
            other.__class__ = _kind(type(other), {"_nwrites": kind._nwrites})
        return other

    return method


@functools.cache
def _count_outs() -> None:
    """Have MXNet's functions of operators count for every array that they get as ``out``."""
    invoke = register._imperative_invoke

    def counted(op: Any, inputs: Any, names: Any, values: Any, out: Any, *rest: Any) -> Any:
        _count(out)
        return invoke(op, inputs, names, values, out, *rest)

    register._imperative_invoke = counted


@functools.cache
def _count_pulls() -> None:
    """Have kvstores count for every array into which they write."""
    for name in ("broadcast", "pull", "pushpull", "row_sparse_pull"):
        setattr(mx.kvstore.KVStore, name, _counted(getattr(mx.kvstore.KVStore, name)))


def _counted(hand_out: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(hand_out)

    @functools.wraps(hand_out)
    def counted(*args: Any, **options: Any) -> Any:
        given = signature.bind_partial(*args, **options).arguments
        out = given.get("out")
        _count(given.get("value") if out is None else out)  # pushpull writes into what it was given
        return hand_out(*args, **options)

    return counted


def _count(out: Any) -> None:
    for array in leaves(out):
        if hasattr(type(array), "_nwrites"):
            type(array)._nwrites[0] += 1
