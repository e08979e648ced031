"""Training loops around networks and losses that others published, as they are and planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from helpers.block_runs import leaves
from helpers.training_runs import Values, differences
from memplan.mxnet.gluon import planned

STEPS = 3
# The first batch is for MXNet's making its graph of the block.
BATCHES = STEPS + 1


@dataclass(frozen=True)
class Script:
    """A network, its batches, and what the loop does with one: ``losses(net, batch)``.

    The losses are computed, and differentiated together, under ``autograd.record()``.
    """

    net: Callable[[], Any]
    batches: Callable[[Any], Iterator[Any]]
    losses: Callable[[Any, Any], Any]
    optimizer: dict[str, Any] = field(default_factory=lambda: {"learning_rate": 0.01})
    initializer: Any = field(default_factory=mx.init.Xavier)
    micro_batches: int = 1
    #: What the loop does with the gradients before an update.
    before_update: Callable[[Any], None] = lambda net: None
    options: dict[str, Any] = field(default_factory=dict)


def differing(script: Script) -> tuple[list[str], Any]:
    """How a planned loop differs from the plain one; and the plan."""
    expected, _ = trained(script, plan=False)
    found, net = trained(script, plan=True)
    (plan,) = net.planned_step.plans.values()
    return differences(expected, found), plan


def trained(script: Script, *, plan: bool) -> tuple[list[Values], Any]:
    """Losses of every step, then weights and states; and the network."""
    mx.random.seed(1)
    np.random.seed(1)
    net = script.net()
    net.initialize(script.initializer)
    batches = script.batches(net)
    net.hybridize()
    with autograd.record():  # MXNet calls what draws random numbers twice when it makes its graph
        script.losses(net, next(batches))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9, **script.optimizer})
    if script.micro_batches > 1:
        net.collect_params().setattr("grad_req", "add")
    if plan:
        planned(net, **{"realisation": "packed", "strategy": "chen_sqrt", **script.options})
    mx.random.seed(2)
    result = []
    for _ in range(STEPS):
        for _ in range(script.micro_batches):
            with autograd.record():
                losses = script.losses(net, next(batches))
            autograd.backward(leaves(losses))
            result.append({str(i): loss.asnumpy() for i, loss in enumerate(leaves(losses))})
        script.before_update(net)
        trainer.step(script.micro_batches)
        if script.micro_batches > 1:
            net.collect_params().zero_grad()
    params = net.collect_params()
    result.append({name.partition("_")[2]: p.data().asnumpy() for name, p in params.items()})
    return result, net
