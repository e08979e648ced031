"""Slopes of a PReLU in blocks: MXNet writes over the gradient of its output in graphs only."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients, gradients_of_steps
from helpers.blocks import CPU, vectors
from helpers.training_runs import differences
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt"}


def network(hybridized: str, *, ends_in_slopes: bool) -> Any:
    net, inner = nn.HybridSequential(prefix="net_"), nn.HybridSequential(prefix="inner_")
    with inner.name_scope():
        inner.add(nn.Dense(9), nn.PReLU(), nn.Dense(9))
    with net.name_scope():
        net.add(nn.Dense(9), nn.PReLU(), inner, nn.PReLU())
        if not ends_in_slopes:
            net.add(nn.Dense(4))
    if hybridized == "imported":
        data = mx.sym.Variable("data")
        net = gluon.SymbolBlock([net(data)], [data], params=net.collect_params())
    elif hybridized:
        (net if hybridized == "all" else inner).hybridize()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    return net


def left_by(make: Any, hybridized: str, *, ends_in_slopes: bool) -> list[Any]:
    mx.random.seed(3)
    net, (x, _) = network(hybridized, ends_in_slopes=ends_in_slopes), vectors()
    return gradients_of_steps(net, x, make)


@pytest.mark.parametrize("ends_in_slopes", [True, False])
@pytest.mark.parametrize("hybridized", ["", "a child", "all", "imported"])
def test_slopes_have_the_gradients_of_the_same_loop(hybridized: str, ends_in_slopes: bool) -> None:
    form: dict[str, Any] = {"hybridized": hybridized, "ends_in_slopes": ends_in_slopes}
    expected = left_by(lambda net: net, **form)
    found = left_by(lambda net: planned(net, realisation="packed", **OPTIONS), **form)
    assert not differences(expected, found)


# Of a child that is hybridized: a Dense, a PReLU, a tanh. Its layers have names of their own.
CHILDREN = {
    "alone": "p",
    "first": "pdt",
    "last": "dtp",
    "within": "dpt",
    "of two operators": "dp",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_slopes_at_the_border_of_a_graph_are_written_over_by_nothing(name: str) -> None:
    """Autograd has the gradients of what a graph gives, and of what it gets."""
    found = []
    for is_planned in (False, True):
        mx.random.seed(3)
        layers = {"p": nn.PReLU, "d": lambda: nn.Dense(9), "t": lambda: nn.Activation("tanh")}
        with mx.name.NameManager():
            child, net = nn.HybridSequential(prefix="child_"), nn.HybridSequential(prefix="net_")
            child.add(*(layers[kind]() for kind in CHILDREN[name]))
            net.add(nn.Dense(9, prefix="before_"), child, nn.Dense(4, prefix="behind_"))
        net.initialize(mx.init.Xavier(), ctx=CPU)
        child.hybridize()
        net(vectors()[0])
        run = planned(net, realisation="packed", **OPTIONS) if is_planned else net
        with autograd.record():
            loss = run(vectors()[0]).square().sum()
        loss.backward()
        parameters = net.collect_params().values()
        found.append([p.grad().asnumpy().tobytes() for p in parameters])
    assert found[0] == found[1]


class Behind(gluon.HybridBlock):
    """Slopes behind a graph whose layers have the names of the block, as in the model zoo."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.features, self.slopes = nn.HybridSequential(prefix=""), nn.PReLU()
            self.features.add(nn.Dense(9, activation="tanh"), nn.Dense(9))
            self.scores = nn.Dense(4)
        self.features.hybridize()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(self.slopes(self.features(x)))


class BehindInForward(Behind):
    """The same, in a forward that MXNet runs in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.hybridize()

    def forward(self, x: Any) -> Any:
        return self.scores(self.slopes(self.features(x)))


class Last(gluon.HybridBlock):
    """A graph of two operators, which MXNet runs one by one."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.scores, self.slopes = nn.Dense(4), nn.PReLU()
        self.hybridize()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.slopes(self.scores(x))


@pytest.mark.parametrize("way", ["planned", "step"])
@pytest.mark.parametrize("kind", [Behind, BehindInForward, Last])
def test_slopes_in_no_graph_are_told_from_others(kind: Any, way: str) -> None:
    found = []
    for run_by in ("mxnet", way):
        mx.random.seed(3)
        net, (x, y) = kind(), vectors()
        net.initialize(mx.init.Xavier(), ctx=CPU)
        net(x)
        if run_by == "step":
            TrainStep(net, lambda scores, _: scores.square().sum(), **OPTIONS)(x, y)
        else:
            run = planned(net, realisation="packed", **OPTIONS) if run_by == "planned" else net
            with autograd.record():
                loss = run(x).square().sum()
            loss.backward()
        found.append(gradients(net))
    assert not differences(*([each] for each in found))


class _Twice(gluon.HybridBlock):
    """The same slopes for an output and for what is within."""

    def __init__(self) -> None:
        super().__init__(prefix="twice_")
        with self.name_scope():
            self.one, self.other, self.slopes = nn.Dense(9), nn.Dense(9), nn.PReLU()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.slopes(self.other(self.slopes(self.one(x))))


def test_one_layer_may_be_called_twice() -> None:
    found = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = _Twice()
        net.initialize(mx.init.Xavier(), ctx=CPU)
        net.hybridize()
        run = planned(net, realisation="packed", **OPTIONS) if is_planned else net
        with autograd.record():
            loss = run(vectors()[0]).square().sum()
        loss.backward()
        found.append(gradients(net))
    assert not differences(*([each] for each in found))


def test_explicit_plans_refuse_what_their_executor_would_write_over() -> None:
    net = planned(network("", ends_in_slopes=False), realisation="explicit", **OPTIONS)
    with (
        pytest.raises(TraceError, match=r"prelu.*would write over the gradient.*'packed'"),
        autograd.record(),
    ):
        net(vectors()[0])
    net.collect_params(".*alpha").setattr("grad_req", "null")
    with autograd.record():
        loss = net(vectors()[0]).square().sum()
    loss.backward()
