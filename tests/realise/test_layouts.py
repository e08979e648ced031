"""What oneDNN adds up depends on the layouts that it meets: packed steps meet those of MXNet's own.

An operator that is none of oneDNN's leaves another layout where it writes over its input, which a
plan lets it do earlier than MXNet: a BatchNorm behind it rounds its sums otherwise then.
"""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.planning.realisation import trace
from memplan.strategies.base import Problem
from memplan.strategies.evict import Evict

Symbol = mx.sym.Symbol
CHANNELS = 16


def gated(x: Symbol) -> Symbol:
    """Squeeze and excitation."""
    means = mx.sym.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1))
    gates = mx.sym.Convolution(means, num_filter=CHANNELS, kernel=(1, 1))
    return mx.sym.broadcast_mul(x, mx.sym.sigmoid(gates))


OPERATORS: dict[str, Callable[[Symbol], Symbol]] = {
    "PReLU, as in ArcFace's ResNets": lambda x: mx.sym.LeakyReLU(x, act_type="prelu"),
    "swish": lambda x: x * mx.sym.sigmoid(x),
    "hard swish": lambda x: x * mx.sym.clip(x + 3, a_min=0, a_max=6) / 6,
    "gates": gated,
}


def network(operator: Callable[[Symbol], Symbol], *, is_residual: bool) -> Symbol:
    body = mx.sym.Variable("data")
    for unit in range(4):
        branch = body
        if unit:
            branch = mx.sym.BatchNorm(operator(branch), fix_gamma=False)
        branch = mx.sym.Convolution(branch, num_filter=CHANNELS, kernel=(3, 3), pad=(1, 1))
        body = body + branch if is_residual and unit else branch
    pooled = mx.sym.Pooling(body, global_pool=True, pool_type="avg", kernel=(1, 1))
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(pooled, num_hidden=5), name="softmax")


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_batchnorm_meets_the_layouts_of_the_unplanned_step(name: str, is_residual: bool) -> None:
    symbol = network(OPERATORS[name], is_residual=is_residual)
    traced = trace(symbol, shapes={"data": (4, 3, 14, 14)}, realisation="packed")
    values = random_values(traced)
    schedule = Evict(patience=0).solve(Problem(traced.graph, None)).schedule
    assert schedule is not None
    assert schedule.recomputed
    planned = bound(traced, schedule, values)
    assert not differences(stock_steps(traced, values), planned_steps(planned))
