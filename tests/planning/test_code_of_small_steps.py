"""Steps of next to no bytes: MXNet's code counts, as far as a process could take more than 10 MB
above a twentieth of its promise else, and a refusal says in how much there is a plan.
"""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

import memplan
from helpers.small_convolutions import convolved
from memplan.errors import BudgetError
from memplan.mxnet.check import TOLERANCE, TOLERANCE_NBYTES, promised_growth
from memplan.mxnet.train.trial import run_apart

pytestmark = pytest.mark.usefixtures("code_counts")

Symbol = mx.sym.Symbol
Network = tuple[Symbol, dict[str, tuple[int, ...]]]


def dense() -> Network:
    """Two dense layers."""
    body = mx.sym.tanh(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16))
    return _classified(body), {"data": (8, 20)}


def normed() -> Network:
    """A convolution, a BatchNorm and a ReLU."""
    body = mx.sym.BatchNorm(convolved(mx.sym.Variable("data")))
    return _classified(mx.sym.Activation(body, act_type="relu")), {"data": (2, 16, 8, 8)}


def cells() -> Network:
    """An LSTM's cell, called 40 times."""
    cell = mx.rnn.LSTMCell(4, prefix="cell_")
    states = [mx.sym.zeros((2, 4)), mx.sym.zeros((2, 4))]
    outputs, _ = cell.unroll(40, mx.sym.Variable("data"), begin_state=states, layout="NTC")
    return _classified(outputs[-1]), {"data": (2, 40, 4)}


def _classified(body: Symbol) -> Symbol:
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=4), name="softmax")


@pytest.mark.long
@pytest.mark.parametrize("realisation", ["packed", "explicit", "mirror"])
@pytest.mark.parametrize("network", [dense, normed, cells])
def test_small_steps_take_at_most_10_mb_more_than_they_are_promised(
    network: Callable[[], Network], realisation: str
) -> None:
    net, shapes = network()
    options = {"realisation": realisation, "strategy": "store_all"}
    plan = memplan.plan(net, ctx=mx.cpu(), **options, **shapes)
    promised = promised_growth(plan.footprint)
    grown = run_apart(plan.schedule, plan.trace, ctx=mx.cpu()).grown_nbytes
    assert grown <= (1 + TOLERANCE) * promised + TOLERANCE_NBYTES
    assert promised <= grown


@pytest.mark.parametrize("realisation", ["packed", "explicit", "mirror"])
def test_a_share_that_code_exceeds_is_refused_with_bytes_that_do(realisation: str) -> None:
    net, shapes = normed()
    options = {"realisation": realisation, "ctx": mx.cpu(), **shapes}
    with pytest.raises(BudgetError, match="the workspace of operators") as refused:
        memplan.plan(net, budget="60%", **options)
    assert refused.value.proved
    assert "lower the batch size" not in str(refused.value)
    lowest = refused.value.lowest_nbytes
    assert lowest is not None
    plan = memplan.plan(net, budget=lowest, **options)
    assert plan.total_nbytes <= lowest < plan.unplanned.total_nbytes
