"""grad_req="add" of what an operator reads whose backward op, told to add, does not."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import numpy as np
import pytest

from helpers.training_runs import random_values
from memplan.mxnet.executor import TrainExecutor
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

S, V = mx.sym, mx.sym.Variable

# The operator, and what it reads whose gradients MXNet does not add up.
READERS: dict[str, tuple[Callable[[], mx.sym.Symbol], tuple[str, ...]]] = {
    "crop": (lambda: S.Crop(V("data"), h_w=(3, 3)), ("data",)),
    "crop like": (lambda: S.Crop(V("data"), V("like", shape=(2, 4, 3, 3))), ("data", "like")),
    "mean": (lambda: S.mean(V("data"), axis=2), ("data",)),
    "margins": (lambda: S.SVMOutput(V("scores", shape=(2, 5)), V("label")), ("scores",)),
    "transformer": (
        lambda: S.SpatialTransformer(
            V("data"),
            V("theta", shape=(2, 6)),
            target_shape=(4, 4),
            transform_type="affine",
            sampler_type="bilinear",
        ),
        ("data", "theta"),
    ),
    "deformable": (
        lambda: S.contrib.DeformableConvolution(
            V("data"),
            V("offset", shape=(2, 18, 4, 4)),
            V("weight", shape=(2, 4, 3, 3)),
            V("bias", shape=(2,)),
            kernel=(3, 3),
            num_filter=2,
        ),
        ("data", "offset"),
    ),
    "lengths": (
        lambda: S.softmax(
            V("scores", shape=(2, 5)),
            length=V("lengths", shape=(2,), dtype="int32"),
            use_length=True,
            axis=1,
        ),
        ("scores", "lengths"),
    ),
    "indices": (
        lambda: S.take(V("rows", shape=(4, 3)), V("indices", shape=(2,), dtype="int32")),
        ("rows", "indices"),
    ),
}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("reader", READERS)
def test_gradients_that_mxnet_does_not_add_are_added(reader: str, realisation: str) -> None:
    call, names = READERS[reader]
    net = S.MakeLoss(S.square(call()))
    shapes = {"data": (2, 4, 6, 6)} if "data" in net.list_arguments() else {}
    left = {}
    for request in ("write", "add"):
        requests = {n: request if n in names else "null" for n in net.list_arguments()}
        traced = trace(net, shapes=shapes, grad_req=requests, realisation=realisation)
        executor = TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu(0))
        left[request] = {name: np.ones(traced.shapes[name], "float32") for name in names}
        for name in names:
            executor.grad_dict[name][:] = 1
        values = random_values(traced)
        for step in range(3):
            for name, value in values.items():
                executor.arg_dict[name][:] = mx.nd.array(value * (step + 1))
            executor.forward(is_train=True)
            for name in names:
                gradient = executor.grad_dict[name].asnumpy()
                left[request][name] = gradient + (left["write"][name] if request == "write" else 0)
    for name in names:
        assert np.array_equal(left["add"][name], left["write"][name]), name


def test_packed_steps_add_the_weight_of_a_deformable_convolution_as_mxnet_does() -> None:
    net = S.MakeLoss(S.square(READERS["deformable"][0]()))
    names = ("weight", "bias")
    requests = {n: "add" if n in names else "null" for n in net.list_arguments()}
    shapes = {"data": (2, 4, 6, 6)}
    traced = trace(net, shapes=shapes, grad_req=requests, realisation="packed")
    planned = TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu(0))
    stock = net.simple_bind(mx.cpu(), grad_req=requests, **shapes)
    values = random_values(traced)
    for executor in (planned, stock):
        for name in names:
            executor.grad_dict[name][:] = 0
        for step in range(3):
            for name, value in values.items():
                executor.arg_dict[name][:] = mx.nd.array(value * (step + 1))
            executor.forward(is_train=True)
            executor.backward()
    for name in names:
        found, expected = (e.grad_dict[name].asnumpy() for e in (planned, stock))
        assert np.array_equal(found, expected)
