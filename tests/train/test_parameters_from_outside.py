"""Blocks whose parameters are attributes of theirs, but in a dictionary made for others."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from memplan.mxnet.gluon import TrainStep, planned

L2 = gluon.loss.L2Loss()
QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Objective(gluon.HybridBlock):
    """In the manner of MXFusion's: made with ``params=``, its own dictionary stays empty."""

    def __init__(self, parameters: gluon.ParameterDict) -> None:
        super().__init__(prefix="", params=parameters)
        for name in parameters:
            setattr(self, name, parameters.get(name))

    def hybrid_forward(self, F: Any, x: Any, w0: Any, w1: Any) -> Any:  # noqa: N803
        h = F.FullyConnected(x, w0, num_hidden=8, no_bias=True)
        for _ in range(3):
            h = F.tanh(h * 1.1)
        return F.FullyConnected(h, w1, num_hidden=5, no_bias=True)


def trained(way: str) -> tuple[list[Any], int]:
    """Losses, gradients and parameters of three steps, and the number of plans."""
    mx.random.seed(1)
    parameters = gluon.ParameterDict()
    for name, shape in (("w0", (8, 6)), ("w1", (5, 8))):
        parameters.get(name, shape=shape)
    block = Objective(parameters)
    parameters.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1})
    step = TrainStep(block, L2, **QUICKLY) if way == "TrainStep" else None
    if way == "planned":
        planned(block, **QUICKLY)
    results = []
    for _ in range(3):
        x, y = mx.nd.random.normal(shape=(4, 6)), mx.nd.random.normal(shape=(4, 5))
        if step is not None:
            loss = step(x, y)
        else:
            with autograd.record():
                loss = L2(block(x), y)
            loss.backward()
        gradients = [parameter.grad().asnumpy() for parameter in parameters.values()]
        trainer.step(4)
        results += [loss.asnumpy(), *gradients, *(p.data().asnumpy() for p in parameters.values())]
    step = getattr(block, "planned_step", step)
    return results, 0 if step is None else len(step.plans)


@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_they_are_trained_by_a_plan(way: str) -> None:
    plain, _ = trained("plain")
    by_plan, nplans = trained(way)
    assert nplans == 1
    assert all(map(np.array_equal, plain, by_plan))
