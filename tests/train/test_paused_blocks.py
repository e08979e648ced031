"""autograd.pause() within a block: Symbols know nothing of it, so that it stops no gradient."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, vectors
from memplan.mxnet.gluon import planned


class Pausing(gluon.HybridBlock):
    """Scores, at weights of which ``kind`` says how gradients are kept from them."""

    def __init__(self, kind: str) -> None:
        super().__init__(prefix="net_")
        self.kind = kind
        with self.name_scope():
            self.weights, self.scores = nn.Dense(10, in_units=12), nn.Dense(10, in_units=12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        with autograd.pause():
            constant = F.sin(x)
            if self.kind.startswith("paused"):
                constant = self.weights(x)
            if self.kind == "stopped":
                constant = F.stop_gradient(self.weights(x))
        return self.scores(x) * F.slice_axis(constant, axis=1, begin=0, end=10)


class PausingInForward(Pausing):
    """In a forward of its own, which MXNet runs in Python."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.hybridize()

    def forward(self, x: Any) -> Any:
        with autograd.pause():
            constant = self.weights(x)
        return self.scores(x) * constant


def test_a_pause_in_a_forward_of_its_own_is_warned_of() -> None:
    net, (x, _) = PausingInForward("paused"), vectors()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net = planned(net, strategy="chen_sqrt", realisation="packed")
    with pytest.warns(UserWarning, match="under autograd.pause"), autograd.record():
        net(x)


@pytest.mark.parametrize(
    "kind", ["paused", "paused graph", "paused, in a graph", "stopped", "of data"]
)
def test_a_pause_that_stops_nothing_is_warned_of(kind: str) -> None:
    net, (x, y) = Pausing(kind.partition(",")[0]), vectors()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net.hybridize(kind == "paused, in a graph")
    if kind == "paused graph":
        net.weights.hybridize()
        net(x)
    net = planned(net, strategy="chen_sqrt", realisation="packed")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with autograd.record():
            loss = SOFTMAX(net(x), y)
    loss.backward()
    messages = [str(warning.message) for warning in found]
    expected = "block 'net' calls net_dense0_fwd under autograd.pause(), which stops no gradient"
    assert [expected in message for message in messages] == (
        [True] if kind in ("paused", "paused graph") else []
    )
