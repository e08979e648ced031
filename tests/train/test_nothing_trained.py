"""Planned blocks that read no parameter that is trained, beside others that they do not read."""

from __future__ import annotations

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
