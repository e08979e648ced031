"""Blocks with two parameters of one name, of which their ``collect_params`` gives one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import three_losses
from memplan.errors import ArgumentError
from memplan.mxnet.gluon import TrainStep, planned

L2 = gluon.loss.L2Loss()
QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Averaged(gluon.HybridBlock):
    """A network and a copy of it, whose weights are averages of those of the network."""

    def __init__(self, net: Any, average: Any, *, reads_both: bool = False) -> None:
        super().__init__(prefix="averaged_")
        self.net, self.average, self._reads_both = net, average, reads_both
        average.collect_params().setattr("grad_req", "null")

    def collect_params(self, select: str | None = None) -> Any:
        return self.net.collect_params(select)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        y = self.net(x)
        return y - F.BlockGrad(self.average(x)) if self._reads_both else y

    def update(self) -> None:
        averages = self.average.collect_params()
        for name, parameter in self.net.collect_params().items():
            average = averages[name]
            average.set_data(0.5 * average.data() + 0.5 * parameter.data())


def network() -> Any:
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh", in_units=6), nn.Dense(5, in_units=6))
    net.initialize(mx.init.Xavier())
    return net


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_a_copy_that_no_step_reads_is_left_to_the_script(way: str, hybridized: bool) -> None:
    results = []
    for is_planned in (False, True):
        net = Averaged(original := network(), copy.deepcopy(original))
        if hybridized:
            net.hybridize()
        for loss in three_losses(net, way if is_planned else None):
            net.update()
            results.append([loss.asnumpy(), net.average(mx.nd.ones((2, 6))).asnumpy()])
    for plain, by_plan in zip(results[:3], results[3:], strict=True):
        assert all(map(np.array_equal, plain, by_plan))


def from_file(folder: Path) -> Callable[[], Any]:
    """What makes a SymbolBlock, which has the same names every time."""
    net, graph, values = network(), str(folder / "net.json"), str(folder / "net.params")
    net(mx.sym.Variable("data")).save(graph)
    net.collect_params().save(values)
    return lambda: gluon.SymbolBlock.imports(graph, ["data"], values)


@pytest.mark.parametrize("kind", ["layers", "hybridized", "called", "SymbolBlock"])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_a_copy_that_a_step_reads_is_refused(way: str, kind: str, tmp_path: Path) -> None:
    make = from_file(tmp_path) if kind == "SymbolBlock" else network
    net = Averaged(make(), make(), reads_both=True)
    if kind in ("hybridized", "called"):
        net.average.hybridize()
    if kind == "called":
        net.average(mx.nd.ones((2, 6)))
    step = TrainStep(net, **QUICKLY).forward if way == "TrainStep" else planned(net, **QUICKLY)
    refused = pytest.raises(ArgumentError, match=r"both named 'net_dense0_weight'.*deepcopy")
    with autograd.record(), refused:
        step(mx.nd.ones((2, 6)))
    # They are read elsewhere as before.
    net.average(mx.sym.Variable("data"))
    net.average(mx.nd.ones((2, 6)))


class Shadowed(gluon.HybridBlock):
    """A layer beside a parameter that MXNet hands to ``hybrid_forward``, and nothing reads."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.layer = nn.Dense(6, in_units=6)
        self.mean = gluon.Parameter("mean", shape=(6,), grad_req="null")  # has no prefix
        self.mean.initialize()

    def hybrid_forward(self, F: Any, x: Any, mean: Any) -> Any:  # noqa: N803
        return F.tanh(self.layer(x))


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_two_of_one_name_that_no_operator_reads(way: str, hybridized: bool) -> None:
    x, y = mx.nd.ones((2, 6)), mx.nd.zeros((2, 6))
    results = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        net.add(Shadowed("a_"), Shadowed("b_"))
        net.initialize(mx.init.Xavier())
        if hybridized:
            net.hybridize()
        step = TrainStep(net, L2, **QUICKLY) if is_planned and way == "TrainStep" else None
        if is_planned and way == "planned":
            planned(net, **QUICKLY)
        if step is not None:
            loss = step(x, y)
        else:
            with autograd.record():
                loss = L2(net(x), y)
            loss.backward()
        results.append([loss.asnumpy(), *(part.layer.weight.grad().asnumpy() for part in net)])
    assert all(map(np.array_equal, *results))
