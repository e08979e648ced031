"""The temporary space of operators without oneDNN, counted by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import SHAPE, N, activated, convolved, pictures
from memplan.mxnet.realise.estimate import workspace_estimate
from memplan.mxnet.realise.estimate.copied_back import copied_back_nbytes
from memplan.mxnet.realise.estimate.layout_copies import copies
from memplan.mxnet.realise.estimate.operator_space import label_nbytes, space_nbytes
from memplan.mxnet.realise.estimate.scratchpads import scratchpads
from memplan.mxnet.realise.estimate.workspace_estimate import largest_nbytes, packed_nbytes
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol


def _traced(net: Symbol, shape: tuple[int, ...] = SHAPE, **options: Any) -> Trace:
    net = mx.sym.MakeLoss(mx.sym.mean(net))
    options = {"grad_req": {"data": "write"}, "realisation": "packed", **options}
    return trace(net, shapes={"data": shape}, **options)


def _spaces(op: str, net: Symbol, shape: tuple[int, ...] = SHAPE, **options: Any) -> list[int]:
    """Of the calls of an op, and of the backward ops of these."""
    nodes = _traced(net, shape, **options).nodes
    return [space_nbytes(node) for node in nodes if op in (node.op, getattr(node.forward, "op", 0))]


def _upsampled(**options: Any) -> Symbol:
    return mx.sym.UpSampling(
        pictures(), mx.sym.Variable("weight"), sample_type="bilinear", num_filter=16, **options
    )


# 16 places of the kernel for each of 16 channels, and the data, of two pictures; of an odd number
# of times as large they are 25.
@pytest.mark.parametrize(("scale", "kernel"), [(2, 16), (3, 25)])
def test_an_upsampling_by_interpolation_is_a_deconvolution(scale: int, kernel: int) -> None:
    nbytes = (kernel + 1) * N
    assert _spaces("UpSampling", _upsampled(scale=scale)) == [nbytes, nbytes]
    nearest = mx.sym.UpSampling(pictures(), scale=scale, sample_type="nearest")
    assert _spaces("UpSampling", nearest) == [0, 0]


@pytest.mark.parametrize(("mb", "npictures"), [(1, 3), (0, 1), (512, 5)])
def test_as_many_pictures_are_rolled_out_as_are_allowed(mb: int, npictures: int) -> None:
    """One takes 17 * 16 * 17 * 17 numbers, of which a MB has room for three."""
    spaces = _spaces("UpSampling", _upsampled(scale=2, workspace=mb), (5, 16, 17, 17))
    assert spaces == [npictures * 4 * 17 * 16 * 17 * 17] * 2


def _deconvolved() -> Symbol:
    return mx.sym.Deconvolution(pictures(), num_filter=8, kernel=(4, 4), stride=(2, 2), pad=(1, 1))


def test_a_deconvolution_without_onednn_rolls_out_many_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nbytes = (8 * 16 + 16) * 2 * 64 * 4
    assert _spaces("Deconvolution", _deconvolved()) == [0, 0]
    double = {"type_dict": {"data": "float64"}}
    assert _spaces("Deconvolution", _deconvolved(), **double) == [2 * nbytes] * 2
    traced = _traced(_deconvolved(), **double)
    assert scratchpads(traced.graph, traced.nodes, range(len(traced.nodes))) == 0
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    assert _spaces("Deconvolution", _deconvolved()) == [nbytes] * 2


SORTS: dict[str, tuple[Callable[[Symbol], Symbol], str, list[int]]] = {
    # What is sorted and its places; the places of what was taken, of eight three.
    "topk": (lambda x: mx.sym.topk(x, k=3, ret_typ="value"), "topk", [2 * N, N * 3 // 8]),
    # What is turned round, too.
    "of channels": (lambda x: mx.sym.sort(x, axis=1), "sort", [3 * N, N]),
    "of all": (lambda x: mx.sym.sort(x, axis=None), "sort", [2 * N, N]),
    "places": (lambda x: x + mx.sym.argsort(x), "argsort", [2 * N]),
    "mask": (
        lambda x: x * mx.sym.topk(x, axis=1, k=2, ret_typ="mask"),
        "topk",
        [3 * N + N * 2 // 16],
    ),
}


@pytest.mark.parametrize("name", SORTS)
def test_sorts_have_copies_and_places(name: str) -> None:
    sort, op, expected = SORTS[name]
    # topk's backward op is that of a sort, too.
    assert _spaces(op, sort(mx.sym.tanh(pictures()))) == expected


def test_space_lies_beside_copies_for_other_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the sin are kept in another place than what comes and goes."""
    sines = mx.sym.sin(convolved(activated(pictures())))
    behind = [mx.sym.sort(sines, axis=3), mx.sym.contrib.quadratic(sines, a=1, b=2)]
    found = []
    for net in behind:
        traced = _traced(net)
        counted = packed_nbytes(traced.graph, traced.nodes)
        with monkeypatch.context() as without:
            without.setattr(workspace_estimate, "space_nbytes", lambda node: 0)
            without.setattr(workspace_estimate, "largest_nbytes", lambda nodes: 0)
            found.append(counted - packed_nbytes(traced.graph, traced.nodes))
        assert counted > found[-1]
    # Nobody knows what a quadratic takes: its gradient reads two arrays and writes one.
    assert found == [2 * N, 7 * 3 * N // 4]


TAKE_NEXT_TO_NOTHING: dict[str, Callable[[Symbol], Symbol]] = {
    "gemm": lambda x: mx.sym.linalg.gemm2(x, x, transpose_b=True),
    "syrk": mx.sym.linalg.syrk,
    "potrf": mx.sym.linalg.potrf,
    "reverse": mx.sym.SequenceReverse,
    "last": lambda x: mx.sym.SequenceLast(
        x, mx.sym.ones(shape=(SHAPE[1],)), use_sequence_length=True
    ),
    "gather": lambda x: mx.sym.gather_nd(x, mx.sym.zeros(shape=(1, 4))),
    "diagonals": mx.sym.diag,
    "one hot": lambda x: mx.sym.broadcast_mul(
        mx.sym.expand_dims(x, 4), mx.sym.one_hot(mx.sym.BlockGrad(x), depth=4)
    ),
    "cropped": lambda x: mx.sym.Crop(x, num_args=1, h_w=(4, 4)),
    "noise": lambda x: mx.sym.broadcast_add(x, mx.sym.random.normal_like(x)),
    "scattered": lambda x: mx.sym.scatter_nd(
        mx.sym.reshape(x, shape=(-1,)), mx.sym.zeros(shape=(1, N // 4)), shape=(N // 4,)
    ),
    "by lengths": lambda x: mx.sym.softmax(
        mx.sym.reshape(x, shape=(0, -1)), mx.sym.ones(shape=(2,), dtype="int32"), use_length=True
    ),
    "regions": lambda x: mx.sym.contrib.ROIAlign(
        x, mx.sym.zeros(shape=(4, 5)), pooled_size=(2, 2), spatial_scale=1.0
    ),
}


@pytest.mark.parametrize("name", TAKE_NEXT_TO_NOTHING)
def test_it_is_known_that_they_take_next_to_nothing(name: str) -> None:
    nodes = _traced(TAKE_NEXT_TO_NOTHING[name](mx.sym.tanh(pictures()))).nodes
    assert largest_nbytes(nodes) == max(map(space_nbytes, nodes)) == 0


def test_moments_have_the_squares_and_a_cross_entropy_the_probabilities() -> None:
    moments = mx.sym.moments(mx.sym.tanh(pictures()), axes=(1,))
    assert _spaces("moments", moments[0] + moments[1]) == [N, 0]
    rows = mx.sym.softmax_cross_entropy(mx.sym.tanh(pictures()), mx.sym.zeros(shape=(8,)))
    assert _spaces("softmax_cross_entropy", rows, (8, 64))[0] == 4 * 8 * 64


def test_deformable_convolutions_roll_out_one_picture() -> None:
    data = mx.sym.tanh(pictures())
    offsets = mx.sym.slice_axis(data, axis=1, begin=0, end=2)
    options = {"num_filter": 4, "kernel": (1, 1), "no_bias": True}
    deformed = mx.sym.contrib.DeformableConvolution(data, offsets, **options)
    assert _spaces("_contrib_DeformableConvolution", deformed) == [N // 2, N // 2]


def _of_inputs(op: str, make: Callable[..., Symbol], *shapes: tuple[int, ...]) -> list[int]:
    """Of the calls of an op on float32 arrays of these ``shapes``, and of the backward ops."""
    by_name = {f"x{place}": shape for place, shape in enumerate(shapes)}
    net = mx.sym.MakeLoss(mx.sym.sum(make(*map(mx.sym.Variable, by_name))))
    nodes = trace(
        net, shapes=by_name, grad_req=dict.fromkeys(by_name, "write"), realisation="mirror"
    ).nodes
    assert largest_nbytes(nodes) == 0
    return [space_nbytes(node) for node in nodes if op in (node.op, getattr(node.forward, "op", 0))]


def test_targets_have_eleven_numbers_for_each_anchor_and_box() -> None:
    targets = _of_inputs(
        "_contrib_MultiBoxTarget",
        lambda *arrays: mx.sym.contrib.MultiBoxTarget(*arrays)[0],
        *((1, 30, 4), (2, 5, 6), (2, 3, 30)),
    )
    assert targets == [4 * 11 * 2 * 30 * 5, 0]


def test_an_alignment_has_its_places_at_all_times() -> None:
    """Of 7 letters between blanks at 20 times, of an alphabet of 10, and two such texts."""
    spaces = _of_inputs("CTCLoss", mx.sym.ctc_loss, (20, 2, 10), (2, 7))
    assert spaces == [4 * 2 * (10 + 15 * 20 + 4 * 15 + 10 * 20), 0]


BOXES: dict[str, tuple[str, Callable[..., Symbol], list[tuple[int, ...]], list[int]]] = {
    "detections": (
        "_contrib_MultiBoxDetection",
        mx.sym.contrib.MultiBoxDetection,
        [(2, 3, 30), (2, 120), (1, 30, 4)],
        [4 * 6 * 30 * 3, 0],
    ),
    "proposals": (
        "_contrib_MultiProposal",
        lambda *arrays: mx.sym.contrib.MultiProposal(*arrays, rpn_pre_nms_top_n=50)[0],
        [(2, 24, 8, 8), (2, 48, 8, 8), (2, 3)],
        [4 * 2 * (7 * 12 * 64 + 8 * 50), 0],
    ),
    "all proposals": (
        "_contrib_Proposal",
        lambda *arrays: mx.sym.contrib.Proposal(*arrays, rpn_pre_nms_top_n=0)[0],
        [(1, 24, 8, 8), (1, 48, 8, 8), (1, 3)],
        [4 * 15 * 12 * 64, 0],
    ),
    "suppression": ("_contrib_box_nms", mx.sym.contrib.box_nms, [(2, 30, 6)], [60 * 64, 0]),
    "matching": (
        "_contrib_bipartite_matching",
        lambda scores: mx.sym.contrib.bipartite_matching(scores, threshold=0.5)[0],
        [(2, 5, 6)],
        [60 * 28, 0],
    ),
    "modulated": (
        "_contrib_ModulatedDeformableConvolution",
        lambda *arrays: mx.sym.contrib.ModulatedDeformableConvolution(
            *arrays, kernel=(3, 3), pad=(1, 1), num_filter=4, no_bias=True, im2col_step=2
        ),
        [(4, 2, 8, 8), (4, 18, 8, 8), (4, 9, 8, 8), (4, 2, 3, 3)],
        [4 * (2 * 18 * 64 + 4 * 4 * 64)] * 2,
    ),
}


@pytest.mark.parametrize("name", BOXES)
def test_operators_of_detectors_have_space_by_formulas(name: str) -> None:
    op, make, shapes, expected = BOXES[name]
    assert _of_inputs(op, make, *shapes) == expected


@pytest.mark.parametrize(("axis", "nbytes"), [(0, 0), (-2, 0), (1, 28 * 6 + 4 * 9), (-1, 204)])
def test_the_gradient_of_a_take_along_a_later_axis_sorts_its_places(axis: int, nbytes: int) -> None:
    take = functools.partial(mx.sym.take, axis=axis)
    assert _of_inputs("take", take, (4, 8), (2, 3)) == [0, nbytes]


def test_a_sum_of_a_gradient_has_the_places_of_what_it_sums() -> None:
    """As many for the gradient of one number as there are sums, for that of a row few."""
    add, subtract = mx.sym.broadcast_add, mx.sym.broadcast_sub
    assert _of_inputs("broadcast_add", add, (8, 16), (1, 1)) == [0, 4 * 128]
    assert _of_inputs("broadcast_sub", subtract, (8, 16), (1, 16)) == [0, 4 * 8]
    assert _of_inputs("broadcast_add", add, (8, 16), (8, 16)) == [0, 0]
    assert _of_inputs("broadcast_mul", mx.sym.broadcast_mul, (8, 16), (1, 1)) == [0, 0]


LABELS = {"rows": ((64, 1024), False, 4 * 64), "places": ((4, 256, 1024), True, 4 * 4 * 1024)}


@pytest.mark.parametrize("name", LABELS)
def test_a_loss_copies_its_label_to_count_what_is_valid(name: str) -> None:
    """Packed steps count it: an executor has blocks for the gradient of the label instead."""
    shape, multi_output, nbytes = LABELS[name]

    def of_loss(normalization: str, realisation: str) -> Trace:
        with mx.name.NameManager():
            net = mx.sym.SoftmaxOutput(
                mx.sym.exp(mx.sym.Variable("data")),
                normalization=normalization,
                multi_output=multi_output,
                name="softmax",
            )
        options = {"grad_req": {"data": "write"}, "realisation": realisation}
        return trace(net, shapes={"data": shape}, **options)

    valid, batch = (of_loss(normalization, "packed") for normalization in ("valid", "batch"))
    assert [label_nbytes(node) for node in valid.nodes] == [0, 0, nbytes, 0]
    counted, without = (packed_nbytes(each.graph, each.nodes) for each in (valid, batch))
    assert counted - without == nbytes
    assert not any(map(space_nbytes, of_loss("valid", "explicit").nodes))


def test_of_probabilities_none_is_counted() -> None:
    label = mx.sym.Variable("label", shape=(64, 1024))
    net = mx.sym.SoftmaxOutput(mx.sym.exp(mx.sym.Variable("data")), label, normalization="valid")
    options = {"grad_req": {"data": "write"}, "realisation": "packed"}
    nodes = trace(net, shapes={"data": (64, 1024)}, **options).nodes
    assert not any(map(label_nbytes, nodes))


def test_without_onednn_packed_steps_have_columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies in oneDNN's layouts, no scratchpads, nothing that is computed beside its place."""
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    monkeypatch.setattr(workspace_estimate, "code_nbytes", lambda *_: 0)
    net = mx.sym.FullyConnected(
        activated(convolved(mx.sym.relu(convolved(pictures())))), num_hidden=512
    )
    traced = _traced(net, (2, 16, 32, 32))
    found = copies(traced.graph, traced.nodes)
    assert not any((*found.kept_nbytes, *found.temporary_nbytes, *map(any, found.layouts)))
    assert not any(copied_back_nbytes(traced.graph, traced.nodes))
    assert packed_nbytes(traced.graph, traced.nodes) == 9 * 16 * N // 2
