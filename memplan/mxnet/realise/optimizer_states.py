"""The bytes of what an optimizer keeps for the parameters of a network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np

from memplan.errors import ArgumentError
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.build import Trace
from memplan.util.numbers import shown

# An optimizer is shown a weight of this size in every dimension, and what it makes for that is
# scaled: nothing is allocated for large ones.
_SIZE = 3


def states_nbytes(traced: Trace, optimizer: str | mx.optimizer.Optimizer) -> int:
    """What ``optimizer``, or one of this name, keeps for all parameters with a gradient, in bytes.

    Copies of parameters in float32, which ``multi_precision`` makes, are counted as well.
    ArgumentError for a name that MXNet does not know, and for parameters that the optimizer cannot
    update.
    """
    optimizer = optimizer_of(optimizer)
    kinds: dict[tuple[int, str], list[Any]] = {}
    total = 0
    for name in wanted(traced.grad_req):
        shape, dtype = traced.shapes[name], traced.dtypes[name]
        if (len(shape), dtype) not in kinds:
            weight = mx.nd.zeros((_SIZE,) * len(shape), mx.cpu(), dtype)
            try:
                state = optimizer.create_state_multi_precision(0, weight)
            except AssertionError as error:  # GroupAdaGrad's, for all but matrices
                kind = type(optimizer).__name__
                raise ArgumentError(f"{kind} cannot update {name!r} of shape {shape}") from error
            kinds[len(shape), dtype] = list(_arrays(state))
        for state in kinds[len(shape), dtype]:
            total += _scaled(state.shape, shape) * np.dtype(state.dtype).itemsize
    return total


def optimizer_of(optimizer: str | mx.optimizer.Optimizer) -> mx.optimizer.Optimizer:
    """``optimizer``, or a new one of this name; ArgumentError for what is neither."""
    if isinstance(optimizer, str):
        return optimizer_named(optimizer)
    if not isinstance(optimizer, mx.optimizer.Optimizer):
        raise ArgumentError(f"optimizer must be one of MXNet's or its name, got {shown(optimizer)}")
    return optimizer


def optimizer_named(name: str) -> mx.optimizer.Optimizer:
    """A new optimizer of this name; ArgumentError where MXNet has none."""
    if name.lower() not in mx.optimizer.Optimizer.opt_registry:
        names = ", ".join(sorted(mx.optimizer.Optimizer.opt_registry))
        raise ArgumentError(f"MXNet has no optimizer {shown(name)}; it has {names}")
    return mx.optimizer.create(name)


def _arrays(state: Any) -> Iterator[Any]:
    if isinstance(state, mx.nd.NDArray):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _arrays(part)


def _scaled(state: tuple[int, ...], weight: tuple[int, ...]) -> int:
    """The elements of a ``state`` made for the small weight, for one of the shape ``weight``."""
    if len(state) != len(weight):
        return math.prod(state)
    return math.prod(
        size if small == _SIZE else small for small, size in zip(state, weight, strict=True)
    )
