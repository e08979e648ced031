"""The scratchpads that oneDNN keeps for convolutions: columns of pictures, by shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import SHAPE, WEIGHT, N, activated, classified, convolved, pictures
from memplan.mxnet.realise.estimate import columns, onednn_kernels, scratchpads
from memplan.mxnet.realise.estimate.layout_copies import copies
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does depends on the processor: that of another machine is imagined."""
    for module in (columns, onednn_kernels):
        monkeypatch.setattr(module, "has_avx512", lambda: True)
    monkeypatch.setattr(columns, "cache_nbytes", {2: 1 << 20}.get)
    monkeypatch.setattr(columns, "cache_nbytes_of_onednn", {2: 512 << 10}.get)


def _estimated(net: Symbol, shape: tuple[int, ...]) -> int:
    traced = trace(classified(net), shapes={"data": shape}, grad_req="write", realisation="packed")
    return scratchpads.scratchpads(traced.graph, traced.nodes, range(len(traced.nodes)))


# Of so many channels oneDNN has kernels of its own, which need no columns; of so few it has one for
# all but the gradient of the data.
@pytest.mark.parametrize(
    ("channels", "nfilter", "matrices"),
    [(16, 16, 0), (24, 24, 0), (3, 24, 1), (3, 12, 3), (12, 24, 3), (24, 12, 3)],
)
@pytest.mark.parametrize("nthreads", [1, 2])
def test_packed_steps_have_scratchpads_for_matrices_only(
    monkeypatch: pytest.MonkeyPatch, channels: int, nfilter: int, matrices: int, nthreads: int
) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: nthreads)
    net = activated(convolved(activated(mx.sym.Variable("data")), nfilter))
    rolled = 4 * channels * 9 * 64
    # Each of two threads has a gradient of the weight, and both are added.
    has_weights = nthreads == 2 and matrices == 3
    weights = 2 * 4 * channels * nfilter * 9 if has_weights else 0
    assert _estimated(net, (2, channels, 8, 8)) == matrices * nthreads * rolled + weights


@pytest.mark.parametrize("realisation", ["mirror", "explicit", "packed"])
def test_a_gradient_of_the_data_that_nobody_reads_has_none(
    monkeypatch: pytest.MonkeyPatch, realisation: str
) -> None:
    """So it is in a network whose first convolution reads what needs no gradient."""
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net = activated(convolved(activated(pictures()), 12))
    found = []
    for grad_req in ("write", None):  # None: not of the data
        traced = trace(
            classified(net),
            shapes={"data": (2, 12, 8, 8)},
            grad_req=grad_req,
            realisation=realisation,
        )
        found.append(scratchpads.scratchpads(traced.graph, traced.nodes, range(len(traced.nodes))))
    rolled = 4 * 12 * 9 * 64
    assert found == [3 * rolled, 2 * rolled]


@pytest.mark.parametrize(
    ("met", "layouts"), [("....", 1), ("ab", 2), (".a", 2), ("aaaa", 1), ("abab", 2), (".abcd", 3)]
)
def test_convolutions_that_meet_the_same_layouts_are_prepared_once(
    monkeypatch: pytest.MonkeyPatch, met: str, layouts: int
) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net = pictures()
    for _ in met:
        net = activated(convolved(net, 12))
    traced = trace(classified(net), shapes={"data": (2, 12, 8, 8)}, realisation="packed")
    given = iter(met)
    all_met = [next(given) if node.op == "Convolution" else "." for node in traced.nodes]
    forward = scratchpads.scratchpads(traced.graph, traced.nodes, all_met)
    monkeypatch.setattr(scratchpads, "LAYOUTS", 1)
    once = scratchpads.scratchpads(traced.graph, traced.nodes, all_met)
    assert forward - once == (layouts - 1) * 4 * 12 * 9 * 64


def _pointwise(data: Symbol) -> Symbol:
    return mx.sym.Convolution(data, num_filter=16, kernel=(1, 1), no_bias=True)


