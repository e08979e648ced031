"""Blocks whose parameters get arrays that a script computes of others, in every step."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from memplan.errors import ArgumentError
from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])


def dense() -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    return net


def drawn(means: list[Any], deviations: list[Any]) -> list[Any]:
    """Weights in the manner of Bayes by backprop."""
    return [
        mean.data() + mx.nd.exp(deviation.data()) * mx.nd.random.normal(shape=mean.shape)
        for mean, deviation in zip(means, deviations, strict=True)
    ]


def trained(net: nn.HybridSequential, wants: str, count: int) -> list[np.ndarray]:
    """Losses and gradients where the first ``count`` parameters are drawn in every step."""
    mx.random.seed(2)
    given = list(net.collect_params().values())[:count]
    means = [gluon.Parameter(f"mean{i}", shape=p.shape) for i, p in enumerate(given)]
    deviations = [gluon.Parameter(f"deviation{i}", shape=p.shape) for i, p in enumerate(given)]
    for parameter in means + deviations:
        parameter.initialize(mx.init.Uniform(0.5))
    for parameter in given:
        parameter.grad_req = wants
    trainer = gluon.Trainer(means + deviations, "sgd", {"learning_rate": 0.1})
    result = []
    for _ in range(3):
        with autograd.record():
            for parameter, array in zip(given, drawn(means, deviations), strict=True):
                parameter._data[0] = array
            loss = SOFTMAX(net(X), Y).sum() + sum((m.data() ** 2).sum() for m in means)
        loss.backward()
        trainer.step(4)
        result += [loss.asnumpy(), *(p.grad().asnumpy() for p in means + deviations)]
    return result


@pytest.mark.parametrize("hybridized", [True, False])
@pytest.mark.parametrize(("wants", "count"), [("write", 4), ("null", 1)])
def test_gradients_go_on_to_what_weights_are_computed_of(
    hybridized: bool, wants: str, count: int
) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        net = dense()
        net.hybridize(hybridized)
        if plan:
            planned(net, strategy="chen_sqrt")
            with pytest.warns(UserWarning, match="unplanned where a script gave its parameters"):
                results.append(trained(net, wants, count))
        else:
            results.append(trained(net, wants, count))
    assert all(map(np.array_equal, *results))


def test_a_block_trains_by_its_plan_when_its_arrays_are_its_own_again() -> None:
    net = planned(dense(), strategy="chen_sqrt")
    own = [p.data() for p in net.collect_params().values()]
    with pytest.warns(UserWarning, match="unplanned where a script gave its parameters"):
        trained(net, "write", 4)
    assert not net.planned_step.plans
    for parameter, array in zip(net.collect_params().values(), own, strict=True):
        parameter._data[0] = array
    with autograd.record():
        loss = SOFTMAX(net(X), Y)
    loss.backward()
    assert net.planned_step.plans


def test_a_step_refuses_such_weights() -> None:
    net = dense()
    step = TrainStep(net, SOFTMAX, strategy="chen_sqrt")
    step(X, Y)
    mean = mx.nd.zeros((8, 6))
    mean.attach_grad()
    with autograd.record():
        net[0].weight._data[0] = mean * 2
    with pytest.raises(ArgumentError, match=r"net_dense0_weight.*take planned\(block\)"):
        step(X, Y)


def test_a_frozen_weight_with_a_gradient_of_the_scripts_is_refused_by_a_step() -> None:
    net = dense()
    net[0].weight.grad_req = "null"
    net[0].weight.data().attach_grad()
    with pytest.raises(ArgumentError, match="net_dense0_weight"):
        TrainStep(net, SOFTMAX, strategy="chen_sqrt")(X, Y)
