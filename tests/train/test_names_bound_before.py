"""Functions of MXNet's that a script has bound by a name before anything is planned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.autograd import backward, mark_variables, record
from mxnet.contrib.autograd import backward as old_backward
from mxnet.contrib.autograd import mark_variables as old_mark_variables
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from memplan.mxnet.gluon import planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])
backward_of_arrays = mx.nd.NDArray.backward

Results = list[np.ndarray[Any, Any]]
WAYS: dict[str, Callable[[Any], None]] = {
    "autograd": lambda loss: backward([loss]),
    "former autograd": lambda loss: old_backward([loss]),
    "arrays": lambda loss: backward_of_arrays(loss),
}


def dense(plan: bool) -> nn.HybridSequential:
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return planned(net, strategy="chen_sqrt", realisation="packed") if plan else net


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
