"""Planned blocks of which a step trains no parameter, though some of them want gradients."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import ArgumentError
from memplan.mxnet.gluon import planned

X = mx.nd.arange(12).reshape((3, 4))


class Extractor(gluon.HybridBlock):
    """As of a model zoo, with features and an output; returns frozen features."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.features, self.output = nn.Dense(4, in_units=4), nn.Dense(2, in_units=4)
        self.features.collect_params().setattr("grad_req", "null")

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.features(x)


def trained(net: Any) -> Any:
    """The gradient of a head behind ``net``."""
    head = nn.Dense(1, in_units=4)
    for block in (net, head):
        block.initialize(mx.init.One())
    with autograd.record():
        loss = (head(net(X)) ** 2).sum()
    loss.backward()
    return head.weight.grad().asnumpy().tolist()


def test_one_whose_graph_reads_none_runs_unplanned() -> None:
    expected, net = trained(Extractor()), Extractor()
    net.hybridize()
    assert trained(planned(net)) == expected
    assert not net.planned_step.plans


def test_one_that_is_not_hybridized_says_how_it_runs_unplanned() -> None:
    """Its code has just run with Symbols, and would draw numbers a second time with arrays."""
    expected, net = trained(Extractor()), planned(Extractor())
    with pytest.raises(ArgumentError, match=r"nothing to train.* does not read to 'null'"):
        trained(net)
    net.output.collect_params().setattr("grad_req", "null")
    assert trained(net) == expected


def test_a_copy_that_autograd_does_not_know_may_be_a_target() -> None:
    """Unplanned, with a warning: MXNet would not train it, and runs it."""
    results = []
    for plan in (False, True):
        net = nn.Dense(2, in_units=4, prefix="net_")
        net.initialize(mx.init.One())
        target = copy.deepcopy(net)
        known = contextlib.nullcontext()
        if plan:
            known = pytest.warns(UserWarning, match=r"autograd knows no array .*copy\.deepcopy")
            planned(target)
        with known, autograd.record():
            loss = ((net(X) - target(X * 2).detach()) ** 2).sum()
        loss.backward()
        results.append(net.weight.grad().asnumpy().tolist())
    assert results[0] == results[1]
