"""Dimensions that MXNet infers in 32 bits: where they would wrap around, the op is named."""

from __future__ import annotations

import contextlib
import gc
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
import pytest

import memplan
from memplan.errors import SizeError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.build import trace
from memplan.mxnet.trace.inference import infer
from memplan.mxnet.trace.nnvm import from_json
from memplan.mxnet.trace.too_large import true_nelements
from memplan.planning import realisation
from memplan.planning.realisation import load

WRAPS = 2**20  # two of them, multiplied, are more than a dimension holds

S = mx.sym


def var(*shape: int, name: str = "data") -> Any:
    return S.Variable(name, shape=shape)


def np_var(*shape: int, name: str = "data") -> Any:
    return var(*shape, name=name).as_np_ndarray()


def rnn(n: int, **options: Any) -> Any:
    directions = 2 if options.get("bidirectional") else 1
    states = [var(0, 1, 0, name=name) for name in ("state", "cell")]
    return S.RNN(
        var(2, 1, 3),
        S.Variable("parameters"),
        *(states if options["mode"] == "lstm" else states[:1]),
        state_size=n // 32 * directions,
        name="op",
        **options,
    )


# By name: an op that has n times n, or so, elements in one dimension.
OPS: dict[str, Callable[[int], Any]] = {
    "tile": lambda n: S.tile(var(n, 2), reps=(n, 2), name="op"),
    "tile once": lambda n: S.tile(var(n, 2), reps=n, name="op"),
    "tile more": lambda n: S.tile(var(n + 3), reps=(2, n), name="op"),
    "repeat": lambda n: S.repeat(var(n, 2), repeats=n, axis=0, name="op"),
    "repeat flat": lambda n: S.repeat(var(n, 2), repeats=n, name="op"),
    "concat": lambda n: S.concat(*[var(n * 16, 2)] * (n // 16), dim=0, name="op"),
    "pad": lambda n: S.Pad(
        var(1, 1, 3, 4), mode="edge", pad_width=(0, 0, 0, 0, n, 3, 0, n), name="op"
    ),
    "upsampling": lambda n: S.UpSampling(
        var(1, 2, 3, n), scale=n, sample_type="nearest", name="op"
    ),
    "khatri_rao": lambda n: S.khatri_rao(var(n, 2), var(n, 2, name="b"), name="op"),
    "deconvolution": lambda n: S.Deconvolution(
        var(1, 1, n, 3),
        kernel=(4, 2),
        stride=(n, 2),
        pad=(1, 0),
        adj=(1, 0),
        num_filter=3,
        name="op",
    ),
    "im2col": lambda n: S.im2col(
        var(1, 3, n, 4), kernel=(n // 2, 3), pad=(1, 2), stride=(1, 1), name="op"
    ),
    "anchors": lambda n: S.contrib.MultiBoxPrior(
        var(1, 1, n, 2**9), sizes=(1, 0.5), ratios=(1, 2, 3), name="op"
    ),
    "lstm": lambda n: rnn(n, mode="lstm", num_layers=2),
    "gru": lambda n: rnn(n, mode="gru", num_layers=3, bidirectional=True),
    "projected": lambda n: rnn(n, mode="lstm", num_layers=2, projection_size=n // 32 - 1),
    "np.tile": lambda n: S.np.tile(np_var(n, 2), (n, 2)),
    "np.repeat": lambda n: S.np.repeat(np_var(n, 2), n, axis=0),
    "np.pad": lambda n: S.np.pad(np_var(3, 4), ((n, 3), (0, n))),
}


@contextlib.contextmanager
def semantics(name: str) -> Iterator[None]:
    with mx.util.np_shape(name.startswith("np.")):
        yield


def node_of(symbol: Any) -> Any:
    _, [(node, _)] = from_json(symbol_json.parse(symbol))
    return node


@pytest.mark.parametrize("name", OPS)
def test_counts_are_those_of_mxnet(name: str) -> None:
    with semantics(name):
        for n in (64, 96):
            node = node_of(OPS[name](n))
            infer([(node, 0)], {}, {"data": "float32"})
            shapes = [info and info.shape for info in node.infos.inputs]
            is_rnn = node.op == "RNN"
            expected = shapes[1] if is_rnn else node.infos.outputs[0].shape
            assert true_nelements(node, shapes) == math.prod(expected)


@pytest.mark.parametrize("name", OPS)
def test_what_would_wrap_is_named(name: str) -> None:
    n = 2**15 if name == "concat" else WRAPS  # this many inputs
    with semantics(name):
        made = OPS[name](n)
        node = node_of(made)
        loss = S.MakeLoss(made.as_nd_ndarray(), name="loss")
        for ends in (loss, S.FullyConnected(loss, num_hidden=2)):
            with pytest.raises(
                SizeError, match=rf"of '{node.name}' \({node.op}\).*elements.*2\^31"
            ):
                trace(ends, shapes={}, grad_req="write")
            with pytest.raises(SizeError, match=node.name):
                memplan.get_cost(ends)


def test_a_size_that_wraps_to_one_that_fits() -> None:
    """2^33 + 120 elements, of which MXNet's inference sees 1073741839."""
    net = S.tile(var(2**30 + 15), reps=(8,), name="op")
    assert net.infer_shape()[1] == [(120,)]
    with pytest.raises(SizeError, match=rf"'op' \(tile\) would have {2**33 + 120} elements"):
        trace(S.MakeLoss(net), shapes={}, grad_req="write")


@pytest.mark.parametrize("kernel", ["(3L, 3L)", "[3, 3]", "(3,3)"])
def test_attributes_are_read_as_mxnet_reads_them(kernel: str) -> None:
    """Those of a file that Python 2 wrote, too."""
    body = S.Deconvolution(var(2, 4, 5, 5), kernel=(3, 3), num_filter=3, name="op")
    rnn_of = rnn(32, mode="gru", num_layers=1, bidirectional=True)
    for net, changes in (
        (body, {"kernel": kernel}),
        (rnn_of, {"bidirectional": "false"}),
    ):
        data = symbol_json.parse(net)
        [attrs] = [node["attrs"] for node in data["nodes"] if node["name"] == "op"]
        attrs.update(changes)
        nodes, _ = from_json(data)
        [op] = [node for node in nodes if node.name == "op"]
        shapes = [(2, 4, 5, 5)] if net is body else [(2, 1, 3)]
        # A picture of 5 by 5 becomes one of 7 by 7; a GRU of one layer and direction has 3 gates.
        width = int(op.attrs.get("state_size", 0))
        expected = 2 * 3 * 7 * 7 if net is body else 3 * width * (3 + width + 2)
        assert true_nelements(op, shapes) == expected


def test_places_in_a_branch_are_read_as_mxnet_reads_them() -> None:
    data = S.Variable("data")
    net = S.contrib.cond(S.sum(data) > 0, lambda: S.sin(data), lambda: S.cos(data))
    other = symbol_json.parse(net)
    for node in other["nodes"]:
        for name, value in node.get("attrs", {}).items():
            if name.endswith("_input_locs"):
                node["attrs"][name] = re.sub("([0-9])", r"\1L", value)
    shapes = {"data": (2, 3)}
    graphs = [
        trace(
            S.MakeLoss(symbol, name="loss"), shapes=shapes, grad_req="write", form=load("packed")
        ).graph
        for symbol in (net, symbol_json.load(other))
    ]
    assert graphs[0].tensors == graphs[1].tensors


def test_a_branch_may_read_what_another_branch_or_a_loop_returns() -> None:
    """MXNet says of neither what it returns: the first is looked at, and then the second."""
    data = S.Variable("data")
    first = S.contrib.cond(S.sum(data) > 0, lambda: S.sin(data), lambda: S.cos(data))
    _, (_, last) = S.contrib.while_loop(
        lambda i, s: i < 3,
        lambda i, s: (s, (i + 1, S.sin(s))),
        (S.zeros((1,)), S.exp(first)),
        max_iterations=3,
    )
    net = S.contrib.cond(S.sum(first) > 0, lambda: last * first, lambda: last)
    traced = trace(
        S.MakeLoss(net, name="loss"),
        shapes={"data": (2, 3)},
        grad_req="write",
        form=load("packed"),
    )
    nodes = {node.name: node for node in traced.nodes}
    assert nodes["loss"].infos.outputs[0].shape == (2, 3)


@pytest.mark.parametrize("name", ["mirror", "explicit", "packed"])
def test_no_garbage_grows_with_the_network(name: str) -> None:
    """While a network is traced Python collects none, and what lies between stays in pieces."""

    def garbage_of(nlayers: int) -> int:
        out, shapes = S.Variable("data"), {"data": (1, 4, 8, 8)}
        for _ in range(nlayers):
            out = S.Convolution(out, num_filter=4, kernel=(3, 3), pad=(1, 1))
        net = S.SoftmaxOutput(out)
        realisation.trace(net, shapes=shapes, realisation=name)  # what is worked out once
        gc.collect()
        gc.disable()
        try:
            traced = realisation.trace(net, shapes=shapes, realisation=name)
            return gc.collect() if len(traced.graph.ops) > nlayers else -1
        finally:
            gc.enable()

    # The first of a test was seen to leave more, whatever its size.
    assert min(garbage_of(30), garbage_of(30)) < 2 * garbage_of(3)
