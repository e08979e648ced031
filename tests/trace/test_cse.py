"""Equal nodes of the user's network, which MXNet merges before it differentiates."""

from __future__ import annotations

import json

import mxnet as mx
import pytest

from helpers.executors import traced_as_mxnet
from memplan.mxnet.trace.build import Trace, trace

SHAPES = {"data": (1 << 17, 64)}


def fully_connected(name: str | None = None) -> mx.sym.Symbol:
    """A call like every other call of this function: same data, same weight."""
    data, weight = DATA, WEIGHT
    return mx.sym.FullyConnected(data, weight, no_bias=True, num_hidden=64, name=name)


DATA, WEIGHT = mx.sym.Variable("data"), mx.sym.Variable("weight")


def merged(result: Trace) -> list[list[str]]:
    """The names of the user's nodes that each forward op stands for, where several."""
    nodes = json.loads(result.symbol.tojson())["nodes"]
    return [
        sorted(nodes[index]["name"] for index in source)
        for source in result.sources
        if len(source) > 1
    ]


def test_equal_nodes() -> None:
    one, two = fully_connected("one"), fully_connected("two")
    result = traced_as_mxnet(mx.sym.relu(one) * mx.sym.relu(two) + mx.sym.tanh(one), SHAPES)
    kinds = [op.kind for op in result.graph.ops[: result.graph.nforward]]
    assert kinds == ["FullyConnected", "relu", "elemwise_mul", "tanh", "elemwise_add"]
    assert merged(result)[0] == ["one", "two"]
    assert len(merged(result)) == 2


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_equal_heads(copies: int) -> None:
    heads = [mx.sym.tanh(fully_connected()) for _ in range(copies)]
    result = traced_as_mxnet(mx.sym.Group(heads), SHAPES)
    assert [len(names) for names in merged(result)] == [copies, copies]


def test_equal_heads_and_inner_nodes() -> None:
    one, two = fully_connected(), fully_connected()
    traced_as_mxnet(mx.sym.Group([one, mx.sym.relu(two), two, mx.sym.relu(one)]), SHAPES)


def test_merged_gradients_keep_their_order() -> None:
    """The gradients come in the order of the arguments of the network as the user wrote it."""
    one, two = fully_connected(), fully_connected()
    other = mx.sym.FullyConnected(two, num_hidden=64, name="other")
    traced_as_mxnet(mx.sym.elemwise_add(other, one), SHAPES, grad_req="write")


def test_random_nodes_differ() -> None:
    body = fully_connected()
    result = traced_as_mxnet(mx.sym.Dropout(body) + mx.sym.Dropout(body), SHAPES)
    assert merged(result) == []


def test_nodes_with_other_attributes_differ() -> None:
    one, two = fully_connected(), fully_connected()
    two._set_attr(lr_mult="2")
    result = traced_as_mxnet(one * two, SHAPES)
    assert merged(result) == []


def test_merging_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol = fully_connected() * fully_connected()
    assert len(merged(trace(symbol, shapes=SHAPES))) == 1
    monkeypatch.setenv("MXNET_ELIMINATE_COMMON_EXPR", "0")
    assert merged(traced_as_mxnet(symbol, SHAPES)) == []
