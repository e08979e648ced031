"""The caller's own loss, between forward and backward: bit for bit as by autograd."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import (
    assert_equal,
    assert_identical_to_autograd,
    autograd_gradients,
    by_autograd,
    gradients,
    train,
    train_step,
)
from helpers.blocks import CASES, CPU, SOFTMAX, Case, conv_net, images
from helpers.halves import by_halves
from helpers.training_runs import differences
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.trace.nnvm import depth_first

REALISATIONS = pytest.mark.parametrize("realisation", ["explicit", "packed"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loss is not None])
def test_identical_to_autograd(name: str) -> None:
    assert_identical_to_autograd(CASES[name], by_halves)


class Nested(gluon.HybridBlock):
    """Nested outputs, one of them twice, one of no gradient, and the input."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = conv_net()
            self.tail = nn.Dense(5)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        scores = self.body(x)
        return scores, [F.BlockGrad(scores), (self.tail(scores), scores)], x


def outputs_twice(outputs: Any, y: Any) -> Any:
    scores, [shown, (tail, again)], x = outputs
    return SOFTMAX(scores, y) * 0.3 + SOFTMAX(again, y) + tail.sum() * (shown * x.mean()).mean()


def only_the_first(outputs: Any, y: Any) -> Any:
    return SOFTMAX(outputs[0], y)


def by_numpy(outputs: Any, y: Any) -> Any:
    """Hard examples only, found by NumPy, and a term that depends on a value."""
    loss = SOFTMAX(outputs, y)
    hard = np.argsort(loss.asnumpy())[-2:]
    chosen = loss[mx.nd.array(hard, dtype="int32")]
    return chosen * 2 if loss.mean().asscalar() > 2 else chosen


class Cubed(autograd.Function):
    def forward(self, x: Any) -> Any:
        self.save_for_backward(x)
        return x * x * x

    def backward(self, gradient: Any) -> Any:
        (x,) = self.saved_tensors
        return gradient * 3 * x * x


def by_a_function(outputs: Any, y: Any) -> Any:
    return Cubed()(SOFTMAX(outputs, y))


LOSSES = {
    "nested": (Nested, outputs_twice),
    "unread": (Nested, only_the_first),
    "numpy": (conv_net, by_numpy),
    "function": (conv_net, by_a_function),
}


@REALISATIONS
@pytest.mark.parametrize("name", LOSSES)
def test_any_loss(name: str, realisation: str) -> None:
    block, loss = LOSSES[name]
    case = Case(block, lambda: images(8), loss, options={"realisation": realisation})
    assert not differences(train(case, by_autograd(case)), train(case, by_halves(case, [])))


def started(**options: Any) -> tuple[Any, TrainStep, Any]:
    """A block, its TrainStep without a loss, and a batch."""
    mx.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    batch = images(8)
    net(batch[0])
    return net, train_step(net, None, **options), batch


def loss_of(step: TrainStep, x: Any, y: Any) -> Any:
    with autograd.record():
        return SOFTMAX(step.forward(x), y)


@REALISATIONS
def test_gradients_of_the_outputs_may_be_given(realisation: str) -> None:
    net, step, (x, y) = started(realisation=realisation)
    step.backward(loss_of(step, x, y))
    expected = gradients(net)
    outputs = step.forward(x)
    probabilities = mx.nd.softmax(outputs)
    step.backward(outputs, probabilities - mx.nd.one_hot(y, 10))
    for name, gradient in gradients(net).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-5)


@REALISATIONS
@pytest.mark.parametrize("request_", ["write", "add"])
def test_a_loss_of_parameters_and_outputs(request_: str, realisation: str) -> None:
    """A penalty on the weights, and a head that is not planned."""
    results = []
    for planned in (False, True):
        net, step, (x, y) = started(realisation=realisation)
        head = nn.Dense(10, in_units=10, prefix="head_")
        head.initialize(mx.init.Normal(0.1), ctx=CPU)
        weight = net[0].weight
        for parameter in (weight, net[3].weight):
            parameter.grad_req = request_
        mx.random.seed(5)
        for _ in range(2):
            with autograd.record():
                outputs = step.forward(x) if planned else net(x)
                loss = SOFTMAX(head(outputs), y).mean() + (weight.data() ** 2).sum()
            if planned:
                step.backward(loss)
            else:
                loss.backward()
        results.append({**gradients(net), **gradients(head)})
    plain, other = results
    np.testing.assert_array_equal(plain["head_weight"], other["head_weight"])
    for name, gradient in plain.items():  # the plain block is not hybridized, and adds in turn
        np.testing.assert_allclose(gradient, other[name], rtol=1e-3, atol=1e-5)


