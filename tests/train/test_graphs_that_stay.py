"""Graphs of hybridized blocks stay as MXNet's do, whichever step has made them, and where."""

from __future__ import annotations

import random
import types
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.array(np.random.RandomState(0).rand(4, 3))
Y = mx.nd.ones((4, 2))
L2 = gluon.loss.L2Loss()
OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Layer(gluon.HybridBlock):
    """Computes by a number of Python's, its calls and the mode."""

    def __init__(self) -> None:
        super().__init__(prefix="layer_")
        self.ncalls, self.scale = 0, 1.0
        with self.name_scope():
            self.body = nn.Dense(3, in_units=3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.ncalls += 1
        hidden = self.body(x) * (self.ncalls + self.scale + random.random())
        return F.tanh(hidden) if autograd.is_training() else hidden


class Body(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__(prefix="body_")
        with self.name_scope():
            self.layer, self.head = Layer(), nn.Dense(2, in_units=3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.head(self.layer(x))


class Past(gluon.HybridBlock):
    """Calls layers of a hybridized block past the block, and keeps what one of them gives."""

    def __init__(self) -> None:
        super().__init__(prefix="past_")
        with self.name_scope():
            self.body = Body()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.kept = self.body.layer(x)
        return self.body.head(F.tanh(self.kept))


def made(make: Any) -> Any:
    random.seed(0)
    mx.random.seed(0)
    net = make()
    net.initialize(mx.init.Xavier())
    return net


def trained(net: Any, loss: Any = L2, *, size: int = 4) -> Any:
    with autograd.record():
        losses = loss(net(X[:size]), Y[:size])
    losses.backward()
    return losses


def assert_equal(found: dict[str, list[Any]]) -> None:
    expected = found.pop("stock")
    for way, arrays in found.items():
        pairs = zip(arrays, expected, strict=True)
        assert all((a == b).asnumpy().all() for a, b in pairs), way


def test_a_layer_that_is_called_past_its_hybridized_block() -> None:
    """MXNet makes a graph of it in its first call."""
    found: dict[str, list[Any]] = {}
    for way in ("stock", "planned", "step"):
        net = made(Past)
        net.body.hybridize()
        step = TrainStep(net, L2, **OPTIONS) if way == "step" else None
        if way == "planned":
            planned(net, **OPTIONS)
        found[way] = []
        for _ in range(3):
            losses = step(X, Y) if step else trained(net)
            found[way] += [losses, net.body.layer.body.weight.grad().copy()]
    assert_equal(found)


@pytest.mark.parametrize("ways", ["planned, step", "step, planned, step", "planned, parent"])
def test_a_graph_is_that_of_all_steps(ways: str) -> None:
    found: dict[str, list[Any]] = {}
    for is_planned in (False, True):
        net = trains = made(Layer)
        net.hybridize()
        losses: list[Any] = []
        step = TrainStep(net, mx.gluon.loss.L1Loss(), **OPTIONS) if is_planned else None
        label = mx.nd.ones((4, 3))
        for way in ways.split(", "):
            if way == "parent":
                trains = nn.HybridSequential(prefix="parent_")
                trains.add(net)
            if is_planned and way != "step":
                planned(trains, **OPTIONS)
            if step is not None and way == "step":
                losses.append(step(X, label))
            else:
                with autograd.record():
                    loss = mx.gluon.loss.L1Loss()(trains(X), label)
                loss.backward()
                losses.append(loss)
            net.scale += 1.0
        found["planned" if is_planned else "stock"] = [*losses, net.body.weight.grad()]
    assert_equal(found)


class Asking(gluon.HybridBlock):
    """Asks whether a child returns a tuple."""

    def __init__(self) -> None:
        super().__init__(prefix="asking_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(3, in_units=3), nn.Dense(2, in_units=3))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        returned = self.body(x)
        return returned[0] * (2 if isinstance(returned, tuple) else 1)


def forward(self: Any, x: Any) -> Any:
    return self[1](self[0](x)) * self.scale, x


def hybrid_forward(self: Any, F: Any, x: Any) -> Any:  # noqa: N803
    return forward(self, x)


@pytest.mark.parametrize("way", ["planned", "step"])
@pytest.mark.parametrize("function", [forward, hybrid_forward])
def test_a_method_that_a_script_has_given_a_hybridized_child(function: Any, way: str) -> None:
    """It stays that of the child, and what it writes is a graph, or is none, in every step."""
    found: dict[str, list[Any]] = {}
    for how in ("stock", way):
        net = made(Asking)
        net.body.hybridize()
        net.body.scale, method = 2.0, types.MethodType(function, net.body)
        setattr(net.body, function.__name__, method)
        found[how] = [net(X)]
        step = TrainStep(net, L2, **OPTIONS) if how == "step" else None
        if how == "planned":
            planned(net, **OPTIONS)
        for size in (4, 3, 2):
            found[how].append(step(X[:size], Y[:size]) if step else trained(net, size=size))
        net.body.scale = 3.0
        found[how].append(net(X))
        assert vars(net.body)[function.__name__] is method
    assert_equal(found)


def test_a_loss_that_reads_what_a_block_has_kept_is_called_once() -> None:
    found: dict[str, list[Any]] = {}
    for way in ("stock", "step"):
        net = made(Past)
        net.body.layer.hybridize()

        def loss(out: Any, y: Any, net: Any = net) -> Any:
            return L2(out, y) * random.random() + (net.kept * net.kept).mean(axis=1)

        step = TrainStep(net, loss, **OPTIONS) if way == "step" else None
        found[way] = []
        for _ in range(3):
            losses = step(X, Y) if step else trained(net, loss)
            found[way] += [losses, net.body.head.weight.grad().copy()]
    assert_equal(found)
