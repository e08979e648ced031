"""MXNet's mirroring: predicted exactly, written on a copy, and never where it computes wrongly."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon.model_zoo import vision

from helpers.executors import ops
from helpers.networks import (
    Network,
    dropout_net,
    hinted_resnet,
    residual_net,
    two_headed_net,
    unrolled_lstm,
)
from memplan.errors import ScheduleError
from memplan.memory.blocks import allocate
from memplan.mxnet.profile import profile
from memplan.mxnet.realise.measure import executor_description
from memplan.mxnet.realise.mirror import annotate, unread_copies, warn_if_overridden
from memplan.mxnet.trace.build import Trace, trace
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import may_be_mirrored
from memplan.mxnet.trace.probe import allocated_mib
from memplan.step.mirroring import flaggable, mirror

Symbol = mx.sym.Symbol
Flags = frozenset[int]
V = mx.sym.Variable


# --- The sequence of ops that MXNet executes ------------------------------------------------------


def zoo(name: str) -> Network:
    scores = getattr(vision, name)()(mx.sym.Variable("data"))
    size = 299 if name == "inception_v3" else 224
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 3, size, size)}


def twins() -> Network:
    """Equal ops on equal inputs, which MXNet merges, and one array that is two gradients."""
    shape = (1 << 20, 4)
    body = V("data") * V("scale", shape=shape)
    first, second = (mx.sym.sin(mx.sym.exp(body)) for _ in "ab")
    body = first * second + V("left", shape=shape) + V("right", shape=shape)
    return mx.sym.tanh(mx.sym.tanh(body)), {"data": shape}


NETWORKS: dict[str, Callable[[], Network]] = {
    "residual": lambda: residual_net(batch=256, size=32),
    "hinted": lambda: hinted_resnet(batch=256, size=32),
    "dropout": lambda: dropout_net(batch=1 << 17),
    "two heads": lambda: two_headed_net(batch=1024, size=32),
    "lstm": lambda: unrolled_lstm(batch=1 << 14),
    "twins": twins,
    **{
        name: lambda name=name: zoo(name)
        for name in """alexnet densenet121 inception_v3 mobilenet0_25 mobilenet_v2_0_25 resnet18_v1
        resnet50_v2 squeezenet1_1 vgg11_bn""".split()
    },
}


def random_flags(traced: Trace, draw: random.Random) -> Flags:
    """Each op with the same chance, which is itself drawn."""
    share = draw.choice((0.2, 0.5, 0.8))
    return frozenset(op for op in flaggable(traced.graph) if draw.random() < share)


def executed(traced: Trace, flags: Flags) -> list[tuple[str, str]]:
    """Operator and name of every step of the mirrored schedule, as MXNet names them."""
    flagged = {traced.nodes[op].name for op in flags}

    def name(node: Node) -> str:
        if node.forward is not None:
            base = node.forward.name
            renamed = f"{base}_mirror" if base in flagged else base
        elif node.name.endswith("_copy"):  # of a gradient that is wanted twice
            base, renamed = node.inputs[0][0].name, name(node.inputs[0][0])
        else:
            return node.name
        return renamed + node.name.removeprefix(base)

    seen: set[int] = set()
    result = []
    for op in mirror(traced.graph, flags).ops:
        node = traced.nodes[op]
        result.append((node.op, name(node) + ("_mirror" if op in seen else "")))
        seen.add(op)
    return result


@pytest.mark.parametrize("name", NETWORKS)
def test_predicted_as_mxnet_executes_and_allocates(name: str) -> None:
    symbol, shapes = NETWORKS[name]()
    traced = trace(symbol, shapes=shapes)
    draw = random.Random(name)
    for flags in (frozenset(flaggable(traced.graph)), *(random_flags(traced, draw) for _ in "abc")):
        description = executor_description(annotate(traced, flags), traced)
        pairs = zip_longest(executed(traced, flags), ops(description))
        assert all(predicted == actual for predicted, actual in pairs)
        total = allocated_mib(description)
        assert total >= 20, "too small to tell"
        assert allocate(mirror(traced.graph, flags)).reported_nbytes >> 20 == total


# --- What the annotator writes --------------------------------------------------------------------


def attributes(symbol: Symbol) -> dict[str, dict[str, str]]:
    return {node["name"]: node.get("attrs", {}) for node in json.loads(symbol.tojson())["nodes"]}


def flagged_names(symbol: Symbol) -> set[str]:
    return {name for name, attrs in attributes(symbol).items() if "__force_mirroring__" in attrs}


def by_name(traced: Trace, *names: str) -> Flags:
    found = frozenset(i for i, op in enumerate(traced.graph.ops) if op.name in names)
    assert len(found) == len(names)
    return found


def test_the_users_symbol_is_untouched() -> None:
    symbol, shapes = hinted_resnet()
    before = symbol.tojson()
    traced = trace(symbol, shapes=shapes)
    plain = traced.symbol.tojson()
    planned = annotate(traced, by_name(traced, "last_bn", "last_leaky"))
    assert flagged_names(planned) == {"last_bn", "last_leaky"}
    assert symbol.tojson() == before
    assert traced.symbol.tojson() == plain


def test_hints_are_kept() -> None:
    symbol, shapes = hinted_resnet()
    traced = trace(symbol, shapes=shapes)
    planned = annotate(traced, frozenset(flaggable(traced.graph)))
    hints = {name for name, attrs in attributes(planned).items() if "__mirror_stage__" in attrs}
    assert hints == {op.name for op in traced.graph.ops if op.mirror_stage == "True"} != set()


def test_flags_of_the_user_give_way_to_the_plan() -> None:
    symbol, shapes = dropout_net()
    symbol.get_internals()["relu0_output"]._set_attr(force_mirroring="True")
    traced = trace(symbol, shapes=shapes)
    assert flagged_names(annotate(traced, by_name(traced, "relu1"))) == {"relu1"}


def test_merged_ops_are_flagged_alike() -> None:
    """MXNet merges equal ops only if their attributes are equal too."""
    symbol, shapes = twins()
    traced = trace(symbol, shapes=shapes)
    (merged,) = [op for op in range(traced.graph.nforward) if traced.nodes[op].op == "sin"]
    assert len(traced.sources[merged]) == 2
    planned = annotate(traced, frozenset({merged}))
    assert len(flagged_names(planned)) == 2
    executed_ops = [op for op, _ in ops(executor_description(planned, traced))]
    assert executed_ops.count("exp") == 1
    assert executed_ops.count("sin") == 2  # the op and its copy


def batch_norms() -> Network:
    body = V("data")
    for name, options in {
        "kept": {},
        "usual": {"momentum": 0.81},
        "default": {},
        "fixed": {"use_global_stats": True},
        "native": {"cudnn_off": True},
    }.items():
        body = mx.sym.sin(mx.sym.BatchNorm(body, name=name, **options))
    return body, {"data": (4, 3, 5, 5)}


def test_momentum_on_cudnn() -> None:
    """Two updates by √m are one by m; only where cuDNN makes them, and only on copied ops."""
    symbol, shapes = batch_norms()
    traced = trace(symbol, shapes=shapes)
    flags = frozenset(flaggable(traced.graph)) - by_name(traced, "kept")

    def momenta(symbol: Symbol) -> dict[str, float]:
        found = attributes(symbol)
        names = ("kept", "usual", "default", "fixed", "native")
        return {name: float(found[name].get("momentum", 0.9)) for name in names}

    before = {"kept": 0.9, "usual": 0.81, "default": 0.9, "fixed": 0.9, "native": 0.9}
    assert momenta(annotate(traced, flags)) == before
    planned = momenta(annotate(traced, flags, cudnn=True))
    assert planned == {**before, "usual": 0.9, "default": 0.9**0.5}
    statistics, batch = 2.0, 5.0
    for _ in range(2):
        statistics = planned["usual"] * statistics + (1 - planned["usual"]) * batch
    assert statistics == pytest.approx(0.81 * 2.0 + (1 - 0.81) * 5.0, rel=1e-12)


def test_what_undoes_a_plan_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, shapes = residual_net()
    traced = trace(symbol, shapes=shapes)
    expected = executed(traced, frozenset())
    assert ops(executor_description(annotate(traced, frozenset()), traced)) == expected
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    with pytest.warns(UserWarning, match="MXNET_BACKWARD_DO_MIRROR is set"):
        planned = annotate(traced, frozenset())
    assert ops(executor_description(planned, traced)) != expected
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_overridden()
    assert ops(executor_description(planned, traced)) == expected


# --- The numbers ----------------------------------------------------------------------------------

SEED = 7
STEPS = 2


def arrays(traced: Trace, names: list[str]) -> dict[str, mx.nd.NDArray]:
    """Random numbers; small indices for a label, positive ones where the name says so."""
    result = {}
    for name in names:
        draw = np.random.default_rng(sum(map(ord, name)))
        shape = traced.shapes[name]
        if name.endswith("label"):
            numbers = draw.integers(0, 2, shape)
        elif name.endswith(("positive", "var")):
            numbers = draw.uniform(0.5, 1.5, shape)
        else:
            numbers = draw.normal(0.0, 0.5, shape)
        result[name] = mx.nd.array(numbers, dtype=traced.dtypes[name])
    return result


def training_run(symbol: Symbol, traced: Trace) -> dict[str, bytes]:
    """Every output, gradient, weight and auxiliary state of a few steps of gradient descent."""
    weights = arrays(traced, symbol.list_arguments())
    states = arrays(traced, symbol.list_auxiliary_states())
    gradients = {
        name: mx.nd.zeros(traced.shapes[name], dtype=traced.dtypes[name])
        for name in weights
        if traced.grad_req[name] != "null"
    }
    executor = symbol.bind(
        mx.cpu(), weights, gradients, grad_req=dict(traced.grad_req), aux_states=states
    )
    mx.random.seed(SEED)
    np.random.seed(SEED)
    found = {}
    for step in range(STEPS):
        outputs = executor.forward(is_train=True)
        draw = np.random.default_rng(step)
        executor.backward([mx.nd.array(draw.normal(size=o.shape), dtype=o.dtype) for o in outputs])
        mx.nd.waitall()  # asnumpy() does not wait for auxiliary states
        named = {"output": dict(enumerate(outputs)), "gradient": gradients, "state": states}
        for kind, values in named.items():
            for name, value in values.items():
                found[f"{kind} {name} of step {step}"] = value.asnumpy().tobytes()
        for name, gradient in gradients.items():
            weights[name] -= 0.01 * gradient
    return found


def assert_bit_identical(symbol: Symbol, traced: Trace, sets_of_flags: Iterator[Flags]) -> None:
    expected = training_run(symbol, traced)
    for flags in sets_of_flags:
        actual = training_run(annotate(traced, flags), traced)
        names = [traced.graph.ops[op].name for op in sorted(flags)]
        differing = [name for name in expected if actual[name] != expected[name]]
        assert not differing, f"flagged {names}"


def some_flags(traced: Trace, nrandom: int = 3) -> Iterator[Flags]:
    """All that may be flagged, each op alone, and a few random sets."""
    candidates = flaggable(traced.graph)
    yield frozenset(candidates)
    for op in candidates:
        yield frozenset({op})
    draw = random.Random(SEED)
    for _ in range(nrandom):
        yield random_flags(traced, draw)


S = mx.sym
CONTRIB = mx.sym.contrib
INTERNAL = mx.sym._internal
NP, NPX = mx.sym.np, mx.sym.npx
SHELL = ("scaled", "input", "reader", "shifted", "output")


def shelled(call: Callable[[Symbol], Symbol], shape: tuple[int, ...]) -> Network:
    """``call`` in the middle of a small network whose other ops may all be flagged."""
    scale = V("scale", shape=(1,) * len(shape))
    body = S.sin(S.broadcast_mul(V("data"), scale, name="scaled"), name="input")
    # The backward op of "output" reads its input, those of "reader" and "shifted" do not.
    body = S._internal._plus_scalar(S.sin(call(body), name="reader"), scalar=1.0, name="shifted")
    return S.square(body, name="output"), {"data": shape}


def vector(name: str, size: int = 4) -> Symbol:
    """A parameter that broadcasts along the channels."""
    return V(name, shape=(1, size, 1, 1))


def half(x: Symbol, axis: int = 1, end: int = 2) -> Symbol:
    return S.slice_axis(x, axis=axis, begin=0, end=end)


def product(parts: Symbol) -> Symbol:
    return parts[0] * parts[1]


def self_attention(qkv: Symbol) -> Symbol:
    scores = CONTRIB.interleaved_matmul_selfatt_qk(qkv, heads=2)
    return CONTRIB.interleaved_matmul_selfatt_valatt(qkv, scores, heads=2)


def affine(x: Symbol) -> Symbol:
    return S.FullyConnected(x, num_hidden=6, name="theta")


def definite(x: Symbol) -> Symbol:
    """A symmetric positive definite matrix."""
    return S.linalg_syrk(x) + INTERNAL._eye(N=4)


def numpy(call: Callable[[Any], Any]) -> Callable[[Symbol], Symbol]:
    return lambda x: call(x.as_np_ndarray()).as_nd_ndarray()


IMAGE, MATRIX, SEQUENCE = (2, 4, 8, 8), (4, 6), (5, 3, 4)
LENGTHS = {"sequence_length": 2 + V("length_label", shape=(3,)), "use_sequence_length": True}
QKV = {"num_hidden": 24, "flatten": False, "name": "qkv"}
SQUARE_PAD = (0, 0, 0, 0, 1, 1, 1, 1)

# Ops in common use, each in the network that the names of the tests call it by.
ON_IMAGES: dict[str, Callable[[Symbol], Symbol]] = {
    "prelu": lambda x: S.LeakyReLU(x, V("slope"), act_type="prelu"),
    "convolution": lambda x: S.Convolution(x, kernel=(3, 3), num_filter=3),
    "grouped": lambda x: S.Convolution(
        x, kernel=(3, 3), dilate=(2, 2), num_filter=4, num_group=2, no_bias=True
    ),
    "depthwise": lambda x: S.Convolution(x, kernel=(3, 3), num_filter=4, num_group=4),
    "pointwise": lambda x: S.Convolution(x, kernel=(1, 1), stride=(2, 2), num_filter=4),
    "deconvolution": lambda x: S.Deconvolution(x, kernel=(3, 3), stride=(2, 2), num_filter=3),
    "fully connected": lambda x: S.FullyConnected(x, num_hidden=5),
    "dense": lambda x: S.FullyConnected(x, num_hidden=5, no_bias=True, flatten=False),
    "batch norm": lambda x: S.BatchNorm(x, fix_gamma=False),
    "batch norm, fixed gamma": lambda x: S.BatchNorm(x, fix_gamma=True),
    "batch norm, global": lambda x: S.BatchNorm(x, fix_gamma=False, use_global_stats=True),
    "batch norm, axis": lambda x: S.BatchNorm(x, fix_gamma=False, axis=2),
    "batch norm, outputs": lambda x: S.broadcast_add(
        *S.BatchNorm(x, axis=3, output_mean_var=True)[:2]
    ),
    "instance norm": lambda x: S.InstanceNorm(x, V("gamma"), V("beta")),
    "lrn": lambda x: S.LRN(x, nsize=3),
    "concat": lambda x: S.Concat(x, S.cos(x), dim=1),
    "stack": lambda x: S.stack(x, S.cos(x), axis=1),
    "add_n": lambda x: S.add_n(x, S.sin(x), S.cos(x)),
    "slice channel": lambda x: product(S.SliceChannel(x, num_outputs=2)),
    "split": lambda x: product(S.split(x, num_outputs=4, squeeze_axis=True)),
    "slice": lambda x: S.slice(x, begin=(0, 1), end=(2, 3)),
    "slice_axis": lambda x: S.slice_axis(x, axis=2, begin=1, end=5),
    "slice_like": lambda x: S.slice_like(x, S.BlockGrad(half(x))),
    "transpose": lambda x: S.transpose(x, axes=(0, 2, 3, 1)),
    "swap axes": lambda x: S.SwapAxis(x, dim1=1, dim2=2),
    "reshape": lambda x: S.Reshape(x, shape=(0, -1)),
    "reshape_like": lambda x: S.reshape_like(x, S.sin(x)),
    "flatten": S.Flatten,
    "squeeze": lambda x: S.squeeze(S.expand_dims(x, axis=1), axis=1),
    "tile": lambda x: S.tile(x, reps=(1, 2, 1, 1)),
    "repeat": lambda x: S.repeat(x, repeats=2, axis=1),
    "flip": lambda x: S.flip(x, axis=1),
    "pad": lambda x: S.Pad(x, mode="constant", pad_width=SQUARE_PAD),
    "pad, edge": lambda x: S.Pad(x, mode="edge", pad_width=SQUARE_PAD),
    "pad, reflect": lambda x: S.Pad(x, mode="reflect", pad_width=SQUARE_PAD),
    "depth_to_space": lambda x: S.depth_to_space(x, block_size=2),
    "space_to_depth": lambda x: S.space_to_depth(x, block_size=2),
    "broadcast_to": lambda x: S.broadcast_to(S.sum(x, axis=1, keepdims=True), shape=IMAGE),
    "broadcast_axis": lambda x: S.broadcast_axis(
        S.sum(x, axis=(1,), keepdims=True), axis=1, size=4
    ),
    "broadcast_like": lambda x: S.broadcast_like(S.sum(x, axis=1, keepdims=True), x),
    "broadcast_add": lambda x: S.broadcast_add(x, vector("other")),
    "broadcast_sub": lambda x: S.broadcast_sub(x, vector("other")),
    "broadcast_mul": lambda x: S.broadcast_mul(x, vector("other")),
    "broadcast_div": lambda x: S.broadcast_div(x, vector("other_positive")),
    "broadcast_power": lambda x: S.broadcast_power(S.exp(x), vector("other")),
    "broadcast_maximum": lambda x: S.broadcast_maximum(x, vector("other")),
    "broadcast_minimum": lambda x: S.broadcast_minimum(x, vector("other")),
    "broadcast_hypot": lambda x: S.broadcast_hypot(x, vector("other")),
    "broadcast_mod": lambda x: S.broadcast_mod(x, vector("other_positive")),
    "softmax": lambda x: S.softmax(x, axis=1),
    "softmax, warm": lambda x: S.softmax(x, temperature=2.0),
    "softmin": lambda x: S.softmin(x),
    "log_softmax": lambda x: S.log_softmax(x),
    "softmax activation": lambda x: S.SoftmaxActivation(x),
    "softmax activation, channel": lambda x: S.SoftmaxActivation(x, mode="channel"),
    "softmax output": lambda x: S.SoftmaxOutput(S.Flatten(x), V("label", shape=(2,))),
    "softmax output, multi": lambda x: S.SoftmaxOutput(
        x, V("label", shape=(2, 8, 8)), multi_output=True, use_ignore=True, ignore_label=1
    ),
    "svm output": lambda x: S.SVMOutput(S.Flatten(x), V("label", shape=(2,))),
    "linear output": lambda x: S.LinearRegressionOutput(x, V("label")),
    "logistic output": lambda x: S.LogisticRegressionOutput(x, V("label")),
    "absolute output": lambda x: S.MAERegressionOutput(x, V("label")),
    "MakeLoss": lambda x: S.MakeLoss(S.square(x)),
    "make_loss": lambda x: S.make_loss(S.square(x)),
    "BlockGrad": lambda x: x * S.BlockGrad(x),
    "sum": lambda x: S.sum(x, axis=(2, 3)),
    "mean": lambda x: S.mean(x, axis=1),
    "max": lambda x: S.max(x, axis=1),
    "min": lambda x: S.min(x, axis=(1, 2)),
    "prod": lambda x: S.prod(x, axis=1),
    "nansum": lambda x: S.nansum(x, axis=1),
    "nanprod": lambda x: S.nanprod(x, axis=1),
    "norm": lambda x: S.norm(x, axis=1),
    "norm, 1": lambda x: S.norm(x, ord=1, axis=1),
    "norm, all": lambda x: S.norm(x),
    "cumsum": lambda x: S.cumsum(x, axis=1),
    "clip": lambda x: S.clip(x, -0.3, 0.3),
    "smooth_l1": lambda x: S.smooth_l1(x, scalar=1.0),
    "where": lambda x: S.where(S.BlockGrad(x) > 0, x, S.cos(x)),
    "cast": lambda x: S.Cast(S.Cast(x, dtype="float64"), dtype="float32"),
    "amp_cast": lambda x: S.amp_cast(S.amp_cast(x, dtype="float16"), dtype="float32"),
    "identity": S.identity,
    "topk": lambda x: S.topk(x, k=2, ret_typ="value"),
    "topk, mask": lambda x: x * S.topk(x, k=2, ret_typ="mask"),
    "argsort": lambda x: x * S.BlockGrad(S.argsort(x)),
    "argmax": lambda x: S.broadcast_mul(x, S.argmax(x, axis=1, keepdims=True)),
    "argmin": lambda x: S.broadcast_mul(x, S.argmin(x, axis=1, keepdims=True)),
    "zeros_like": lambda x: x + S.zeros_like(x),
    "ones_like": lambda x: x + S.ones_like(x),
    "shape_array": lambda x: S.broadcast_mul(x, S.Cast(S.sum(S.shape_array(x)), dtype="float32")),
    "upsampling": lambda x: S.UpSampling(x, scale=2, sample_type="nearest"),
    "im2col": lambda x: S.im2col(x, kernel=(2, 2)),
    "col2im": lambda x: S.col2im(S.im2col(x, kernel=(2, 2)), kernel=(2, 2), output_size=(8, 8)),
    "adaptive pooling": lambda x: CONTRIB.AdaptiveAvgPooling2D(x, output_size=3),
    "bilinear resize": lambda x: CONTRIB.BilinearResize2D(x, height=5, width=6),
    "roi align": lambda x: CONTRIB.ROIAlign(
        x, V("roi_label", shape=(2, 5)), pooled_size=(2, 2), spatial_scale=1.0
    ),
    "quadratic": lambda x: CONTRIB.quadratic(x, a=1, b=2, c=3),
    "div_sqrt_dim": lambda x: CONTRIB.div_sqrt_dim(x),
    "gradientmultiplier": lambda x: CONTRIB.gradientmultiplier(x, scalar=2.0),
    "round_ste": lambda x: CONTRIB.round_ste(3 * x),
    "sign_ste": lambda x: CONTRIB.sign_ste(x),
    "arange_like": lambda x: S.broadcast_mul(x, CONTRIB.arange_like(x, axis=3)),
    # More than one output, not in traits._SEVERAL_OUTPUTS_SAFE: kept, and so are their neighbours.
    "split_v2": lambda x: product(S.split_v2(x, 2, axis=1)),
    "moments": lambda x: product(S.moments(x, axes=(2, 3))),
    "topk, both": lambda x: S.topk(x, k=2, ret_typ="both")[0] * 1.0,
    "roi pooling": lambda x: S.ROIPooling(
        x, V("roi_label", shape=(2, 5)), pooled_size=(2, 2), spatial_scale=1.0
    ),
    "bilinear sampler": lambda x: S.BilinearSampler(x, half(x)),
    "warp grid": lambda x: S.GridGenerator(half(x), transform_type="warp"),
    "affine grid": lambda x: S.GridGenerator(
        affine(x), transform_type="affine", target_shape=(4, 4)
    ),
    "spatial transformer": lambda x: S.SpatialTransformer(
        x, affine(x), target_shape=(4, 4), transform_type="affine", sampler_type="bilinear"
    ),
    "correlation": lambda x: S.Correlation(x, S.sin(x), max_displacement=2, pad_size=2),
    "batch norm with relu": lambda x: CONTRIB.BatchNormWithReLU(x, fix_gamma=False),
    **{
        f"activation {kind}": lambda x, kind=kind: S.Activation(x, act_type=kind)
        for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    },
    **{
        f"activation {kind}": lambda x, kind=kind: S.LeakyReLU(x, act_type=kind)
        for kind in ("leaky", "elu", "selu", "gelu")
    },
    **{
        f"{pool} pooling, {convention}": lambda x, pool=pool, convention=convention: S.Pooling(
            x,
            kernel=(3, 3),
            stride=(2, 2),
            pool_type=pool,
            pooling_convention=convention,
            p_value=2,
        )
        for pool in ("max", "avg", "sum", "lp")
        for convention in ("valid", "full")
    },
    **{
        f"global {pool} pooling": lambda x, pool=pool: S.Pooling(
            x, pool_type=pool, global_pool=True, p_value=2
        )
        for pool in ("max", "avg", "sum", "lp")
    },
    **{
        f"l2 norm, {mode}": lambda x, mode=mode: S.L2Normalization(x, mode=mode)
        for mode in ("instance", "channel", "spatial")
    },
    **{
        name: lambda x, name=name: getattr(S, name)(0.2 + 0.6 * S.sigmoid(x))
        for name in """abs arccos arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees erf
        erfinv exp expm1 fix floor gamma gammaln log log10 log1p log2 negative radians rcbrt
        reciprocal relu rint round rsqrt sigmoid sign sin sinh softsign sqrt square tan tanh
        trunc""".split()
    },
    "arccosh": lambda x: S.arccosh(1.1 + S.sigmoid(x)),
    **{
        name: lambda x, name=name: getattr(INTERNAL, name)(S.exp(x), 0.5 + S.sigmoid(x))
        for name in "_plus _minus _mul _div _maximum _minimum _power _hypot _mod".split()
    },
    **{
        name: lambda x, name=name: x * getattr(INTERNAL, name)(x, S.sin(x))
        for name in "_equal _not_equal _greater _lesser _logical_and _logical_xor".split()
    },
    **{
        name: lambda x, name=name: getattr(INTERNAL, name)(0.5 + S.sigmoid(x), scalar=1.2)
        for name in """_plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar
        _rdiv_scalar _power_scalar _rpower_scalar _maximum_scalar _minimum_scalar _mod_scalar
        _rmod_scalar _hypot_scalar""".split()
    },
}
ON_MATRICES: dict[str, Callable[[Symbol], Symbol]] = {
    "dot": lambda x: S.dot(x, V("weight", shape=(6, 3))),
    "dot, itself": lambda x: S.dot(x, x, transpose_b=True),
    "batch norm, matrix": lambda x: S.BatchNorm(x, fix_gamma=False),
    "gemm2": lambda x: S.linalg_gemm2(x, x, transpose_b=True),
    "gemm": lambda x: S.linalg_gemm(x, x, S.linalg_syrk(x), transpose_b=True),
    "syrk": S.linalg_syrk,
    "potrf": lambda x: S.linalg_potrf(definite(x)),
    "potri": lambda x: S.linalg_potri(S.linalg_potrf(definite(x))),
    "trmm": lambda x: S.linalg_trmm(S.linalg_syrk(x), x),
    "trsm": lambda x: S.linalg_trsm(S.linalg_potrf(definite(x)), x),
    "sumlogdiag": lambda x: S.linalg_sumlogdiag(definite(x)),
    "inverse": lambda x: S.linalg_inverse(definite(x)),
    "det": lambda x: S.linalg_det(definite(x)),
    "slogdet": lambda x: S.linalg_slogdet(definite(x))[1],
    "gelqf": lambda x: S.linalg_gemm2(*reversed(list(S.linalg_gelqf(x)))),
    "extractdiag": lambda x: S.linalg_extractdiag(S.linalg_syrk(x)),
    "makediag": lambda x: S.linalg_makediag(x),
    "extracttrian": lambda x: S.linalg_extracttrian(S.linalg_syrk(x)),
    "maketrian": lambda x: S.linalg_maketrian(x),
    "density": lambda x: S.random_pdf_normal(x, S.sum(x, axis=1), S.exp(S.sum(x, axis=1))),
    **{
        f"np.{name}": numpy(call)
        for name, call in {
            "sum": lambda x: NP.sum(x, axis=1),
            "mean": lambda x: NP.mean(x, axis=1),
            "max": lambda x: NP.max(x, axis=1),
            "prod": lambda x: NP.prod(x, axis=1),
            "std": lambda x: NP.std(x, axis=1),
            "var": lambda x: NP.var(x, axis=1),
            "average": lambda x: NP.average(x, axis=1, weights=NP.exp(x)),
            "dot": lambda x: NP.dot(x, x.T),
            "matmul": lambda x: NP.matmul(x, x.T),
            "tensordot": lambda x: NP.tensordot(x, x, axes=([1], [1])),
            "tensordot, count": lambda x: NP.tensordot(x, x.T, axes=1),
            "einsum": lambda x: NP.einsum("ij,kj,kl->il", x, x, x),
            "einsum, optimized": lambda x: NP.einsum("ij,kj,kl->il", x, x, x, optimize=True),
            "where": lambda x: NP.where(x > 0, x, -x),
            "maximum": lambda x: NP.maximum(x, -x),
            "power": lambda x: NP.power(NP.exp(x), x),
            "true_divide": lambda x: NP.true_divide(x, NP.exp(x)),
            "arctan2": lambda x: NP.arctan2(x, NP.exp(x)),
            "concatenate": lambda x: NP.concatenate([x, -x], axis=0),
            "stack": lambda x: NP.stack([x, -x]),
            "split": lambda x: product(NP.split(x, 2, axis=0)),
            "reshape": lambda x: NP.reshape(x, (-1,)),
            "transpose": lambda x: NP.transpose(x),
            "swapaxes": lambda x: NP.swapaxes(x, 0, 1),
            "squeeze": lambda x: NP.squeeze(NP.expand_dims(x, 0)),
            "broadcast_to": lambda x: NP.broadcast_to(x, (2, 4, 6)),
            "tile": lambda x: NP.tile(x, (2, 1)),
            "repeat": lambda x: NP.repeat(x, 2),
            "roll": lambda x: NP.roll(x, 1),
            "flip": lambda x: NP.flip(x, 0),
            "cumsum": lambda x: NP.cumsum(x),
            "clip": lambda x: NP.clip(x, -0.3, 0.3),
            "tril": lambda x: NP.tril(x),
            "diff": lambda x: NP.diff(x),
            "getitem": lambda x: x[1:3],
            "svd": lambda x: NP.linalg.svd(x)[1],
            "cholesky": lambda x: NP.linalg.cholesky(NP.dot(x, x.T) + NP.eye(4)),
            "inv": lambda x: NP.linalg.inv(NP.dot(x, x.T) + NP.eye(4)),
            "solve": lambda x: NP.linalg.solve(NP.dot(x, x.T) + NP.eye(4), x),
            "relu": lambda x: NPX.relu(x),
            "sigmoid": lambda x: NPX.sigmoid(x),
            "softmax": lambda x: NPX.softmax(x),
            "log_softmax": lambda x: NPX.log_softmax(x),
            "leaky_relu": lambda x: NPX.leaky_relu(x),
            "reshape, extended": lambda x: NPX.reshape(x, (-1,)),
            "smooth_l1": lambda x: NPX.smooth_l1(x),
        }.items()
    },
}
ON_SEQUENCES: dict[str, Callable[[Symbol], Symbol]] = {
    "batch_dot": lambda x: S.batch_dot(x, x, transpose_b=True),
    "sequence mask": lambda x: S.SequenceMask(x, **LENGTHS),
    "sequence last": lambda x: S.SequenceLast(x, **LENGTHS),
    "sequence reverse": lambda x: S.SequenceReverse(x, **LENGTHS),
    "convolution, 1D": lambda x: S.Convolution(x, kernel=(3,), num_filter=3),
    "deconvolution, 1D": lambda x: S.Deconvolution(x, kernel=(3,), num_filter=3),
    "pooling, 1D": lambda x: S.Pooling(x, kernel=(2,), stride=(2,), pool_type="max"),
    "self attention, scores": lambda x: CONTRIB.interleaved_matmul_selfatt_qk(
        S.FullyConnected(x, **QKV), heads=2
    ),
    "self attention": lambda x: self_attention(S.FullyConnected(x, **QKV)),
}
ON_VIDEOS: dict[str, Callable[[Symbol], Symbol]] = {
    "convolution, 3D": lambda x: S.Convolution(x, kernel=(2, 2, 2), num_filter=3),
    "pooling, 3D": lambda x: S.Pooling(x, kernel=(2, 2, 2), stride=(2, 2, 2), pool_type="max"),
}
TABLE = {
    name: (call, shape)
    for shape, calls in {
        IMAGE: ON_IMAGES,
        MATRIX: ON_MATRICES,
        SEQUENCE: ON_SEQUENCES,
        (2, 2, 4, 4, 4): ON_VIDEOS,
    }.items()
    for name, call in calls.items()
}


@pytest.mark.parametrize("name", TABLE)
def test_recomputed_ops_compute_the_same(name: str) -> None:
    symbol, shapes = shelled(*TABLE[name])
    traced = trace(symbol, shapes=shapes)
    assert set(SHELL) <= {traced.graph.ops[op].name for op in flaggable(traced.graph)}
    assert_bit_identical(symbol, traced, some_flags(traced))


@pytest.mark.parametrize(
    "network",
    [residual_net, hinted_resnet, dropout_net, two_headed_net, unrolled_lstm],
    ids=lambda network: network.__name__,
)
def test_networks_compute_the_same(network: Callable[[], Network]) -> None:
    symbol, shapes = network()
    traced = trace(symbol, shapes=shapes)
    draw = random.Random(SEED)
    everything = frozenset(flaggable(traced.graph))
    flags = iter([everything, *(random_flags(traced, draw) for _ in range(5))])
    assert_bit_identical(symbol, traced, flags)


class _Counting(mx.operator.CustomOp):
    """Its output tells how often it ran, and its backward pass relies on the latest run."""

    runs = 0

    def forward(self, is_train, req, in_data, out_data, aux):
        type(self).runs += 1
        self.factor = float(self.runs)
        self.assign(out_data[0], req[0], in_data[0] * self.factor)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * self.factor)


@mx.operator.register("memplan_counting")
class _CountingProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        _Counting.runs = 0
        return _Counting()


def states(*names: str, layers: int = 1) -> list[Symbol]:
    return [V(name, shape=(layers, 3, 5)) for name in names]


def foreach(x: Symbol) -> Symbol:
    def step(data: Symbol, state: Symbol) -> tuple[Symbol, Symbol]:
        state = S.Dropout(S.tanh(data + state), p=0.5)
        return S.sin(state), state

    return CONTRIB.foreach(step, x, V("first", shape=(3, 4)))[0]


def label(*shape: int) -> Symbol:
    return V("index_label", shape=shape)


# Operator -> networks with it, none of whose copies may run.
DANGEROUS: dict[str, list[tuple[Callable[[Symbol], Symbol], tuple[int, ...]]]] = {
    # a copy computes nothing, or aborts, where its main output is not read
    "LayerNorm": [(lambda x: S.LayerNorm(x), IMAGE), (lambda x: S.LayerNorm(x, axis=1), IMAGE)],
    "GroupNorm": [(lambda x: S.GroupNorm(x, V("gamma"), V("beta"), num_groups=2), IMAGE)],
    "Embedding": [
        (
            lambda x: S.Embedding(
                S.BlockGrad(S.round(S.abs(x))), V("weight"), input_dim=5, output_dim=3
            ),
            MATRIX,
        )
    ],
    "pick": [(lambda x: S.pick(x, label(2, 8, 8), axis=1), IMAGE)],
    "take": [(lambda x: S.take(x, label(3), axis=1), IMAGE)],
    "gather_nd": [(lambda x: S.gather_nd(x, label(2, 3)), IMAGE)],
    "one_hot": [(lambda x: S.broadcast_mul(x, S.one_hot(label(2, 4, 8), depth=8)), IMAGE)],
    "Crop": [(lambda x: S.Crop(x, h_w=(4, 4), num_args=1), IMAGE)],
    "Convolution_v1": [(lambda x: S.Convolution_v1(x, kernel=(3, 3), num_filter=3), IMAGE)],
    "_contrib_DeformableConvolution": [
        (
            lambda x: CONTRIB.DeformableConvolution(
                x,
                S.Convolution(x, kernel=(3, 3), num_filter=18, name="offset"),
                kernel=(3, 3),
                num_filter=3,
            ),
            IMAGE,
        )
    ],
    "UpSampling": [
        (
            lambda x: S.UpSampling(
                x, V("weight"), scale=2, sample_type="bilinear", num_filter=4, num_args=2
            ),
            IMAGE,
        )
    ],
    "diag": [(lambda x: S.diag(x), MATRIX)],
    "hard_sigmoid": [(lambda x: S.hard_sigmoid(x), MATRIX)],
    "_np_diag": [(numpy(lambda x: NP.diag(x)), MATRIX)],
    "_np_diagonal": [(numpy(lambda x: NP.diagonal(x)), MATRIX)],
    "_np_moveaxis": [(numpy(lambda x: NP.moveaxis(x, 0, 1)), MATRIX)],
    "_npi_pad": [(numpy(lambda x: NP.pad(x, ((1, 1), (1, 1)), "constant")), MATRIX)],
    # random numbers
    "Dropout": [
        (lambda x: S.Dropout(x, p=0.5), IMAGE),
        (lambda x: S.Dropout(S.exp(S.Dropout(x, p=0.3)), p=0.5, axes=(2,)), IMAGE),
        (numpy(lambda x: NPX.dropout(x, p=0.5)), MATRIX),
    ],
    "_random_normal": [(lambda x: x + S.random.normal(shape=IMAGE), IMAGE)],
    "_random_normal_like": [(lambda x: x * S.random.normal_like(x), IMAGE)],
    "_random_uniform_like": [(lambda x: x * S.random.uniform_like(x), IMAGE)],
    "_sample_normal": [(lambda x: x * S.sample_normal(x, S.exp(x)), IMAGE)],
    "_sample_multinomial": [
        (
            lambda x: S.broadcast_mul(
                x, S.Cast(S.sum(S.sample_multinomial(S.softmax(S.BlockGrad(x)))), dtype="float32")
            ),
            MATRIX,
        )
    ],
    "_npi_normal": [(numpy(lambda x: x * NP.random.normal(x, 1.0)), MATRIX)],
    # state, or the user's code
    "RNN": [
        (
            lambda x: S.RNN(
                x,
                V("weights"),
                *states("hidden", "cell", layers=2),
                mode="lstm",
                state_size=5,
                num_layers=2,
                p=0.5,
            ),
            SEQUENCE,
        ),
        (
            lambda x: S.RNN(
                x, V("weights"), *states("hidden"), mode="gru", state_size=5, num_layers=1
            ),
            SEQUENCE,
        ),
    ],
    "Custom": [(lambda x: S.Custom(x, op_type="memplan_counting"), IMAGE)],
    "_foreach": [(foreach, SEQUENCE)],
    "_contrib_SyncBatchNorm": [
        (lambda x: CONTRIB.SyncBatchNorm(x, key="only", fix_gamma=False), IMAGE)
    ],
    "BatchNorm_v1": [(lambda x: S.BatchNorm_v1(x, fix_gamma=False), IMAGE)],
    "IdentityAttachKLSparseReg": [
        (lambda x: S.IdentityAttachKLSparseReg(S.Flatten(S.sigmoid(x))), IMAGE)
    ],
    "CTCLoss": [(lambda x: S.CTCLoss(S.expand_dims(x, axis=1), 1 + label(1, 2)), MATRIX)],
}


@pytest.mark.parametrize(
    ("op", "call", "shape"),
    [
        pytest.param(op, *net, id=f"{op}-{i}")
        for op in DANGEROUS
        for i, net in enumerate(DANGEROUS[op])
    ],
)
def test_dangerous_ops_are_never_recomputed(
    op: str, call: Callable[[Symbol], Symbol], shape: tuple[int, ...]
) -> None:
    symbol, shapes = shelled(call, shape)
    traced = trace(symbol, shapes=shapes)
    dangerous = [i for i in range(traced.graph.nforward) if traced.graph.ops[i].kind == op]
    assert dangerous
    assert not set(dangerous) & set(flaggable(traced.graph))
    with pytest.raises(ScheduleError, match="must not be recomputed"):
        mirror(traced.graph, frozenset(dangerous))
    assert_bit_identical(symbol, traced, some_flags(traced))


@pytest.mark.parametrize(
    "name",
    """sgd_update sgd_mom_update adam_update ftrl_update signum_update lamb_update_phase1
    multi_sgd_mom_update preloaded_multi_sgd_update reset_arrays _adamw_update _multi_lamb_update
    _while_loop _cond _CachedOp _CustomFunction""".split(),
)
def test_ops_that_are_never_in_a_trace_are_never_recomputed(name: str) -> None:
    """MXNet refuses optimizers in a Symbol ("Not enough argument"); a JSON can hold any op."""
    assert not may_be_mirrored(Node(name, "op"))


def test_begin_states_without_a_batch_size_can_be_bound_with_any_flags() -> None:
    cell = mx.rnn.LSTMCell(8, prefix="l_")
    outputs, _ = cell.unroll(3, V("data"), layout="NTC", merge_outputs=False)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(outputs[-1], num_hidden=5), name="softmax")
    traced = trace(net, shapes={"data": (4, 3, 6)})
    candidates = flaggable(traced.graph)
    states = [i for i, op in enumerate(traced.graph.ops) if op.kind == "_zeros"]
    assert states
    assert not set(states) & set(candidates)
    for seed in range(8):
        draw = random.Random(seed)
        flags = frozenset(op for op in candidates if draw.random() < 0.7)
        executor_description(annotate(traced, flags), traced)


def test_random_leaky_relu_is_never_recomputed() -> None:
    """Not run: MXNet's own training step crashes on it on the CPU."""
    symbol, shapes = shelled(lambda x: S.LeakyReLU(x, act_type="rrelu")[0], IMAGE)
    graph = trace(symbol, shapes=shapes).graph
    assert [op.recomputable for op in graph.ops if op.kind == "LeakyReLU"] == [False]


