"""What steps take beside blocks or their array on a CPU, counted by hand on small networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import (
    SHAPE,
    WEIGHT,
    N,
    activated,
    classified,
    convolved,
    normed,
    pictures,
)
from memplan.mxnet.realise.estimate import (
    columns,
    matrix_buffers,
    onednn_kernels,
    scratchpads,
    workspace_estimate,
)
from memplan.mxnet.realise.estimate.layout_copies import Copies, copies
from memplan.mxnet.realise.estimate.workspace_estimate import (
    executor_nbytes,
    largest_nbytes,
    packed_nbytes,
)
from memplan.planning.realisation import load, trace

Symbol = mx.sym.Symbol


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does depends on the processor: that of another machine is imagined.

    What threads keep, and code, is left out: it is counted beside all that is counted here.
    """
    monkeypatch.setattr(matrix_buffers, "threads", lambda: 1)
    for module in (columns, onednn_kernels, workspace_estimate):
        monkeypatch.setattr(module, "has_avx512", lambda: True)
    monkeypatch.setattr(workspace_estimate, "code_nbytes", lambda *_: 0)
    monkeypatch.setattr(workspace_estimate, "further_calls", lambda graph, _: [0] * len(graph.ops))


def _copies(net: Symbol, shape: tuple[int, ...] = SHAPE, **options: Any) -> Copies:
    traced = trace(classified(net), shapes={"data": shape}, **options)
    return copies(traced.graph, traced.nodes)


