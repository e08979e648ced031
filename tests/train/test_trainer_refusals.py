"""Trainers whose updates cannot be within a step of TrainStep: they are behind it, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import pytest
from mxnet import gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

from helpers.trainer_loops import Loop, assert_equal_loops, differing, within
from memplan.errors import ArgumentError

OTHER = "it draws random|momentum schedule|momentum by|adds up gradients"
BEHIND = "ignore:parameters are updated behind the step"


class MyTrainer(gluon.Trainer):  # type: ignore[misc]
    """Of the user's."""


@pytest.mark.parametrize("optimizer", ["sgld", "nadam", "lars", "lbsgd"])
def test_optimizers_that_are_refused(optimizer: str) -> None:
    with pytest.warns(UserWarning, match=OTHER):
        step = assert_equal_loops(optimizer, {"learning_rate": 0.01})
    assert not within(step)


@pytest.mark.parametrize(
    ("more", "reason"),
    [({}, "a kvstore"), ({"update_on_kvstore": False}, "a kvstore")],
)
def test_kvstores_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason):
        step = assert_equal_loops("sgd", {"learning_rate": 0.1}, kvstore="local", **more)
    assert not within(step)


def test_parameters_beside_the_trainer_or_the_network() -> None:
    loop = Loop("sgd", {"learning_rate": 0.1}, planned=True)
    loop.trainer = gluon.Trainer(loop.net[0].collect_params(), "sgd", {"learning_rate": 0.1})
    with pytest.warns(UserWarning, match="is none of the trainer's"):
        loop.start()(loop.x, loop.y)
    assert loop.net[3].weight.grad().asnumpy().any()
    other = nn.Dense(3, in_units=3)
    other.initialize()
    params = loop.net.collect_params()
    params.update(other.collect_params())
    loop.trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1})
    with (
        pytest.warns(UserWarning, match="no gradient for parameter"),
        pytest.raises(UserWarning, match="has not been updated by backward"),  # MXNet's own
    ):
        loop.start()(loop.x, loop.y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.start(ignore_stale_grad=True)(loop.x, loop.y)
    assert within(loop.step)


@pytest.mark.filterwarnings(BEHIND)
def test_what_else_is_refused() -> None:
    loop = Loop("sgd", {"learning_rate": 0.1}, planned=True)
    loop.trainer = MyTrainer(loop.net.collect_params(), "sgd", {"learning_rate": 0.1})
    loop.start()(loop.x, loop.y)
    assert not within(loop.step)
    with pytest.raises(ArgumentError, match=r"trainer must be a gluon\.Trainer"):
        loop.start(trainer="sgd")
    with pytest.raises(ArgumentError, match="packed steps of TrainStep"):
        loop.start(realisation="updating")
    loop.net[0].weight.grad_req = "add"
    with pytest.raises(ArgumentError, match="grad_req='add'"):
        loop.start()(loop.x, loop.y)


def test_a_refusal_that_comes_later() -> None:
    """AMP scales the loss dynamically from some step on."""
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1, "momentum": 0.9}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(2)
        loop.trainer._amp_loss_scaler = LossScaler()
        with pytest.warns(UserWarning, match="AMP") if planned else warnings.catch_warnings():
            loop.train(1)
        loop.train(1)
        del loop.trainer._amp_loss_scaler
        loop.train(2)
        found.append(loop.values())
    assert not differing(*found)
    made = [plan.realisation for plan in loop.step.plans.values()]
    assert made == ["packed"]
