"""Networks as memplan sees them, against what MXNet's executor says of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon.model_zoo import vision

from helpers.amounts import long_except
from helpers.executors import traced_as_mxnet
from helpers.networks import (
    Network,
    dropout_net,
    hinted_resnet,
    residual_net,
    two_headed_net,
    unrolled_lstm,
)
from memplan.errors import ArgumentError, MemplanError, TraceError
from memplan.memory.blocks import allocate
from memplan.mxnet.trace.build import Trace, trace
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate

ZOO = """
    alexnet densenet121 densenet161 densenet169 densenet201 inception_v3 mobilenet0_25 mobilenet0_5
    mobilenet0_75 mobilenet1_0 mobilenet_v2_0_25 mobilenet_v2_0_5 mobilenet_v2_0_75
    mobilenet_v2_1_0 resnet101_v1 resnet101_v2 resnet152_v1 resnet152_v2 resnet18_v1 resnet18_v2
    resnet34_v1 resnet34_v2 resnet50_v1 resnet50_v2 squeezenet1_0 squeezenet1_1 vgg11 vgg11_bn
    vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn
""".split()


def zoo_network(name: str, batch: int = 32) -> Network:
    scores = getattr(vision, name)()(mx.sym.Variable("data"))
    size = 299 if name == "inception_v3" else 224
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (batch, 3, size, size)}


OWN: dict[str, Callable[[], Network]] = {
    "residual": lambda: residual_net(batch=256, size=32),
    "hinted": lambda: hinted_resnet(batch=256, size=32),
    "dropout": lambda: dropout_net(batch=1 << 17),
    "two heads": lambda: two_headed_net(batch=1024, size=32),
    "lstm": lambda: unrolled_lstm(batch=1 << 14),
}


@pytest.mark.parametrize(
    "name", long_except(ZOO, ["alexnet", "mobilenet_v2_0_25", "resnet18_v2", "squeezenet1_1"])
)
def test_model_zoo(name: str) -> None:
    traced_as_mxnet(*zoo_network(name))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("grad_req", [None, "write", "add"])
def test_own_networks(name: str, grad_req: str | None) -> None:
    traced_as_mxnet(*OWN[name](), grad_req=grad_req)


@pytest.mark.parametrize("name", OWN)
def test_both_opinions_of_mirrored_networks(name: str) -> None:
    symbol, shapes = OWN[name]()
    graph = trace(symbol, shapes=shapes).graph
    draw = random.Random(name)
    for share in (0.0, 0.3, 1.0):
        flags = {op for op in flaggable(graph) if draw.random() < share}
        schedule = mirror(graph, flags)
        verdict = validate(schedule)
        assert verdict.valid, verdict.reason
        assert verdict.peak_nbytes == simulate(schedule).peak_nbytes > 0


def test_forward_backward_and_heads() -> None:
    symbol, shapes = dropout_net(layers=1)
    result = trace(symbol, shapes=shapes)
    graph = result.graph
    names = [op.name for op in graph.ops]
    assert names[: graph.nforward] == ["fc0", "relu0", "dropout0", "flatten", "scores", "softmax"]
    assert names[graph.nforward :] == [
        "softmax_backward",
        "scores_backward",
        "flatten_backward",
        "dropout0_backward",
        "relu0_backward",
        "fc0_backward",
    ]
    differentiated = [op.differentiates for op in graph.ops]
    assert differentiated == [None] * 6 + [5, 4, 3, 2, 1, 0]
    heads = [graph.tensors[head].name for head in graph.heads]
    assert heads == [
        "softmax[0]",
        "fc0_backward[1]",
        "fc0_backward[2]",
        "scores_backward[1]",
        "scores_backward[2]",
    ]
    # The gradients of parameters lie in arrays that exist anyway; nobody wants that of the data.
    sizes = [graph.tensors[tensor].nbytes for tensor in graph.ops[-1].outputs]
    assert sizes == [8 * 20 * 4, 0, 0]
    assert result.grad_req == {
        "data": "null",
        "fc0_weight": "write",
        "fc0_bias": "write",
        "scores_weight": "write",
        "scores_bias": "write",
        "softmax_label": "null",
    }


def test_fixed_bytes() -> None:
    symbol, shapes = dropout_net(layers=1)
    parameters = 20 * 32 + 32 + 32 * 10 + 10
    data, label = 8 * 20, 8
    given = trace(symbol, shapes=shapes).graph.fixed_nbytes
    assert given == 4 * (2 * parameters + data + label)
    every = trace(symbol, shapes=shapes, grad_req="write").graph.fixed_nbytes
    assert every == given + 4 * (data + label)
    # No loss: BatchNorm's parameters, statistics, data and head gradient.
    batch_norm = mx.sym.BatchNorm(mx.sym.Variable("data"), name="bn")
    statistics = trace(batch_norm, shapes={"data": (2, 3, 5, 5)}).graph.fixed_nbytes
    assert statistics == 4 * (2 * 2 * 3 + 2 * 3 + 150 + 150)


def test_liveness_is_per_tensor() -> None:
    """BatchNorm's backward op reads its mean and variance, but not its main output."""
    symbol, shapes = residual_net(units=1)
    graph = trace(symbol, shapes=shapes).graph
    backward = next(op for op in graph.ops if op.name == "unit0_a_bn_backward")
    assert backward.differentiates is not None
    outputs = graph.ops[backward.differentiates].outputs
    assert len(outputs) == 3
    assert set(outputs) & set(backward.inputs) == set(outputs[1:])


