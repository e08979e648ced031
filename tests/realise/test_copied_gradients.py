"""Which gradients are copied into other layouts, counted by hand on small networks."""

from __future__ import annotations

import mxnet as mx
import pytest

from helpers.small_convolutions import SHAPE, N, activated, convolved, pictures
from memplan.mxnet.realise import onednn_kernels, scratchpads, workspace_estimate
from memplan.mxnet.realise.layout_copies import copies
from memplan.mxnet.realise.workspace_estimate import (
    executor_nbytes,
    largest_nbytes,
    packed_nbytes,
)
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does depends on the processor: that of another machine is imagined."""
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: True)
    monkeypatch.setattr(workspace_estimate, "code_nbytes", lambda *_: 0)


def _traced(net: Symbol, shape: tuple[int, ...] = SHAPE) -> Trace:
    loss = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(net), num_hidden=4))
    return trace(loss, shapes={"data": shape}, grad_req="write")


def _of_backward(kind: str, traced: Trace) -> tuple[int, int]:
    """The bytes that the backward op of that kind copies: what is kept, and what is not."""
    found = copies(traced.graph, traced.nodes)
    [index] = [i for i, node in enumerate(traced.nodes) if node.op == f"_backward_{kind}"]
    return found.kept_nbytes[index], found.temporary_nbytes[index]


def _pooled(data: Symbol) -> Symbol:
    return mx.sym.Pooling(data, kernel=(2, 2), stride=(2, 2), pool_type="max")


def test_the_gradient_of_a_pooling_has_the_layout_of_thepicture() -> None:
    """The one that the convolution behind it wrote is brought into that."""
    traced = _traced(convolved(_pooled(mx.sym.tanh(pictures()))))
    assert _of_backward("Pooling", traced) == (0, N // 4)
    assert _of_backward("tanh", traced) == (0, 0)


def test_the_gradient_of_a_pooling_in_one_layout_is_not_copied() -> None:
    traced = _traced(convolved(_pooled(mx.sym.tanh(convolved(pictures())))))
    assert _of_backward("Pooling", traced) == (0, 0)
    assert _of_backward("tanh", traced)[0] > 0


def test_the_gradient_of_an_lrn_has_the_layout_of_the_one_that_it_reads() -> None:
    traced = _traced(convolved(mx.sym.LRN(mx.sym.tanh(pictures()), nsize=5)))
    assert _of_backward("LRN", traced) == (0, 0)
    assert _of_backward("tanh", traced)[0] > 0


def test_an_lrn_brings_its_data_into_the_usual_layout_for_its_gradient() -> None:
    traced = _traced(mx.sym.LRN(convolved(pictures()), nsize=5))
    assert _of_backward("LRN", traced) == (0, N)


# Of the gradient of three channels no kernel of oneDNN's is: that would be in the usual layout.
def test_a_convolution_copies_its_gradient_for_that_of_data_which_nobody_reads() -> None:
    net = activated(convolved(pictures(), 16))
    loss = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(convolved(net)), num_hidden=4))
    traced = trace(loss, shapes={"data": (2, 3, 8, 8)})
    found = copies(traced.graph, traced.nodes).temporary_nbytes
    first = [i for i, node in enumerate(traced.nodes) if node.op == "_backward_Convolution"][-1]
    assert found[first] == N


@pytest.mark.parametrize(("realisation", "thirds"), [("packed", 3), ("explicit", 2)])
def test_an_lrn_leaves_one_array_for_its_gradient(realisation: str, thirds: int) -> None:
    net = mx.sym.MakeLoss(mx.sym.mean(mx.sym.LRN(pictures(), nsize=5)))
    traced = trace(net, shapes={"data": SHAPE}, grad_req={"data": "write"}, realisation=realisation)
    if realisation == "packed":
        nbytes = packed_nbytes(traced.graph, traced.nodes)
    else:
        nbytes, *_ = executor_nbytes(traced.graph, traced.nodes, leaves_holes=False)
    assert nbytes == thirds * N // 2


@pytest.mark.parametrize("leaves_holes", [True, False])
def test_executors_prepare_convolutions_of_the_usual_layout_once(
    monkeypatch: pytest.MonkeyPatch, leaves_holes: bool
) -> None:
    net = pictures()
    for _ in range(3):  # none of sin and relu is an operator of oneDNN's
        net = mx.sym.relu(mx.sym.sin(convolved(net, 12)))
    traced, found = _traced(net, (2, 12, 8, 8)), []
    for layouts in (1, scratchpads.LAYOUTS):
        monkeypatch.setattr(scratchpads, "LAYOUTS", layouts)
        found.append(executor_nbytes(traced.graph, traced.nodes, leaves_holes=leaves_holes))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "op",
    [
        lambda data: mx.sym.slice(data, begin=(0, 0), end=(1, 8)),
        lambda data: mx.sym.reverse(data, axis=1),
        lambda data: mx.sym.squeeze(mx.sym.expand_dims(data, axis=1)),
        lambda data: mx.sym.cast(mx.sym.cast(data, "float64"), "float32"),
        lambda data: mx.sym.split_v2(data, 2, axis=1)[0],
        lambda data: mx.sym.Pooling(data, kernel=(2, 2), pool_type="sum"),
        lambda data: mx.sym.contrib.AdaptiveAvgPooling2D(data, output_size=(2, 2)),
    ],
)
def test_it_is_known_of_many_operators_that_they_take_nothing(op: object) -> None:
    net = mx.sym.MakeLoss(mx.sym.mean(op(mx.sym.tanh(pictures()))))  # type: ignore[operator]
    traced = trace(net, shapes={"data": SHAPE}, grad_req="write")
    assert largest_nbytes(traced.nodes) == 0


def test_many_small_products_have_no_room_for_parts_of_matrices() -> None:
    rows = mx.sym.Variable("data")
    net = mx.sym.MakeLoss(mx.sym.mean(mx.sym.batch_dot(rows, rows, transpose_b=True)))
    traced = trace(net, shapes={"data": (2048, 9, 64)}, grad_req="write", realisation="packed")
    assert packed_nbytes(traced.graph, traced.nodes) == 0


def test_products_of_heads_that_lie_side_by_side_are_as_many() -> None:
    parts = mx.sym.Variable("data")
    weights = mx.sym.contrib.interleaved_matmul_selfatt_qk(parts, heads=8)
    mixed = mx.sym.contrib.interleaved_matmul_selfatt_valatt(parts, weights, heads=8)
    net = mx.sym.MakeLoss(mx.sym.mean(mixed))
    options = {"grad_req": "write", "realisation": "packed"}
    traced = trace(net, shapes={"data": (64, 16, 3 * 8 * 32)}, **options)
    assert packed_nbytes(traced.graph, traced.nodes) == 0
