"""Which gradients are copied into other layouts, counted by hand on small networks."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.small_convolutions import (
    SHAPE,
    WEIGHT,
    N,
    activated,
    classified,
    convolved,
    pictures,
    pooled,
)
from memplan.mxnet.realise.estimate import (
    onednn_kernels,
    scratchpads,
    whole_pictures,
    workspace_estimate,
)
from memplan.mxnet.realise.estimate.layout_copies import Copies, copies
from memplan.mxnet.realise.estimate.workspace_estimate import (
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
    for module in (onednn_kernels, whole_pictures):
        monkeypatch.setattr(module, "has_avx512", lambda: True)
    monkeypatch.setattr(workspace_estimate, "code_nbytes", lambda *_: 0)


def _traced(net: Symbol, shape: tuple[int, ...] = SHAPE) -> Trace:
    return trace(classified(net), shapes={"data": shape}, grad_req="write")


def _of_backward(kind: str, traced: Trace) -> tuple[int, int]:
    """The bytes that the backward op of that kind copies: what is kept, and what is not."""
    found = copies(traced.graph, traced.nodes)
    [index] = [i for i, node in enumerate(traced.nodes) if node.op == f"_backward_{kind}"]
    return found.kept_nbytes[index], found.temporary_nbytes[index]


def test_the_gradient_of_a_pooling_has_the_layout_of_thepicture() -> None:
    """The one that the convolution behind it wrote is brought into that."""
    traced = _traced(convolved(pooled(mx.sym.tanh(pictures()))))
    assert _of_backward("Pooling", traced) == (0, N // 4)
    assert _of_backward("tanh", traced) == (0, 0)


def test_the_gradient_of_a_pooling_in_one_layout_is_not_copied() -> None:
    traced = _traced(convolved(pooled(mx.sym.tanh(convolved(pictures())))))
    assert _of_backward("Pooling", traced) == (0, 0)
    assert _of_backward("tanh", traced)[0] > 0


def test_the_gradient_of_an_lrn_has_the_layout_of_the_one_that_it_reads() -> None:
    traced = _traced(convolved(mx.sym.LRN(mx.sym.tanh(pictures()), nsize=5)))
    assert _of_backward("LRN", traced) == (0, 0)
    assert _of_backward("tanh", traced)[0] > 0


def test_an_lrn_brings_its_data_into_the_usual_layout_for_its_gradient() -> None:
    traced = _traced(mx.sym.LRN(convolved(pictures()), nsize=5))
    assert _of_backward("LRN", traced) == (0, N)


def _of_whole_pictures(data: Symbol) -> Symbol:
    return mx.sym.Pooling(data, kernel=(1, 1), global_pool=True, pool_type="avg")


# In blocks of 16 there are 8 of 128 channels, as many as rows.
@pytest.mark.parametrize(("nchannels", "is_turned"), [(16, True), (112, True), (128, False)])
@pytest.mark.parametrize("op", [activated, lambda data: mx.sym.LeakyReLU(data, slope=0.1)])
def test_data_is_brought_into_the_layout_of_the_gradient_of_whole_pictures(
    op: Callable[[Symbol], Symbol], nchannels: int, is_turned: bool
) -> None:
    """What is written has that layout: a convolution copies it as it does that of a BatchNorm."""
    nbytes = 4 * 2 * nchannels * 64
    body = convolved(pictures(), nchannels)
    kind = "Activation" if op is activated else "LeakyReLU"
    traced = _traced(_of_whole_pictures(op(body)))
    assert _of_backward(kind, traced) == (0, nbytes * is_turned)
    without = _of_backward("Convolution", _traced(_of_whole_pictures(mx.sym.BatchNorm(body))))
    assert _of_backward("Convolution", traced) == without


# All of oneDNN's have the layout of the gradient that they read. A sum of two terms of which one is
# in the usual layout copies the other, and a BatchNorm brings its gradient back.
@pytest.mark.parametrize("by_executor", [True, False])
@pytest.mark.parametrize("kind", ["relu", "tanh", "sigmoid", "softrelu", "leaky", "gelu"])
def test_the_gradient_of_an_activation_behind_one_in_the_usual_layout_is_in_that(
    kind: str, by_executor: bool
) -> None:
    def op(data: Symbol) -> Symbol:
        if kind in ("leaky", "gelu"):
            return mx.sym.LeakyReLU(data, act_type=kind)
        return mx.sym.Activation(data, act_type=kind)

    block = op(mx.sym.BatchNorm(convolved(pictures())))
    net = convolved(op(block + mx.sym.BatchNorm(convolved(block))), 3)
    _, activation, norm, convolution, total, first, last, *_ = _backward(net, by_executor)
    name = "LeakyReLU" if kind in ("leaky", "gelu") else "Activation"
    assert (activation, norm) == ((name, 0, 1), ("BatchNorm", 0, 1))
    assert convolution == ("Convolution", 0, OF_WEIGHT)
    assert (total, first, last) == (("add_n", 0, 1), (name, 0, 1), ("BatchNorm", 0, 1))


@pytest.mark.parametrize(("kind", "ncopies"), [("relu", 0), ("tanh", 1)])
def test_an_output_that_onednn_does_not_read_is_not_brought_into_a_layout(
    kind: str, ncopies: int
) -> None:
    """The Flatten behind turns the output into the usual layout, but not what a tanh has read."""
    traced = _traced(mx.sym.Activation(convolved(pictures()), act_type=kind))
    assert _of_backward("Activation", traced) == (0, ncopies * N)


def test_blocks_of_channels_are_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _traced(_of_whole_pictures(activated(convolved(pictures(), 64))))
    for has_avx512, copied in ((True, 4 * N), (False, 0)):
        for module in (onednn_kernels, whole_pictures):
            monkeypatch.setattr(module, "has_avx512", lambda has_it=has_avx512: has_it)
        assert _of_backward("Activation", traced) == (0, copied)


def test_a_convolution_brings_the_gradient_of_whole_pictures_into_its_own_layout() -> None:
    """As a pooling of parts of pictures does. A BatchNorm reads both layouts as they are."""
    copied = []
    for channels in (16, 128):  # of 128 it is in that layout
        traced = _traced(_of_whole_pictures(mx.sym.BatchNorm(convolved(pictures(), channels))))
        assert _of_backward("BatchNorm", traced) == (0, 0)
        copied.append(_of_backward("Convolution", traced)[1])
    of_weight = 2 * WEIGHT
    assert copied == [N + N + of_weight, N + 8 * of_weight]
    traced = _traced(_of_whole_pictures(activated(pooled(convolved(pictures())))))
    names = [node.op for node in traced.nodes]
    of_whole, of_parts = (n for n, name in enumerate(names) if name == "_backward_Pooling")
    found = copies(traced.graph, traced.nodes).temporary_nbytes
    assert (found[of_whole], found[of_parts]) == (0, N // 4)


# Of the gradient of three channels no kernel of oneDNN's is: that would be in the usual layout.
def test_a_convolution_copies_its_gradient_for_that_of_data_which_nobody_reads() -> None:
    net = activated(convolved(pictures(), 16))
    loss = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Flatten(convolved(net)), num_hidden=4))
    traced = trace(loss, shapes={"data": (2, 3, 8, 8)})
    found = copies(traced.graph, traced.nodes).temporary_nbytes
    first = [i for i, node in enumerate(traced.nodes) if node.op == "_backward_Convolution"][-1]
    assert found[first] == N


def _backward(net: Symbol, by_executor: bool = True) -> list[tuple[str, float, float]]:
    """Of each backward op behind the dense layer's: name, pictures kept, pictures not kept."""
    traced = _traced(net)
    found = copies(traced.graph, traced.nodes, by_executor=by_executor)
    pairs = zip(traced.nodes, found.kept_nbytes, found.temporary_nbytes, strict=True)
    rows = [(node.op.removeprefix("_backward_"), kept / N, more / N) for node, kept, more in pairs]
    return rows[[name for name, *_ in rows].index("copy") + 1 :]


