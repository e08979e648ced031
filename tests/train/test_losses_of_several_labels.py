"""Losses of several labels, which arrive as one argument, and that have parameters of their own."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, vectors
from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.gluon import TrainStep

ADVICE = r"self\.loss, and whose hybrid_forward\(self, F, outputs, labels\) returns self\.loss"


class Weighted(gluon.HybridBlock):
    """Two losses, of a label each, weighed by a parameter."""

    def __init__(self) -> None:
        super().__init__(prefix="weighted_")
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(2,), init="ones")
            self.first, self.second = gluon.loss.SoftmaxCELoss(), gluon.loss.L2Loss()

    def hybrid_forward(self, F: Any, x: Any, y: Any, z: Any, weight: Any) -> Any:  # noqa: N803
        both = F.stack(self.first(x, y), self.second(x, z), axis=1)
        return F.broadcast_mul(both, weight).sum(axis=1)


class Both(gluon.HybridBlock):
    """What the advice says."""

    def __init__(self, loss: Any) -> None:
        super().__init__(prefix="both_")
        self.loss = loss

    def hybrid_forward(self, F: Any, outputs: Any, labels: Any) -> Any:  # noqa: N803
        return self.loss(outputs, *labels)


def _made() -> tuple[Any, Any, Any, list[Any]]:
    mx.random.seed(0)
    net, loss, (x, y) = nn.Dense(10), Weighted(), vectors()
    for block in (net, loss):
        block.initialize(ctx=CPU)
        block.hybridize()
    return net, loss, x, [y, mx.nd.random.uniform(shape=(64, 10), ctx=CPU)]


def test_a_function_is_told_how_to_be_a_block() -> None:
    net, loss, x, labels = _made()
    with pytest.raises(ArgumentError, match=rf"'weighted_weight'.*as a Block.*{ADVICE}"):
        TrainStep(net, lambda outputs, each: loss(outputs, *each))(x, labels)


def test_a_block_of_several_labels_is_told_that_they_are_one_argument() -> None:
    net, loss, x, labels = _made()
    with pytest.raises(TraceError, match=rf"the 2 labels arrive as one argument.*{ADVICE}"):
        TrainStep(net, loss)(x, labels)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_the_advice_trains_as_mxnet_does(realisation: str) -> None:
    net, loss, x, labels = _made()
    params = [*net.collect_params().values(), *loss.collect_params().values()]
    with autograd.record():
        expected = loss(net(x), *labels)
    expected.backward()
    arrays = [expected.asnumpy(), *(param.grad(CPU).asnumpy() for param in params)]
    losses = TrainStep(net, Both(loss), realisation=realisation, strategy="chen_sqrt")(x, labels)
    found = [losses.asnumpy(), *(param.grad(CPU).asnumpy() for param in params)]
    assert all(map(np.array_equal, found, arrays))
