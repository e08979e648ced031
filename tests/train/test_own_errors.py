"""Errors of a script's own classes, which blocks raise and loops catch, come as in MXNet."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.arange(12).reshape((3, 4))


class Enough(Exception):  # noqa: N818
    pass


class Stopping(gluon.HybridBlock):
    """Raises in every third call of its code, in the first of them if it ``is_late``."""

    def __init__(self, is_late: bool = False) -> None:
        super().__init__(prefix="net_")
        self.ncalls = 2 if is_late else 0
        with self.name_scope():
            self.scores = nn.Dense(2, in_units=4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.ncalls += 1
        if self.ncalls % 3 == 0:
            raise Enough
        return self.scores(x) * self.ncalls


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_loop_catches_them_and_goes_on(hybridized: bool) -> None:
    results = []
    for plan in (False, True):
        net, found = Stopping(is_late=hybridized), []
        net.initialize(mx.init.One())
        if hybridized:
            net.hybridize()
        if plan:
            planned(net, strategy="store_all")
        for _ in range(5):
            try:
                with autograd.record():
                    loss = (net(X) ** 2).mean()
                loss.backward()
                found.append((net.ncalls, net.scores.weight.grad().asnumpy().tolist()))
            except Enough:
                found.append(("stopped", net.ncalls))
        results.append(found)
    assert results[0] == results[1]
    assert any(first == "stopped" for first, _ in results[0])


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_warning_tells_what_may_differ_then(hybridized: bool) -> None:
    net = Stopping(is_late=True)
    net.initialize()
    if hybridized:
        net.hybridize()
    planned(net, strategy="store_all")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with autograd.record(), pytest.raises(Enough):
            net(X)
    told = [str(w.message) for w in caught if "may have drawn random numbers" in str(w.message)]
    assert len(told) == (not hybridized)


def test_those_of_a_loss_are_raised_as_they_are() -> None:
    def loss(outputs: Any, labels: Any) -> Any:
        raise Enough

    net = Stopping()
    net.initialize()
    with pytest.raises(Enough):
        TrainStep(net, loss)(X, X)


class Asking(nn.Dense):  # type: ignore[misc]
    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any) -> Any:  # noqa: N803
        try:
            return F.FullyConnected(x, weight, bias, num_hidden=x.shape[1])
        except AttributeError as error:
            raise Enough from error


def test_one_that_symbols_are_the_cause_of_is_explained() -> None:
    net = Asking(4, in_units=4)
    net.initialize()
    with pytest.raises(TraceError, match=r"Enough.*F.reshape"), autograd.record():
        planned(net)(X)
