"""What oneDNN adds up depends on the layouts that it meets: packed steps meet those of MXNet's own.

An operator that is none of oneDNN's leaves another layout where it writes over its input, which a
plan lets it do earlier than MXNet: a BatchNorm behind it rounds its sums otherwise then. So does
one behind a sum that is written over another of its terms. Where a plan keeps what MXNet writes
over, a copy of it is written over.
"""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.planning.realisation import trace
from memplan.strategies.base import Problem
from memplan.strategies.chen import ChenSqrt
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
    "tanh, whose input a plan keeps": mx.sym.tanh,
    "a product, whose input a plan keeps": lambda x: x * 1.5,
}


def convolution(data: Symbol) -> Symbol:
    return mx.sym.Convolution(data, num_filter=CHANNELS, kernel=(3, 3), pad=(1, 1))


def before_norms(operator: Callable[[Symbol], Symbol], *, is_residual: bool) -> Symbol:
    body = convolution(mx.sym.Variable("data"))
    for _ in range(3):
        branch = convolution(mx.sym.BatchNorm(operator(body), fix_gamma=False))
        body = body + branch if is_residual else branch
    return body


def before_sums(operator: Callable[[Symbol], Symbol]) -> Symbol:
    body = convolution(mx.sym.Variable("data"))
    for _ in range(4):
        branch = operator(mx.sym.BatchNorm(body, fix_gamma=False))
        body = body + operator(convolution(branch))
    return body


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_batchnorm_meets_the_layouts_of_the_unplanned_step(name: str, is_residual: bool) -> None:
    assert not different(before_norms(OPERATORS[name], is_residual=is_residual))


@pytest.mark.parametrize("name", ["swish", "hard swish", "gates", "PReLU, as in ArcFace's ResNets"])
def test_a_sum_is_written_over_the_term_of_the_unplanned_step(name: str) -> None:
    assert not different(before_sums(OPERATORS[name]))


def test_where_there_is_one_layout_sums_take_over_any_term() -> None:
    symbol = mx.sym.MakeLoss(mx.sym.mean(before_sums(OPERATORS["PReLU, as in ArcFace's ResNets"])))
    nterms = {}
    for device_type in ("cpu", "gpu"):
        options = {"realisation": "packed", "device_type": device_type}
        graph = trace(symbol, shapes={"data": (4, 3, 14, 14)}, **options).graph
        sums = [op for op in graph.ops if op.kind == "elemwise_add"]
        nterms[device_type] = sum(len(op.handovers) for op in sums)
    assert nterms["cpu"] < nterms["gpu"]


def different(body: Symbol) -> list[str]:
    """What differs from MXNet in steps that recompute much, and in such that keep some tensors."""
    pooled = mx.sym.Pooling(body, global_pool=True, pool_type="avg", kernel=(1, 1))
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(pooled, num_hidden=5), name="softmax")
    traced = trace(symbol, shapes={"data": (4, 3, 14, 14)}, realisation="packed")
    values = random_values(traced)
    result = []
    for strategy in (Evict(patience=0), ChenSqrt()):
        schedule = strategy.solve(Problem(traced.graph, None)).schedule
        assert schedule is not None
        assert schedule.recomputed
        planned = planned_steps(bound(traced, schedule, values))
        result += differences(stock_steps(traced, values), planned)
    return result
