"""The arrays that an optimizer makes and drops as it updates parameters.

Most of MXNet's optimizers update a parameter by one operator, in place. Those below do so by
several, whose outputs are as large as the parameter. MXNet's engine gets the updates of further
parameters meanwhile and begins with them, so that arrays of several parameters are there at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mxnet as mx
import numpy as np
from mxnet import optimizer as optimizers

from memplan.mxnet.realise.optimizer_states import optimizer_of
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.build import Trace
from memplan.util.heap import KEPT_NBYTES

# How many equal parameters were updated behind a step where the numbers of arrays were measured.
NUMBERS = (1, 4, 16, 64)


@dataclass(frozen=True)
class _Arrays:
    """How many arrays as large as a parameter a process grew by, at most, in three updates.

    ``within``: where the parameter is updated within a step, with the copy of its gradient that
    :class:`memplan.mxnet.realise.update_calls.UpdateCall` makes; 0 where memplan lets no such
    optimizer update there. ``holes``: how many more those of parameters take there that the C
    library keeps when they are freed. ``behind``: where so many equal ones are as :data:`NUMBERS`
    says, and ``holes_behind``: how many more there.
    """

    behind: tuple[float, float, float, float]
    within: int = 0
    holes: int = 0
    holes_behind: int = 0

    def nbytes_within(self, sizes: Sequence[int]) -> int:
        """The bytes for parameters of these ``sizes``: of the largest returned and kept ones."""
        returned = max((size for size in sizes if size >= KEPT_NBYTES), default=0)
        largest = max((size for size in sizes if size < KEPT_NBYTES), default=0)
        return self.within * (returned + largest) + _nbytes_of_holes(self.holes, sizes)

    def nbytes_behind(self, sizes: Sequence[int]) -> int:
        """The bytes for parameters of these ``sizes``, the largest first.

        Each counts as the one that came in its place did, beyond the last as the last ones did.
        """
        places, total = (0, *NUMBERS), 0.0
        spans = zip(itertools.pairwise((0, *self.behind)), itertools.pairwise(places), strict=True)
        for (few, many), (begin, end) in spans:
            part = sizes[begin:] if end == NUMBERS[-1] else sizes[begin:end]
            total += sum(part) * (many - few) / (end - begin)
        return round(total) + _nbytes_of_holes(self.holes_behind, sizes)


def _nbytes_of_holes(number: int, sizes: Sequence[int]) -> int:
    """So many as large as the largest kept parameter, but no more than all kept ones together."""
    kept = [size for size in sizes if size < KEPT_NBYTES]
    return min(number * max(kept, default=0), sum(kept))


# By the class whose update it is, on two processors, one thread each: a longer form of
# benchmarks/updates.py --arrays, of which the numbers behind a step differ by a third from run to
# run. Within, it says one array more for AdaGrad, Adamax and DCASGD than a perceptron of 84 MB
# took, which these are. SGLD, Nadam and LBSGD never update within. The holes are what perceptrons
# of parameters of 4 and 17 MB and a ResNet-18 grew by from the third step on, when memory below
# KEPT_NBYTES is kept: 2.0 to 3.1 arrays, and less than half of one with LAMB and Test; that of
# GroupAdaGrad, which was not measured there, is AdaGrad's. Where one parameter of 17 to 26 MB was
# larger than all others together, they were 0.3 to 1.4 times what all have, over 12 steps. To
# return this memory, too, took the perceptrons' steps 1.5 to 1.8 times the processor's time, and
# ResNet-18's up to 1.6 times. Behind a step such perceptrons grew by 2.3 to 3.3 arrays more with
# SGLD in 10 steps than with SGD and the table; DCASGD was within the table in three runs of four.
_ARRAYS = {
    optimizers.AdaGrad: _Arrays((4, 18, 30, 31), within=4, holes=3),
    optimizers.AdaDelta: _Arrays((4, 15, 40, 130), within=5, holes=3),
    optimizers.Adamax: _Arrays((4, 11, 30, 102), within=4, holes=3),
    optimizers.DCASGD: _Arrays((5, 17, 34, 83), within=5, holes=3),
    optimizers.Nadam: _Arrays((4, 8, 8, 8)),
    optimizers.SGLD: _Arrays((4, 12, 16, 17), holes_behind=3),
    optimizers.LBSGD: _Arrays((2, 8, 8, 8)),
    optimizers.Test: _Arrays((1, 5, 7, 7), within=2),
    optimizers.contrib.GroupAdaGrad: _Arrays((3, 12, 17, 17), within=4, holes=3),
    optimizers.LAMB: _Arrays((4, 4, 4, 4), within=2),
}

# LAMB asks for temporary space as large as all the parameters that it updates at once, and MXNet
# has this many such spaces, which it takes in turn and keeps (MXNET_CPU_TEMP_COPY): 16 parameters
# of 4 MB took 16, 32 and 48 arrays in the first updates of all at once, for which a Trainer and a
# Module ask. Within a step it updates one parameter, in the one space that a step has.
_SPACES = 4


# The gradients in single precision, and the copies in half precision of which they are made, where
# an optimizer has no operator for half precision (update_multi_precision of MXNet's Optimizer):
# for six parameters of 16 MB Adam took 1.1 of the former in the first steps, RMSProp 2.1, and both
# took 2.1 to 3.1 from the third step on. Behind a step Adam, RMSProp and Ftrl took 1, 4 to 8, 18 to
# 22 and 65 to 69 (benchmarks/updates.py --arrays --half), of six parameters in a step 5.5 to 11,
# of 24 Adam took 25, and AdaGrad took as many more than in single precision.
_IN_SINGLE_PRECISION = _Arrays((1, 8, 22, 69), within=2, holes=1)


def update_nbytes(traced: Trace, optimizer: str | mx.optimizer.Optimizer) -> int:
    """The bytes of what ``optimizer``, or one of this name, makes as it updates, and drops.

    Nothing is counted for an update of the user's own, but the gradients in single precision that
    MXNet makes for it. ArgumentError for what is no optimizer.
    """
    optimizer = optimizer_of(optimizer)
    names = wanted(traced.grad_req)
    kind = next(each for each in type(optimizer).__mro__ if "update" in vars(each))

    def sizes(names: Iterable[str]) -> list[int]:
        return sorted((_nbytes(traced, name, optimizer) for name in names), reverse=True)

    if kind is optimizers.LAMB and not traced.form.updates:
        return _SPACES * sum(sizes(names)[: optimizer.aggregate_num])
    converted = [name for name in names if _is_converted(traced, name, optimizer)]
    made = _nbytes_made(traced, _IN_SINGLE_PRECISION, sizes(converted))
    return made + (_nbytes_made(traced, _ARRAYS[kind], sizes(names)) if kind in _ARRAYS else 0)


def _nbytes_made(traced: Trace, arrays: _Arrays, sizes: Sequence[int]) -> int:
    """The bytes for parameters of these ``sizes``, where the step has them updated."""
    return arrays.nbytes_within(sizes) if traced.form.updates else arrays.nbytes_behind(sizes)


def _is_converted(traced: Trace, name: str, optimizer: mx.optimizer.Optimizer) -> bool:
    """Does MXNet make the gradient of this parameter in single precision for ``optimizer``?"""
    update = type(optimizer).update_multi_precision
    is_general = update is optimizers.Optimizer.update_multi_precision
    return is_general and optimizer.multi_precision and traced.dtypes[name] == "float16"


def _nbytes(traced: Trace, name: str, optimizer: mx.optimizer.Optimizer) -> int:
    """The bytes of a parameter, or of its copy in single precision that ``optimizer`` updates."""
    dtype = np.dtype(traced.dtypes[name])
    if optimizer.multi_precision and dtype == np.float16:
        dtype = np.dtype(np.float32)
    return math.prod(traced.shapes[name]) * dtype.itemsize
