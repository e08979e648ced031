"""Dtypes of a network's arguments where none are given: those of a Module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mxnet as mx
import numpy as np
import pytest

from memplan.mxnet.trace.build import trace


@pytest.mark.parametrize(
    "make", [mx.sym.cast, partial(mx.sym.Embedding, input_dim=9, output_dim=5)]
)
def test_parameters_have_the_dtype_of_an_operator(make: Callable[..., mx.sym.Symbol]) -> None:
    """As in a Module, which names the dtypes of data and labels only."""
    data = make(mx.sym.Variable("data"), dtype="float64", name="made")
    scores = mx.sym.cast(mx.sym.FullyConnected(data, num_hidden=3, name="fc"), dtype="float32")
    symbol = mx.sym.SoftmaxOutput(scores, name="softmax")
    module = mx.mod.Module(symbol)
    module.bind([("data", (2, 4))], [("softmax_label", (2,))])
    arrays = module._exec_group.execs[0].arg_dict
    expected = {name: np.dtype(array.dtype).name for name, array in arrays.items()}
    assert expected["fc_weight"] == "float64"
    assert trace(symbol, shapes={"data": (2, 4)}).dtypes == expected


def test_all_are_float32_where_an_operator_asks_for_that_of_a_variable() -> None:
    places = mx.sym.Embedding(mx.sym.Variable("places", shape=(1, 5)), input_dim=5, output_dim=4)
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=9, output_dim=4)
    symbol = mx.sym.MakeLoss(mx.sym.broadcast_add(words, places))
    assert set(trace(symbol, shapes={"data": (8, 5)}).dtypes.values()) == {"float32"}