def _as_one(data: Symbol) -> Symbol:
    """The two pictures of SHAPE as one of twice the channels, convolved."""
    return convolved(mx.sym.reshape(data, shape=(1, 32, 8, 8)), 32)


IN_ROW, OF_WEIGHT = (2, 16, 64), 2 * WEIGHT / N


def test_who_reads_an_array_in_the_layout_of_another_shape_has_one_more_copy_in_executors() -> None:
    """The gradient of a shape is written over an array in oneDNN's layout, for the old shape."""
    _, reshape, sine = _backward(_as_one(mx.sym.sin(pictures())))
    assert reshape == ("reshape", 2, 0)
    assert sine == ("sin", 1, 1)
    traced = _traced(_as_one(mx.sym.sin(pictures())))
    last = len(traced.nodes) - 1
    assert last in copies(traced.graph, traced.nodes).beside
    _, _, convolution = _backward(_as_one(convolved(pictures())))
    copied = 3 + OF_WEIGHT  # its data once, and its gradient twice
    assert convolution == ("Convolution", 0, copied)


def test_a_loss_that_mxnet_computes_in_training_has_its_copy_beside_its_temporary_space() -> None:
    """Of what a convolution has left in a layout of oneDNN's."""
    loss = mx.sym.SoftmaxOutput(convolved(pictures()), multi_output=True, name="loss")
    traced = trace(loss, shapes={"data": SHAPE})
    index = [node.name for node in traced.nodes].index("loss")
    found = copies(traced.graph, traced.nodes)
    assert found.temporary_nbytes[index] == N
    assert index in found.beside


