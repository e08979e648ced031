"""A TrainStep whose batches have another length every time."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.fitting import differing
from memplan.mxnet.gluon import TrainStep

LENGTHS = tuple(range(40, 20, -1))
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def network() -> gluon.nn.HybridSequential:
    """Convolutions over pictures of any width."""
    net = gluon.nn.HybridSequential()
    for _ in range(3):
        net.add(gluon.nn.Conv2D(8, 3, padding=1), gluon.nn.BatchNorm(), gluon.nn.Activation("tanh"))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(12))
    return net


def trained(lengths: tuple[int, ...], step_of: Any) -> tuple[dict[str, np.ndarray], Any]:
    """All that a loop over batches of these lengths sees, and what trained."""
    mx.random.seed(3)
    net = network()
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "adam")
    step, found, random = step_of(net), {}, np.random.default_rng(5)
    for number, length in enumerate(lengths):
        pictures = mx.nd.array(random.normal(size=(4, 3, 8, length)))
        labels = mx.nd.array(random.integers(0, 12, 4))
        found[f"loss {number}"] = step(pictures, labels).asnumpy()
        trainer.step(4)
    mx.nd.waitall()
    arrays = enumerate(net.collect_params().values())
    return found | {f"array {n}": p.data().asnumpy() for n, p in arrays}, step


def plain(net: Any) -> Any:
    def step(x: Any, y: Any) -> Any:
        with autograd.record():
            loss = LOSS(net(x), y)
        loss.backward()
        return loss

    return step


@pytest.mark.long
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_twenty_lengths(realisation: str) -> None:
    """The numbers of the plain loop, in the memory of the longest."""

    def planned(net: Any) -> TrainStep:
        options = {"strategy": "evict:patience=5", "realisation": realisation}
        return TrainStep(net, LOSS, budget="80%", **options)

    stock, _ = trained(LENGTHS, plain)
    ours, step = trained(LENGTHS, planned)
    assert not differing(stock, ours)
    hold_no_more_than_the_longest(step, len(LENGTHS))


@pytest.mark.long
def test_a_hundred_lengths_in_any_order() -> None:
    """One array serves all: the longest comes in the middle, and budgets are of each length."""
    lengths = np.random.default_rng(0).permutation(np.arange(20, 120)).tolist()

    def planned(net: Any) -> TrainStep:
        options = {"strategy": "evict:patience=0", "realisation": "packed"}
        return TrainStep(net, LOSS, budget="80%", **options)

    _, step = trained(tuple(lengths), planned)
    hold_no_more_than_the_longest(step, 100)


def hold_no_more_than_the_longest(step: TrainStep, count: int) -> None:
    plans = list(step.plans.values())
    assert len(plans) == count
    assert any(plan.schedule.recomputed for plan in plans)
    [pool] = step._pools.values()
    assert pool.nbytes <= max(p.budget_nbytes - p.total_nbytes + p.allocated_nbytes for p in plans)
    if plans[0].realisation == "packed":
        memories = {id(bound.executor.memory) for bound in step._bound.values()}
        assert len(memories) == 1


def test_lengths_that_are_not_planned() -> None:
    def planned(net: Any) -> TrainStep:
        options = {"strategy": "evict:patience=5", "realisation": "packed"}
        return TrainStep(net, LOSS, budget="88%", unseen="nearest", **options)

    stock, _ = trained((24, 25), plain)
    with pytest.warns(UserWarning, match="not seen before, trained by the nearest schedule"):
        ours, _ = trained((24, 25), planned)
    assert not differing(stock, ours)
