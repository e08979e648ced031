"""A BatchNorm of series, volumes or another axis behind a convolution, in packed steps.

MXNet's own step ends with ``Check failed: !is_view`` where no Reshape turns the convolution's
output; where one does, packed steps are as MXNet's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.realise.viewed_arrays import turned_inputs
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol

# Dimensions of a picture, and the axis of the BatchNorm.
KINDS = [(1, 1), (2, 2), (2, -1), (3, 1)]


def _convolution(data: Symbol, name: str, ndim: int) -> Symbol:
    window = {"kernel": (3,) * ndim, "pad": (1,) * ndim}
    return mx.sym.Convolution(data, num_filter=16, no_bias=True, name=name, **window)


def _norm(data: Symbol, axis: int) -> Symbol:
    return mx.sym.BatchNorm(data, axis=axis, fix_gamma=False, name="norm")


def _pooling(data: Symbol, ndim: int) -> Symbol:
    window = {"kernel": (2,) * ndim, "stride": (2,) * ndim}
    return mx.sym.Pooling(data, pool_type="max", name="pool", **window)


def _loss(*parts: Symbol) -> Symbol:
    """A loss of what dense layers make of ``parts``, in this order."""
    dense = [mx.sym.FullyConnected(p, num_hidden=8, name=f"dense{i}") for i, p in enumerate(parts)]
    return mx.sym.SoftmaxOutput(mx.sym.add_n(*dense), name="loss")


def _flat_first(ndim: int, axis: int) -> Symbol:
    shared = _convolution(mx.sym.Variable("data"), "conv", ndim)
    flat = mx.sym.Flatten(shared, name="flat")
    return _loss(flat, mx.sym.relu(_norm(shared, axis)))


def _behind(ndim: int, axis: int) -> Symbol:
    """Data and the output's gradient are a convolution's."""
    data = _convolution(mx.sym.Variable("data"), "conv", ndim)
    return _loss(_convolution(_norm(data, axis), "next", ndim))


def _norm_first(ndim: int, axis: int) -> Symbol:
    """A pooling takes notes on what the BatchNorm reads: its gradient comes first."""
    data = _convolution(mx.sym.Variable("data"), "conv", ndim)
    return _loss(_norm(data, axis), _pooling(data, ndim))


def _norm_last(ndim: int, axis: int) -> Symbol:
    """The gradient of the BatchNorm comes first; the pooling reads the data by another name."""
    data = _convolution(mx.sym.Variable("data"), "conv", ndim)
    pooled = _pooling(mx.sym.identity(data), ndim)
    return _loss(pooled, _norm(data, axis))


def _over_a_sum(ndim: int, axis: int) -> Symbol:
    """MXNet writes the gradient of the dense layer over the sum, in the layout of that."""
    data = mx.sym.Variable("data")
    norm = _norm(_convolution(data, "conv", ndim), axis)
    return _loss(_convolution(data, "other", ndim) + norm)


def _traced(network: Symbol, ndim: int, dtype: str = "float32") -> Trace:
    options: dict[str, Any] = {"shapes": {"data": (4, 3) + (6,) * ndim}}
    if dtype != "float32":
        options["type_dict"] = {"data": dtype}
    return trace(network, realisation="packed", **options)


@pytest.mark.parametrize(("ndim", "axis"), [kind for kind in KINDS if kind[0] < 3])
def test_where_a_reshape_turns_the_data_a_step_is_as_mxnets(ndim: int, axis: int) -> None:
    traced = _traced(_flat_first(ndim, axis), ndim)
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for seed in range(3):
        schedule = random_schedule(traced.graph, seed)
        assert not differences(stock, planned_steps(bound(traced, schedule, values), 2)), seed


@pytest.mark.parametrize("network", [_behind, _norm_first, _norm_last, _over_a_sum])
@pytest.mark.parametrize(("ndim", "axis"), KINDS)
def test_where_mxnet_cannot_run_it_a_step_is_as_without_onednn(
    network: Callable[[int, int], Symbol], ndim: int, axis: int
) -> None:
    """MXNet computes numbers of twice the precision without oneDNN."""
    traced = _traced(network(ndim, axis), ndim)
    values = random_values(traced)
    exact = {name: value.astype("float64") for name, value in values.items()}
    [expected] = stock_steps(_traced(network(ndim, axis), ndim, "float64"), exact, 1)
    for seed in range(3):
        schedule = random_schedule(traced.graph, seed)
        [found] = planned_steps(bound(traced, schedule, values), 1)
        for name, value in expected.items():
            scale = np.abs(value).max() + 1e-3
            np.testing.assert_allclose(found[name] / scale, value / scale, atol=1e-4, err_msg=name)


def test_nothing_is_asked_for_where_no_array_is_in_a_layout_of_onednns() -> None:
    """Each request is an operation of the engine's."""
    rows = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="rows")
    pictures = _convolution(mx.sym.Variable("data"), "conv", 2)
    for network in (_norm(rows, 1), mx.sym.relu(_norm(pictures, 1))):
        traced = _traced(_loss(network), 2)
        assert not turned_inputs(traced.graph, traced.nodes, "cpu")
    traced = _traced(_norm_last(2, 2), 2)
    turned = turned_inputs(traced.graph, traced.nodes, "cpu")
    kinds = sorted(traced.nodes[index].op for index in turned)
    assert kinds == ["Pooling", "_backward_BatchNorm", "_backward_Pooling"]
    assert not turned_inputs(traced.graph, traced.nodes, "gpu")