def test_what_may_run_twice() -> None:
    symbol, shapes = dropout_net(layers=2)
    graph = trace(symbol, shapes=shapes).graph
    never = [op.name for op in graph.ops[: graph.nforward] if not op.recomputable]
    assert never == ["dropout0", "dropout1"]
    assert not any(op.recomputable for op in graph.ops[graph.nforward :])


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (mx.sym.relu(mx.sym.Variable("data")), True),
        (mx.sym.BatchNorm(mx.sym.Variable("data")), True),
        (mx.sym.LeakyReLU(mx.sym.Variable("data"), act_type="leaky"), True),
        (mx.sym.LeakyReLU(mx.sym.Variable("data"), act_type="rrelu"), False),
        (mx.sym.random.normal_like(mx.sym.Variable("data")), False),
        (mx.sym.BlockGrad(mx.sym.shuffle(mx.sym.Variable("data"))), False),
        (mx.sym.LayerNorm(mx.sym.Variable("data")), False),
    ],
)
def test_one_op_that_may_run_twice_or_not(symbol: mx.sym.Symbol, expected: bool) -> None:
    graph = trace(symbol, shapes={"data": (2, 3)}, grad_req="write").graph
    assert graph.ops[0].recomputable is expected


def test_flags_are_taken_off_and_hints_kept() -> None:
    symbol, shapes = hinted_resnet()
    plain = trace(symbol, shapes=shapes)
    hinted = [op.name for op in plain.graph.ops if op.mirror_stage == "True"]
    assert len(hinted) == 5
    symbol.get_internals()["last_bn_output"]._set_attr(force_mirroring="True")
    flagged = trace(symbol, shapes=shapes)
    assert flagged.graph == plain.graph
    assert "force_mirroring" not in flagged.symbol.tojson()
    assert "force_mirroring" in symbol.tojson()


def test_sources_are_the_nodes_of_the_symbol() -> None:
    symbol, shapes = two_headed_net()
    result = trace(symbol, shapes=shapes)
    nodes = json.loads(result.symbol.tojson())["nodes"]
    names = [[nodes[index]["name"] for index in source] for source in result.sources]
    assert names == [[op.name] for op in result.graph.ops[: result.graph.nforward]]


def half_and_single(**options: Any) -> tuple[Trace, Trace]:
    symbol, shapes = residual_net(batch=256, size=32)
    return traced_as_mxnet(symbol, shapes, **options), traced_as_mxnet(symbol, shapes)


def test_half_floats_are_half_as_large() -> None:
    half, single = half_and_single(type_dict={"data": "float16"})
    assert half.dtypes["unit0_conv1_weight"] == "float16"
    allocation = allocate(Schedule.unplanned(half.graph))
    assert allocation == allocate(Schedule.unplanned(half.graph), match_range=16)
    assert allocation.reported_nbytes == allocate(Schedule.unplanned(single.graph)).nbytes
    # BatchNorm's statistics stay float32: a few bytes more than half.
    assert 0.5 <= allocation.nbytes / allocation.reported_nbytes < 0.501


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32")])
def test_dtypes_of_any_form(dtype: Any) -> None:
    symbol, shapes = dropout_net()
    assert trace(symbol, shapes=shapes, type_dict={"data": dtype}).dtypes["data"] == "float32"


def test_a_variable_may_carry_its_shape_and_dtype() -> None:
    data = mx.sym.Variable("data", shape=(1 << 20, 20), dtype="float64")
    weight = mx.sym.Variable("weight", dtype="float64")
    symbol = mx.sym.FullyConnected(data, weight, no_bias=True, num_hidden=8)
    result = traced_as_mxnet(mx.sym.relu(symbol), {})
    assert result.shapes == {"data": (1 << 20, 20), "weight": (8, 20)}
    assert result.dtypes == {"data": "float64", "weight": "float64"}
    assert result.grad_req == {"data": "write", "weight": "write"}
    allocation = allocate(Schedule.unplanned(result.graph))
    assert allocation.nbytes == 2 * allocation.reported_nbytes


