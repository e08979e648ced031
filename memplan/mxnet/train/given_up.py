"""Gradients that nobody needs, as a step updates the parameters: they are given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.mxnet.realise.own_autograd import mark_variables
from memplan.mxnet.train.array_memory import chunk_of
from memplan.mxnet.train.asked_gradients import marked_gradient

NDArray = Any
Parameter = Any


def give_up_gradient(parameter: Parameter, ctx: mx.Context) -> None:
    """Free the array for the gradient of ``parameter``, which is on ``ctx`` alone.

    MXNet says from now on that it has none; where its ``grad_req`` is set anew it gets one again.
    """
    if parameter._grad is not None:
        parameter._grad = None
        # Autograd holds it as well, until it is told of another one.
        stand_in = mx.nd.zeros((1,), ctx, parameter.dtype)
        mark_variables(parameter._data, [stand_in], ["null"])
        _STAND_INS[parameter] = chunk_of(stand_in)


#: The memory of what autograd holds for gradients that were given up.
_STAND_INS: WeakKeyDictionary[Parameter, int] = WeakKeyDictionary()


def is_stand_in(parameter: Parameter, gradient: NDArray) -> bool:
    """Is what autograd has for the ``gradient`` of ``parameter`` none of anybody's?"""
    return chunk_of(gradient) == _STAND_INS.get(parameter)


def given_up() -> Iterator[tuple[Parameter, NDArray]]:
    """The parameters for whose gradients autograd has stand-ins, with the arrays of these."""
    for parameter in [reference() for reference in _STAND_INS.keyrefs()]:
        if parameter is not None and parameter._grad is None:
            for array in parameter._data or ():
                marked = marked_gradient(array)
                if marked is not None and is_stand_in(parameter, marked):
                    yield parameter, array
