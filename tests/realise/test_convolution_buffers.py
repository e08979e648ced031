"""The buffers of gradients of convolutions: what several threads were seen to allocate."""

from __future__ import annotations

import mxnet as mx
import pytest

from memplan.mxnet.realise.estimate import (
    matrix_buffers,
    onednn_kernels,
    scratchpads,
    workspace_estimate,
)
from memplan.mxnet.realise.estimate.workspace_estimate import packed_nbytes
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor of another machine is imagined."""
    for module in (matrix_buffers, onednn_kernels):
        monkeypatch.setattr(module, "has_avx512", lambda: True)


def _have_threads(monkeypatch: pytest.MonkeyPatch, nthreads: int) -> None:
    for module in (matrix_buffers, scratchpads, workspace_estimate):
        monkeypatch.setattr(module, "threads", lambda: nthreads)


def _traced(op: str, shape: tuple[int, ...], noutputs: int, kernel: int) -> Trace:
    data = mx.sym.tanh(mx.sym.Variable("data"))
    side, pad = (kernel, kernel), (kernel // 2, kernel // 2)
    made = getattr(mx.sym, op)(data, num_filter=noutputs, kernel=side, pad=pad, no_bias=True)
    return trace(mx.sym.MakeLoss(mx.sym.mean(made)), shapes={"data": shape}, realisation="packed")


# In MB, of a malloc that prints: what each product gets, of which threads may make several at once.
@pytest.mark.parametrize(
    ("op", "shape", "noutputs", "kernel", "nthreads", "seen"),
    [
        ("Convolution", (4, 90, 80, 80), 90, 3, 4, [4.9]),
        ("Convolution", (4, 90, 48, 48), 90, 3, 8, [3.5]),
        ("Convolution", (4, 90, 44, 44), 90, 3, 8, [0.0]),
        ("Convolution", (8, 150, 80, 80), 190, 3, 2, [5.2, 2.5]),
        ("Deconvolution", (4, 20, 80, 80), 300, 1, 2, [2.5]),
    ],
)
def test_products_of_gradients_are_known(
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    shape: tuple[int, ...],
    noutputs: int,
    kernel: int,
    nthreads: int,
    seen: list[float],
) -> None:
    _have_threads(monkeypatch, nthreads)
    nodes = _traced(op, shape, noutputs, kernel).nodes
    products = [each for node in nodes for each, _ in matrix_buffers._of_gradients(node)]
    assert len(products) == 2
    allocated = [round(matrix_buffers._allocated(each) / 1e6, 1) for each in products]
    assert allocated[-len(seen) :] == seen


def test_several_threads_return_buffers_of_gradients_of_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = _traced("Convolution", (4, 90, 80, 80), 90, 3).nodes
    _have_threads(monkeypatch, 1)
    assert matrix_buffers.kept_below(nodes) == 32 << 20
    _have_threads(monkeypatch, 4)
    assert matrix_buffers.kept_below(nodes) == 0


def test_buffers_of_all_threads_count_of_convolutions_without_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = _traced("Convolution", (8, 30, 256, 32), 42, 1)
    _have_threads(monkeypatch, 4)
    of_all = 4 * 4 * 42 * (8208 + 24)
    assert max(map(matrix_buffers.convolution_nbytes, traced.nodes)) == of_all
    counted = packed_nbytes(traced.graph, traced.nodes)
    monkeypatch.setattr(workspace_estimate, "convolution_nbytes", lambda _: 0)
    assert counted - packed_nbytes(traced.graph, traced.nodes) == of_all