def test_an_activation_leaves_its_gradient_in_the_layout_of_another_shape() -> None:
    _, _, activation, convolution = _backward(_as_one(activated(convolved(pictures()))))
    assert activation == ("Activation", 0, 1)
    assert convolution == ("Convolution", 0, 3 + OF_WEIGHT)


def test_an_array_that_has_its_first_shape_again_is_in_an_ordinary_layout() -> None:
    """A sine reads it in the shape between, which takes one more copy; the convolution none."""
    rows = mx.sym.sin(mx.sym.reshape(convolved(pictures()), shape=IN_ROW))
    net = convolved(mx.sym.reshape(rows, shape=SHAPE))
    _, first, sine, second, convolution = _backward(net)
    assert (first, sine, second) == (("reshape", 2, 0), ("sin", 2, 1), ("reshape", 2, 1))
    assert convolution == ("Convolution", 0, 1 + OF_WEIGHT)


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


@pytest.mark.parametrize("size", [N, 24 << 20])
def test_each_array_of_one_operator_leaves_a_hole_in_executors_and_one_in_packed_steps(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """An array brought into another layout, and what is computed beside its place: both are kept
    by the C library though together they are larger than what it keeps.
    """
    traced = _traced(pictures(), (2, 3))
    none = [0] * (len(traced.nodes) - 1)
    layouts = ((),) * len(traced.nodes)
    found = Copies((0, *none), (size, *none), layouts)
    monkeypatch.setattr(workspace_estimate, "copies", lambda *_, **__: found)
    monkeypatch.setattr(workspace_estimate, "copied_back_nbytes", lambda *_: [size, *none])
    monkeypatch.setattr(workspace_estimate, "further_calls", lambda graph, _: none)
    assert packed_nbytes(traced.graph, traced.nodes) == 2 * size + size // 2
    without, with_holes = (
        executor_nbytes(traced.graph, traced.nodes, leaves_holes=leaves_holes)[0]
        for leaves_holes in (False, True)
    )
    assert (without, with_holes) == (2 * size, 4 * size)


def test_copies_of_large_arrays_leave_no_hole_in_packed_steps_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = mx.sym.MakeLoss(mx.sym.mean(activated(convolved(pictures()))))
    traced = trace(loss, shapes={"data": SHAPE}, realisation="packed")
    nbytes = []
    for most_kept in (N + WEIGHT, N + WEIGHT - 1):  # of the two arrays that an op copies
        monkeypatch.setattr(workspace_estimate, "MOST_KEPT", most_kept)
        nbytes.append(packed_nbytes(traced.graph, traced.nodes))
    assert nbytes[0] > nbytes[1]
