"""A transposed convolution of many channels to one filter, of which oneDNN has no backward pass."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.mxnet.gluon import planned

LAYERS = {nn.Conv1DTranspose: (2, 16, 6), nn.Conv2DTranspose: (2, 16, 6, 6)}


def weight_gradient(layer: Any, dtype: str) -> Any:
    """In float64 MXNet's own: oneDNN has no part in that."""
    draw, shape = np.random.default_rng(1), LAYERS[layer]
    net = layer(1, 4, 2, 1, in_channels=16)
    net.initialize(ctx=CPU)
    net.cast(dtype)
    net.weight.set_data(mx.nd.array(draw.normal(size=net.weight.shape), CPU, dtype))
    x = mx.nd.array(draw.normal(size=shape), CPU, dtype)
    if dtype == "float32":
        net = planned(net, realisation="explicit", strategy="store_all")
    with autograd.record():
        loss = net(x).tanh().sum()
    loss.backward()
    return net.weight.grad().asnumpy()


@pytest.mark.parametrize("layer", LAYERS)
def test_explicit_steps_train_it(layer: Any) -> None:
    found, expected = weight_gradient(layer, "float32"), weight_gradient(layer, "float64")
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
