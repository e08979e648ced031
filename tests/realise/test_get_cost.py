"""memonger's get_cost: what MXNet allocates to train a network by the flags that it carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.networks import Network, hinted_resnet, residual_net, unrolled_lstm
from helpers.special_networks import embedding, fused_rnn
from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.trace.flags import without_flags


def by_memonger(net: mx.sym.Symbol, type_dict: Any = None, **shapes: Any) -> int:
    """By memonger's own code, on the CPU."""
    executor = net.simple_bind(ctx=mx.cpu(), grad_req="write", type_dict=type_dict, **shapes)
    return int(executor.debug_str().split("\n")[-3].split()[1])


NETWORKS: dict[str, Callable[[], Network]] = {
    "residual": lambda: residual_net(batch=16, size=32, units=6, filters=16),
    "hinted": lambda: hinted_resnet(batch=8, size=32, units=(3, 3), filters=16),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_planned_network_costs_what_it_trains_in(name: str) -> None:
    net, shapes = NETWORKS[name]()
    planned = memplan.search_plan(net, ntrial=6, **shapes)
    assert memplan.get_cost(net, **shapes) == by_memonger(net, **shapes)
    assert memplan.get_cost(planned, **shapes) == by_memonger(planned, **shapes)
    assert memplan.get_cost(planned, **shapes) < 0.8 * memplan.get_cost(net, **shapes)
    assert memplan.get_cost(without_flags(planned), **shapes) == memplan.get_cost(net, **shapes)


@pytest.mark.parametrize("is_hinted", [False, True])
def test_few_trials_are_no_worse_than_memongers(is_hinted: bool) -> None:
    """Its first is without a threshold, its second by a guess that is a good one in a chain."""
    body = mx.sym.Variable("data")
    for layer in range(12):
        body = mx.sym.Convolution(body, num_filter=16, kernel=(3, 3), pad=(1, 1), name=f"c{layer}")
        body = mx.sym.Activation(mx.sym.BatchNorm(body), act_type="relu")
        if is_hinted:
            body._set_attr(mirror_stage="True")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=10), name="softmax")
    shapes = {"data": (16, 3, 64, 64)}
    assert memplan.get_cost(net, **shapes) == 100
    for ntrial in (1, 6, 200):
        planned = memplan.search_plan(net, ntrial=ntrial, **shapes)
        assert memplan.get_cost(planned, **shapes) <= 40


def test_flags_of_the_users_own_count() -> None:
    net, shapes = NETWORKS["residual"]()
    before = memplan.get_cost(net, **shapes)
    for op in net.get_internals():
        if op.list_inputs() != [op.name] and "add" not in op.name:
            op._set_attr(force_mirroring="True")
    assert memplan.get_cost(net, **shapes) == by_memonger(net, **shapes) < before


def wide_embedding() -> Network:
    """Whose weight has a sparse gradient, which only MXNet knows how to bind."""
    body = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=50, output_dim=512, sparse_grad=True)
    body = mx.sym.tanh(mx.sym.tanh(body))
    return mx.sym.MakeLoss(body), {"data": (16, 100)}


OTHERS: dict[str, Callable[[], Network]] = {
    "embedding": lambda: (embedding()[0], {"data": (100, 500), "places": (100, 500)}),
    "sparse gradient": wide_embedding,
    "fused rnn": lambda: (fused_rnn()[0], {"data": (500, 640, 4)}),
    "unrolled lstm": lambda: unrolled_lstm(batch=64, hidden=128),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks(name: str) -> None:
    net, shapes = OTHERS[name]()
    assert memplan.get_cost(net, **shapes) == by_memonger(net, **shapes) > 1


def test_dtypes_are_the_second_argument() -> None:
    """MXNet's total is the same for all of them; what it cannot infer is an error."""
    net, shapes = NETWORKS["residual"]()
    half = {"data": "float16"}
    assert memplan.get_cost(net, half, **shapes) == by_memonger(net, half, **shapes)
    with pytest.raises(ArgumentError, match="'date', which is no argument"):
        memplan.get_cost(net, {"date": "float16"}, **shapes)


MASKED = mx.sym.contrib.boolean_mask(mx.sym.Variable("data"), mx.sym.Variable("mask"))
COUNTED = mx.sym.contrib.getnnz(mx.sym.Variable("data"))


@pytest.mark.parametrize(
    ("net", "shapes", "error", "message"),
    [
        (mx.gluon.nn.Dense(3), {"data": (2, 3)}, ArgumentError, "Gluon block"),
        (residual_net()[0], {}, ArgumentError, "name the input shapes"),
        (residual_net()[0], {"data": (2, 3)}, ArgumentError, "do not fit the network"),
        (MASKED, {"data": (8, 4), "mask": (8,)}, TraceError, "'boolean_mask0_output' is not known"),
        (COUNTED, {"data": (8, 4)}, TraceError, "non-differentiable"),
    ],
    ids=["a block", "no shapes", "wrong shapes", "unknown sizes", "no gradient"],
)
def test_errors(net: Any, shapes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        memplan.get_cost(net, **shapes)
