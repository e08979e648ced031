"""Loops by trainer.step, and by a TrainStep that has the trainer, to be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from helpers.planning import NEVER_SECONDS
from memplan.mxnet.gluon import TrainStep

Values = dict[str, np.ndarray]
X = np.random.default_rng(1).normal(size=(4, 3, 8, 8)).astype("float32")
Y = np.arange(4, dtype="float32")


class Half(gluon.HybridBlock):  # type: ignore[misc]
    """Parameters in half precision, and a layer in single precision, for a CPU has no other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(10, 192))
            self.scale = self.params.get("scale", shape=(1, 192), init="ones")

    def hybrid_forward(self, F: Any, x: Any, weight: Any, scale: Any) -> Any:  # noqa: N803
        """Scores."""
        weight, scaled = F.cast(weight, "float32"), F.broadcast_mul(F.flatten(x), scale)
        scores = F.FullyConnected(F.cast(scaled, "float32"), weight, num_hidden=10, no_bias=True)
        return F.tanh(scores)


def network(*, prepare: Callable[[Any], None] = lambda net: None) -> Any:
    """Layers, two of which share their parameters, and a Dropout."""
    mx.random.seed(5)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        twice = nn.Conv2D(8, 3, padding=1, in_channels=8)
        net.add(twice, nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3))
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=8, params=twice.params))
        net.add(nn.Activation("tanh"), nn.Dense(16), nn.LayerNorm(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    prepare(net)
    return net


class Loop:
    """Trains by autograd and trainer.step, or by a TrainStep that has the trainer."""

    def __init__(
        self,
        optimizer: Any,
        options: dict[str, Any],
        *,
        planned: bool,
        dtype: str = "float32",
        prepare: Callable[[Any], None] = lambda net: None,
        **more: Any,
    ) -> None:
        self.net = network(prepare=prepare)
        if dtype == "float16":
            self.net = Half(prefix="half_")
            self.net.initialize(mx.init.Xavier())
            self.net.cast(dtype)
        self.x, self.y, self.planned = mx.nd.array(X, dtype=dtype), mx.nd.array(Y), planned
        self.net(self.x)
        if isinstance(optimizer, str) and "lr_scheduler" in options:
            options = {**options, "lr_scheduler": options["lr_scheduler"]()}
        params = self.net.collect_params()
        if "kvstore" in more:
            more = {**more, "kvstore": mx.kv.create(more["kvstore"])}
        self.trainer = gluon.Trainer(params, optimizer, options, **more)
        if not planned:
            self.net.hybridize()

    def start(self, **options: Any) -> TrainStep:
        given: dict[str, Any] = {"realisation": "packed", "trainer": self.trainer}
        given |= {"strategy": "store_all", "time_limit": NEVER_SECONDS}
        self.step = TrainStep(self.net, SOFTMAX, **(given | options))
        return self.step

    def train(self, nsteps: int, **options: Any) -> list[np.ndarray]:
        losses = []
        for _ in range(nsteps):
            if self.planned:
                loss = self.step(self.x, self.y, **options)
            else:
                with autograd.record():
                    loss = SOFTMAX(self.net(self.x), self.y)
                loss.backward()
                mx.nd.waitall()  # or an update may meet a weight in a layout of oneDNN's
                self.trainer.step(options.get("batch_size", 4))
            losses.append(loss.asnumpy())
        return losses

    def values(self) -> Values:
        found = {name: p.data().asnumpy() for name, p in self.net.collect_params().items()}
        for index, state in self.trainer._updaters[0].states.items():
            for i, array in enumerate(arrays_in(state)):
                found[f"state {index}, {i}"] = array.asnumpy()
        return found


def arrays_in(state: Any) -> list[Any]:
    if isinstance(state, list | tuple):
        return [array for item in state for array in arrays_in(item)]
    return [] if state is None else [state]


def differing(one: Values, other: Values) -> list[str]:
    assert one.keys() == other.keys()
    assert all(np.isfinite(value).all() for value in one.values())
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def assert_equal_loops(
    optimizer: str, options: dict[str, Any], step: dict[str, Any] | None = None, **more: Any
) -> TrainStep:
    """Both loops leave the same; the step that was used."""
    loops = [Loop(optimizer, options, planned=planned, **more) for planned in (False, True)]
    loops[1].start(**(step or {}))
    losses = []
    for loop in loops:
        mx.random.seed(9)
        losses.append(loop.train(5))
    assert np.array_equal(*losses)
    assert not differing(*(loop.values() for loop in loops))
    return loops[1].step


def within(step: TrainStep) -> bool:
    [plan] = step.plans.values()
    assert plan.realisation in ("packed", "updating")
    return plan.realisation == "updating"
