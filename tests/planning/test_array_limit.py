"""MXNet 1.9.1 holds fewer than 2^31 elements in one array: what does not fit is named."""

from __future__ import annotations

import mxnet as mx
import pytest

import memplan
from memplan.errors import SizeError
from memplan.mxnet.trace.build import trace

MOST = 2**31 - 1


def network() -> mx.sym.Symbol:
    body = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="wide")
    body = mx.sym.Activation(body, act_type="relu", name="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=4), name="softmax")


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (MOST // 8 + 1, r"an output of 'wide' \(FullyConnected\) of shape \(268435456, 8\)"),
        (MOST // 6 + 1, "the array 'data'"),
        (2**31, "the array 'data'"),
        (2**60, "the array 'data'"),
    ],
)
def test_an_array_that_is_too_large_is_named(batch: int, named: str) -> None:
    with pytest.raises(SizeError, match=f"{named}.*fewer than 2\\^31"):
        trace(network(), shapes={"data": (batch, 6)})


def test_the_largest_array_is_planned() -> None:
    graph = trace(network(), shapes={"data": (MOST // 8, 6)}).graph
    assert max(tensor.nelements for tensor in graph.tensors) == MOST // 8 * 8


def test_the_largest_batch_ends_where_arrays_do() -> None:
    """Its tensors have more bytes than 32 bits can count, too."""
    result = memplan.max_batch_size(
        network(), "160GiB", strategy="store_all", costs="roofline:cpu", data=("N", 6)
    )
    assert (result.batch_size, result.too_large) == (MOST // 8, MOST // 8 + 1)
    assert result.plan.total_nbytes < 160 * 2**30
    first = str(result).splitlines()[0]
    assert "did not fit" not in first
    assert f"; {MOST // 8 + 1} is too large for MXNet: an output of 'wide'" in first
    assert "fewer than 2^31" in first


def test_a_network_too_large_for_any_batch_says_so() -> None:
    net = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2**20, name="huge")
    )
    with pytest.raises(SizeError, match="'huge_weight'"):
        memplan.max_batch_size(net, "1TiB", strategy="store_all", data=("N", 2**12))
