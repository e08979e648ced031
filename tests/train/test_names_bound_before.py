"""Functions of MXNet's that a script has bound by a name before anything is planned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.autograd import Function, backward, grad, mark_variables, record
from mxnet.contrib.autograd import backward as old_backward
from mxnet.contrib.autograd import mark_variables as old_mark_variables
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX, dense
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])
backward_of_arrays = mx.nd.NDArray.backward

Results = list[np.ndarray[Any, Any]]
WAYS: dict[str, Callable[[Any], None]] = {
    "autograd": lambda loss: backward([loss]),
    "former autograd": lambda loss: old_backward([loss]),
    "arrays": lambda loss: backward_of_arrays(loss),
}


def loss_of(net: Any) -> Any:
    """A loss that reads the weights besides: then no trainer misses what the block would add."""
    with record():
        return SOFTMAX(net(X), Y).sum() + sum((layer.weight.data() ** 2).sum() for layer in net)


@pytest.mark.parametrize("way", WAYS)
def test_backward_finishes_the_step(way: str) -> None:
    results: list[Results] = []
    for plan in (False, True):
        net = dense(plan)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for _ in range(2):
            WAYS[way](loss_of(net))
            trainer.step(4, ignore_stale_grad=True)
        assert not plan or net.planned_step.plans
        results.append([p.data().asnumpy() for p in net.collect_params().values()])
    assert all(map(np.array_equal, *results))


@pytest.mark.parametrize("mark", [mark_variables, old_mark_variables])
def test_gradients_that_are_marked_later_are_noticed(mark: Callable[..., None]) -> None:
    results: list[Results] = []
    for plan in (False, True):
        net = dense(plan)
        parameters = list(net.collect_params().values())
        for number in range(4):
            if number == 2:
                arrays = [mx.nd.zeros(p.shape) for p in parameters]
                mark([p.data() for p in parameters], arrays)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                loss = loss_of(net)
            texts = [str(warning.message) for warning in found]
            is_told = any("gradients of its parameters in other arrays" in text for text in texts)
            assert is_told is (plan and number > 1)
            loss.backward()
        results.append([array.asnumpy() for array in arrays])
    assert all(map(np.array_equal, *results))
    assert all(array.any() for array in results[0])


class Reversed(Function):
    def forward(self, x: Any) -> Any:
        return x * 1

    def backward(self, dy: Any) -> Any:
        return -dy


class Calling(gluon.HybridBlock):
    """Two dense layers, and what ``call`` makes of the output of the first, and of the input."""

    def __init__(self, call: Callable[[Any, Any], Any]) -> None:
        super().__init__(prefix="net_")
        self.call = call
        with self.name_scope():
            self.body, self.scores = nn.Dense(8, in_units=6), nn.Dense(3, in_units=8)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        y = self.body(x)
        made = self.call(y, x)
        return self.scores(y if made is None else F.BlockGrad(made))


def caught(y: Any, x: Any) -> Any:
    try:
        return Reversed()(y)
    except TraceError:
        return None


OF_ARRAYS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "Function": (lambda y, x: Reversed()(y), "Function.__call__"),
    "Function, caught": (caught, "Function.__call__"),
    "grad": (lambda y, x: grad(y, x)[0], "grad"),
    "grad, listed": (lambda y, x: grad(heads=[y], variables=[X])[0], "grad"),
    "backward": (lambda y, x: backward([y]), "backward"),
    "backward of an array": (lambda y, x: backward([X], head_grads=[y]), "backward"),
    "former backward": (lambda y, x: old_backward([y]), "backward"),
    "method": (lambda y, x: backward_of_arrays(X, y), "NDArray.backward"),
    "mark_variables": (lambda y, x: mark_variables([x], [x]), "mark_variables"),
    "former mark_variables": (lambda y, x: old_mark_variables([x], [x]), "mark_variables"),
}


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_autograd_is_refused_symbols(name: str) -> None:
    """MXNet would take them for arrays, and end the process."""
    call, what = OF_ARRAYS[name]
    net = Calling(call)
    net.initialize()
    with pytest.raises(TraceError, match=rf"{what} is called with Symbols.*Custom op"):
        loss_of_scores(planned(net, strategy="chen_sqrt", realisation="packed"))
    with record():
        assert Reversed()(X).shape == X.shape  # arrays go to MXNet as before


def loss_of_scores(net: Any) -> Any:
    with record():
        return SOFTMAX(net(X), Y)


def test_autograd_is_refused_symbols_in_a_loss() -> None:
    net = nn.Dense(3, in_units=6)
    net.initialize()
    step = TrainStep(net, lambda outputs, y: SOFTMAX(Reversed()(outputs), y), strategy="chen_sqrt")
    with pytest.raises(TraceError, match=r"Function\.__call__ is called with Symbols"):
        step(X, Y)


def test_a_function_that_is_not_recorded_is_what_its_forward_computes() -> None:
    def paused(y: Any, x: Any) -> Any:
        with mx.autograd.pause():
            return Reversed()(y)

    losses = []
    for plan in (False, True):
        mx.random.seed(1)
        net = Calling(paused)
        net.initialize()
        net = planned(net, strategy="chen_sqrt", realisation="packed") if plan else net
        loss = loss_of_scores(net)
        loss.backward()
        losses.append(loss.asnumpy())
    assert np.array_equal(*losses)