# What convolutions of 16 filters write is in oneDNN's layouts, and what a sine does in the usual
# one. Those of 12 filters, which have columns, read one of these each.
@pytest.mark.parametrize(
    ("blocks", "layouts"),
    [
        ([convolved] * 3, 1),
        ([mx.sym.sin] * 3, 1),
        ([convolved, mx.sym.sin, convolved], 2),
        ([convolved, _pointwise, convolved], 2),
    ],
)
def test_equal_blocks_meet_the_same_layouts(
    monkeypatch: pytest.MonkeyPatch, blocks: list[Callable[[Symbol], Symbol]], layouts: int
) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net, heads = convolved(pictures()), []
    for block in blocks:
        net = activated(block(net))
        heads.append(mx.sym.sum(convolved(net, 12)))
    traced = trace(
        mx.sym.MakeLoss(mx.sym.add_n(*heads)), shapes={"data": SHAPE}, realisation="packed"
    )
    all_met = copies(traced.graph, traced.nodes).layouts
    columns = 4 * 16 * 9 * 64  # of the convolution, and of its gradients, which meet as many
    assert scratchpads.scratchpads(traced.graph, traced.nodes, all_met) == 3 * layouts * columns


def test_packed_steps_prepare_convolutions_of_the_usual_layout_once() -> None:
    net = pictures()
    for _ in range(3):
        net = mx.sym.relu(
            mx.sym.sin(convolved(net, 12))
        )  # no operator of oneDNN's: in the usual layout
    traced = trace(classified(net), shapes={"data": (2, 12, 8, 8)}, realisation="packed")
    met = copies(traced.graph, traced.nodes).layouts
    assert not any(any(m) for m, n in zip(met, traced.nodes, strict=True) if n.op == "Convolution")


def _dilated(data: Symbol, by: int) -> Symbol:
    return mx.sym.Convolution(
        data, num_filter=16, kernel=(3, 3), pad=(by, by), dilate=(by, by), no_bias=True
    )


def test_avx2_multiplies_matrices_for_the_weights_of_dilated_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net, estimates, temporary = activated(_dilated(activated(convolved(pictures())), 2)), [], []
    for has_avx512 in (True, False):
        monkeypatch.setattr(onednn_kernels, "has_avx512", lambda answer=has_avx512: answer)
        estimates.append(_estimated(net, SHAPE))
        traced = trace(classified(net), shapes={"data": SHAPE})
        temporary.append(copies(traced.graph, traced.nodes).temporary_nbytes)
    assert estimates == [0, 4 * 16 * 9 * 64]
    # The data, which all else has in oneDNN's layout, is copied; the gradient of the weight is not.
    [more] = [other - one for one, other in zip(*temporary, strict=True) if one != other]
    assert more == N - WEIGHT


ALL_ELSE = 4 * (2 * 12 * 100 + 12 * 81 + 2 * 100)


# Of one filter, the gradient of the data takes a tenth of 15 times all else, that of the weight
# half of that.
@pytest.mark.parametrize(
    ("nfilter", "expected"),
    [(12, 3 * 4 * 12 * 81 * 100), (1, 15 * ALL_ELSE // 10 + 15 * ALL_ELSE // 20)],
)
def test_columns_far_larger_than_all_else_are_made_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, nfilter: int, expected: int
) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net = mx.sym.Convolution(
        activated(pictures()), num_filter=nfilter, kernel=(9, 9), pad=(4, 4), no_bias=True
    )
    assert _estimated(net, (2, 12, 10, 10)) == expected


def test_columns_of_a_gigabyte_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net = convolved(activated(pictures()), 12)
    shape = (1, 12, 2048, 2048)
    assert 4 * 12 * 9 * 2048 * 2048 > 1 << 30
    assert _estimated(net, shape) == (1 << 20) + (1 << 30) // 10 + (1 << 30) // 20


# Beyond some padding the convolution itself is a product of matrices, too.
@pytest.mark.parametrize(("by", "times", "products"), [(2, 1, 1), (2, 3, 3), (4, 1, 2), (4, 3, 6)])
def test_what_is_prepared_for_dilated_convolutions(
    monkeypatch: pytest.MonkeyPatch, by: int, times: int, products: int
) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: False)
    net = activated(convolved(pictures()))
    for _ in range(times):
        net = activated(_dilated(net, by))
    assert _estimated(net, SHAPE) == products * 4 * 16 * 9 * 64


def test_a_convolution_itself_has_columns_that_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    monkeypatch.setattr(columns, "cache_nbytes", {2: 1000}.get)
    monkeypatch.setattr(columns, "cache_nbytes_of_onednn", {2: 500}.get)
    net = activated(convolved(activated(pictures()), 12))
    assert _estimated(net, (2, 12, 8, 8)) == 2 * 4 * 12 * 9 * 64 + 1000


# Of 16 channels oneDNN has kernels of its own; those of 12 are products, which have columns, too.
@pytest.mark.parametrize("nfilter", [16, 12])
def test_deconvolutions_add_a_bias_to_a_copy(nfilter: int) -> None:
    estimates = []
    for no_bias in (True, False):
        options = {"kernel": (2, 2), "stride": (2, 2), "no_bias": no_bias}
        net = mx.sym.Deconvolution(activated(pictures()), num_filter=nfilter, **options)
        estimates.append(_estimated(net, SHAPE))
    assert estimates[1] - estimates[0] == 4 * N * nfilter // 16


