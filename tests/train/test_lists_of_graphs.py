"""Hybridized blocks get and return lists in a planned step, too, whatever tuples a script has."""

from __future__ import annotations

import threading
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])


class Child(gluon.HybridBlock):
    """Gets a tuple, and returns one, with what an operator of several outputs returns."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.first, self.second = nn.Dense(6, in_units=6), nn.Dense(6, in_units=6)

    def hybrid_forward(self, F: Any, x: Any, pair: Any) -> Any:  # noqa: N803
        first = self.first(x) * pair[0] * (3 if isinstance(pair, tuple) else 1)
        return first, F.split(self.second(x) * pair[1], num_outputs=2, axis=1)


class Parent(gluon.HybridBlock):
    """Asks what it gets of a child, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body, self.child = nn.Dense(6, in_units=6), Child()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        hidden = self.body(x)
        returned = self.child(x, (hidden, hidden * 2))
        first, parts = returned
        last = parts[-1] if isinstance(parts, list) else parts[0]
        return first * (2 if isinstance(returned, tuple) else 1), parts[0] + parts[1] + last


def loss_of(outputs: Any, y: Any) -> Any:
    scores = outputs[0] * (2 if isinstance(outputs, list) else 1)
    return SOFTMAX(scores, y) + outputs[1].mean(axis=1)


def trained(way: str, *, hybridized: bool) -> list[np.ndarray]:
    """The parameters after training, of which either the whole block or its child is hybridized."""
    mx.random.seed(1)
    net = Parent()
    net.initialize(mx.init.Xavier())
    (net if hybridized else net.child).hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    whole, halves = TrainStep(net, loss_of, **OPTIONS), TrainStep(net, **OPTIONS)
    if way == "planned":
        planned(net, **OPTIONS)
    for _ in range(2):
        if way == "whole":
            whole(X, Y)
        else:
            with autograd.record():
                loss = loss_of((halves.forward if way == "halves" else net)(X), Y)
            halves.backward(loss) if way == "halves" else loss.backward()
        trainer.step(4)
    return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "whole", "halves"])
def test_a_block_and_a_loss_that_ask_for_tuples(way: str, hybridized: bool) -> None:
    expected = trained("unplanned", hybridized=hybridized)
    for array, wanted in zip(trained(way, hybridized=hybridized), expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_another_thread_may_have_mxnet_make_a_graph_meanwhile() -> None:
    """Of another child, as this thread calls one that has a graph."""
    losses = [_asked_loss(plan=False), _asked_loss(plan=True)]
    assert losses[0] == losses[1]


def _asked_loss(*, plan: bool) -> bytes:
    is_inside, may_go = threading.Event(), threading.Event()

    class Slow(gluon.HybridBlock):
        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            if threading.current_thread() is not threading.main_thread():
                is_inside.set()
                may_go.wait(60)
            return F.relu(x)

    class Asks(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__(prefix="net_")
            with self.name_scope():
                self.body, self.slow, self.pair = nn.Dense(6, in_units=6), Slow(), Pair()

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            other = threading.Thread(target=lambda: self.slow(mx.nd.ones((4, 6))))
            if F is mx.sym:
                other.start()
                assert is_inside.wait(60)
            returned = self.pair(self.body(x))
            if F is mx.sym:
                may_go.set()
                other.join()
            return returned[0] * (10 if isinstance(returned, list) else 1)

    net = Asks()
    mx.random.seed(1)
    net.initialize(mx.init.Normal(1))
    net.slow.hybridize()
    net.pair.hybridize()
    net.pair(mx.nd.ones((4, 6)))
    if plan:
        with pytest.warns(UserWarning, match="asks whether"):
            loss = TrainStep(net, SOFTMAX, **OPTIONS)(X, Y)
    else:
        with autograd.record():
            loss = SOFTMAX(net(X), Y)
    return bytes(loss.asnumpy().tobytes())


class Pair(gluon.HybridBlock):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return x * 2, F.relu(x)
