"""A planned block whose ``__call__`` computes itself trains unplanned, and says so."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.mxnet.gluon import planned


class Bypassing(nn.HybridBlock):  # type: ignore[misc]
    """Computes in its ``__call__``, or leaves that to Gluon, or returns what it got."""

    way = "itself"

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.scores = nn.Dense(3, in_units=6)
        mx.random.seed(1)
        self.initialize(ctx=CPU)

    def __call__(self, x: Any) -> Any:
        if self.way == "itself":
            return mx.nd.tanh(self.scores(x))
        return super().__call__(x) if self.way == "super" else x

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.tanh(self.scores(x))


def weights_after_steps(block: Any) -> np.ndarray:
    trainer = gluon.Trainer(block.collect_params(), "sgd")
    for n in range(2):
        with autograd.record():
            loss = block(mx.nd.ones((4, 6), ctx=CPU) * n).square().sum()
        loss.backward()
        trainer.step(1)
    return block.scores.weight.data().asnumpy()


def test_a_call_that_computes_without_forward_trains_unplanned_and_says_so_once() -> None:
    other = planned(Bypassing(), strategy="chen_sqrt")
    with pytest.warns(UserWarning, match=r"leave the computation to super\(\)") as caught:
        found = weights_after_steps(other)
    np.testing.assert_array_equal(found, weights_after_steps(Bypassing()))
    assert not other.planned_step.plans
    assert [w.filename for w in caught if "super()" in str(w.message)] == [__file__]


@pytest.mark.filterwarnings("error:planned block")
def test_of_calls_that_do_not_train_past_the_plan_nothing_is_said() -> None:
    batch, other = mx.nd.ones((4, 6), ctx=CPU), planned(Bypassing(), strategy="chen_sqrt")
    other(batch)
    with autograd.record(train_mode=False):
        other(batch)
    with autograd.record():
        with autograd.pause(train_mode=True):
            other(batch)
        for other.way in ("handed on", "super"):
            other(batch)
    assert other.planned_step.plans


def test_a_call_that_returns_a_dict_says_so_too() -> None:
    class Naming(Bypassing):
        def __call__(self, x: Any) -> Any:
            return {"scores": self.scores(x)}

    other = planned(Naming(), strategy="chen_sqrt")
    with pytest.warns(UserWarning, match=r"leave the computation to super\(\)"), autograd.record():
        other(mx.nd.ones((4, 6), ctx=CPU))


def test_a_cell_whose_call_is_of_mxnet_and_goes_past_says_so_too() -> None:
    cell = gluon.rnn.HybridSequentialRNNCell(prefix="cells_")
    cell.add(gluon.rnn.LSTMCell(4, input_size=6))
    cell.initialize(ctx=CPU)
    cell = planned(cell, strategy="chen_sqrt")
    with pytest.warns(UserWarning, match=r"leave the computation to super\(\)"), autograd.record():
        cell(mx.nd.ones((4, 6), ctx=CPU), cell.begin_state(batch_size=4, ctx=CPU))
