"""Room for what the products of large matrices are made of."""

from __future__ import annotations

import mxnet as mx
import pytest

from memplan.mxnet.realise import workspace_estimate
from memplan.mxnet.realise.workspace_estimate import packed_nbytes
from memplan.planning.realisation import trace


@pytest.mark.parametrize(
    ("op", "width"), [("dense", 512), ("dense", 4096), ("batch_dot", 512), ("batch_dot", 4096)]
)
def test_large_products_of_matrices_have_room_for_copies_of_their_parts(
    op: str, width: int
) -> None:
    data = mx.sym.Variable("data")
    if op == "dense":
        out = mx.sym.FullyConnected(data, num_hidden=width, flatten=False, no_bias=True)
    else:
        out = mx.sym.batch_dot(data, mx.sym.Variable("other", shape=(2, width, width)))
    net = mx.sym.MakeLoss(mx.sym.mean(out))
    traced = trace(net, shapes={"data": (2, 256, width)}, realisation="packed")
    nbytes = packed_nbytes(traced.graph, traced.nodes)
    picture, matrix = 4 * 2 * 256 * width, 4 * width * width * (1 if op == "dense" else 2)
    # The data and the matrix are read, and their gradients written, by the backward op.
    assert nbytes >= min(8 << 20, picture + matrix) - workspace_estimate.SMALL_PRODUCT
    assert (nbytes >= 8 << 20) is (width == 4096)
