"""Gradients of outputs that a script hands to ``backward``, where all outputs are losses."""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from helpers.fitting import TWO, Make, Result, differing, planned, seed, state
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import TrainStep
from memplan.planning.planner import plan

DATA, LABELS = [("data", (4, 5))], [("classes", (4,)), ("values", (4, 3))]
NAMES = {"label_names": ["classes", "values"]}

# Their shapes; MXNet looks at none but the first dimension, and at no more than there are outputs.
LISTS = {
    "too few": [(4, 3)],
    "one for each output": [(4, 3)] * 6 + [(12,), (4, 3), (4, 3)],
    "too many": [(4, 3)] * 6 + [(12,), (4, 3), (4, 3), (7,)],
    "of another shape": [(9, 2)],
}


def net_of_losses() -> mx.sym.Symbol:
    """One of each kind, one behind a Reshape, and what is not trained."""
    classes, values = mx.sym.Variable("classes"), mx.sym.Variable("values")
    scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="scores")
    losses = [
        mx.sym.LinearRegressionOutput(scores, values, grad_scale=0.5),
        mx.sym.MAERegressionOutput(scores, values),
        mx.sym.LogisticRegressionOutput(scores, values),
        mx.sym.MakeLoss(mx.sym.square(scores - values), grad_scale=2),
        mx.sym.make_loss(mx.sym.square(scores + values)),
        mx.sym.SVMOutput(scores, classes),
        mx.sym.Reshape(mx.sym.SoftmaxOutput(scores, classes, name="softmax"), shape=(-1,)),
    ]
    return mx.sym.Group([*losses, mx.sym.BlockGrad(scores), mx.sym.sin(mx.sym.BlockGrad(scores))])


def trained(
    make: Make, net: mx.sym.Symbol, out_grads: Sequence[mx.nd.NDArray], **options: object
) -> Result:
    """The parameters after two steps."""
    seed()
    module = make(net, **NAMES, **options)
    module.bind(DATA, LABELS)
    module.init_params(mx.init.Uniform(1))
    module.init_optimizer(optimizer_params={"learning_rate": 0.1})
    for _ in range(2):
        batch = mx.io.DataBatch(
            [mx.nd.random.normal(shape=(4, 5))], [mx.nd.ones(4), mx.nd.ones((4, 3))]
        )
        module.forward(batch, is_train=True)
        module.backward(out_grads=out_grads)
        module.update()
    return state(module)


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
@pytest.mark.parametrize("which", LISTS)
def test_losses_ignore_gradients_from_elsewhere_as_in_mxnet(which: str, realisation: str) -> None:
    net, out_grads = net_of_losses(), [7 * mx.nd.ones(shape) for shape in LISTS[which]]
    expected = trained(mx.mod.Module, net, out_grads)
    assert not differing(expected, trained(mx.mod.Module, net, []))
    assert not differing(expected, trained(planned, net, out_grads, realisation=realisation))


def test_those_that_two_devices_share_are_ignored_too() -> None:
    net, out_grads = net_of_losses(), [7 * mx.nd.ones((4, 3))]
    expected = trained(mx.mod.Module, net, out_grads, context=TWO)
    assert not differing(expected, trained(planned, net, out_grads, context=TWO))


def test_an_executor_of_losses_ignores_them() -> None:
    made = plan(net_of_losses(), strategy="store_all", realisation="explicit", data=(4, 5))
    executor = TrainExecutor(made.trace, made.schedule)
    found = []
    for out_grads in (None, [7 * mx.nd.ones((4, 3))], 7 * mx.nd.ones((4, 3))):
        executor.forward(is_train=True)
        executor.backward(out_grads)
        found.append(executor.grad_dict["scores_bias"].asnumpy())
    assert found[0].any()
    assert np.array_equal(found[1], found[0])
    assert np.array_equal(found[2], found[0])


def test_gradients_from_elsewhere_are_refused_before_a_training_step() -> None:
    module = planned(net_of_losses(), **NAMES)
    module.bind(DATA, LABELS)
    module.init_params()
    half = mx.io.DataBatch([mx.nd.ones((2, 5))], [mx.nd.ones(2), mx.nd.ones((2, 3))])
    module.forward(half, is_train=False)
    with pytest.raises(ArgumentError, match=r"before forward.*use mx\.mod\.Module"):
        module.backward(out_grads=[mx.nd.ones((2, 3))])
    module.forward(half, is_train=True)
    module.backward(out_grads=[mx.nd.ones((2, 3))])


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
def test_a_module_computes_no_gradients_of_an_inference(realisation: str) -> None:
    module = planned(net_of_losses(), **NAMES, realisation=realisation)
    module.bind(DATA, LABELS)
    module.init_params()
    module.init_optimizer()
    batch = mx.io.DataBatch([mx.nd.ones((4, 5))], [mx.nd.ones(4), mx.nd.ones((4, 3))])
    for _ in range(2):  # with no training step before it, and with one
        module.forward(batch, is_train=False)
        with pytest.raises(UsageError, match=r"backward\(\) after forward\(is_train=False\)"):
            module.backward()
        module.forward_backward(batch)
        module.update()


def test_a_module_is_differentiated_after_another_one_has_inferred() -> None:
    """Not by its own evaluation, whose gradients MXNet would compute."""
    batch = mx.io.DataBatch([mx.nd.ones((4, 5))], [mx.nd.ones(4), mx.nd.ones((4, 3))])
    module, other = planned(net_of_losses(), **NAMES), planned(net_of_losses(), **NAMES)
    module.bind(DATA, LABELS)
    module.init_params()
    other.bind(DATA, LABELS, shared_module=module)
    module.forward(batch, is_train=True)
    other.forward(batch, is_train=False)
    module.backward()
    module.forward(batch, is_train=True)
    module.forward(batch, is_train=False)
    with pytest.raises(UsageError, match="and evaluate after it"):
        module.backward()


def test_an_executor_computes_no_gradients_of_an_inference() -> None:
    made = plan(net_of_losses(), strategy="store_all", realisation="packed", data=(4, 5))
    executor = TrainExecutor(made.trace, made.schedule)
    executor.forward(is_train=False)
    with pytest.raises(UsageError, match=r"backward\(\) after forward\(is_train=False\)"):
        executor.backward()
    executor.forward(is_train=True)
    executor.backward()


def test_an_executor_has_gradients_of_a_step_in_halves_after_an_inference() -> None:
    net = mx.gluon.nn.Dense(2, in_units=5)
    net.initialize()
    step = TrainStep(net, strategy="store_all")
    with autograd.record():
        loss = step.forward(mx.nd.ones((3, 5))).sum()
    step.backward(loss)
    (made,) = step.plans.values()
    executor = TrainExecutor(made.trace, made.schedule)
    executor.forward(is_train=False)
    executor.forward_half()
    executor.backward_half({})
    computed = {name: array.asnumpy() for name, array in executor.grad_dict.items()}
    executor.backward()
    assert computed
    assert all(
        np.array_equal(array.asnumpy(), computed[n]) for n, array in executor.grad_dict.items()
    )
