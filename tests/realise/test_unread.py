"""Gradients that nobody reads: packed steps neither compute them nor have memory for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.networks import dense, loss, var
from helpers.schedules import random_schedule
from helpers.training_runs import (
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.mxnet.realise import unread
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.imperative import Call, RecordedCall
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

PICTURES, ROWS = (8, 12, 1, 1), (8, 12)


def convolution(data: mx.sym.Symbol, **options: Any) -> mx.sym.Symbol:
    return mx.sym.Convolution(data, num_filter=5, kernel=(1, 1), name="layer", **options)


def deconvolution(data: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.Deconvolution(data, num_filter=5, kernel=(2, 2), no_bias=False, name="layer")


def dot(data: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.dot(data, var("layer_weight", shape=(12, 5)), name="layer")


LAYERS: dict[str, tuple[Callable[..., mx.sym.Symbol], tuple[int, ...]]] = {
    "convolution": (convolution, PICTURES),
    "without_bias": (lambda data: convolution(data, no_bias=True), PICTURES),
    "dense": (lambda data: dense(data, 5, name="layer"), ROWS),
    "deconvolution": (deconvolution, (2, 12, 4, 4)),
    "dot": (dot, ROWS),
    "layer_norm": (lambda data: mx.sym.LayerNorm(data, name="layer"), ROWS),
    "layer_norm_of_channels": (
        lambda data: mx.sym.LayerNorm(data, axis=1, name="layer"),
        (2, 12, 4, 4),
    ),
    "group_norm": (lambda data: mx.sym.GroupNorm(data, num_groups=3, name="layer"), (2, 12, 4, 4)),
    "embedding": (
        lambda data: mx.sym.Embedding(data, input_dim=9, output_dim=3, name="layer"),
        (8,),
    ),
}


def traced_layer(name: str, **options: Any) -> Trace:
    """A layer that reads the data of a network, or what ``of`` makes of it."""
    layer, shape = LAYERS[name]
    of = options.pop("of", lambda data: data)
    with mx.name.NameManager():
        net = loss(layer(of(var("data"))))
    return trace(net, shapes={"data": shape}, realisation="packed", **options)


def sizes_of_gradients(traced: Trace) -> list[int]:
    """What the outputs of the layer's backward op take in memory."""
    [op] = [
        op
        for op, node in zip(traced.graph.ops, traced.nodes, strict=True)
        if node.forward is not None and node.forward.name == "layer"
    ]
    return [traced.graph.tensors[tensor].nbytes for tensor in op.outputs]


@pytest.mark.parametrize("name", LAYERS)
def test_they_are_neither_computed_nor_stored(name: str) -> None:
    traced = traced_layer(name)
    of_data, *others = sizes_of_gradients(traced)
    assert not of_data
    assert all(others)
    values = random_values(traced, {"data": 9} if name == "embedding" else {})
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    shown: list[str] = []
    executor.set_monitor_callback(lambda name, _: shown.append(name.decode()))
    executor.forward(is_train=True)
    [node] = [n for n in traced.nodes if n.forward is not None and n.forward.name == "layer"]
    assert sum(output.startswith(node.name) for output in shown) == len(others)
    again = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(again))


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"embedding"}))
def test_with_frozen_parameters_only_that_of_the_data_is_computed(name: str) -> None:
    options = {"of": lambda data: mx.sym.broadcast_add(data, var("shift", shape=data_shape))}
    data_shape = LAYERS[name][1]
    traced = traced_layer(name, grad_req={"shift": "write"}, **options)
    of_data, *others = sizes_of_gradients(traced)
    assert of_data
    assert not any(others)
    values = random_values(traced)
    stock = stock_steps(traced, values)
    for seed in range(3):
        executor = bound(traced, random_schedule(traced.graph, seed), values)
        assert not differences(stock, planned_steps(executor))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["convolution", "dense"])
def test_those_of_weight_and_bias_are_computed_together(name: str, frozen: str) -> None:
    """oneDNN's kernels write both, or neither."""
    other = "bias" if frozen == "weight" else "weight"
    traced = traced_layer(name, grad_req={f"layer_{other}": "write"})
    of_data, *others = sizes_of_gradients(traced)
    assert not of_data
    assert all(others)


@pytest.mark.parametrize("frozen", ["gamma", "beta"])
@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_of_channels", "group_norm"])
def test_those_of_a_norm_are_computed_one_by_one(name: str, frozen: str) -> None:
    other = "beta" if frozen == "gamma" else "gamma"
    traced = traced_layer(name, grad_req={f"layer_{other}": "write"})
    sizes = sizes_of_gradients(traced)
    assert [size > 0 for size in sizes] == [False, other == "gamma", other == "beta"]
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