DOUBLE = {"data": "float64", "scale": "float64"}
UNREAD = ("convolution", "grouped", "depthwise", "deconvolution", "convolution, 1D")


@pytest.mark.parametrize("name", UNREAD)
def test_copies_that_must_be_read(name: str) -> None:
    """MXNet's own convolution, which oneDNN does not compute in float64, must write its output."""
    symbol, shapes = shelled(*TABLE[name])
    traced = trace(symbol, shapes=shapes, type_dict=DOUBLE)
    (op,) = (i for i in flaggable(traced.graph) if "onvolution" in traced.graph.ops[i].kind)
    assert unread_copies(traced, frozenset({op}), on_gpu=False) == {op}
    reader = next(i for i in flaggable(traced.graph) if traced.graph.ops[i].name == "reader")
    assert not unread_copies(traced, frozenset({op, reader}), on_gpu=False)
    assert_bit_identical(symbol, traced, some_flags(traced))


def test_mxnet_fails_where_such_a_copy_is_not_read() -> None:
    """Or there would be no need for a reader."""
    symbol, shapes = shelled(*TABLE["convolution"])
    traced = trace(symbol, shapes=shapes, type_dict=DOUBLE)
    (op,) = (i for i in flaggable(traced.graph) if traced.graph.ops[i].kind == "Convolution")
    traced.symbol.get_internals()[traced.graph.ops[op].name + "_output"]._set_attr(
        force_mirroring="True"
    )
    with pytest.raises(mx.base.MXNetError, match="kWriteTo"):
        training_run(traced.symbol, traced)


