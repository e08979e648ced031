"""Outputs of planned blocks by which no parameter gets a gradient: of BlockGrad or argmax.

In MXNet they have a graph all the same, so that a loss that reads nothing else can be
differentiated: its gradients are zeros. Hence autograd knows them as variables, of which it
computes no gradient. It forgets them in a ``backward`` that has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.realise.own_autograd import mark_variables
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss, number_of

NDArray = Any

# Of so many the number is known, by which autograd knows it: who reads one had it not long ago.
_REMEMBERED = 10_000

_NUMBERS: dict[int, None] = {}


def mark_constants(arrays: Sequence[NDArray]) -> None:
    """Let a loss be made of these ``arrays``, without a gradient of them."""
    for array in arrays:
        # MXNet never writes there.
        mark_variables([array], [mx.nd.zeros((1,), array.ctx, array.dtype)], ["null"])
        _NUMBERS[number_of(array)] = None
        if len(_NUMBERS) > _REMEMBERED:
            del _NUMBERS[next(iter(_NUMBERS))]


def reads_only_constants(read: ReadByLoss) -> bool:
    """Does a loss begin with constants alone, so that autograd finds nothing to differentiate?"""
    are_constants = (number in _NUMBERS for number in read.variables)
    return read.is_complete and bool(read.variables) and all(are_constants)


def is_of_constants(array: NDArray) -> bool:
    """Is the ``array`` one of them, or computed of them and of what has no gradient?"""
    read = ReadByLoss([array])
    # What a recorded operator has read is no variable, unless it is marked, and has no gradient.
    return read.is_complete and all(number in _NUMBERS for number in read.variables)
