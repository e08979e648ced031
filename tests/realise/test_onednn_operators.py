"""Which operators MXNet hands to oneDNN on a CPU: these read arrays in layouts of its own."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import SHAPE, N, activated, convolved, pictures
from memplan.mxnet.realise.layout_copies import copies
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.operators import reads_any_layout
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