@pytest.mark.parametrize(
    ("grad_req", "expected"),
    [
        ("write", {"data": "write", "fc_weight": "write", "fc_bias": "write"}),
        ("add", {"data": "add", "fc_weight": "add", "fc_bias": "add"}),
        (None, {"data": "null", "fc_weight": "write", "fc_bias": "write"}),
        (
            {"data": "add", "fc_weight": "null"},
            {"data": "add", "fc_weight": "null", "fc_bias": "null"},
        ),
    ],
)
def test_grad_req(grad_req: Any, expected: dict[str, str]) -> None:
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=256, name="fc")
    result = traced_as_mxnet(symbol, {"data": (1 << 16, 256)}, grad_req=grad_req)
    assert result.grad_req == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": {"dat": (8, 20)}}, "a shape was given for 'dat', which is no argument"),
        ({"shapes": {}}, "the shape of 'data', .* is unknown"),
        ({"shapes": {"data": (0, 20)}}, "the shape of 'data', .* is unknown"),
        ({"shapes": {"data": 8}}, "the shape of 'data' must be a tuple of integers, got 8"),
        ({"shapes": {"data": ("a", 1)}}, "the shape of 'data' must be a tuple of integers"),
        ({"shapes": {"data": {8, 20}}}, "the shape of 'data' must be a tuple of integers"),
        ({"shapes": {"data": {8: 1, 20: 2}}}, "the shape of 'data' must be a tuple of integers"),
        ({"shapes": {"data": b"ab"}}, "the shape of 'data' must be a tuple of integers"),
        (
            {"shapes": {"data": (8, 20), "fc1_weight": (3, 3)}},
            r"'fc1_weight': \(3, 3\)} do not fit the network: .*operator fc1: Shape inconsistent",
        ),
        ({"type_dict": {"dat": "float16"}}, "a dtype was given for 'dat', which is no argument"),
        ({"type_dict": {"data": "float17"}}, "the dtype of 'data' is 'float17', which MXNet"),
        ({"type_dict": {"data": "i4,(2"}}, r"the dtype of 'data' is 'i4,\(2', which MXNet"),
        ({"type_dict": {"data": "uint16"}}, "'uint16', which MXNet does not have; it has float32"),
        (
            {"type_dict": {"data": "float16", "fc0_weight": "float64"}},
            "the dtypes do not fit the network: .*fc0",
        ),
        ({"grad_req": "wrte"}, "grad_req of 'data' is 'wrte'; it must be 'write', 'add' or 'null'"),
        ({"grad_req": {"fc0_weight": "wrte"}}, "grad_req of 'fc0_weight' is 'wrte'"),
        ({"grad_req": {"fc9_weight": "add"}}, "grad_req names 'fc9_weight'; the arguments are"),
        ({"grad_req": "null"}, "no argument wants a gradient"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    symbol, shapes = dropout_net()
    with pytest.raises(ArgumentError, match=message):
        trace(symbol, **{"shapes": shapes, **options})


@pytest.mark.parametrize("shapes", [{}, {"data": (8, 20)}])
def test_a_symbol_without_outputs(shapes: dict[str, tuple[int, ...]]) -> None:
    """As the JSON of one whose "heads" somebody has emptied; MXNet loads it."""
    data = json.loads(dropout_net()[0].tojson()) | {"heads": []}
    with pytest.raises(ArgumentError, match=r"the network has no outputs, so .* 'heads' are the"):
        trace(mx.sym.load_json(json.dumps(data)), shapes=shapes)


def test_a_network_without_arguments() -> None:
    with pytest.raises(ArgumentError, match="'data', which is no argument of the network; it has"):
        trace(mx.sym.MakeLoss(mx.sym.ones((2, 3))), shapes={"data": (8, 20)})


@pytest.mark.parametrize(
    "sizes",
    [(-2, 3), (-(10**30), 3), (10**30, 0), (10**30, -1), (2**33, 0), (10**5000, 3)],
    ids=range(6),
)
def test_sizes_that_no_array_has(sizes: tuple[int, int]) -> None:
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2))
    with pytest.raises(MemplanError, match=r"negative size|MXNet 1\.9\.1 holds fewer than"):
        trace(symbol, shapes={"data": sizes})


def test_a_shape_that_does_not_fit_within_is_an_error_of_memplan() -> None:
    """MXNet infers a state of a BatchNorm otherwise than the weight that it is, too."""
    data, both = mx.sym.Variable("data"), mx.sym.Variable("both")
    net = mx.sym.Convolution(data, both, num_filter=8, kernel=(3, 3), no_bias=True)
    net = mx.sym.SoftmaxOutput(mx.sym.Flatten(mx.sym.BatchNorm(net, moving_mean=both)))
    with pytest.raises(TraceError, match="MXNet cannot infer the shapes of the network"):
        trace(net, shapes={"data": (4, 3, 8, 8)})


