"""Gradients that stay when the step that computed them has gone, in arrays of their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.train.arrays.array_memory import is_recorded_elsewhere

if TYPE_CHECKING:
    from memplan.mxnet.train.arrays.gradients import Gradients, Held

#: So many milliseconds MXNet's engine has to be done with the updates of a trainer, which hold what
#: a graph holds. To wait for them would take the error of a step that has failed from the script.
LOOKS = 1000


def move_out_for_good(gradients: Gradients) -> None:
    """The parameters keep their ``gradients`` outside of the memory of the step, which is gone.

    They stay in it where what was recorded would write gradients there, which the parameters would
    not see elsewhere, and where a device has no room for them beside it.
    """
    every = gradients.in_memory()
    if _are_recorded(every):
        return
    with autograd.pause(), contextlib.suppress(mx.MXNetError):
        arrays = [held.array.as_nd_ndarray() for held in every]
        copies = [
            # Made at once, it fails here, and not in what waits for it.
            mx.nd.empty(array.shape, array.ctx, array.dtype, stype=array.stype)
            for array in arrays
        ]
        for held, array, copy in zip(every, arrays, copies, strict=True):
            array.copyto(copy)
            held.move_out(copy)


def _are_recorded(every: Sequence[Held]) -> bool:
    """Is there a graph still that reads one of the parameters as they are marked now?"""
    for _ in range(LOOKS):
        if not any(is_recorded_elsewhere(held.data) for held in every):
            return False
        time.sleep(0.001)
    return True
