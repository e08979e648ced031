"""The gradient of an LRN, which MXNet gets wrong where it reads one in a layout of oneDNN's.

Planned steps have it as MXNet's blocks have it, right or wrong, but behind what autograd calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from helpers.small_convolutions import pooled
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.gluon import planned
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.strategies.base import Problem
from memplan.strategies.chen import ChenSqrt

Symbol = mx.sym.Symbol


class _Net(mx.gluon.HybridBlock):
    """An LRN of pictures before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.conv = mx.gluon.nn.Conv2D(32, 3, padding=1, in_channels=3)
            self.dense = mx.gluon.nn.Dense(3, in_units=32 * 64)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.dense(F.LRN(self.conv(x), nsize=3, alpha=1.0))


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_before_a_dense_layer_it_is_that_of_the_hybridized_block(realisation: str) -> None:
    """MXNet's executor writes the gradient of the dense layer over the output of the LRN."""
    data = mx.nd.array(np.random.default_rng(0).normal(size=(2, 3, 8, 8)))
    found = []
    for is_planned in (False, True):
        mx.random.seed(1)
        block = _Net()
        block.initialize(mx.init.Normal(0.3))
        block.hybridize()
        if is_planned:
            block = planned(block, realisation=realisation, strategy="store_all")
        with autograd.record():
            loss = block(data).square().sum()
        loss.backward()
        found.append([p.grad().asnumpy().tobytes() for p in block.collect_params().values()])
    assert found[0] == found[1]


def _convolved(data: Symbol) -> Symbol:
    return mx.sym.Convolution(data, num_filter=16, kernel=(3, 3), pad=(1, 1))


def _activated(data: Symbol) -> Symbol:
    return mx.sym.Activation(_convolved(data), act_type="relu")


def _normed(data: Symbol) -> Symbol:
    return mx.sym.LRN(data, nsize=5, knorm=2)


NETWORKS: dict[str, Callable[[Symbol], Symbol]] = {
    "AlexNet": lambda x: _activated(pooled(_normed(_activated(x)))),
    "GoogLeNet": lambda x: _activated(_normed(_activated(pooled(_normed(pooled(x)))))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_elsewhere_it_is_mxnets(name: str) -> None:
    body = NETWORKS[name](_activated(mx.sym.Variable("data")))
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=4), name="softmax")
    traced = trace(symbol, shapes={"data": (2, 3, 16, 16)}, realisation="packed")
    again = ChenSqrt().solve(Problem(traced.graph, None)).schedule
    assert again is not None
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for schedule in (Schedule.unplanned(traced.graph), again):
        assert not differences(stock, planned_steps(bound(traced, schedule, values), 2))
