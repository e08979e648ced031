"""Functions that a script gives to layers, or puts into their classes: those of now are called."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.mxnet.gluon import planned


class Scale:
    """What a script keeps a factor in, with the method that multiplies by it."""

    factor = 1.0

    def apply(self, F: Any, x: Any) -> Any:  # noqa: N803
        return x * self.factor


def multiplied(F: Any, x: Any, factor: float) -> Any:  # noqa: N803
    return x * factor


def dense_of(factor: float) -> Callable[..., Any]:
    def hybrid_forward(self: Any, F: Any, x: Any, weight: Any, bias: Any) -> Any:  # noqa: N803
        return F.FullyConnected(x * factor, weight, bias, num_hidden=4)

    return hybrid_forward


def method(net: Any, factor: float, patch: Any) -> None:
    if factor == 1:
        scale = net.scale = Scale()
        net[1]._func = scale.apply
    net.scale.factor = factor


def partial(net: Any, factor: float, patch: Any) -> None:
    net[1]._func = functools.partial(multiplied, factor=factor)


def method_of_layer(net: Any, factor: float, patch: Any) -> None:
    net[0].hybrid_forward = types.MethodType(dense_of(factor), net[0])


def class_of_layer(net: Any, factor: float, patch: Any) -> None:
    if factor > 1:
        patch.setattr(nn.Dense, "hybrid_forward", dense_of(factor))


def class_that_reads(net: Any, factor: float, patch: Any) -> None:
    Scale.factor = factor

    def hybrid_forward(self: Any, F: Any, x: Any, **weights: Any) -> Any:  # noqa: N803
        return dense_of(Scale.factor)(self, F, x, **weights)

    if factor == 1:
        patch.setattr(nn.Dense, "hybrid_forward", hybrid_forward)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize(
    "give", [method, partial, method_of_layer, class_of_layer, class_that_reads]
)
def test_functions_are_those_of_the_last_call(
    give: Any, hybridized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybridized block keeps those of its first one, with a plan and without."""

    def left(is_planned: bool) -> list[float]:
        net = nn.HybridSequential()
        # A HybridLambda of a function runs in every step, and the block with it.
        net.add(nn.Dense(4, in_units=3), nn.HybridLambda("identity"))
        net.initialize(mx.init.One(), ctx=CPU)
        net.hybridize(hybridized)
        if is_planned:
            planned(net, strategy="chen_sqrt", realisation="packed")
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(Scale, "factor", 1.0)
            for factor in (1.0, 1.0, 5.0, 3.0):
                give(net, factor, patch)
                with autograd.record():
                    loss = net(mx.nd.ones((2, 3), ctx=CPU)).sum()
                loss.backward()
                found += [loss.asscalar(), *net[0].weight.grad().asnumpy().ravel()]
        return found

    assert left(True) == left(False)
