"""Parameters that begin with what MXNet cannot write into their variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep, planned

QUICKLY: dict[str, Any] = {"strategy": "store_all", "realisation": "packed"}


class Held(mx.init.Initializer):
    """An initializer of a script's that holds an array, which has no text."""

    def __init__(self, value: Any) -> None:
        super().__init__(value=value)
        self.value = value

    def _init_weight(self, _: Any, array: Any) -> None:
        array[:] = self.value


def twice(init: Any) -> list[Any]:
    return [init, init]


VALUES = np.array([1.0, 2.0, 3.0])

# The initializers of two parameters.
INITIAL: dict[str, Callable[[], list[Any]]] = {
    "lists": lambda: [mx.init.Constant(VALUES.tolist()), mx.init.Constant((3, 1, 2))],
    "one for both": lambda: twice(mx.init.Constant(mx.nd.array(VALUES))),
    "a script's own": lambda: twice(Held(VALUES)),
}


class Scaled(gluon.HybridBlock):
    """A statistic that is not trained, a scale that is, and a layer."""

    def __init__(self, mean: Any, scale: Any) -> None:
        super().__init__(prefix="scaled_")
        with self.name_scope():
            self.mean = self.params.get("mean", shape=(3,), init=mean, differentiable=False)
            self.scale = self.params.get("scale", shape=(3,), init=scale)
            self.fc = nn.Dense(4)

    def hybrid_forward(self, F: Any, x: Any, mean: Any, scale: Any) -> Any:  # noqa: N803
        return self.fc(F.broadcast_mul(F.broadcast_sub(x, mean), scale))


def trained(init: str, plan: str) -> list[np.ndarray]:
    """The parameters after some steps, of a child of a block, and what they begin with."""
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(Scaled(*INITIAL[init]()), nn.Dense(2))
    net.initialize()
    begin = [net[0].mean.data().asnumpy(), net[0].scale.data().asnumpy()]
    loss, x, y = gluon.loss.L2Loss(), mx.nd.random.uniform(shape=(5, 3)), mx.nd.ones((5, 2))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    step = TrainStep(net, loss, **QUICKLY) if plan == "step" else None
    if plan == "planned":
        planned(net, **QUICKLY)
    for _ in range(3):
        if step is not None:
            step(x, y)
        else:
            with autograd.record():
                losses = loss(net(x), y)
            losses.backward()
        trainer.step(5)
    return [*begin, *(p.data().asnumpy() for p in net.collect_params().values())]


@pytest.mark.parametrize("plan", ["planned", "step"])
@pytest.mark.parametrize("init", INITIAL)
def test_equal_bits(init: str, plan: str) -> None:
    for own, found in zip(trained(init, ""), trained(init, plan), strict=True):
        assert np.array_equal(own, found)


def test_the_parameter_keeps_its_initializer() -> None:
    net = Scaled(*INITIAL["lists"]())
    net.initialize()
    init = net.mean.init
    planned(net, **QUICKLY)
    with autograd.record():
        net(mx.nd.ones((2, 3))).sum().backward()
    assert net.mean.init is init
