"""Planned blocks whose classes have attributes and methods of any name."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import three_losses
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import planned

QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Decoder(gluon.HybridBlock):
    """Its names are those that a planned block had for what belongs to the plan."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self._past, self._given, self._planned_by, self._unplanned = 0, 3.0, "me", 2.0
        with self.name_scope():
            self.dense = nn.Dense(5, in_units=6)

    def finished(self) -> str:
        return f"{self._planned_by}, {self.begun()}"

    def begun(self) -> str:
        return "begun"

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.dense(x) * self._unplanned
        return F.tanh(x) if self._past else x * self._given


def test_a_block_keeps_what_its_class_calls_by_any_name() -> None:
    results = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = Decoder()
        net.initialize(mx.init.Xavier())
        if is_planned:
            planned(net, **QUICKLY)
        for net._past in (0, 1):
            with autograd.record():
                loss = net(mx.nd.ones((2, 6))).sum()
            loss.backward()
            results.append([loss.asnumpy(), net.dense.weight.grad().asnumpy()])
        assert net.finished() == "me, begun"
    for plain, by_plan in zip(results[:2], results[2:], strict=True):
        assert all(map(np.array_equal, plain, by_plan))


def test_what_is_documented_under_a_name_of_the_block_is_refused() -> None:
    class Another(Decoder):
        def planned_step(self) -> None:
            """One that the script has planned itself."""

    net, other = Another(), Decoder()
    other.planned_step = 3
    for block in (net, other):
        with pytest.raises(ArgumentError, match=r"'net_?' has a planned_step of its own.*another"):
            planned(block, **QUICKLY)
    assert other.planned_step == 3


class OnlyTheHead(nn.HybridSequential):
    """Its ``collect_params`` gives what a trainer is to have."""

    def collect_params(self, select: str | None = None) -> Any:
        return self[-1].collect_params(select)


@pytest.mark.parametrize("request_", ["null", "write"])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_a_block_reads_parameters_that_its_collect_params_leaves_out(
    way: str, request_: str
) -> None:
    results = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = OnlyTheHead(prefix="net_")
        with net.name_scope():
            net.add(nn.Dense(6, activation="tanh", in_units=6), nn.Dense(5, in_units=6))
        for layer in net:
            layer.initialize(mx.init.Xavier())
        net[0].weight.grad_req = net[0].bias.grad_req = request_
        for loss in three_losses(net, way if is_planned else None):
            results.append([loss.asnumpy(), net[1].weight.data().asnumpy()])
            if request_ == "write":
                results[-1].append(net[0].weight.grad().asnumpy())
    for plain, by_plan in zip(results[:3], results[3:], strict=True):
        assert all(map(np.array_equal, plain, by_plan))


def test_autograd_s_grad_is_refused_for_those_that_are_left_out() -> None:
    net = OnlyTheHead()
    net.add(nn.Dense(6, in_units=6), nn.Dense(5, in_units=6))
    for layer in net:
        layer.initialize()
    planned(net, **QUICKLY)
    with autograd.record():
        loss = net(mx.nd.ones((2, 6))).sum()
    with pytest.raises(UsageError, match="does not reach parameter"):
        autograd.grad(loss, [net[0].weight.data()])