def test_two_variables_of_one_name() -> None:
    symbol = mx.sym.dot(mx.sym.Variable("one"), mx.sym.Variable("one"))
    with pytest.raises(TraceError, match="two different variables are both named 'one'"):
        trace(symbol, shapes={"one": (2, 2)}, grad_req="write")


@pytest.mark.parametrize("as_view", [False, True])
def test_a_hard_sigmoid_that_shares_a_gradient_is_refused(as_view: bool) -> None:
    """The gradient of such a sum is wrong in MXNet's own executor."""
    x = mx.sym.tanh(mx.sym.Variable("x"))
    gate = mx.sym.hard_sigmoid(x, name="gate")
    other = mx.sym.reshape(mx.sym.sin(x), shape=(-1,)) if as_view else mx.sym.sin(x)
    total = other + (mx.sym.reshape(gate, shape=(-1,)) if as_view else gate)
    with pytest.raises(TraceError, match=r"'gate' \(hard_sigmoid\) shares the gradient"):
        trace(mx.sym.MakeLoss(total), shapes={"x": (2, 4)}, grad_req="write")


def test_a_hard_sigmoid_with_a_gradient_of_its_own() -> None:
    x = mx.sym.tanh(mx.sym.Variable("x"))
    gated = x * mx.sym.hard_sigmoid(x, name="gate")
    graph = trace(mx.sym.MakeLoss(gated), shapes={"x": (2, 4)}, grad_req="write").graph
    assert any(op.name == "gate_backward" for op in graph.ops)


def averaged(x: mx.sym.Symbol, weights: Any = None) -> mx.sym.Symbol:
    x = x.as_np_ndarray()
    weights = weights if weights is None else weights.as_np_ndarray()
    return mx.sym.np.average(x, axis=1, weights=weights).as_nd_ndarray()


@pytest.fixture
def numpy_shapes() -> Iterator[None]:
    with mx.util.np_shape(True):
        yield


@pytest.mark.usefixtures("numpy_shapes")
def test_an_average_without_weights_that_shares_a_gradient_is_refused() -> None:
    """MXNet divides that gradient where it lies, for the other op, too."""
    x = mx.sym.tanh(mx.sym.Variable("x"))
    other = mx.sym.sum(mx.sym.sin(x), axis=1)
    for total in (averaged(x) + other, mx.sym.add_n(other, mx.sym.cos(other), averaged(x))):
        with pytest.raises(TraceError, match=r"\(np.average without weights\) shares .* np.mean"):
            trace(mx.sym.MakeLoss(total), shapes={"x": (2, 4)}, grad_req="write")
    for harmless in (averaged(x) * other, averaged(x, mx.sym.exp(x)) + other):
        trace(mx.sym.MakeLoss(harmless), shapes={"x": (2, 4)}, grad_req="write")


def test_ops_that_a_backend_has_fused_are_refused() -> None:
    network, shapes = residual_net()
    fused = network.get_backend_symbol("MKLDNN")
    with pytest.raises(TraceError, match=r"\(_sg_mkldnn_conv\) .*get_backend_symbol"):
        trace(fused, shapes=shapes)


@pytest.mark.parametrize("shapes", [{}, {"behind_weight": (3, 8), "behind_bias": (3,)}])
def test_an_op_of_unknown_shape_is_named_before_what_stands_behind_it(shapes: Any) -> None:
    """Of the parameters behind it no shape is known, either, and to give them helps nobody."""
    kept = mx.sym.contrib.boolean_mask(mx.sym.Variable("x"), mx.sym.Variable("mask"), name="kept")
    body = mx.sym.FullyConnected(kept, num_hidden=3, name="behind")
    symbol = mx.sym.SoftmaxOutput(body, name="softmax")
    with pytest.raises(TraceError, match=r"the shape of 'kept' .* is not known before it runs"):
        trace(symbol, shapes={"x": (4, 8), "mask": (4,), **shapes})
    with pytest.raises(ArgumentError, match=r"'x', 'mask', .* is unknown; name the input shapes"):
        trace(symbol, shapes={})


def test_a_gradient_that_depends_on_the_memory_is_refused() -> None:
    scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3)
    symbol = mx.sym.SoftmaxOutput(scores, name="softmax", out_grad=True)
    with pytest.raises(TraceError, match=r"'softmax' \(SoftmaxOutput\) has out_grad=True"):
        trace(symbol, shapes={"data": (2, 4)})
