"""Loss operators: by them MXNet gives gradients where those of the outputs are zeros."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.blocks import CPU
from helpers.dangerous_operators import CALLS
from helpers.operator_calls import shelled
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.losses import has_gradient, is_loss
from memplan.mxnet.trace.nnvm import Node, from_json

# What it gives only its own code knows.
USER_CODE = "Custom 0"


def nodes_of(symbol: mx.sym.Symbol) -> list[Node]:
    return from_json(symbol_json.parse(symbol))[0]


@pytest.mark.parametrize("name", [name for name in CALLS if name != USER_CODE])
def test_they_are_those_by_which_mxnet_trains(name: str) -> None:
    net, shapes = shelled(*CALLS[name])
    executor, draw = net.simple_bind(CPU, **shapes), np.random.default_rng(0)
    for array in executor.arg_arrays:
        array[:] = draw.uniform(0.2, 0.8, array.shape)
    executor.forward(is_train=True)
    executor.backward([mx.nd.zeros(output.shape, CPU, output.dtype) for output in executor.outputs])
    trains = executor.grad_dict["scale"].asnumpy().any()
    assert trains == any(map(is_loss, nodes_of(net)))


def test_user_code_may_be_one() -> None:
    net, _ = shelled(*CALLS[USER_CODE])
    assert [node.op for node in nodes_of(net) if is_loss(node)] == ["Custom"]


@pytest.mark.parametrize("is_within", [False, True])
def test_a_loop_is_one_if_one_is_in_its_body(is_within: bool) -> None:
    def body(row: Any, state: Any) -> Any:
        return mx.sym.SoftmaxOutput(row, state) if is_within else mx.sym.softmax(row), state

    found, _ = mx.sym.contrib.foreach(body, mx.sym.Variable("data"), mx.sym.Variable("label"))
    (loop,) = (node for node in nodes_of(found) if node.op == "_foreach")
    assert is_loss(loop) == is_within


def test_inputs_without_a_gradient() -> None:
    x, y = mx.sym.Variable("x"), mx.sym.Variable("y")
    symbols = [mx.sym.BlockGrad(x), mx.sym.argmax(x), mx.sym.where(x, y, y), mx.sym.sin(x)]
    anchors = mx.sym.contrib.MultiBoxPrior(x)
    calls = [nodes_of(symbol)[-1] for symbol in (*symbols, anchors)]
    given = [[has_gradient(call, k) for k in range(len(call.inputs))] for call in calls]
    assert given == [[False], [False], [False, True, True], [True], [False]]
