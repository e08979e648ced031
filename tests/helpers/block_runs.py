"""Trains Gluon blocks by a plan and by autograd, and compares bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

from helpers.blocks import CPU, SOFTMAX, Case, conv_net, images
from helpers.training_runs import Values, differences
from memplan.mxnet.gluon import TrainStep, planned

STEPS = 3


def prepared(case: Case) -> tuple[Any, Any]:
    """The block of a case and its trainer, as a seed makes them."""
    mx.random.seed(3)
    net = case.block()
    net.initialize(case.initializer, ctx=list(case.contexts))
    if case.dtype != "float32":
        net.cast(case.dtype)
    case.prepare(net)
    options = {"learning_rate": 0.05, "momentum": 0.9}
    return net, gluon.Trainer(net.collect_params(), "sgd", options)


def batches(case: Case) -> list[list[tuple[Any, Any]]]:
    """For every step its micro-batches."""
    mx.random.seed(11)

    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(cast, value))
        return None if value is None else value.astype(case.dtype)

    return [[cast(case.batch()) for _ in range(case.micro_batches)] for _ in range(STEPS)]


def train(case: Case, losses_of: Callable[[Any, Any, list[mx.Context]], Any]) -> list[Values]:
    """What a training loop leaves after each step, where ``losses_of`` differentiates."""
    net, trainer = prepared(case)
    made = batches(case)
    mx.random.seed(7)
    result = []
    for step in made:
        values: Values = {}
        for x, y in step:
            losses = losses_of(net, (x, y), list(case.contexts))
            for loss in leaves(losses):
                values[f"loss {len(values)}"] = loss.asnumpy()
        mx.nd.waitall()
        params = net.collect_params()
        for name, parameter in params.items():
            if parameter.grad_req != "null":
                for i, grad in enumerate(parameter.list_grad()):
                    values[f"gradient of {name} {i}"] = grad.asnumpy()
        trainer.step(8)
        if case.micro_batches > 1:
            params.zero_grad()
        mx.nd.waitall()
        for name, parameter in params.items():
            for i, data in enumerate(parameter.list_data()):
                values[f"{name} {i}"] = data.asnumpy()
        result.append(values)
    return result


def leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def by_autograd(case: Case) -> Callable[[Any, Any, list[mx.Context]], Any]:
    """Gluon's own way, with the block hybridized."""

    def loss_of(net: Any, x: Any, y: Any) -> Any:
        inputs = x if isinstance(x, tuple) else (x,)
        if case.loss is None:
            return net(*inputs, y)
        if isinstance(case.loss, list):
            return [fn(*pair) for fn, *pair in zip(case.loss, net(*inputs), y, strict=True)]
        return case.loss(net(*inputs), y)

    def losses_of(net: Any, batch: Any, contexts: list[mx.Context]) -> Any:
        net.hybridize()
        parts = [gluon.utils.split_and_load(a, contexts) for a in batch] if contexts[1:] else None
        with autograd.record():
            pairs = [batch] if parts is None else list(zip(*parts, strict=True))
            losses = [loss_of(net, *pair) for pair in pairs]
        autograd.backward(leaves(losses))
        return losses

    return losses_of


def by_plan(case: Case, made: list[TrainStep]) -> Callable[[Any, Any, list[mx.Context]], Any]:
    """By a TrainStep, which is appended to ``made``."""

    def losses_of(net: Any, batch: Any, contexts: list[mx.Context]) -> Any:
        if not made:
            made.append(train_step(net, case.loss, **case.options))
        if contexts[1:]:
            return made[0](*(gluon.utils.split_and_load(array, contexts) for array in batch))
        return made[0](*batch)

    return losses_of


def train_step(net: Any, loss: Any = SOFTMAX, **options: Any) -> TrainStep:
    """One that is planned quickly, for the least memory."""
    return TrainStep(net, loss, **({"strategy": "chen_sqrt"} | options))


def assert_identical_to_autograd(
    case: Case,
    way: Callable[[Case, list[TrainStep]], Callable[[Any, Any, list[mx.Context]], Any]],
) -> None:
    """Steps by plans, run this ``way``, leave the bits that the loop without plans leaves."""
    expected = train(case, by_autograd(case))
    # Packed steps run on one context only.
    for realisation in ("explicit", "packed") if len(case.contexts) == 1 else ("explicit",):
        realised = dataclasses.replace(case, options={**case.options, "realisation": realisation})
        made: list[TrainStep] = []
        assert not differences(expected, train(realised, way(realised, made))), realisation
        for plan in made[0].plans.values():
            assert plan.realisation == realisation
            assert bool(plan.schedule.recomputed) == case.recomputes


def trained(block: Any = None, **options: Any) -> tuple[Any, TrainStep, Any]:
    """A block after a step, its TrainStep, and the batch."""
    mx.random.seed(3)
    net = conv_net() if block is None else block
    net.initialize(mx.init.Xavier(), ctx=CPU)
    step, batch = train_step(net, **options), images(8)
    step(*batch)
    return net, step, batch


def three_losses(net: Any, way: str | None) -> Iterator[Any]:
    """Those of three steps, each after its update: planned, by a TrainStep, or without a plan."""
    l2, quickly = gluon.loss.L2Loss(), {"strategy": "chen_sqrt", "realisation": "packed"}
    x, y = mx.nd.ones((2, 6)), mx.nd.zeros((2, 5))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    step = TrainStep(net, l2, **quickly) if way == "TrainStep" else None
    if way == "planned":
        planned(net, **quickly)
    for _ in range(3):
        if step is not None:
            loss = step(x, y)
        else:
            with autograd.record():
                loss = l2(net(x), y)
            loss.backward()
        trainer.step(2)
        yield loss


def gradients(net: Any) -> Values:
    mx.nd.waitall()
    return {
        name: parameter.grad().asnumpy()
        for name, parameter in net.collect_params().items()
        if parameter.grad_req != "null"
    }


def autograd_gradients(net: Any, batch: Any) -> Values:
    """Those of Gluon's own way, on a copy of the block."""
    copy = conv_net()
    copy.cast(batch[0].dtype)
    copy.initialize(ctx=CPU)
    copy(batch[0])
    for name, parameter in net.collect_params().items():
        copy.collect_params()[name].set_data(parameter.data())
        copy.collect_params()[name].grad_req = parameter.grad_req
    copy.hybridize()
    with autograd.record():
        loss = SOFTMAX(copy(batch[0]), batch[1])
    loss.backward()
    return gradients(copy)


def assert_equal(one: Values, other: Values) -> None:
    assert not differences([one], [other])


def gradients_of_steps(net: Any, x: Any, make: Callable[[Any], Any]) -> list[Values]:
    """Those of three steps of what ``make`` makes of ``net``; before the last it is hybridized."""
    found = []
    net(x)
    net = make(net)
    for step in range(3):
        if step == 2:
            net.hybridize()
        with autograd.record():
            loss = net(x).square().sum()
        loss.backward()
        found.append(gradients(net))
    return found


def losses_of_two_steps(net: Any, x: Any, y: Any) -> list[float]:
    """Of every example, without an update between."""
    found: list[float] = []
    for _ in range(2):
        with autograd.record():
            loss = SOFTMAX(net(x), y)
        loss.backward()
        found += loss.asnumpy().tolist()
    return found
