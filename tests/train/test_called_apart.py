"""Equal ops are one in MXNet's graphs, and each its own in a block that is not hybridized."""

from __future__ import annotations

import itertools
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.amounts import long_unless
from helpers.block_runs import gradients, gradients_of_steps
from helpers.blocks import CPU
from helpers.training_runs import differences
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.train.blocks import block_network
from memplan.planning.shapes import ShapePlanner

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt"}
X = mx.nd.array(np.random.RandomState(0).normal(size=(7, 15)))


class Anew(gluon.HybridBlock):
    """Computes something of its parameters anew for every part of its input."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.w = self.params.get("w", shape=(5, 5))
            self.theta = self.params.get("theta", shape=(5, 5))
            self.scale = self.params.get("scale", shape=(1, 5))

    def hybrid_forward(self, F: Any, x: Any, w: Any, theta: Any, scale: Any) -> Any:  # noqa: N803
        found = 0
        for k in range(3):
            part = F.slice_axis(x, axis=1, begin=5 * k, end=5 * k + 5)
            attention = F.broadcast_mul(F.tanh(F.sigmoid(theta) * w), scale)
            found = found + F.dot(part, attention) * (k + 1)
        return found


class AnewOfFrozen(Anew):
    """A part of what is computed anew has no gradient, and is there once; what reads it is not."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.theta.grad_req = "null"


class Twins(gluon.HybridBlock):
    """Two layers with the same parameters on one input, of which each is read by others."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.body = nn.Dense(15, in_units=15)
            self.one = nn.Dense(5, in_units=15)
            self.other = nn.Dense(5, in_units=15, params=self.one.params)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        hidden = self.body(x)
        one, other = self.one(hidden), self.other(hidden)
        return F.tanh(one) * F.exp(other) + F.sin(other) * one


class CalledTwice(Twins):
    """One layer on one input, twice: both calls have one name."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.other = self.one


class GraphCalledTwice(CalledTwice):
    """The same where MXNet runs a graph of the layer, of which the block has two then."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.one.hybridize(inline_limit=0)


class TwinsBehind(Twins):
    """Twins behind a graph whose layers have the names of the block, as in the model zoo."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        with self.name_scope():
            self.features = nn.HybridSequential(prefix="")
            layers = [nn.Dense(15, activation="tanh", in_units=15) for _ in range(2)]
            self.features.add(*layers)
        self.features.hybridize()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return super().hybrid_forward(F, self.features(x))


def network(kind: Any, hybridized: str) -> Any:
    inner, net = kind("inner_"), nn.HybridSequential(prefix="net_")
    inner.initialize(mx.init.Normal(1), ctx=CPU)
    if hybridized == "imported":
        data = mx.sym.Variable("data")
        inner = gluon.SymbolBlock([inner(data)], [data], params=inner.collect_params())
    elif hybridized == "a child":
        inner.hybridize()
    with net.name_scope():
        net.add(inner, nn.Dense(3, in_units=5))
    net.initialize(mx.init.Normal(1), ctx=CPU)
    if hybridized == "all":
        net.hybridize()
    return net


def left_by(make: Any, kind: Any, hybridized: str) -> list[Any]:
    mx.random.seed(3)
    return gradients_of_steps(network(kind, hybridized), X, make)


KINDS = [Anew, AnewOfFrozen, Twins, TwinsBehind, CalledTwice, GraphCalledTwice]
HYBRIDIZED = ["", "a child", "all", "imported"]


@pytest.mark.parametrize(
    ("kind", "hybridized", "realisation"),
    long_unless(
        itertools.product(KINDS, HYBRIDIZED, ["packed", "explicit"]),
        lambda case: case[2] == "packed" or case[0] in (Anew, GraphCalledTwice),
    ),
)
def test_gradients_are_those_of_the_same_loop(kind: Any, hybridized: str, realisation: str) -> None:
    expected = left_by(lambda net: net, kind, hybridized)
    options = OPTIONS | {"realisation": realisation}
    found = left_by(lambda net: planned(net, **options), kind, hybridized)
    assert not differences(expected, found)


def test_what_is_trained_may_change_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ops are apart depends on it. A plan for each is made once, and a network."""
    calls: list[str] = []

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counting(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counting)

    counted(ShapePlanner, "plan")
    counted(block_network, "warn_of_symbols")  # called for each network that is not known
    found = []
    for make in (lambda net: net, lambda net: planned(net, **OPTIONS)):
        mx.random.seed(3)
        net, of_loop = network(Anew, ""), []
        net(X)
        net = make(net)
        for step in range(8):
            net[0].theta.grad_req = "null" if step in (0, 1, 3, 5) else "write"
            with autograd.record():
                loss = net(X).square().sum()
            loss.backward()
            of_loop.append(gradients(net))
        found.append(of_loop)
    assert not differences(*found)
    assert (calls.count("plan"), calls.count("warn_of_symbols")) == (2, 2)


class LossAnew(Anew):
    def hybrid_forward(self, F: Any, x: Any, y: Any, *args: Any, **params: Any) -> Any:  # noqa: N803
        return super().hybrid_forward(F, x, **params).square().sum() + y.sum()


@pytest.mark.parametrize("hybridized", [True, False])
def test_a_loss_is_in_a_graph_if_it_is_hybridized(hybridized: bool) -> None:
    found = []
    for plan in (False, True):
        mx.random.seed(3)
        net, loss = nn.Dense(15, in_units=15, prefix="net_"), LossAnew("loss_")
        for block in (net, loss):
            block.initialize(mx.init.Normal(0.3), ctx=CPU)
        loss.hybridize(hybridized)
        if plan:
            TrainStep(net, loss, **OPTIONS)(X, X)
        else:
            with autograd.record():
                value = loss(net(X), X)
            value.backward()
        found.append([gradients(net), gradients(loss)])
    assert not differences(*found)


def test_what_needs_no_gradient_is_computed_once() -> None:
    """It is the same, and a plan has less to keep."""
    counts = []
    for request in ("write", "null"):
        net = network(Anew, "")
        net[0].collect_params().setattr("grad_req", request)
        graph = TrainStep(net, **OPTIONS).plan((7, 15)).trace.graph
        counts.append(sum(op.kind == "tanh" for op in graph.ops))
    assert counts == [3, 1]
