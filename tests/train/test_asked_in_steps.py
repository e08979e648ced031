"""What a step of TrainStep looks at in Python, which short steps wait for."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.train import step_trainer
from memplan.mxnet.train.arrays.bound_arrays import BoundArrays
from memplan.mxnet.train.arrays.nesting import is_recorded

X, Y = mx.nd.array(np.arange(12).reshape(4, 3)), mx.nd.ones((4, 2))


def steps(**options: Any) -> tuple[TrainStep, Any]:
    net = nn.Dense(2, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    given = {"realisation": "packed", "strategy": "store_all", "trainer": trainer, **options}
    return TrainStep(net, gluon.loss.L2Loss(), **given), net


def test_inputs_are_copied_by_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = steps()
    step(X, Y)
    keys: list[Any] = []
    monkeypatch.setattr(mx.nd.NDArray, "__setitem__", lambda _, key, value: keys.append(key))
    step(X, Y)
    assert not keys


@pytest.mark.parametrize(
    "value",
    [
        mx.nd.array([[1, 2], [3, 4]]),
        mx.nd.array([[1, 2], [3, 4]], dtype="float16"),
        mx.nd.array([[1, 2], [3, 4]], dtype="int32").as_np_ndarray(),
        np.array([[1, 2], [3, 4]]),
        [[1, 2], [3, 4]],
        mx.nd.array([[0, 9], [1, 2], [3, 4]])[1:],
    ],
)
def test_values_are_copied_into_arguments(value: Any) -> None:
    arrays = BoundArrays()
    arrays.arg_dict = {"data": mx.nd.zeros((2, 2))}
    arrays._set({"data": value})
    assert np.array_equal(arrays.arg_dict["data"].asnumpy(), [[1, 2], [3, 4]])
    arrays._set({"data": arrays.arg_dict["data"]})
    assert np.array_equal(arrays.arg_dict["data"].asnumpy(), [[1, 2], [3, 4]])


def test_arrays_that_autograd_does_not_know_raise_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which MXNet writes down from where it came."""
    known = mx.nd.ones(2)
    known.attach_grad()
    with autograd.record():
        recorded = known * 2

    def never(_: Any) -> Any:
        raise AssertionError

    assert is_recorded(recorded)
    monkeypatch.setattr(mx.nd.NDArray, "_fresh_grad", property(never))
    assert not is_recorded(mx.nd.ones(2))


def test_memories_are_looked_at_where_arrays_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    step, net = steps()
    found: list[Any] = []
    look = step_trainer._overlapping

    def noted(params: Any) -> Any:
        found.append(look(params))
        return found[-1]

    monkeypatch.setattr(step_trainer, "_overlapping", noted)
    for _ in range(3):
        step(X, Y)
    assert found == [None]
    flat = mx.nd.zeros(8)
    net.weight._data, net.bias._data = [flat[:6].reshape((2, 3))], [flat[5:7]]
    for parameter in (net.weight, net.bias):
        parameter._init_grad()
    for _ in range(2):
        step(X, Y)
    assert [pair and len(pair) for pair in found] == [None, 2]
