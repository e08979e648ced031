"""Which operators MXNet hands to oneDNN on a CPU: these read arrays in layouts of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import SHAPE, N, activated, convolved, pictures
from memplan.mxnet.realise.estimate.layout_copies import copies
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol


def _traced(net: Symbol) -> Trace:
    net = mx.sym.MakeLoss(mx.sym.mean(net))
    return trace(net, shapes={"data": SHAPE}, grad_req={"data": "write"}, realisation="mirror")


@pytest.mark.parametrize("kind", ["max", "avg", "sum"])
@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": True},
        {"global_pool": True, "kernel": (1, 1)},
        {"kernel": (2, 2)},
        {"kernel": (2, 2), "layout": "NHWC"},
        {"kernel": (2, 2), "layout": "NCHW"},
    ],
)
def test_which_poolings_are_onednns(kind: str, options: dict[str, Any]) -> None:
    """MXNet says so: where it calls oneDNN's function a largest number has a hidden output."""
    pooled = mx.sym.Pooling(mx.sym.tanh(pictures()), pool_type=kind, **options)
    [node, gradient] = [n for n in _traced(pooled).nodes if n.op.endswith("Pooling")]
    of_max = mx.sym.Pooling(mx.sym.tanh(pictures()), pool_type="max", **options)
    [node_of_max] = [n for n in _traced(of_max).nodes if n.op == "Pooling"]
    is_onednns = node_of_max.noutputs == 2 and kind != "sum"
    assert reads_any_layout(node) == reads_any_layout(gradient) == is_onednns


def test_executors_keep_copies_for_poolings_without_a_kernel() -> None:
    pooled = mx.sym.Pooling(convolved(activated(pictures())), global_pool=True, pool_type="avg")
    traced = _traced(pooled)
    kept = copies(traced.graph, traced.nodes).kept_nbytes
    of = {node.op: nbytes for node, nbytes in zip(traced.nodes, kept, strict=True)}
    # The gradient, of one place, is in the usual layout; it is written where nothing lay.
    assert (of["Pooling"], of["_backward_Pooling"]) == (N, N)


def test_a_softmax_of_rows_of_several_lengths_is_none_of_onednns() -> None:
    lengths = mx.sym.cast(mx.sym.ones(shape=(2, 16, 8)), dtype="int32")
    found = []
    for options in ({}, {"length": lengths, "use_length": True}, {"dtype": "float32"}):
        nodes = _traced(mx.sym.softmax(mx.sym.tanh(pictures()), **options)).nodes
        found.append([reads_any_layout(node) for node in nodes if "softmax" in node.op])
    assert found == [[True, True], [False, False], [True, False]]


def _slice(data: Symbol, **options: Any) -> Symbol:
    return mx.sym.slice(data, begin=(None,) * 4, end=(None,) * 4, **options)


@pytest.mark.parametrize(
    ("options", "is_onednns"),
    [
        ({}, True),
        ({"dim": 3}, True),
        ({"dim": 0}, False),
        ({"dim": -1}, False),
        ({"dim": -3}, False),
    ],
)
def test_a_concat_is_onednns_by_an_axis_counted_from_the_first(
    options: dict[str, Any], is_onednns: bool
) -> None:
    """MXNet says so, and of slices (MXNET_INFER_STORAGE_TYPE_VERBOSE_LOGGING=1)."""
    data = pictures()
    parts = mx.sym.tanh(data), mx.sym.sin(data)
    nodes = _traced(mx.sym.Concat(*parts, **options)).nodes
    found = [reads_any_layout(node) for node in nodes if node.op.endswith("Concat")]
    assert found == [is_onednns, is_onednns]


@pytest.mark.parametrize(
    ("options", "is_onednns"),
    [
        ({}, True),
        ({"step": (1, None, None, 1)}, True),
        ({"step": (None, None, 2, None)}, False),
        ({"step": (1, 1, 1, -1)}, False),
        ({"step": (11, 1, 1, 1)}, False),
    ],
)
def test_a_slice_is_onednns_without_steps(options: dict[str, Any], is_onednns: bool) -> None:
    nodes = _traced(_slice(mx.sym.tanh(pictures()), **options)).nodes
    found = [reads_any_layout(node) for node in nodes if node.op.endswith("slice")]
    assert found == [is_onednns, False]  # a gradient never is


@pytest.mark.parametrize(
    ("call", "kind", "of_one"),
    [
        (lambda x: mx.sym.Concat(x, x, dim=-3), "Concat", 2),
        (lambda x: mx.sym.Concat(x, x, dim=1), "Concat", 0),
        (lambda x: _slice(x, step=(1, 1, 1, -1)), "slice", 1),
        (_slice, "slice", 0),
    ],
)
def test_executors_keep_copies_for_what_is_none_of_onednns(
    call: Callable[[Symbol], Symbol], kind: str, of_one: int
) -> None:
    traced = _traced(convolved(call(convolved(pictures()))))
    kept = copies(traced.graph, traced.nodes).kept_nbytes
    of = {node.op: nbytes for node, nbytes in zip(traced.nodes, kept, strict=True)}
    assert of[kind] == of_one * N
