"""A TrainStep that has the trainer: the bits of trainer.step, within the step or behind it."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from helpers.planning import NEVER_SECONDS
from helpers.trainer_loops import Loop, assert_equal_loops, differing, within
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import TrainStep

TOLD = {"updates_in_any_order": True}


def multiply(net: Any) -> None:
    for i, parameter in enumerate(net.collect_params().values()):
        parameter.lr_mult, parameter.wd_mult = 1.0 + i / 8, 0.5 + i / 4


def freeze(net: Any) -> None:
    """The first parameter of the trainer, which is one of the last to be updated in a step."""
    net[1].beta.grad_req = "null"


def schedule() -> Any:
    return mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "adagrad", "lamb"])
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"lr_scheduler": schedule, "wd": 0.01}, {}),
        ({"learning_rate": 0.1, "wd": 0.1, "clip_gradient": 0.01}, {"prepare": multiply}),
        ({"learning_rate": 0.1, "multi_precision": True}, {"dtype": "float16"}),
        ({"learning_rate": 0.1}, {"prepare": freeze}),
    ],
)
def test_options_of_optimizers(
    optimizer: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    momentum = {"momentum": 0.9} if optimizer in ("sgd", "nag") else {}
    assert within(assert_equal_loops(optimizer, options | momentum, **more))


def test_readers_that_are_recomputed() -> None:
    step = assert_equal_loops(
        "adam", {"learning_rate": 0.1}, {"strategy": "evict", "time_limit": NEVER_SECONDS}
    )
    assert within(step)
    [plan] = step.plans.values()
    assert plan.optimizer_nbytes == sum(
        array.size * 4 for s in step._trainer.trainer._updaters[0].states.values() for array in s
    )
    kinds = {plan.schedule.graph.ops[op].kind for op in plan.schedule.recomputed}
    assert kinds & {"BatchNorm", "Convolution", "FullyConnected"}


def test_a_scheduler_sees_each_parameter_in_the_order_of_the_trainer() -> None:
    """After frozen parameters are freed, the number of updates differs from one to the other."""
    found = []
    for planned in (False, True):
        loop = Loop("adam", {"lr_scheduler": schedule}, planned=planned, prepare=freeze)
        loop.start()
        mx.random.seed(9)
        loop.train(2)
        loop.net[1].beta.grad_req = "write"
        loop.train(5)
        found.append(loop.values())
    assert not differing(*found)
    assert {plan.realisation for plan in loop.step.plans.values()} == {"updating"}


def test_parameters_are_frozen_after_an_update_within_the_step() -> None:
    """Its gradient was given up: what autograd has in its place is none that a script attached."""
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1}, planned=planned)
        loop.start()
        mx.random.seed(9)
        for _ in range(2):
            for request in ("null", "write"):
                loop.train(1)
                loop.net[1].gamma.grad_req = request
        found.append(loop.values())
    assert not differing(*found)


def test_batch_size_is_that_of_the_trainer() -> None:
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(1)
        loop.train(2, batch_size=7)
        loop.train(1)
        found.append(loop.values())
    assert not differing(*found)
    step = TrainStep(loop.net, SOFTMAX)
    with pytest.raises(ArgumentError, match="given a trainer"):
        step(loop.x, loop.y, batch_size=3)


def test_one_of_two_steps_with_a_trainer_that_updates_behind_it_is_told_how_not_to() -> None:
    """What a loop that calls trainer.step is told would be no help: this one does not call it."""
    one, other = (nn.Dense(units, prefix=f"{units}_") for units in (3, 2))
    x, loss = mx.nd.ones((2, 4)), gluon.loss.L2Loss()
    for net in (one, other):
        net.initialize()
        net(x)
    params = one.collect_params()
    params.update(other.collect_params())
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    options = {"trainer": trainer, "strategy": "store_all", "realisation": "packed"}
    TrainStep(one, loss, ignore_stale_grad=True, **options)(x, mx.nd.ones((2, 3)))
    before = other.weight.data().asnumpy()
    with (
        pytest.warns(UserWarning, match="updated behind the step"),
        pytest.raises(
            UsageError, match=r"'3_\w+' has been used up.*give this one ignore_stale_grad"
        ),
    ):
        TrainStep(other, loss, **options)(x, mx.nd.ones((2, 2)))
    assert np.array_equal(other.weight.data().asnumpy(), before)
    TrainStep(other, loss, ignore_stale_grad=True, **options)(x, mx.nd.ones((2, 2)))
    assert not np.array_equal(other.weight.data().asnumpy(), before)


def test_gradients_are_gone_and_come_back() -> None:
    loop = Loop("sgd", {"learning_rate": 0.1}, planned=True)
    step = loop.start()
    loop.train(2)
    weight = loop.net[0].weight
    before = weight.data().asnumpy()
    for call in (loop.trainer.step, loop.trainer.update):
        with pytest.raises(UsageError, match=r"Leave trainer\.step out"):
            call(4, ignore_stale_grad=True)
    with pytest.raises(RuntimeError, match="Cannot get gradient"):
        weight.grad()
    loop.net.collect_params().zero_grad()
    assert np.array_equal(weight.data().asnumpy(), before)
    for parameter in loop.net.collect_params().values():
        if parameter.grad_req == "write":
            parameter.grad_req = "null"
            parameter.grad_req = "write"
    loop.planned = False
    loop.train(1)
    assert weight.grad().asnumpy().any()
    other = TrainStep(loop.net, SOFTMAX, realisation="packed", strategy="store_all")
    loop.planned = True
    loop.train(1)  # gone again
    other(loop.x, loop.y)
    loop.trainer.step(4)
    after = weight.data().asnumpy()
    step(loop.x, loop.y)
    assert not np.array_equal(weight.data().asnumpy(), after)
    with pytest.raises(UsageError):
        loop.trainer.step(4)


def test_states_of_the_trainer_are_saved_and_loaded(tmp_path: Any) -> None:
    found = []
    for planned in (False, True):
        loop = Loop("adam", {"lr_scheduler": schedule}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(3)
        loop.trainer.save_states(str(tmp_path / "states"))
        saved = (tmp_path / "states").read_bytes()
        loop.train(1)
        loop.trainer.load_states(str(tmp_path / "states"))
        loop.train(2)
        found.append((saved, loop.values()))
    assert found[0][0] == found[1][0]
    assert not differing(found[0][1], found[1][1])


class MySGD(mx.optimizer.SGD):  # type: ignore[misc]
    """Of the user's."""


def test_optimizers_of_the_users() -> None:
    for kind, is_within in ((MySGD, False), (type("M", (MySGD,), TOLD), True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if not is_within else "error", UserWarning)
            loop = Loop(kind(learning_rate=0.1), {}, planned=True)
            loop.start()
            loop.train(1)
        assert within(loop.step) is is_within


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_halves_are_followed_by_the_trainer(realisation: str) -> None:
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1}, planned=planned)
        options: dict[str, Any] = {"realisation": realisation, "strategy": "store_all"}
        step = TrainStep(loop.net, trainer=loop.trainer, **options)
        mx.random.seed(9)
        for batch_size in (4, 9):
            if planned:
                scores = step.forward(loop.x, batch_size=batch_size)
                with autograd.record():
                    loss = SOFTMAX(scores, loop.y)
                step.backward(loss)
            else:
                loop.train(1, batch_size=batch_size)
        found.append(loop.values())
    assert not differing(*found)
