"""What MXNet answers when asked about single operators."""

from __future__ import annotations

import os
from typing import Any

import mxnet as mx
import pytest

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.build import trace
from memplan.mxnet.trace.environment import current_match_range, match_range
from memplan.mxnet.trace.inference import infer
from memplan.mxnet.trace.nnvm import Node, depth_first, from_json
from memplan.mxnet.trace.probe import allocated_mib, handovers, merges
from memplan.step.graph import Handover


def node_of(symbol: mx.sym.Symbol, **shapes: tuple[int, ...]) -> Node:
    """The one op of ``symbol``, with its infos."""
    _, heads = from_json(symbol_json.parse(symbol))
    found, _, states = symbol.infer_shape(**shapes)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    infer(
        heads,
        dict(zip(names, [*found, *states], strict=True)),
        dict.fromkeys(symbol.list_arguments(), "float32"),
    )
    (node,) = (node for node in depth_first(heads) if not node.is_variable)
    return node


def asked(symbol: mx.sym.Symbol, **shapes: tuple[int, ...]) -> tuple[Handover, ...]:
    return handovers(node_of(symbol, **shapes))


A, B = mx.sym.Variable("a"), mx.sym.Variable("b")
OVER, ALIAS, SECOND = Handover(0, 0, False), Handover(0, 0, True), Handover(1, 1, True)


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (mx.sym.Activation(A, act_type="relu"), (OVER,)),
        (mx.sym.exp(A), (OVER,)),
        (mx.sym.identity(A), (ALIAS,)),
        (mx.sym.reshape(A, shape=(-1, 0), reverse=True), (ALIAS,)),
        (mx.sym.Flatten(A), (ALIAS,)),
        (mx.sym.BlockGrad(A), (ALIAS,)),
        (mx.sym.transpose(A), ()),
        (mx.sym.Convolution(A, kernel=(1, 1), num_filter=3, no_bias=True), ()),
        (mx.sym.sum(A), ()),
    ],
)
def test_handovers_of_one_input(symbol: mx.sym.Symbol, expected: tuple[Handover, ...]) -> None:
    assert asked(symbol, a=(2, 3, 4, 5)) == expected


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (mx.sym.elemwise_add(A, B), (OVER, Handover(1, 0, False))),
        (mx.sym.broadcast_add(A, B), (OVER, Handover(1, 0, False))),
        (mx.sym.dot(A, B), ()),
        (mx.sym.reshape_like(A, B), (ALIAS,)),
        (mx.sym.amp_multicast(A, B, num_outputs=2), (ALIAS, SECOND)),
    ],
)
def test_handovers_of_two_inputs(symbol: mx.sym.Symbol, expected: tuple[Handover, ...]) -> None:
    assert asked(symbol, a=(7, 7), b=(7, 7)) == expected


def test_only_equal_sizes_are_handed_over() -> None:
    assert asked(mx.sym.broadcast_add(A, B), a=(7, 7), b=(1, 7)) == (OVER,)
    assert asked(mx.sym.Cast(A, dtype="float16"), a=(7, 7)) == ()


def test_what_is_written_into_is_handed_over() -> None:
    places = mx.sym.Variable("places")
    written = mx.sym._internal._scatter_set_nd(A, B, places, shape=(7, 7))
    assert asked(written, a=(7, 7), b=(49,), places=(2, 49)) == (ALIAS,)


def test_handovers_of_an_identity_of_several() -> None:
    parts = mx.sym.amp_multicast(mx.sym.sin(A), mx.sym.exp(B), num_outputs=2)
    graph = trace(parts[0] * parts[1], shapes={"a": (7, 7), "b": (7, 7)}, grad_req="write").graph
    (given,) = (op.handovers for op in graph.ops if op.kind == "_backward_amp_multicast")
    assert set(given) == {ALIAS, SECOND}


def test_handovers_of_backward_ops() -> None:
    body = mx.sym.BatchNorm(mx.sym.Variable("data"), name="bn")
    body = mx.sym.Activation(body, act_type="relu", name="relu")
    graph = trace(body, shapes={"data": (2, 3, 4, 5)}).graph
    given = {op.name: op.handovers for op in graph.ops}
    assert given["relu_backward"] == (OVER,)
    assert given["bn"] == given["bn_backward"] == ()


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (mx.sym.FullyConnected(A, num_hidden=3), True),
        (mx.sym.exp(A), True),
        (mx.sym.Pooling(A, kernel=(2, 2), pool_type="max"), True),
        (mx.sym.Dropout(A), False),
        (mx.sym.BatchNorm(A), False),
    ],
)
def test_merged_ops(symbol: mx.sym.Symbol, expected: bool) -> None:
    assert merges(node_of(symbol, a=(2, 3, 4, 5))) is expected


def test_the_total_is_read_from_the_description() -> None:
    text = "Op:x, Name=Total 9 MB allocated\nTotal 2772 MB allocated\nTotal 11 TempSpace resource\n"
    assert allocated_mib(text) == 2772


@pytest.mark.parametrize("before", [None, "5"])
def test_the_match_range_is_put_back(before: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NNVM_EXEC_MATCH_RANGE"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with match_range(2):
        assert os.environ[name] == "2"
        assert current_match_range() == 2
    assert os.environ.get(name) == before
    assert current_match_range() == (16 if before is None else 5)


def test_the_graph_remembers_the_match_range() -> None:
    with match_range(4):
        graph = trace(mx.sym.relu(A), shapes={"a": (2, 3)}, grad_req="write").graph
    assert graph.match_range == 4
