"""A trainer that has not used gradients when a planned block is called, which overwrites them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

Net = Any
Trainer = Any


def trained(plan: str | None, train: Callable[[Net, Trainer], None], req: str = "write") -> Any:
    """The parameters that ``train`` leaves."""
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh", in_units=4), nn.Dense(2, in_units=6))
    net.initialize(mx.init.Xavier())
    net.collect_params().setattr("grad_req", req)
    if plan is not None:
        planned(net, realisation=plan, strategy="chen_sqrt")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "wd": 0.1})
    train(net, trainer)
    return {name: p.data().asnumpy() for name, p in net.collect_params().items()}


def call(net: Net, nrows: int = 3) -> Any:
    with autograd.record():
        return (net(mx.nd.ones((nrows, 4))) ** 2).sum()


def call_and_leave(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net)
    trainer.step(3, ignore_stale_grad=True)


def call_for_another_shape(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net, 5)
    call(net)
    trainer.step(3, ignore_stale_grad=True)


def ignore_none(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net)
    trainer.step(3)


def update_alone(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net)
    trainer.update(3, ignore_stale_grad=True)


LEFT = [call_and_leave, call_for_another_shape, ignore_none, update_alone]


def use_before(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    trainer.step(3)
    call(net, 5)
    for _ in range(2):
        trainer.step(3, ignore_stale_grad=True)


def differentiate_later(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net)
    call(net).backward()
    trainer.step(3)
    call(net)
    trainer.step(3, ignore_stale_grad=True)


def write_zeros(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net)
    net.collect_params().zero_grad()
    for _ in range(2):
        trainer.step(3, ignore_stale_grad=True)
    call(net)
    trainer.step(3, ignore_stale_grad=True)


def write_ones(net: Net, trainer: Trainer) -> None:
    call(net).backward()
    call(net)
    for parameter in net.collect_params().values():
        parameter.grad()[:] = 1
    trainer.step(3)


def write_unused(net: Net, trainer: Trainer) -> None:
    """What no backward has written is used by no trainer, whoever writes into it."""
    call(net)
    net.collect_params().zero_grad()
    trainer.step(3, ignore_stale_grad=True)


RIGHT = [use_before, differentiate_later, write_zeros, write_ones, write_unused]


@pytest.mark.parametrize("plan", ["packed", "explicit"])
@pytest.mark.parametrize("train", LEFT)
def test_no_parameter_is_left_out_without_a_word(
    train: Callable[[Net, Trainer], None], plan: str
) -> None:
    """MXNet updates by the gradients of before, which a planned step has not."""
    with pytest.raises(UsageError, match=r"'net_dense0_\w+' is not there: .* call trainer.step"):
        trained(plan, train)


@pytest.mark.parametrize("train", LEFT)
def test_those_that_are_added_up_are_used(train: Callable[[Net, Trainer], None]) -> None:
    results = [trained(plan, train, "add") for plan in (None, "packed")]
    assert not differences(results[:1], results[1:])


@pytest.mark.parametrize("train", RIGHT)
def test_parameters_are_updated_as_without_a_plan(train: Callable[[Net, Trainer], None]) -> None:
    results = [trained(plan, train) for plan in (None, "packed")]
    assert not differences(results[:1], results[1:])


def test_gradients_of_before_the_first_plan_are_missed() -> None:
    def train(net: Net, trainer: Trainer) -> None:
        call(net).backward()
        planned(net, realisation="packed", strategy="chen_sqrt")
        call(net)
        trainer.step(3, ignore_stale_grad=True)

    with pytest.raises(UsageError, match="is not there"):
        trained(None, train)


def test_those_of_a_step_that_was_left_are_missed() -> None:
    def train(net: Net, trainer: Trainer) -> None:
        step = TrainStep(net, realisation="packed", strategy="chen_sqrt")
        for is_last in (False, True):
            with autograd.record():
                loss = (step.forward(mx.nd.ones((3, 4))) ** 2).sum()
            step.abandon() if is_last else step.backward(loss)
        trainer.step(3, ignore_stale_grad=True)

    with pytest.raises(UsageError, match="is not there"):
        trained(None, train)


def test_a_step_that_updates_parameters_beside_it_misses_theirs() -> None:
    def train(net: Net, trainer: Trainer) -> None:
        other = nn.Dense(2, in_units=4, prefix="other_")
        other.initialize()
        params = {**net.collect_params(), **other.collect_params()}
        both = gluon.Trainer(params, "sgd", {"learning_rate": 0.1}, kvstore=None)
        options = {"realisation": "packed", "strategy": "store_all", "ignore_stale_grad": True}
        step = TrainStep(other, gluon.loss.L2Loss(), trainer=both, **options)
        x, y = mx.nd.ones((3, 4)), mx.nd.ones((3, 2))
        call(net).backward()
        before = net[0].weight.data().asnumpy()
        step(x, y)
        assert not np.array_equal(net[0].weight.data().asnumpy(), before)
        call(net).backward()
        call(net)
        step(x, y)

    with pytest.raises(UsageError, match=r"'net_dense0_\w+' is not there"):
        trained("packed", train)
