"""Room for what the products of large matrices are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from memplan.mxnet.realise.estimate import workspace_estimate
from memplan.mxnet.realise.estimate.workspace_estimate import packed_nbytes
from memplan.planning.realisation import trace


@pytest.mark.parametrize("width", [512, 4096])
def test_large_products_of_matrices_have_room_for_copies_of_their_parts(width: int) -> None:
    other = mx.sym.Variable("other", shape=(2, width, width))
    net = mx.sym.MakeLoss(mx.sym.mean(mx.sym.batch_dot(mx.sym.Variable("data"), other)))
    traced = trace(net, shapes={"data": (2, 256, width)}, realisation="packed")
    nbytes = packed_nbytes(traced.graph, traced.nodes)
    picture, matrices = 4 * 2 * 256 * width, 4 * width * width * 2
    # The data and the matrices are read, and their gradients written, by the backward op, which
    # makes one of two products at a time.
    assert nbytes >= min(8 << 20, (picture + matrices) // 2) - workspace_estimate.SMALL_PRODUCT
    assert (nbytes >= 8 << 20) is (width == 4096)


@pytest.mark.parametrize("product", [mx.sym.np.dot, lambda a, b: mx.sym.np.tensordot(a, b, axes=1)])
def test_so_have_those_of_numpy(product: Callable[[Any, Any], Any]) -> None:
    data, other = (mx.sym.Variable(name) for name in ("data", "other"))
    shapes, nbytes = {"data": (256, 4096), "other": (4096, 4096)}, []
    for out in (mx.sym.dot(data, other), product(data.as_np_ndarray(), other.as_np_ndarray())):
        net = mx.sym.MakeLoss(mx.sym.mean(out.as_nd_ndarray()))
        traced = trace(net, shapes=shapes, grad_req="write", realisation="packed")
        nbytes.append(workspace_estimate._for_matrices(traced.nodes))
    assert nbytes == [8 << 20, 8 << 20]
