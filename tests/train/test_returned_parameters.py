"""A hybridized block that returns a parameter as it is gives it no gradient there."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import ArgumentError
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt"}
X = mx.nd.array(np.random.RandomState(0).normal(size=(5, 6)))


class Returning(gluon.HybridBlock):
    """Returns what ``kind`` names of its parameter, beside what a layer or more compute."""

    def __init__(self, kind: str, nlayers: int) -> None:
        super().__init__(prefix="own_")
        self.kind, self.nlayers = kind, nlayers
        with self.name_scope():
            self.layers = nn.HybridSequential()
            for _ in range(nlayers):
                self.layers.add(nn.Dense(6, in_units=6))
            self.w = self.params.get("w", shape=(1, 6), init=mx.init.Normal(1))

    def hybrid_forward(self, F: Any, x: Any, w: Any) -> Any:  # noqa: N803
        if self.kind == "blocked":
            x = F.broadcast_add(x, F.BlockGrad(w))
        elif self.kind == "read":
            x = F.broadcast_add(x, w)
        y = self.layers(x) if self.nlayers else x * 2
        return y, F.identity(w) if self.kind == "identity" else w


class Around(gluon.HybridBlock):
    """Reads what it returns; is not hybridized itself."""

    def __init__(self, inner: Returning) -> None:
        super().__init__(prefix="around_")
        self.inner = inner

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.broadcast_mul(*self.inner(x))


def made(kind: str, nlayers: int, hybridize: bool = True) -> Around:
    mx.random.seed(3)
    net = Around(Returning(kind, nlayers))
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.inner.hybridize()
    return net


def gradient_of(net: Any) -> np.ndarray:
    with autograd.record():
        loss = (net(X) ** 2).sum()
    loss.backward()
    return net.inner.w.grad().asnumpy()


KINDS = [("identity", 1, True), ("identity", 3, True), ("read", 3, True), ("plain", 3, False)]


@pytest.mark.parametrize(("kind", "nlayers", "hybridize"), KINDS)
def test_a_gradient_that_mxnet_has_is_that_of_the_step(
    kind: str, nlayers: int, hybridize: bool
) -> None:
    stock = gradient_of(made(kind, nlayers, hybridize))
    assert np.abs(stock).max() > 0
    ours = gradient_of(planned(made(kind, nlayers, hybridize), **OPTIONS))
    assert np.array_equal(stock, ours)


LOST = [("plain", 1), ("plain", 3), ("blocked", 1), ("blocked", 3)]


@pytest.mark.parametrize(("kind", "nlayers"), LOST)
def test_a_gradient_that_mxnet_loses_is_refused(kind: str, nlayers: int) -> None:
    stock = gradient_of(made(kind, nlayers))
    whole = gradient_of(made(kind, nlayers, hybridize=False))
    assert np.abs(stock - whole).max() > 0.1
    message = r"block 'own' returns parameter 'own_w' as it is.*F\.identity"
    with pytest.raises(ArgumentError, match=message):
        gradient_of(planned(made(kind, nlayers), **OPTIONS))
    step = TrainStep(made(kind, nlayers), gluon.loss.L2Loss(), **OPTIONS)
    with pytest.raises(ArgumentError, match=message):
        step(X, X)


def test_an_output_that_the_loss_does_not_read_is_no_matter() -> None:
    net = Returning("plain", 3)
    net.initialize()
    net.hybridize()
    TrainStep(net, lambda outputs, _: outputs[0].sum(), **OPTIONS)(X, X)


@pytest.mark.parametrize(("kind", "nlayers"), [("plain", 1), ("read", 0)])
def test_what_a_planned_block_returns_itself_is_refused(kind: str, nlayers: int) -> None:
    """Of few ops, which MXNet runs one by one, it loses the gradient of a parameter they read."""
    net = Returning(kind, nlayers)
    net.initialize()
    net.hybridize()
    planned(net, **OPTIONS)
    with autograd.record(), pytest.raises(ArgumentError, match="parameter 'own_w' as it is"):
        net(X)