@pytest.mark.parametrize("depth", [2, 8])
def test_volumes_are_rolled_out_slice_by_slice(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(scratchpads, "threads", lambda: 1)
    net = mx.sym.Convolution(
        activated(mx.sym.Variable("data")), num_filter=12, kernel=(3, 3, 3), pad=(1, 1, 1)
    )
    assert _estimated(net, (2, 12, depth, 8, 8)) == 3 * 4 * 12 * 27 * 64


def _found(
    monkeypatch: pytest.MonkeyPatch, nthreads: int, shape: tuple[int, ...], **options: Any
) -> list[float]:
    """For a convolution, and for the gradients of its data and weight, in MB with so many threads.

    What is not given of ``options`` is 3 in each dimension, or 1.
    """
    monkeypatch.setattr(scratchpads, "threads", lambda: nthreads)
    ndim = len(shape) - 2
    options = {"kernel": (3,) * ndim, "pad": (1,) * ndim, "no_bias": True, **options}
    traced = trace(classified(mx.sym.Convolution(pictures(), **options)), shapes={"data": shape})
    [call] = [node for node in traced.nodes if node.op == "Convolution"]
    return [round(nbytes / 1e6, 2) for nbytes in scratchpads._of_products(call)]


# What a process was seen to touch, with 16 threads, of oneDNN's scratchpads (a malloc that prints,
# and mincore). Of a convolution of pictures there were 4.94, 5.81, 6.14 and 4.81 MB for the last
# four, and 0.3 with one thread, for whose columns more counts.
@pytest.mark.parametrize(
    ("shape", "options", "with_many", "with_one"),
    [
        ((1, 24, 32, 64, 64), {"num_filter": 12}, [169.87, 10.62, 10.62], [10.62] * 3),
        ((4, 48, 192, 192), {"num_filter": 3}, [8.0, 63.7, 63.7], [1.05, 63.7, 63.7]),
        (
            (8, 36, 96, 96),
            {"num_filter": 35, "stride": (2, 2)},
            [5.68, 2.99, 24.25],
            [1.05, 2.99, 2.99],
        ),
        ((8, 7, 96, 96), {"num_filter": 18}, [6.63, 2.32, 2.32], [1.05, 2.32, 2.32]),
        (
            (8, 18, 96, 96),
            {"num_filter": 36, "num_group": 3},
            [6.92, 31.85, 1.99],
            [1.05, 1.99, 1.99],
        ),
        ((8, 3, 192, 192), {"num_filter": 7, "stride": (2, 2)}, [5.6, 7.96, 1.0], [1.0, 1.0, 1.0]),
    ],
)
def test_threads_have_columns_of_their_own_where_each_makes_products_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    options: dict[str, Any],
    with_many: list[float],
    with_one: list[float],
) -> None:
    assert _found(monkeypatch, 16, shape, **options) == with_many
    assert _found(monkeypatch, 1, shape, **options) == with_one


def test_threads_that_find_no_picture_touch_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    _, of_data, of_weight = _found(monkeypatch, 16, (5, 12, 32, 32), num_filter=12)
    rolled, weight = 4 * 12 * 9 * 1024 / 1e6, 4 * 12 * 12 * 9 / 1e6
    assert of_data == round(5 * rolled, 2)
    assert of_weight == round(5 * (rolled + weight), 2)


def test_one_picture_of_one_group_is_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    _, of_data, of_weight = _found(monkeypatch, 16, (1, 12, 32, 32), num_filter=12)
    assert of_data == of_weight == round(4 * 12 * 9 * 1024 / 1e6, 2)


def test_points_have_columns_only_where_some_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"num_filter": 12, "kernel": (1, 1), "pad": (0, 0)}
    assert _found(monkeypatch, 1, (2, 30, 64, 64), **points) == [0, 0, 0]
    # Seen were 92,288, 123,008 and 128,896 bytes, and with four threads 16,441,344 of the gradients
    # of a weight that each of them has.
    strided = _found(monkeypatch, 1, (2, 30, 64, 64), stride=(2, 2), **points)
    assert strided == [0.12, 0.12, 0.12]
    points["num_filter"] = 500
    assert _found(monkeypatch, 4, (16, 2055, 8, 8), **points) == [0, 0, 16.44]
