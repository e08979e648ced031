"""autograd.grad beside planned steps: of parameters through a step refused, else as MXNet's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.autograd import grad  # as a script binds it, before the first planned block

from helpers.blocks import SOFTMAX, dense
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])
REFUSED = r"does not reach parameter 'net_dense0_weight'"


def loss_of(net: Any, **mode: bool) -> Any:
    """A loss that reads the weight besides: gradients of that alone would look like all."""
    with autograd.record(**mode):
        return SOFTMAX(net(X), Y).sum() + (net[0].weight.data() ** 2).sum()


def test_a_name_for_it_that_a_script_has_is_of_no_avail() -> None:
    net = dense(plan=True)
    with pytest.raises(UsageError, match=REFUSED):
        grad(loss_of(net), [net[0].weight.data()])


HANDLES: dict[str, Callable[[Any], Any]] = {
    "of mx.np": lambda array: array.as_np_ndarray(),
    "of both": lambda array: array.as_np_ndarray().as_nd_ndarray(),
}


@pytest.mark.parametrize("kind", HANDLES)
def test_other_handles_of_a_parameter_are_known(kind: str) -> None:
    net = dense(plan=True)
    loss = loss_of(net)
    with pytest.raises(UsageError, match=REFUSED):
        autograd.grad(loss, [HANDLES[kind](net[0].weight.data())])


def test_handles_of_before_the_step_are_known() -> None:
    net = dense(plan=True)
    other = net[0].weight.data().as_np_ndarray()
    with autograd.record():
        loss = SOFTMAX(net(X), Y).sum() + (other.as_nd_ndarray() ** 2).sum()
    with pytest.raises(UsageError, match="before the block was called"):
        autograd.grad(loss, [other])


@pytest.mark.parametrize("place", ["heads", "variables"])
def test_both_may_be_in_a_view(place: str) -> None:
    net = dense(plan=True)
    asked = {"heads": loss_of(net), "variables": [net[0].weight.data()]}
    asked[place] = dict(
        enumerate(asked[place] if place == "variables" else [asked[place]])
    ).values()
    with pytest.raises(UsageError, match=REFUSED):
        autograd.grad(**asked)


def test_a_step_that_is_finished_is_refused_where_its_graph_was_retained() -> None:
    net = dense(plan=True)
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match=REFUSED):
        autograd.grad(loss, [net[0].weight.data()])


def square(net: Any) -> Any:
    """A penalty, which is recorded now."""
    with autograd.record():
        return (net[0].weight.data() ** 2).sum()


def whole_step(net: Any) -> Any:
    step = TrainStep(net, SOFTMAX, strategy="chen_sqrt", realisation="packed")
    step(X, Y)
    return step


def halves(net: Any) -> Any:
    step = TrainStep(net, strategy="chen_sqrt", realisation="packed")
    with autograd.record():
        loss = SOFTMAX(step.forward(X), Y)
    step.backward(loss)
    return step


def planned_step(net: Any) -> Any:
    loss_of(planned(net, strategy="chen_sqrt", realisation="packed")).backward()
    return net


@pytest.mark.parametrize("run", [whole_step, halves, planned_step])
def test_what_was_recorded_before_a_step_is_refused_after_it(run: Callable[[Any], Any]) -> None:
    """Also where the loss reads the weight as it is now, too: the gradient would be a part."""
    net = dense(plan=False)
    weight = net[0].weight.data()
    before, other = square(net), net[1].weight.data().asnumpy()
    _step = run(net)
    with autograd.record():
        both = before + (weight**2).sum()
        of_another = (net[1].weight.data() ** 2).sum()
    for loss in (before, both):
        with pytest.raises(UsageError, match="has begun or ended since the loss was recorded"):
            autograd.grad(loss, [weight], retain_graph=True)
    [gradient] = autograd.grad([before, of_another], [net[1].weight.data()])
    assert np.array_equal(gradient.asnumpy(), 2 * other)


def test_what_was_recorded_within_a_step_is_refused_after_it() -> None:
    net = dense(plan=True)
    loss = loss_of(net)
    penalty = square(net)
    loss.backward()
    with pytest.raises(UsageError, match="has begun or ended since the loss was recorded"):
        autograd.grad(penalty, [net[0].weight.data()])


def penalty(net: Any, weight: Any) -> Any:
    with autograd.record():
        loss = (weight**3).sum()
    return autograd.grad(loss, weight)


def inference(net: Any, weight: Any) -> Any:
    loss = loss_of(net, train_mode=False)
    # MXNet itself forgets the weights with the graph, and loses the open step.
    return autograd.grad(loss, [weight], retain_graph=True, train_mode=False)


def behind_the_block(net: Any, weight: Any) -> Any:
    factor = mx.nd.ones((4, 3))
    factor.attach_grad()
    with autograd.record():
        loss = (net(X) * factor).sum()
    return autograd.grad(loss, [factor], retain_graph=True)


@pytest.mark.parametrize("asked", [penalty, inference, behind_the_block])
def test_what_does_not_go_through_the_open_step_is_as_mxnets(
    asked: Callable[[Any, Any], list[Any]],
) -> None:
    results = []
    for plan in (False, True):
        net = dense(plan)
        loss = loss_of(net)
        found = asked(net, net[0].weight.data())
        if asked is not behind_the_block:  # where another step has begun
            loss.backward()
            found += [net[0].weight.grad()]
        results.append([array.asnumpy() for array in found])
    assert all(map(np.array_equal, *results))
    assert all(array.any() for array in results[0])


def test_what_was_given_up_is_refused_until_it_is_asked_for_anew() -> None:
    net = dense(plan=False)
    params, weight = net.collect_params(), net[0].weight
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1})
    step = TrainStep(net, SOFTMAX, strategy="chen_sqrt", realisation="packed", trainer=trainer)
    before = square(net)
    for _ in range(2):
        step(X, Y)
        other = X.copy()
        other.attach_grad()
        with autograd.record():
            both = (weight.data() * other[0]).sum()
        for loss in (before, both, square(net)):
            with pytest.raises(UsageError, match=REFUSED + r".*given their gradients up"):
                autograd.grad(loss, [other, weight.data()], retain_graph=True)
        [found] = autograd.grad(both, [other])
        assert np.array_equal(found[0].asnumpy(), weight.data().sum(axis=0).asnumpy())
        # With the graph of ``both`` autograd has forgotten the weight, which wants no gradient.
        for array in (weight.data(), weight.data()[:]):
            with pytest.raises(UsageError, match=REFUSED + r".*given their gradients up"):
                autograd.grad(square(net), [array])
        for request in ("null", "write"):
            params.setattr("grad_req", request)
        [found] = autograd.grad(square(net), [weight.data()])
        assert np.array_equal(found.asnumpy(), 2 * weight.data().asnumpy())


def test_a_gradient_that_a_script_attached_behind_it_is_computed() -> None:
    net = dense(plan=False)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    TrainStep(net, SOFTMAX, strategy="chen_sqrt", realisation="packed", trainer=trainer)(X, Y)
    weight = net[0].weight.data()
    weight.attach_grad()
    [found] = autograd.grad(square(net), [weight])
    assert np.array_equal(found.asnumpy(), 2 * weight.asnumpy())
