"""Losses that take turns train as in MXNet, which runs the forward pass of all of them first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mxnet as mx
import pytest

from helpers.networks import Network, conv, dense, var
from helpers.special_networks import heads_of_trunk
from helpers.states_of_user_code import read_beside_user_code
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.planning.realisation import trace
from memplan.search.by_loss import loss_by_loss
from memplan.search.evicted_least import evicted_least
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop


def dense_heads() -> Network:
    """Heads whose outputs are outputs of the network, too, with other losses."""
    trunk = mx.sym.relu(dense(var(), 32, name="trunk"))
    outputs = []
    for head in range(3):
        x = mx.sym.LayerNorm(dense(trunk, 256, name=f"head{head}"), name=f"norm{head}")
        x = dense(mx.sym.tanh(x), 7, name=f"scores{head}")
        outputs.append(mx.sym.SoftmaxOutput(x, name=f"softmax{head}"))
    return mx.sym.Group(outputs), {"data": (64, 16)}


def pooled_heads(*, sensitive: bool = False) -> Network:
    """Convolutions in oneDNN's layouts; each head reads the trunk twice, pooled by maxima.

    With ``sensitive`` operators whose numbers depend on layouts, or on what is written over.
    """
    trunk = mx.sym.relu(conv(var(), "trunk", 16))
    losses = []
    for head in range(3):
        x = conv(trunk, f"head{head}", 16)
        if sensitive:
            x = mx.sym.LRN(mx.sym.LeakyReLU(x, act_type="prelu", name=f"slopes{head}"), nsize=3)
        x = mx.sym.Pooling(x + trunk, kernel=(2, 2), stride=(2, 2), pool_type="max")
        x = conv(mx.sym.relu(x), f"last{head}", 16)
        losses.append(mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(x)), name=f"loss{head}"))
    return mx.sym.Group(losses), {"data": (2, 3, 16, 16)}


CASES: dict[str, tuple[Callable[[], Network], tuple[str, ...]]] = {
    "statistics and random numbers": (heads_of_trunk, ("explicit", "packed")),
    "outputs": (dense_heads, ("explicit", "packed")),
    "layouts": (pooled_heads, ("explicit", "packed")),
    "state that user code writes": (
        partial(read_beside_user_code, when="backward"),
        ("packed",),
    ),
    "sensitive operators": (partial(pooled_heads, sensitive=True), ("packed",)),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_in_turns_train_as_mxnet(name: str) -> None:
    network, realisations = CASES[name]
    symbol, shapes = network()
    for realisation in realisations:
        traced = trace(symbol, shapes=shapes, realisation=realisation)
        other = loss_by_loss(traced.graph, reorder=True, recompute_backward=False)
        assert other.graph is not traced.graph
        least = other.back(evicted_least(other.graph, Stop.after(1e5)))
        assert least.recomputed
        values = random_values(traced)
        expected = stock_steps(traced, values)
        for schedule in (other.back(Schedule.unplanned(other.graph)), least):
            assert not differences(expected, planned_steps(bound(traced, schedule, values)))
