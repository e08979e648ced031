"""What ``p.data().grad`` gives for a parameter that is planned: the same array as ``p.grad()``.

MXNet makes a new array of that memory whenever it is asked. A script that keeps it from step to
step would read what a plan for other shapes has put there, and between the halves of a step what is
no gradient. The array that the parameter has follows its gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.mxnet.train.arrays.array_memory import chunk_of
from memplan.mxnet.train.arrays.parameters import every_parameter
from memplan.util.weak_keys import keys_of

NDArray = Any
Parameter = Any

# After so many arrays those that are known are forgotten: most are gone by then.
_MANY = 10_000

# MXNet's own properties, of its two kinds of arrays.
_ND, _NP = (vars(kind)["grad"] for kind in (mx.nd.NDArray, mx.np.ndarray))

_BLOCKS: WeakKeyDictionary[mx.gluon.Block, None] = WeakKeyDictionary()

#: Of which parameter an array is, by the array's id, and in which place.
_FOUND: dict[int, tuple[weakref.ref[Parameter], int]] = {}


def follow(blocks: Iterable[mx.gluon.Block]) -> None:
    """From now on the parameters of ``blocks`` have one array for a gradient, however asked."""
    _wrap()
    for block in blocks:
        _BLOCKS[block] = None


def marked_gradient(array: NDArray) -> NDArray | None:
    """What autograd knows as the gradient of an array, in a new array each time."""
    return (_NP if isinstance(array, mx.np.ndarray) else _ND).fget(array)


@functools.cache
def _wrap() -> None:
    mx.nd.NDArray.grad = property(_gradient, doc=_ND.__doc__)
    mx.np.ndarray.grad = property(_gradient, doc=_NP.__doc__)


def _gradient(array: NDArray) -> NDArray | None:
    marked = marked_gradient(array)
    if marked is None or (found := _owner(array)) is None:
        return marked
    parameter, place = found
    own = None if parameter._grad is None else parameter._grad[place]
    return own if own is not None and chunk_of(own) == chunk_of(marked) != 0 else marked


def _owner(array: NDArray) -> tuple[Parameter, int] | None:
    """The parameter that has this ``array``, and where, if it is one that is planned."""
    reference, place = _FOUND.get(id(array), (lambda: None, 0))
    parameter = reference()
    if parameter is not None and any(a is array for a in (parameter._data or [])[place:][:1]):
        return parameter, place
    if len(_FOUND) > _MANY:
        _FOUND.clear()
    for block in keys_of(_BLOCKS):
        for parameter in every_parameter(block):
            for place, data in enumerate(parameter._data or ()):
                if data is array:
                    _FOUND[id(array)] = weakref.ref(parameter), place
                    return parameter, place
    return None
