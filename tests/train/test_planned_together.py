"""Several planned blocks, or losses, in one step: what they share is as without plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU, SOFTMAX
from helpers.training_runs import differences
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import TrainStep, planned


def normal(*shape: int) -> Any:
    return mx.nd.random.normal(shape=shape, ctx=CPU)


def heads_of_one_trunk(number: int = 2, *, norm: bool) -> list[Any]:
    """Networks that share all but their last layer."""
    trunk = nn.HybridSequential(prefix="trunk_")
    with trunk.name_scope():
        for _ in range(3):
            trunk.add(nn.Dense(6, activation="tanh"), *([nn.BatchNorm()] if norm else []))
    nets = []
    for place in range(number):
        net = nn.HybridSequential(prefix=f"net{place}_")
        with net.name_scope():
            net.add(trunk, nn.Dense(3))
        net.initialize()
        net(normal(2, 4))
        nets.append(net)
    return nets


def left_by(train: Callable[[list[Any]], Any], *, plan: bool, norm: bool = False) -> list[Any]:
    """Gradients and values that ``train`` leaves in the networks of one trunk."""
    mx.random.seed(3)
    nets = heads_of_one_trunk(norm=norm)
    for net in nets:
        net.hybridize()
        if plan:
            planned(net, realisation="packed", strategy="chen_sqrt")
    for _ in range(2):
        train(nets)
    mx.nd.waitall()
    params = [p for net in nets for p in net.collect_params().values()]
    return [*map(gradients, nets), {str(i): p.data().asnumpy() for i, p in enumerate(params)}]


def losses_of(nets: list[Any]) -> list[Any]:
    # Each has labels of its own: autograd lets go of all that a loss has read.
    batches = [(normal(5, 4) + place, mx.nd.arange(5) % 3) for place in range(len(nets))]
    with autograd.record():
        return [SOFTMAX(net(x), y) for net, (x, y) in zip(nets, batches, strict=True)]


def one_after_the_other(nets: list[Any]) -> None:
    """The second backward overwrites what the first has written for the trunk."""
    for loss in losses_of(nets):
        loss.backward()


def in_one_loss(nets: list[Any]) -> None:
    with autograd.record():
        loss = sum(losses_of(nets))
    loss.backward()


def penalty_of(net: Any) -> Any:
    return sum((p.data() ** 2).sum() for p in net.collect_params(".*weight").values())


def with_a_penalty_before(nets: list[Any]) -> None:
    """Its gradients are looked at, say, and then overwritten."""
    with autograd.record():
        [loss], penalty = losses_of(nets[:1]), penalty_of(nets[0])
    penalty.backward()
    loss.backward()


@pytest.mark.parametrize("train", [one_after_the_other, in_one_loss, with_a_penalty_before])
def test_gradients_of_what_is_shared(train: Callable[[list[Any]], Any]) -> None:
    assert not differences(left_by(train, plan=False), left_by(train, plan=True))


def test_a_penalty_before_the_second_half_is_overwritten() -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(3)
        [net] = heads_of_one_trunk(1, norm=False)
        step = TrainStep(net, strategy="chen_sqrt")
        with autograd.record():
            outputs = step.forward(mx.nd.ones((5, 4))) if plan else net(mx.nd.ones((5, 4)))
            loss, penalty = SOFTMAX(outputs, mx.nd.zeros(5)), penalty_of(net)
        penalty.backward()
        step.backward(loss) if plan else loss.backward()
        results.append(gradients(net))
    assert not differences(results[:1], results[1:])


def test_a_step_that_is_not_reached_keeps_what_autograd_wrote() -> None:
    [net] = heads_of_one_trunk(1, norm=False)
    planned(net, strategy="chen_sqrt")
    weight = net[1].weight
    with autograd.record():
        net(mx.nd.ones((5, 4)))
        penalty, other = (weight.data() ** 2).sum(), (weight.data() ** 3).sum()
    penalty.backward()
    assert weight.data()._fresh_grad
    factor = mx.nd.ones((1,))
    factor.attach_grad()
    with autograd.record():
        other = factor * 2
    other.backward()
    assert weight.data()._fresh_grad
    assert np.array_equal(weight.grad().asnumpy(), 2 * weight.data().asnumpy())


def test_statistics_that_are_shared() -> None:
    """MXNet updates them in the order of the graph; with a backward for each there is one."""
    with pytest.raises(UsageError, match=r"share 'trunk_batchnorm0_running_mean'.*grad_req='add'"):
        left_by(in_one_loss, plan=True, norm=True)

    def as_the_error_says(nets: list[Any]) -> None:
        for net in nets:
            for parameter in net[0].collect_params().values():
                if parameter.grad_req != "null":
                    parameter.grad_req = "add"
        for net in nets:
            [loss] = losses_of([net])
            loss.backward()

    results = [left_by(as_the_error_says, plan=plan, norm=True) for plan in (False, True)]
    assert not differences(*results)


def test_the_gradient_of_an_input_by_a_block_without_a_plan() -> None:
    """As the error says: a block of the same symbol and parameters, before every planned step."""

    def train(net: Any, twin: Any) -> list[Any]:
        mx.random.seed(1)
        net.initialize(force_reinit=True)
        left = []
        for _ in range(3):
            x, y = normal(5, 3, 8, 8), mx.nd.arange(5)
            x.attach_grad()
            with autograd.record():
                loss = SOFTMAX(twin(x), y)
            loss.backward()
            worse = (x + x.grad.sign() / 10).detach()
            with autograd.record():
                loss = SOFTMAX(net(worse), y)
            loss.backward()
            left.append({"input": x.grad.asnumpy(), "loss": loss.asnumpy(), **gradients(net)})
        return left

    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.MaxPool2D())
    net.add(nn.Dense(5, in_units=72))
    net.initialize()
    net.hybridize()
    expected = train(net, net)
    planned(net, strategy="chen_sqrt")
    data = mx.sym.Variable("data")
    twin = mx.gluon.SymbolBlock(net(data), [data], net.collect_params())
    assert not differences(expected, train(net, twin))
    x = normal(5, 3, 8, 8)
    x.attach_grad()
    refused = pytest.raises(ArgumentError, match=r"SymbolBlock\(block\(data\), \[data\]")
    with refused, autograd.record():
        net(x)