def test_that_of_a_convolution_of_points_is_there_without_onednn() -> None:
    """MXNet's own kernel writes it, whatever it is asked for."""
    traced = traced_layer("convolution", type_dict={"data": "float64"})
    assert all(sizes_of_gradients(traced))
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


def test_without_a_way_to_ask_for_some_outputs_all_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread, "may_be_partial", lambda op: False)
    assert all(sizes_of_gradients(traced_layer("dense")))


@pytest.mark.parametrize("operator", ["elemwise_sub", "elemwise_mul", "elemwise_div"])
def test_that_of_a_target_has_no_memory(operator: str) -> None:
    with mx.name.NameManager():
        body = getattr(mx.sym, operator)(dense(var(), 5, name="layer"), var("label"), name="other")
        net = mx.sym.MakeLoss(mx.sym.square(body))
    traced = trace(net, shapes={"data": ROWS, "label": (8, 5)}, realisation="packed")
    [op] = [op for op in traced.graph.ops if op.name == "other_backward"]
    assert [traced.graph.tensors[tensor].nbytes for tensor in op.outputs] == [8 * 5 * 4, 0]
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


@pytest.mark.parametrize("shape", [(8, 5), (8, 1), (1, 5)])
@pytest.mark.parametrize("operator", ["add", "sub", "mul", "div"])
def test_that_of_a_mask_has_no_memory(operator: str, shape: tuple[int, int]) -> None:
    with mx.name.NameManager():
        layer = dense(var(), 5, name="layer")
        body = getattr(mx.sym, f"broadcast_{operator}")(layer, var("mask"), name="other")
        net = mx.sym.MakeLoss(mx.sym.square(body))
    traced = trace(net, shapes={"data": ROWS, "mask": shape}, realisation="packed")
    [op] = [op for op in traced.graph.ops if op.name == "other_backward"]
    assert [traced.graph.tensors[tensor].nbytes for tensor in op.outputs] == [8 * 5 * 4, 0]
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


@pytest.mark.parametrize("output", ["Linear", "MAE", "Logistic"])
def test_that_of_a_label_has_no_memory(output: str) -> None:
    """MXNet's kernels write none, and it is as large as the output."""
    operator = getattr(mx.sym, f"{output}RegressionOutput")
    with mx.name.NameManager():
        net = operator(dense(var(), 5, name="layer"), var("label"), name="loss")
    shapes = {"data": ROWS, "label": (8, 5)}
    traced = trace(net, shapes=shapes, realisation="packed")
    [op] = [op for op in traced.graph.ops if op.kind.endswith("reg_out")]
    assert [traced.graph.tensors[tensor].nbytes for tensor in op.outputs] == [8 * 5 * 4, 0]
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


def cropped(data: mx.sym.Symbol) -> mx.sym.Symbol:
    larger = mx.sym.Convolution(data, num_filter=2, kernel=(3, 3), pad=(3, 3))
    return mx.sym.Crop(larger, data, num_args=2, center_crop=True, name="layer")


def transformed(data: mx.sym.Symbol) -> mx.sym.Symbol:
    options = {"transform_type": "affine", "sampler_type": "bilinear", "target_shape": (4, 4)}
    return mx.sym.SpatialTransformer(data, dense(data, 6), name="layer", **options)


def deformed(data: mx.sym.Symbol, **options: Any) -> mx.sym.Symbol:
    options = {"kernel": (3, 3), "pad": (1, 1), **options}
    offsets = mx.sym.Convolution(data, num_filter=18, **options)
    return mx.sym.contrib.DeformableConvolution(
        data, offsets, num_filter=4, name="layer", **options
    )


def detected(data: mx.sym.Symbol) -> mx.sym.Symbol:
    classes = mx.sym.softmax(mx.sym.reshape(dense(data, 8), shape=(0, 2, -1)), axis=1)
    return mx.sym.contrib.MultiBoxDetection(
        classes, dense(data, 16), var("anchors_label", shape=(1, 4, 4)), name="layer"
    )


# Layers that write the gradient of the data, or of anchors, whatever they are asked for.
WRITE_UNASKED: dict[str, Callable[[mx.sym.Symbol], mx.sym.Symbol]] = {
    "cropped": cropped,
    "cropped_itself": lambda data: mx.sym.Crop(
        data, mx.sym.Convolution(data, num_filter=2, kernel=(3, 3)), num_args=2, name="layer"
    ),
    "transformed": transformed,
    "correlated": lambda data: mx.sym.Correlation(
        mx.sym.Convolution(data, num_filter=3, kernel=(1, 1)), data, name="layer"
    ),
    "deformed": deformed,
    "deformed_by_frozen": lambda data: deformed(mx.sym.BlockGrad(data)),
    "detected": detected,
}


