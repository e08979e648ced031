"""What a step leaves of a gamma that a BatchNorm fixes, and through which no gradient goes."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.gluon import planned
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("request_of_gamma", ["write", "null"])
@pytest.mark.parametrize("has_mean", [False, True])
def test_an_executor_leaves_such_a_gamma_as_mxnet_does(
    realisation: str, request_of_gamma: str, has_mean: bool
) -> None:
    norm = mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm", output_mean_var=has_mean)
    dense = mx.sym.FullyConnected(norm[0], num_hidden=3, name="dense")
    network = mx.sym.SoftmaxOutput(dense, name="softmax")
    if has_mean:
        network = mx.sym.Group([network, mx.sym.BlockGrad(norm[1])])
    requests = dict.fromkeys(network.list_arguments(), "write") | {
        "data": "null",
        "softmax_label": "null",
        "norm_gamma": request_of_gamma,
        "norm_beta": request_of_gamma,
    }
    shapes = {"data": (2, 8, 6, 6)}
    traced = trace(network, shapes=shapes, realisation=realisation, grad_req=requests)
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values, 2), planned_steps(executor, 2))


@pytest.mark.parametrize("realisation", [None, "packed", "explicit"])
def test_a_block_writes_ones_into_such_a_gamma(realisation: str | None) -> None:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.BatchNorm(scale=False, center=False, in_channels=8), nn.Dense(3))
    net.initialize()
    net.hybridize()
    data = mx.nd.ones((4, 8, 6, 6))
    net(data)
    if realisation is not None:
        planned(net, realisation=realisation, strategy="store_all")
    for _ in range(2):
        net[0].gamma.set_data(mx.nd.full((8,), 1.5))
        with autograd.record():
            total = net(data).sum()
        total.backward()
        mx.nd.waitall()  # MXNet's engine does not know that the BatchNorm writes it
        np.testing.assert_array_equal(net[0].gamma.data().asnumpy(), 1)
