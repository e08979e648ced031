"""Updates within a step beside what else the trainer, the block and the optimizer have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep

L2 = gluon.loss.L2Loss()
PACKED = {"realisation": "packed", "strategy": "store_all"}
RANDOM = np.random.default_rng(1)
BATCHES = [
    (RANDOM.normal(size=(5, 3)).astype("float32"), RANDOM.normal(size=(5, 4)).astype("float32"))
    for _ in range(6)
]

Values = dict[str, bytes]


def train(net: Any, x: Any, y: Any) -> None:
    with autograd.record():
        loss = L2(net(x), y)
    loss.backward()


def values(params: Any) -> Values:
    return {name: p.data().asnumpy().tobytes() for name, p in params.items()}


def realisations(step: TrainStep) -> list[str]:
    return [plan.realisation for plan in step.plans.values()]


class Partly(gluon.HybridBlock):  # type: ignore[misc]
    """It has a layer that it does not run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self.read, self.unread = nn.Dense(4, in_units=3), nn.Dense(2, in_units=2)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        """Of the one layer."""
        return self.read(x)


class Overflow:
    """As AMP's loss scaler, in a step that overflows."""

    loss_scale = 1.0

    def has_overflow(self, params: Any) -> bool:
        """Always."""
        return True


def replace_step(trainer: Any) -> None:
    trainer.step = lambda *_, **__: None


def attach_scaler(trainer: Any) -> None:
    trainer._amp_loss_scaler = Overflow()


@pytest.mark.parametrize(
    ("leave_out", "reason"), [(replace_step, "was replaced"), (attach_scaler, "AMP looks")]
)
def test_a_refusal_after_updates_beside_a_layer_that_nothing_reads(
    leave_out: Callable[[Any], None], reason: str
) -> None:
    """The trainer does not have the layer, either: that does not keep the others from updates."""
    net = Partly()
    net.initialize()
    trainer = gluon.Trainer(net.read.collect_params(), "sgd", {"learning_rate": 0.1})
    step = TrainStep(net, L2, trainer=trainer, **PACKED)
    x, y = map(mx.nd.array, BATCHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step(x, y)
    assert realisations(step) == ["updating"]
    before = values(net.collect_params())
    leave_out(trainer)
    with pytest.warns(UserWarning, match=reason):
        step(x, y)
    step(x, y)
    assert values(net.collect_params()) == before


HEADS = ("first", "second")


def trained_by_turns(
    realisation: str | None, optimizer: str, options: dict[str, Any]
) -> tuple[Values, int, list[TrainStep]]:
    """A body with two heads, of which the first is trained for some batches: one update for both.

    The trainer's parameters, its number of updates and the steps.
    """
    mx.random.seed(1)
    body = nn.Dense(4, in_units=3, prefix="body_")
    heads = [nn.Dense(4, in_units=4, prefix=f"{name}_") for name in HEADS]
    nets, params = [nn.HybridSequential() for _ in HEADS], gluon.ParameterDict()
    for block in (body, *heads):
        block.initialize()
        params.update(block.collect_params())
    for net, head in zip(nets, heads, strict=True):
        net.add(body, head)
    scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    trainer = gluon.Trainer(params, optimizer, {"lr_scheduler": scheduler, **options})
    given: dict[str, Any] = {"realisation": realisation, "strategy": "store_all"}
    steps = []
    if realisation is not None:
        steps = [TrainStep(nets[0], L2, **given)]
        steps += [TrainStep(nets[1], L2, trainer=trainer, ignore_stale_grad=True, **given)]
    for i, batch in enumerate(BATCHES):
        x, y = map(mx.nd.array, batch)
        for place in (1,) if i in (0, 3) else (0, 1):
            if steps:
                steps[place](x, y)
            else:
                train(nets[place], x, y)
        if not steps:
            trainer.step(5, ignore_stale_grad=True)
    return values(params), trainer.optimizer.num_update, steps


@pytest.mark.parametrize(
    ("optimizer", "options"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("adagrad", {})]
)
def test_fresh_gradients_beside_the_network(optimizer: str, options: dict[str, Any]) -> None:
    """With ignore_stale_grad the trainer leaves out stale ones, and no others."""
    expected = trained_by_turns(None, optimizer, options)
    for realisation in ("explicit", "packed"):
        found = trained_by_turns(realisation, optimizer, options)
        assert found[:2] == expected[:2]
    assert realisations(found[2][1]) == ["updating"]
