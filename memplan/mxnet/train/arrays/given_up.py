"""Gradients that nobody needs, as a step updates the parameters: they are given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.mxnet.realise.own_autograd import mark_variables
from memplan.mxnet.train.arrays.array_memory import chunk_of
from memplan.mxnet.train.arrays.asked_gradients import marked_gradient
from memplan.mxnet.train.arrays.read_by_loss import name_of
from memplan.util.weak_keys import keys_of

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
        _STAND_INS[parameter] = stand_in


#: What autograd has for gradients that were given up. Autograd alone would free it, as it forgets
#: of what no gradient is wanted where a loss reads it, and something else may be in its memory.
_STAND_INS: WeakKeyDictionary[Parameter, NDArray] = WeakKeyDictionary()


def is_stand_in(parameter: Parameter, gradient: NDArray) -> bool:
    """Is what autograd has for the ``gradient`` of ``parameter`` none of anybody's?"""
    stand_in = _STAND_INS.get(parameter)
    return stand_in is not None and chunk_of(gradient) == chunk_of(stand_in)


def given_up() -> Iterator[tuple[Parameter, NDArray]]:
    """The parameters whose gradients were given up, with their arrays.

    For these autograd has stand-ins, or nothing, where a loss that read them was differentiated.
    """
    for parameter in keys_of(_STAND_INS):
        if parameter._grad is None:
            for array in parameter._data or ():
                marked = marked_gradient(array)
                is_forgotten = marked is None and name_of(array) is None
                if is_forgotten or (marked is not None and is_stand_in(parameter, marked)):
                    yield parameter, array
