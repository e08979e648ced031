"""Recurrent cells under mx.util.np_shape(True), where a 0 in a shape is a size."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon

from helpers.block_runs import assert_equal, gradients
from helpers.blocks import CPU
from memplan.errors import ArgumentError
from memplan.mxnet.gluon import planned


class Unrolled(gluon.HybridBlock):
    """Begins with the cell's states, whose batch size is a 0 in its graph, or with given ones."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.cell = gluon.rnn.LSTMCell(6, input_size=5)

    def hybrid_forward(self, F: Any, x: Any, *states: Any) -> Any:  # noqa: N803
        given = {"begin_state": list(states)} if states else {}
        return self.cell.unroll(3, x, layout="NTC", merge_outputs=True, **given)[0]


def begun(plan: bool) -> Any:
    mx.random.seed(3)
    net = Unrolled()
    net.initialize(ctx=CPU)
    return planned(net, strategy="chen_sqrt") if plan else net


def after_backward(net: Any, *states: Any) -> Any:
    with autograd.record():
        loss = (net(mx.nd.ones((2, 3, 5), ctx=CPU), *states) ** 2).sum()
    loss.backward()
    return gradients(net)


def test_where_a_cell_makes_its_states_is_said() -> None:
    net = begun(plan=True)
    with (
        mx.util.np_shape(True),
        pytest.raises(ArgumentError, match=r"begin_state_0' is made with a 0.*outside of that"),
    ):
        after_backward(net)
    assert_equal(after_backward(begun(plan=False)), after_backward(net))


def test_given_states_train_there() -> None:
    states = [mx.nd.ones((2, 6), ctx=CPU), mx.nd.zeros((2, 6), ctx=CPU)]
    with mx.util.np_shape(True):
        found = [after_backward(begun(plan), *states) for plan in (False, True)]
    assert_equal(*found)
