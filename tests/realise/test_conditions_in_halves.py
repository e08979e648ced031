"""What a cond or a while_loop returns of inputs alone, as an output of an explicit step's half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from memplan.mxnet.gluon import planned


def branch(F: Any, data: Any) -> Any:  # noqa: N803
    return F.contrib.cond(F.sum(data) > 0, lambda: F.sin(data), lambda: data * 2)


def loop(F: Any, data: Any) -> Any:  # noqa: N803
    _, (_, result) = F.contrib.while_loop(
        lambda i, _: F.sum(i) < 3,
        lambda i, x: (x * 2, [i + 1, x + 1]),
        [F.zeros((1,)), data],
        max_iterations=4,
    )
    return result


class Beside(gluon.HybridBlock):
    """A dense layer, and beside it what ``of`` makes of the input."""

    def __init__(self, of: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.of = of
        self.dense = gluon.nn.Dense(3, in_units=5)

    def hybrid_forward(self, F: Any, data: Any) -> Any:  # noqa: N803
        return self.dense(data), F.square(self.of(F, data))


def steps(net: gluon.Block) -> list[np.ndarray]:
    """The outputs and the gradient of two steps, of which a cond takes either branch."""
    weight = net.dense.weight
    weight.set_data(mx.nd.arange(15).reshape((3, 5)) / 10)
    result = []
    for sign in (1, -1):
        with autograd.record():
            outputs = net(sign * mx.nd.ones((2, 5)))
        autograd.backward(outputs)
        result += [array.asnumpy() for array in (*outputs, weight.grad())]
    return result


@pytest.mark.parametrize("of", [branch, loop])
def test_the_executor_learns_the_shape_as_it_runs(of: Callable[[Any, Any], Any]) -> None:
    net = Beside(of)
    net.initialize()
    net.hybridize()
    expected = steps(net)
    planned(net, realisation="explicit", strategy="store_all")
    for own, found in zip(expected, steps(net), strict=True):
        assert np.array_equal(own, found)
