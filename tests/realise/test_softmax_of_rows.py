"""A softmax of the rows of what a convolution leaves, which a Reshape may have turned before it.

MXNet ends the process where one reads a layout of oneDNN's and does not write over that. So all
networks are run in another process, in one for all tests.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from helpers.schedules import random_schedule
from helpers.script import printed_by
from helpers.training_runs import (
    Values,
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol

CHANNELS, SIZE = 16, {1: (12,), 2: (6, 6)}

SOFTMAXES: dict[str, Callable[[Symbol], Symbol]] = {
    "softmax": lambda x: mx.sym.softmax(x, axis=-1),
    "log_softmax": lambda x: mx.sym.log_softmax(x, axis=-1),
    "softmin": lambda x: mx.sym.softmin(x, axis=-1),
    "temperature": lambda x: mx.sym.softmax(x, axis=-1, temperature=2.0),
    "of channels": lambda x: mx.sym.softmax(x, axis=1),
    "SoftmaxActivation": lambda x: mx.sym.SoftmaxActivation(x, mode="channel"),
}

TURNING: dict[str, Callable[[Symbol], Symbol]] = {
    "Flatten": mx.sym.Flatten,
    "reshape": lambda x: mx.sym.reshape(x, shape=(0, 0, -1)),
    "expand_dims": lambda x: mx.sym.expand_dims(x, axis=0),
}


def _convolution(ndim: int) -> Symbol:
    data, options = mx.sym.Variable("data"), {"num_filter": CHANNELS, "name": "conv"}
    return mx.sym.Convolution(data, kernel=(3,) * ndim, pad=(1,) * ndim, **options)


def _loss(data: Symbol) -> Symbol:
    return mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(mx.sym.FullyConnected(data, num_hidden=4))))


def beside(kind: str, turning: str, ndim: int) -> Symbol:
    """Losses of the ReLU of a convolution, which is turned, and of its softmax."""
    data = mx.sym.Activation(_convolution(ndim), act_type="relu")
    return mx.sym.Group([_loss(TURNING[turning](data)), _loss(SOFTMAXES[kind](data))])


def pooled(kind: str, turning: str, ndim: int) -> Symbol:
    """A max pooling notes places in the layout before, so that packed steps turn nothing."""
    data = _convolution(ndim)
    first = mx.sym.Pooling(data, kernel=(2,) * ndim, pool_type="max", name="pooled")
    first = mx.sym.sum(mx.sym.BlockGrad(first))
    losses = [_loss(TURNING[turning](data)), _loss(SOFTMAXES[kind](data))]
    return mx.sym.Group([mx.sym.BlockGrad(first), *losses])


def twice(kind: str, turning: str, ndim: int) -> Symbol:
    """A softmax of a softmax, which is turned between them, and so for both gradients."""
    data = mx.sym.softmax(_convolution(ndim), axis=-1, name="first")
    turned = mx.sym.reshape(mx.sym.sin(TURNING[turning](data)), shape=(4, CHANNELS, *SIZE[ndim]))
    other = SOFTMAXES[kind](data)
    return mx.sym.MakeLoss(mx.sym.square(mx.sym.softmax(turned, axis=1) + other))


def networks_of(ndim: int) -> Iterator[tuple[str, Symbol, float]]:
    """The networks of each test, and by what part of a step's largest number it may differ."""
    for kind in SOFTMAXES:
        for turning in TURNING:
            yield f"beside {turning} {kind}", beside(kind, turning, ndim), 0.0
    for kind in ("softmax", "log_softmax"):
        yield f"pooled {kind}", pooled(kind, "Flatten", ndim), 1e-5
        yield f"twice {kind}", twice(kind, "Flatten", ndim), 0.0


def show_different() -> None:
    """Print for each network what differs from MXNet's steps.

    In steps by the base order and by plans that repeat much.
    """
    for ndim, shape in SIZE.items():
        for name, symbol, rtol in networks_of(ndim):
            traced = trace(symbol, shapes={"data": (4, CHANNELS, *shape)}, realisation="packed")
            values, graph = random_values(traced), traced.graph
            schedules = [random_schedule(graph, seed, repeated=0.8) for seed in range(1, 4)]
            stock = stock_steps(traced, values, 2)
            different: list[str] = []
            for schedule in [Schedule.unplanned(graph), *schedules]:
                planned = planned_steps(bound(traced, schedule, values), 2)
                if found := differences(stock, planned) and _gaps(stock, planned, rtol):
                    different += found
            print(f"{ndim} {name}: {different}", flush=True)


def _gaps(stock: Sequence[Values], planned: Sequence[Values], rtol: float) -> list[str]:
    result = []
    for one, other in zip(stock, planned, strict=True):
        bound_of_gaps = rtol * max(np.abs(array).max() for array in one.values())
        result += [k for k in one if not np.abs(one[k] - other[k]).max() <= bound_of_gaps]
    return result


@functools.cache
def _printed() -> list[str]:
    """What :func:`show_different` prints in another process."""
    code = f"from {Path(__file__).stem} import *\nshow_different()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return printed_by("-c", code, PYTHONPATH=path).splitlines()


def _assert_none_differs(ndim: int, tested: str, *, count: int) -> None:
    lines = [line for line in _printed() if line.startswith(f"{ndim} {tested} ")]
    assert len(lines) == count
    assert not [line for line in lines if not line.endswith(": []")]


@pytest.mark.parametrize("ndim", SIZE)
def test_one_that_reads_what_a_reshape_has_turned(ndim: int) -> None:
    """In packed steps the Reshape writes another array, so that the softmax turns this one."""
    _assert_none_differs(ndim, "beside", count=18)


@pytest.mark.parametrize("ndim", SIZE)
def test_one_that_reads_what_packed_steps_do_not_turn(ndim: int) -> None:
    """It is written over a copy of that, and rounds otherwise than MXNet's."""
    _assert_none_differs(ndim, "pooled", count=2)


@pytest.mark.parametrize("ndim", SIZE)
def test_one_that_reads_what_another_has_left_in_a_layout_of_onednn(ndim: int) -> None:
    _assert_none_differs(ndim, "twice", count=2)