@pytest.mark.parametrize("name", WRITE_UNASKED)
def test_what_mxnet_writes_unasked_is_written_in_packed_memory(name: str) -> None:
    """Autograd is asked for it, or MXNet would make an array for it that nobody counts."""
    with mx.name.NameManager():
        net = loss(WRITE_UNASKED[name](var("data")))
    traced = trace(net, shapes={"data": (2, 3, 8, 8)}, realisation="packed")
    assert all(sizes_of_gradients(traced))
    values = random_values(traced)
    stock = stock_steps(traced, values)
    for seed in range(2):
        executor = bound(traced, random_schedule(traced.graph, seed), values)
        recorded = [call for call in executor._training._calls if isinstance(call, RecordedCall)]
        assert recorded
        assert not any(array is None for call in recorded for array in call.backward.gradients)
        assert not differences(stock, planned_steps(executor))


CALLS: dict[str, tuple[str, dict[str, str], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "convolution": (
        "_backward_Convolution",
        {"kernel": "(3, 3)", "pad": "(1, 1)", "num_filter": "8"},
        [(2, 8, 9, 9), (2, 3, 9, 9), (8, 3, 3, 3), (8,)],
        [(2, 3, 9, 9), (8, 3, 3, 3), (8,)],
    ),
    "points": (
        "_backward_Convolution",
        {"kernel": "(1, 1)", "num_filter": "16", "no_bias": "True"},
        [(2, 16, 9, 9), (2, 16, 9, 9), (16, 16, 1, 1)],
        [(2, 16, 9, 9), (16, 16, 1, 1)],
    ),
    "dense": (
        "_backward_FullyConnected",
        {"num_hidden": "5"},
        [(8, 5), (8, 12), (5, 12)],
        [(8, 12), (5, 12), (5,)],
    ),
    "deconvolution": (
        "_backward_Deconvolution",
        {"kernel": "(2, 2)", "stride": "(2, 2)", "num_filter": "8", "no_bias": "False"},
        [(2, 8, 8, 8), (2, 3, 4, 4), (3, 8, 2, 2), (8,)],
        [(2, 3, 4, 4), (3, 8, 2, 2), (8,)],
    ),
    "dot": ("_backward_dot", {}, [(8, 5), (8, 12), (12, 5)], [(8, 12), (12, 5)]),
    "difference": ("_backward_sub", {}, [(8, 5)], [(8, 5)] * 2),
    "product": ("_backward_mul", {}, [(8, 5)] * 3, [(8, 5)] * 2),
    "quotient": ("_backward_div", {}, [(8, 5)] * 3, [(8, 5)] * 2),
    "layer_norm": (
        "_backward_LayerNorm",
        {},
        [(8, 12), (8, 12), (12,), (8, 1), (8, 1)],
        [(8, 12), (12,), (12,)],
    ),
    "group_norm": (
        "_backward_GroupNorm",
        {"num_groups": "3"},
        [(2, 12, 5), (2, 12, 5), (3,), (2, 3), (2, 3)],
        [(2, 12, 5), (3,), (3,)],
    ),
    **{
        f"broadcast_{name}": (f"_backward_broadcast_{name}", {}, read, [(8, 5), (8, 1)])
        for name, read in {
            "add": [(8, 5)],
            "sub": [(8, 5)],
            "mul": [(8, 5), (8, 5), (8, 1)],
            "div": [(8, 5), (8, 5), (8, 1)],
        }.items()
    },
}


def called(name: str, unread_outputs: Sequence[int]) -> list[np.ndarray]:
    """What such a call leaves in outputs that were ones."""
    op, attrs, read, written = CALLS[name]
    rng = np.random.default_rng(0)
    inputs = [mx.nd.array(rng.standard_normal(shape)) for shape in read]
    outputs = [mx.nd.ones(shape) for shape in written]
    Call(op, attrs, Handles(inputs), Handles(outputs), unread_outputs)()
    return [output.asnumpy() for output in outputs]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_asked_for_is_left_alone(name: str) -> None:
    complete = called(name, ())
    noutputs = len(complete)
    for left_out in ({0}, set(range(1, noutputs)), set(range(noutputs))):
        for place, found in enumerate(called(name, left_out)):
            expected = np.ones_like(found) if place in left_out else complete[place]
            assert np.array_equal(found, expected), (left_out, place)
