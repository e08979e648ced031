"""What MXNet says, in messages: without the time and the line of its source."""

from __future__ import annotations

import re
from typing import Any

import mxnet as mx
import pytest

import memplan
from memplan.errors import ArgumentError, MemplanError, TraceError
from memplan.mxnet.trace.build import trace

SHAPES = {"data": (4, 3)}
PLACE = re.compile(r"\[\d\d:|src/|MXNetError")


def squares() -> mx.sym.Symbol:
    layer = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="layer")
    scaled = mx.sym.broadcast_mul(layer, mx.sym.Variable("scale", shape=(1, 5)), name="scaled")
    return mx.sym.MakeLoss(mx.sym.square(scaled))


def refusal(error: type[MemplanError], net: mx.sym.Symbol, **options: Any) -> str:
    with pytest.raises(error) as caught:
        trace(net, **{"shapes": SHAPES, **options})
    return str(caught.value)


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
def test_the_symbol_of_a_whole_step_is_no_network(realisation: str) -> None:
    options: dict[str, Any] = {"realisation": realisation, "strategy": "store_all", **SHAPES}
    text = refusal(TraceError, memplan.plan(squares(), **options).symbol)
    assert "(_backward_broadcast_mul) cannot be differentiated: Operator _backward_" in text
    assert text.endswith("By such a plan trains memplan.mxnet.Module(net, plan=plan).")
    assert "BlockGrad" not in text
    assert not PLACE.search(text)


def test_an_op_without_gradient_may_stand_behind_blockgrad() -> None:
    counts = mx.sym.histogram(squares(), bins=4, range=(0, 1))[0]
    text = refusal(TraceError, mx.sym.MakeLoss(counts))
    assert "Wrap its output in BlockGrad" in text
    assert not PLACE.search(text)


def test_shapes_and_dtypes_that_do_not_fit() -> None:
    wrong_shapes = SHAPES | {"layer_weight": (5, 4)}
    text = refusal(ArgumentError, squares(), shapes=wrong_shapes)
    assert "do not fit the network: Error in operator layer: Shape inconsistent" in text
    assert not PLACE.search(text)
    text = refusal(ArgumentError, squares(), type_dict={"data": "int8", "layer_weight": "float16"})
    assert "the dtypes do not fit the network: Error in operator layer: " in text
    assert not PLACE.search(text)