# relu reads what a convolution wrote, and writes where that lay. What Flatten then makes of it is
# in the usual layout, and so is all that relu's backward op reads.
@pytest.mark.parametrize(
    ("net", "shape", "kept"),
    [
        (lambda data: mx.sym.relu(convolved(data)), SHAPE, 2 * N),
        (lambda data: activated(convolved(data)), SHAPE, 0),
        (lambda data: mx.sym.relu(convolved(data, 8)), SHAPE, 2 * N // 2),
        (lambda data: mx.sym.relu(convolved(data, 12)), SHAPE, 0),
        (lambda data: mx.sym.relu(convolved(data)), (2, 12, 8, 8), 2 * N),
        (lambda data: mx.sym.relu(convolved(data)), (2, 3, 8, 8), 2 * N),
        (lambda data: mx.sym.relu(convolved(data, groups=16)), SHAPE, 2 * N),
        (lambda data: mx.sym.relu(convolved(data, groups=4)), SHAPE, 2 * N),
        (lambda data: mx.sym.relu(convolved(data, groups=8)), SHAPE, 0),
        (lambda data: mx.sym.relu(convolved(data, groups=2)), SHAPE, 2 * N),
        (lambda data: mx.sym.relu(data), SHAPE, 0),
        # Its gradient and its output are those of convolutions, and its result lies in one.
        (lambda data: mx.sym.relu(convolved(mx.sym.relu(convolved(data)))), SHAPE, (2 + 2 + 3) * N),
        (lambda data: mx.sym.relu(normed(convolved(data))), SHAPE, 2 * N),
        # Terms in several layouts are added without oneDNN, which leaves the usual one.
        (lambda data: mx.sym.relu(mx.sym.add_n(convolved(data), convolved(data))), SHAPE, 2 * N),
        (lambda data: mx.sym.relu(mx.sym.add_n(convolved(data), data)), SHAPE, 0),
    ],
)
def test_the_copies_that_an_executor_keeps(
    net: Callable[[Symbol], Symbol], shape: tuple[int, ...], kept: int
) -> None:
    assert sum(_copies(net(mx.sym.Variable("data")), shape).kept_nbytes) == kept


def test_double_precision_is_none_of_onednns() -> None:
    net = mx.sym.relu(convolved(pictures()))
    assert sum(_copies(net, type_dict={"data": "float64"}).kept_nbytes) == 0


def _beside_copies(net: Symbol, *, leaves_holes: bool, shape: tuple[int, ...] = SHAPE) -> int:
    """What an executor takes beside its blocks and the copies that it keeps."""
    traced = trace(classified(net), shapes={"data": shape}, grad_req="write")
    nbytes, *_ = executor_nbytes(traced.graph, traced.nodes, leaves_holes=leaves_holes)
    return nbytes - sum(copies(traced.graph, traced.nodes).kept_nbytes)


def test_executors_have_room_for_what_an_unknown_op_reads_and_writes() -> None:
    net = mx.sym.contrib.quadratic(activated(pictures()), a=1, b=2, c=3)
    # The output's gradient, the data, and what the backward op makes of them.
    assert _beside_copies(net, leaves_holes=False) == 3 * N + 3 * N // 2


def test_executors_have_room_for_what_one_op_copies() -> None:
    net = mx.sym.relu(convolved(mx.sym.relu(convolved(pictures()))))
    # relu's backward op copies the gradient, the output, and what it makes of them.
    assert _beside_copies(net, leaves_holes=False, shape=(2, 16, 32, 32)) == 3 * 16 * N


def test_what_an_op_copies_and_what_it_computes_beside_its_place_are_there_at_once() -> None:
    net = mx.sym.MakeLoss(mx.sym.mean(activated(convolved(pictures()))))
    # The mean's gradient, in oneDNN's layout for that of the activation, which is written over it.
    traced = trace(net, shapes={"data": (2, 3, 8, 8)})
    nbytes, *_ = executor_nbytes(traced.graph, traced.nodes, leaves_holes=False)
    assert nbytes == sum(copies(traced.graph, traced.nodes).kept_nbytes) + 2 * N


def test_what_mxnet_adds_up_is_copied_beside_the_space_in_which_others_are() -> None:
    net = activated(mx.sym.add_n(convolved(pictures()), mx.sym.Variable("other")))
    # The backward op of the convolution copies the picture, the gradient of its output, the weight
    # and its gradient, and MXNet, which adds something to what it leaves, this.
    picture = 16 * N
    nbytes = _beside_copies(net, leaves_holes=False, shape=(2, 16, 32, 32))
    assert nbytes == (2 * picture + 2 * WEIGHT) + picture


def test_no_more_than_16_mb_of_what_one_op_copies_counts_once_more() -> None:
    net = mx.sym.relu(convolved(mx.sym.relu(convolved(pictures()))))
    shape = (2, 16, 224, 224)  # 19 MB of copies; and oneDNN's own are less than 16
    assert _beside_copies(net, leaves_holes=False, shape=shape) == 16 << 20


def test_executors_have_room_for_copies_of_every_size() -> None:
    net = activated(convolved(activated(convolved(pictures())), 32))
    # Forward ops bring the picture and weights into oneDNN's layout, the backward op of the last
    # activation the gradient that it reads; those of convolutions the picture, the gradient of
    # their output and the weight, and that of the weight out of it. All else is in that layout.
    forward = (N + WEIGHT, 2 * WEIGHT)
    backward = (2 * N, 2 * N + 2 * 2 * WEIGHT, N + 2 * WEIGHT)
    nbytes = _beside_copies(net, leaves_holes=False)
    assert nbytes == max(backward) + sum(forward + backward) // 5


def test_memory_that_nobody_gives_back_counts_again_unless_copies_fill_it() -> None:
    net = activated(convolved(pictures()))
    # The picture and the weight; the gradient that the activation reads; the picture, the weight,
    # and the gradients of both sides of the convolution.
    sizes = (N + WEIGHT, N, 2 * N + 2 * WEIGHT)
    assert _beside_copies(net, leaves_holes=False) == max(sizes) + sum(sizes) // 5
    assert _beside_copies(net, leaves_holes=True) == 2 * max(sizes) + sum(sizes) // 10
    net = mx.sym.relu(convolved(mx.sym.relu(convolved(pictures()))))
    largest, fifth = N + 2 * WEIGHT, _beside_copies(net, leaves_holes=False) - (N + 2 * WEIGHT)
    assert _beside_copies(net, leaves_holes=True) == largest + fifth // 2 + largest // 4


def test_large_arrays_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    net = activated(convolved(activated(convolved(pictures())), 32))
    monkeypatch.setattr(workspace_estimate, "MOST_KEPT", 2 * N + 1)
    nbytes = _beside_copies(net, leaves_holes=False)
    largest = 2 * N + 4 * WEIGHT
    assert nbytes == largest + 2 * N // 5
    assert _beside_copies(net, leaves_holes=True) == largest + 2 * N // 10 + 2 * N + 1


@pytest.mark.parametrize("name", ["mirror", "explicit"])
def test_nothing_is_estimated_for_a_gpu_or_without_onednn(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = trace(classified(convolved(pictures())), shapes={"data": SHAPE}, realisation=name)
    assert load(name).workspace(traced, "cpu") is not None
    assert load(name).workspace(traced, "gpu") is None
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    assert load(name).workspace(traced, "cpu") is None


@pytest.mark.parametrize(("channels", "matrices"), [(16, 0), (12, 3), (3, 1)])
def test_executors_keep_the_columns_of_convolutions_as_matrices(
    monkeypatch: pytest.MonkeyPatch, channels: int, matrices: int
) -> None:
    net = activated(convolved(activated(mx.sym.Variable("data")), 12 if channels == 12 else 16))
    beside = []
    for nthreads in (1, 2, 8):  # there are two pictures
        monkeypatch.setattr(scratchpads, "threads", lambda n=nthreads: n)
        beside.append(_beside_copies(net, leaves_holes=False, shape=(2, channels, 8, 8)))
    rolled, is_all = 4 * channels * 9 * 64, matrices == 3
    # No more than two threads compute gradients, each one of the weight; but eight a convolution.
    by_two = matrices * rolled + 2 * 4 * 12 * 12 * 9 * is_all
    by_eight = by_two + 6 * rolled * is_all
    assert [nbytes - beside[0] for nbytes in beside] == [0, by_two, by_eight]


# Seen were 10 to 20 MB of 16 threads packed, and 20 to 40 MB unplanned, of three networks.
@pytest.mark.parametrize(
    ("channels", "size", "by_thread"),
    [(16, 64, 0), (12, 64, 1_250_000), (12, 8, 4 * 12 * 9 * 64 * 3 // 2)],
)
def test_threads_keep_parts_of_the_largest_convolution_as_matrices(
    monkeypatch: pytest.MonkeyPatch, channels: int, size: int, by_thread: int
) -> None:
    net = activated(convolved(activated(mx.sym.Variable("data")), channels))
    estimates = []
    for nthreads in (1, 16):
        monkeypatch.setattr(matrix_buffers, "threads", lambda n=nthreads: n)
        shape = (2, channels, size, size)
        traced = trace(classified(net), shapes={"data": shape}, realisation="packed")
        packed = packed_nbytes(traced.graph, traced.nodes)
        holes = _beside_copies(net, leaves_holes=True, shape=shape)
        estimates.append((packed, _beside_copies(net, leaves_holes=False, shape=shape), holes))
    more = [many - one for one, many in zip(*estimates, strict=True)]
    assert more == [16 * by_thread, 16 * by_thread, 2 * 16 * by_thread]


def test_packed_steps_copy_for_operators_without_onednn_only() -> None:
    estimates = {}
    for name, activation in (("onednn", activated), ("other", mx.sym.relu)):
        net = classified(activation(convolved(pictures())))
        traced = trace(net, shapes={"data": (2, 16, 32, 32)}, realisation="packed")
        estimates[name] = packed_nbytes(traced.graph, traced.nodes)
        assert load("packed").workspace(traced, "gpu") is None
    # The gradient of either is in the usual layout: the convolution's backward op brings the data
    # and the gradients of output and weight into oneDNN's, and half of these copies count again.
    # relu copies what it reads and writes, its backward op one of what it reads.
    picture = 16 * N
    space = 2 * picture + WEIGHT
    other = space + (2 + 1) * picture + picture * 3 // 4
    onednn = space + space // 2
    assert estimates == {"onednn": onednn, "other": other}


@pytest.mark.parametrize(
    ("space", "kept", "uncounted", "expected", "with_avx512"),
    [
        (100, 10, 99, 160, 160),
        (100, 100, 99, 275, 287.5),
        (100, 100, 40, 265, 277.5),
        (100, 100, 20, 250, 257.5),
        (10, 100, 99, 185, 197.5),
        (10, 100, 0, 135, 147.5),
        (10, 0, 99, 15, 15),
    ],
)
@pytest.mark.parametrize("has_avx512", [False, True])
def test_packed_steps_have_room_for_copies_of_both_kinds(
    monkeypatch: pytest.MonkeyPatch,
    space: int,
    kept: int,
    uncounted: int,
    expected: float,
    with_avx512: float,
    has_avx512: bool,
) -> None:
    """Those of the operator that has most, and half of those of the next, with AVX-512 three
    quarters. In small networks, of whose code not all is counted, for more.
    """
    traced = trace(classified(pictures()), shapes={"data": (2, 3)}, realisation="packed")
    nops = len(traced.nodes)
    found = Copies(
        kept_nbytes=(0, kept * N, kept * N // 2, *(0,) * (nops - 3)),
        temporary_nbytes=(space * N, *(0,) * (nops - 1)),
        layouts=((),) * nops,
    )
    monkeypatch.setattr(workspace_estimate, "copies", lambda *_, **__: found)
    monkeypatch.setattr(workspace_estimate, "uncounted_nbytes", lambda nodes, each: uncounted * N)
    monkeypatch.setattr(workspace_estimate, "has_avx512", lambda: has_avx512)
    more = packed_nbytes(traced.graph, traced.nodes)
    assert more == (with_avx512 if has_avx512 else expected) * N


def test_updates_and_sums_of_gradients_are_in_place() -> None:
    table = mx.sym.Variable("table")
    first, second = (
        mx.sym.Embedding(mx.sym.Variable(n), table, input_dim=5000, output_dim=4) for n in "ab"
    )
    net = mx.sym.MakeLoss(mx.sym.tanh(first + second))
    traced = trace(net, shapes={"a": (2,), "b": (2,)}, realisation="updating")
    assert largest_nbytes(traced.nodes) < 5000 * 4


@pytest.mark.parametrize(("shape", "copied"), [((2, 12, 8, 16), 0), ((2, 12, 2, 8, 8), 2)])
def test_gradients_of_a_norm_of_volumes_copy_what_they_read(
    shape: tuple[int, ...], copied: int
) -> None:
    found = _copies(normed(activated(mx.sym.Variable("data"))), shape)
    assert max(found.temporary_nbytes) == copied * 4 * 2 * 12 * 128
    assert not any(found.kept_nbytes)


@pytest.mark.parametrize(("shape", "copied"), [((2, 16, 8, 8), 0), ((2, 16, 2, 8, 8), 6)])
def test_parts_of_the_gradient_of_joined_pictures_are_taken_without_a_copy(
    shape: tuple[int, ...], copied: int
) -> None:
    """Of volumes MXNet computes them without oneDNN, which reads all in the usual layout."""
    kernel = (1,) * (len(shape) - 2)
    options = {"num_filter": 16, "kernel": kernel, "no_bias": True}
    data = pictures()
    parts = [mx.sym.Convolution(data, **options) for _ in range(3)]
    net = mx.sym.Convolution(mx.sym.Concat(*parts, dim=1), **options)
    traced = trace(classified(net), shapes={"data": shape})
    nbytes = copies(traced.graph, traced.nodes).temporary_nbytes
    kinds = zip(traced.nodes, nbytes, strict=True)
    [backward] = [each for node, each in kinds if node.op == "_backward_Concat"]
    picture = 4 * math.prod(shape)
    assert backward == copied * picture


# What oneDNN reads and writes in the gradient of a pooling of whole pictures: it says so itself
# (DNNL_VERBOSE=1).
@pytest.mark.parametrize(
    ("shape", "is_own"),
    [
        ((4, 20, 7, 7), False),
        ((4, 20, 20, 20), False),
        ((4, 20, 28, 28), True),
        ((4, 20, 7, 28), True),
        ((4, 20, 7, 1), False),
        ((4, 20, 198, 1), True),
        ((4, 20, 1, 7), True),
        ((4, 20, 8), False),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_the_gradient_of_a_pooling_of_whole_pictures_of_few_channels_is_in_another_layout(
    shape: tuple[int, ...], is_own: bool, is_whole: bool
) -> None:
    ones = (1,) * (len(shape) - 2)
    places = {"global_pool": True} if is_whole else {"pad": ones}
    out = mx.sym.Pooling(mx.sym.tanh(pictures()), kernel=ones, pool_type="max", **places)
    traced = trace(classified(out), shapes={"data": shape}, grad_req="write")
    kept = copies(traced.graph, traced.nodes).kept_nbytes
    [backward] = [
        each for node, each in zip(traced.nodes, kept, strict=True) if node.op == "_backward_tanh"
    ]
    assert (backward > 0) is (is_own and is_whole)


def test_the_gradient_of_an_activation_is_computed_beside_what_it_overwrites() -> None:
    """No array of 15 channels is in another layout, for which there would be copies."""
    beside = []
    for activation in (activated, normed):
        net = mx.sym.MakeLoss(mx.sym.mean(activation(normed(convolved(pictures(), 15)))))
        traced = trace(net, shapes={"data": (2, 15, 8, 8)}, realisation="packed")
        beside.append(packed_nbytes(traced.graph, traced.nodes))
    picture = 4 * 2 * 15 * 64
    assert beside[0] - beside[1] == picture + picture // 2


@pytest.mark.parametrize(
    ("op", "times"),
    [
        (mx.sym.LayerNorm, 2),
        (lambda data: mx.sym.GroupNorm(data, num_groups=4), 2),
        (mx.sym.InstanceNorm, 0),
        (mx.sym.relu, 0),
        (lambda data: mx.sym.Dropout(data, p=0.5), 0),
        (lambda data: mx.sym.Pad(data, mode="edge", pad_width=(0,) * 6 + (1, 1)), 0),
    ],
)
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_temporary_space_is_counted_for_the_operators_that_ask_for_it(
    realisation: str, op: Callable[[Symbol], Symbol], times: int
) -> None:
    net = mx.sym.MakeLoss(mx.sym.mean(op(pictures())))
    traced = trace(net, shapes={"data": SHAPE}, grad_req={"data": "write"}, realisation=realisation)
    estimate = load(realisation).workspace(traced, "cpu")
    assert estimate is not None
    assert estimate[0] == times * N


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # One picture of 16 channels, of which nine places are looked at, whatever lies behind.
        (convolved, 2 * N // 2 * 9),
        (lambda data: convolved(convolved(data), 8), 2 * N // 2 * 9),
        (lambda data: convolved(data, groups=4), 2 * N // 2 * 9),
        (lambda data: mx.sym.Convolution(data, num_filter=8, kernel=(1, 1)), 0),
    ],
)
def test_space_of_mxnets_own_layers_is_counted_once(
    body: Callable[[Symbol], Symbol], expected: int
) -> None:
    """Of double precision, which oneDNN does not compute."""
    net = mx.sym.MakeLoss(mx.sym.mean(body(pictures())))
    options: dict[str, Any] = {"type_dict": {"data": "float64"}, "grad_req": {"data": "write"}}
    traced = trace(net, shapes={"data": SHAPE}, realisation="packed", **options)
    assert packed_nbytes(traced.graph, traced.nodes) == expected


def test_an_op_may_read_the_shape_of_what_explicit_steps_gate() -> None:
    """MXNet takes gather_nd for a backward op, so that explicit steps have another node for it."""
    picked = mx.sym.gather_nd(mx.sym.sin(mx.sym.Variable("data")), mx.sym.zeros((1, 4)))
    net = mx.sym.MakeLoss(picked * mx.sym.ones_like(picked))
    traced = trace(net, shapes={"data": (16, 8)}, realisation="explicit", grad_req="write")
    assert traced.form.workspace(traced, "cpu") is not None