def test_outputs_keep_their_names_behind_a_reader() -> None:
    body = S.broadcast_mul(V("data"), V("scale", shape=(1, 1, 1, 1)))
    symbol = S.Convolution(body, kernel=(3, 3), num_filter=3, name="last")
    traced = trace(symbol, shapes={"data": IMAGE}, type_dict=DOUBLE)
    (op,) = by_name(traced, "last")
    planned = annotate(traced, frozenset({op}))
    assert planned.list_outputs() == ["last_output"]
    assert planned.list_arguments() == symbol.list_arguments()
    assert_bit_identical(symbol, traced, iter([frozenset({op})]))


@pytest.mark.parametrize("options", [{}, {"use_global_stats": True}, {"cudnn_off": True}])
def test_copies_that_must_be_read_on_a_gpu(options: dict[str, bool]) -> None:
    """cuDNN's BatchNorm fails, too. (Its own numbers cannot be seen here, those of a CPU can.)"""
    symbol, shapes = shelled(lambda x: S.BatchNorm(x, name="bn", **options), IMAGE)
    traced = trace(symbol, shapes=shapes)
    flags = by_name(traced, "bn", "input")
    expected = by_name(traced, "bn") if not options else frozenset()
    assert unread_copies(traced, flags, on_gpu=True) == expected
    assert not unread_copies(traced, flags, on_gpu=False)
    planned = annotate(traced, flags, cudnn=True)
    executed_ops = [op for op, _ in ops(executor_description(planned, traced))]
    assert executed_ops.count("BatchNorm") == 2
    unplanned, actual = training_run(symbol, traced), training_run(planned, traced)
    differing = {name for name in unplanned if actual[name] != unplanned[name]}
    assert all(name.startswith("state bn_moving") for name in differing)
    description = executor_description(planned, traced)
    copy = "bn_unread_mirror" if not options else "bn_mirror"
    read = re.search(rf"=.*{copy}\(0\)", description)
    assert bool(read) == bool(expected)


def test_profile_needs_no_readers() -> None:
    symbol, shapes = residual_net(units=1)
    table = profile(symbol, ctx=mx.cpu(), type_dict={"data": "float64"}, repeats=1, **shapes)
    graph = trace(symbol, shapes=shapes, type_dict={"data": "float64"}).graph
    assert table.seconds.keys() == {op.signature for op in graph.ops}
