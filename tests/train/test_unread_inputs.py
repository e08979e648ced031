"""Blocks that do not read their inputs, such as learned queries, in steps of two halves."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.networks import residual_net
from memplan.errors import UsageError
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import planned
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


def queries(F: Any, one: Any, other: Any) -> Any:  # noqa: N803
    total = one + other
    return total, F.reshape(total, (3, 4)), other * 2


def noise(F: Any, one: Any, other: Any) -> Any:  # noqa: N803
    scale = F.exp(one)
    return scale, scale * other, F.exp(one) * F.exp(other)


class Unread(gluon.HybridBlock):
    """Computes its outputs of two parameters alone."""

    def __init__(self, function: Any) -> None:
        super().__init__(prefix="net_")
        self.function = function
        with self.name_scope():
            for name in ("one", "other"):
                setattr(self, name, self.params.get(name, shape=(4, 3), init=mx.init.Uniform(1)))

    def hybrid_forward(self, F: Any, x: Any, one: Any, other: Any) -> Any:  # noqa: N803
        return self.function(F, one, other)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("function", [queries, noise])
def test_outputs_and_gradients_are_those_of_this_step(function: Any, realisation: str) -> None:
    found: list[list[np.ndarray]] = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = Unread(function)
        net.initialize()
        net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
        if is_planned:
            planned(net, realisation=realisation, strategy="auto:effort=0.01")
        arrays = []
        for _ in range(3):
            with autograd.record():
                outputs = net(mx.nd.ones((2, 3)))
                loss = sum((output * output).sum() for output in outputs)
            loss.backward()
            arrays += [*outputs, *(p.grad().copy() for p in net.collect_params().values())]
            trainer.step(1)
        found.append([array.asnumpy() for array in arrays])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_plan_for_whole_steps_is_not_cut_in_two(realisation: str) -> None:
    """Its outputs may be computed at the end."""
    net, shapes = residual_net()
    traced = trace(net, shapes=shapes, realisation=realisation)
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    with pytest.raises(UsageError, match="cannot be run in halves"):
        executor.forward_half()
