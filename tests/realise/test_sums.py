"""Sums of 3 or 4 gradients are added in the order of MXNet's own executor, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.explicit import identical
from helpers.networks import Network
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


def convolution(data: mx.sym.Symbol, size: int = 1) -> mx.sym.Symbol:
    pad = size // 2
    return mx.sym.Convolution(
        data, num_filter=16, kernel=(size, size), pad=(pad, pad), no_bias=True
    )


def body() -> mx.sym.Symbol:
    return convolution(mx.sym.Variable("data"), 3)


def joined(*branches: mx.sym.Symbol) -> Network:
    loss = mx.sym.MakeLoss(mx.sym.mean(mx.sym.Concat(*branches) ** 2))
    return loss, {"data": (2, 16, 12, 12)}


def pooled(pool_type: str = "max", stride: int = 1) -> Network:
    """An inception block: three convolutions, and a pooling of the same size."""
    whole = body()
    small = mx.sym.Pooling(
        whole, kernel=(3, 3), pad=(1, 1), stride=(stride, stride), pool_type=pool_type
    )
    if stride == 2:
        small = mx.sym.UpSampling(small, scale=2, sample_type="nearest")
    return joined(*(convolution(whole) for _ in range(3)), convolution(small))


def of_a_wide_gradient() -> Network:
    """A relu, an upsampling and a residual whose gradients meet."""
    whole = body()
    active = mx.sym.relu(whole)
    branches = [convolution(active) for _ in range(2)]
    resized = mx.sym.UpSampling(active, scale=2, sample_type="nearest")
    large = mx.sym.Pooling(resized, kernel=(2, 2), stride=(2, 2), pool_type="max")
    return joined(*branches, mx.sym.Activation(large + whole, act_type="relu"), whole)


NETWORKS: dict[str, Callable[[], Network]] = {
    "max": pooled,
    "average": lambda: pooled("avg"),
    "strided": lambda: pooled(stride=2),
    "wide": of_a_wide_gradient,
    "convolutions": lambda: joined(*map(convolution, [body()] * 3)),
}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_bits_are_those_of_mxnet(name: str, realisation: str) -> None:
    symbol, shapes = NETWORKS[name]()
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    again = [op for op, call in enumerate(traced.graph.ops) if call.recomputable]
    nforward = traced.graph.nforward
    steps = [*range(nforward), *again, *range(nforward, len(traced.nodes))]
    assert identical(traced, Schedule.unplanned(traced.graph))
    assert identical(traced, Schedule.sequence(traced.graph, steps))


def test_a_batchnorm_behind_a_sum_without_onednn_meets_the_usual_layout() -> None:
    """The sum of the gradients of its readers, of which an upsampling's is not of oneDNN's.

    A convolution of 20 channels leaves the usual layout before it.
    """
    data = mx.sym.Variable("data")
    whole = mx.sym.Convolution(data, num_filter=24, kernel=(3, 3), pad=(1, 1), no_bias=True)
    whole = mx.sym.relu(mx.sym.BatchNorm(whole, fix_gamma=False))
    resized = mx.sym.UpSampling(whole, scale=2, sample_type="nearest")
    resized = mx.sym.Pooling(resized, kernel=(2, 2), stride=(2, 2))
    readers = [resized, whole, whole, whole, whole]
    branches = [
        mx.sym.Convolution(reader, num_filter=24, kernel=(1, 1), no_bias=True) for reader in readers
    ]
    symbol, _ = joined(*branches)
    traced = trace(symbol, shapes={"data": (2, 20, 14, 14)}, realisation="packed")
    assert identical(traced, Schedule.unplanned(traced.graph))


def of_a_far_dilated_convolution() -> Network:
    """What segments pictures, as DeepLab's head: a pooling of all places, and convolutions.

    The gradient of the pooling comes first in the sum, in a layout of oneDNN's. oneDNN computes
    that of the dilated convolution as a product of matrices, which is in the usual layout.
    """
    data = mx.sym.Variable("data")
    whole = mx.sym.Convolution(data, num_filter=32, kernel=(3, 3), pad=(1, 1), no_bias=True)
    whole = mx.sym.BatchNorm(whole, fix_gamma=False)
    far = mx.sym.Convolution(
        whole, num_filter=16, kernel=(3, 3), dilate=(18, 18), pad=(18, 18), no_bias=True
    )
    means = mx.sym.Pooling(whole, global_pool=True, pool_type="avg", kernel=(1, 1))
    near = [convolution(whole) for _ in range(3)]
    wide = mx.sym.broadcast_like(convolution(means), far, lhs_axes=(2, 3), rhs_axes=(2, 3))
    return joined(*near, far, wide)[0], {"data": (1, 3, 48, 48)}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_a_chain_of_sums_leaves_the_layout_of_one_sum(realisation: str) -> None:
    symbol, shapes = of_a_far_dilated_convolution()
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    assert identical(traced, Schedule.unplanned(traced.graph))


@pytest.mark.parametrize(
    ("name", "device_type", "kinds"),
    [
        ("max", "cpu", {"broadcast_plus"}),
        ("max", "gpu", {"add_n"}),
        ("average", "cpu", {"add_n"}),
        ("convolutions", "cpu", {"add_n"}),
    ],
)
def test_sums_are_chains_where_mxnet_adds_from_the_right_for_certain(
    name: str, device_type: str, kinds: set[str]
) -> None:
    symbol, shapes = NETWORKS[name]()
    traced = trace(symbol, shapes=shapes, realisation="packed", device_type=device_type)
    assert {op.kind for op in traced.graph.ops if op.name.startswith("sum_grad")} == kinds


def test_a_sum_of_the_forward_pass_keeps_its_place() -> None:
    """What another op has read before it MXNet writes it over, and a BatchNorm rounds by that."""
    whole = body()
    gate = mx.sym.InstanceNorm(whole, mx.sym.Variable("gamma"), mx.sym.Variable("beta"))
    normed = mx.sym.BatchNorm(gate + whole, fix_gamma=False)
    loss = mx.sym.MakeLoss(mx.sym.mean(((gate > 0.1) + normed) ** 2))
    traced = trace(loss, shapes={"data": (2, 16, 12, 12)}, realisation="explicit")
    forward = range(traced.graph.nforward)
    assert tuple(op for op in traced.stock_order if op in forward) == tuple(forward)
    assert identical(traced, Schedule.unplanned(traced.graph))