@REALISATIONS
def test_the_outputs_are_the_callers(realisation: str) -> None:
    _, step, (x, y) = started(realisation=realisation)
    outputs = step.forward(x)
    before = outputs.asnumpy()
    outputs[:] = 0
    step.abandon()
    again = step.forward(x)
    step.backward(again, mx.nd.ones_like(again))
    loss_of(step, x * 2, y)
    mx.nd.waitall()
    assert np.array_equal(again.asnumpy(), before)
    assert not outputs.asnumpy().any()


@REALISATIONS
def test_their_bytes_are_in_the_budget(realisation: str) -> None:
    _, step, (x, _) = started(realisation=realisation)
    plan = step.plan(x, in_halves=True)
    # The outputs, a copy of them for the caller, and their gradients.
    assert plan.schedule.graph.fixed_nbytes - fixed_nbytes(plan.trace) == 4 * 10 * 4
    step.forward(x)
    assert list(step.plans.values()) == [plan]


def fixed_nbytes(trace: Any) -> int:
    """Of the arguments, states and gradients that are given."""
    variables = [node for node in depth_first(trace.heads) if node.is_variable]
    return sum(node.infos.outputs[0].nbytes for node in variables)


@REALISATIONS
def test_an_abandoned_step_leaves_the_block_as_it_was(realisation: str) -> None:
    net, step, (x, y) = started(realisation=realisation)
    expected = autograd_gradients(net, (x, y))
    step.backward(loss_of(step, x, y))
    loss_of(step, x, y)
    step.abandon()
    with autograd.record():
        loss = SOFTMAX(net(x), y)
    loss.backward()
    for name, gradient in gradients(net).items():  # not hybridized: equal but for rounding
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-5)
    step.backward(loss_of(step, x, y))
    assert_equal(expected, gradients(net))


def test_an_optimizer_does_not_take_gradients_that_are_not_there() -> None:
    net, step, (x, y) = started()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    loss = loss_of(step, x, y)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(4)
    step.backward(loss)
    trainer.step(4)


@REALISATIONS
def test_autograd_s_grad_of_a_parameter_is_an_error(realisation: str) -> None:
    """Where the loss reads the parameter, too, it would be a part of the gradient."""
    net, step, (x, y) = started(realisation=realisation)
    weight = next(iter(net.collect_params(".*weight").values())).data(CPU)
    with autograd.record():
        loss = SOFTMAX(step.forward(x), y).mean() + (weight**2).sum()
    with pytest.raises(UsageError, match=r"does not reach parameter .*weight.*backward\(\)"):
        autograd.grad(loss, [weight])
    step.backward(loss)
    with autograd.record():
        penalty = (weight**2).sum()
    [gradient] = autograd.grad(penalty, [weight])
    assert np.array_equal(gradient.asnumpy(), 2 * weight.asnumpy())


def test_misuse_is_an_error() -> None:
    net, step, (x, y) = started()
    with pytest.raises(UsageError, match=r"forward\(\) first"):
        step.backward(x)
    old = loss_of(step, x, y)
    for call in (step.forward, step):
        with pytest.raises(UsageError, match=r"backward\(loss\), or abandon"):
            call(x)
    step.backward(old)
    with pytest.raises(UsageError, match=r"forward\(\) first"):
        step.backward(old)
    step.forward(x)
    with pytest.raises(ArgumentError, match=r"under autograd.record\(\)"):
        step.backward(SOFTMAX(mx.nd.ones((4, 10)), y))
    weight = net[0].weight.data()
    with autograd.record():
        other = (weight**2).sum()
    with pytest.raises(ArgumentError, match=r"does not depend.* on cpu\(0\)"):
        step.backward(other)
    step.abandon()
    with pytest.raises(ArgumentError, match="memplan_input0"):
        step.forward(mx.nd.ones((4, 8)))
    with pytest.raises(ArgumentError, match="without a loss"):
        train_step(net, SOFTMAX).forward(x)


@pytest.mark.parametrize("wrong", [3, np.ones(4), [3], {"loss": 3}, "loss"])
def test_what_is_no_array_is_no_loss(wrong: Any) -> None:
    net, step, (x, y) = started()
    expected = autograd_gradients(net, (x, y))
    loss = loss_of(step, x, y)
    with pytest.raises(ArgumentError, match="loss must be an array"):
        step.backward(wrong)
    with pytest.raises(ArgumentError, match="head_grads must be an array"):
        step.backward(loss, wrong)
    with pytest.raises(ArgumentError, match="head_grads are 2, and losses 1"):
        step.backward(loss, [None, None])
    step.backward(loss, [None])
    assert_equal(expected, gradients(net))
