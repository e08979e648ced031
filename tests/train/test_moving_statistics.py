"""Statistics of norms move as in MXNet, or the loss is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.errors import TraceError, UsageError
from memplan.mxnet.gluon import TrainStep, planned

DRAW = np.random.default_rng(0)
BATCHES = [mx.nd.array(DRAW.normal(size=(5, 6)), ctx=CPU) for _ in range(3)]
WHOLE = {"inline_limit": 0}

Loss = Callable[..., Any]


class Towers(gluon.HybridBlock):
    """Three calls of the same layers, and another norm that depends on the first."""

    def __init__(self) -> None:
        super().__init__(prefix="towers_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4))
            self.head, self.norm = nn.Dense(4, in_units=4), nn.BatchNorm(in_channels=4)

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:  # noqa: N803
        a, b, c = map(self.body, inputs)
        return a, b, c, self.norm(self.head(a))


class Dropping(gluon.HybridBlock):
    """Drops an output of its hybridized child."""

    def __init__(self) -> None:
        super().__init__(prefix="dropping_")
        with self.name_scope():
            self.towers = Towers()
            self.towers.hybridize(**WHOLE)

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:  # noqa: N803
        return sum(self.towers(*inputs)[:3])


class Apart(gluon.HybridBlock):
    """Two branches with weights of their own share a norm; one returns its middle, too."""

    def __init__(self) -> None:
        super().__init__(prefix="apart_")
        with self.name_scope():
            self.one, self.other = nn.Dense(4, in_units=6), nn.Dense(4, in_units=6)
            self.norm = nn.BatchNorm(in_channels=4)

    def hybrid_forward(self, F: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: N803
        middle = self.other(b)
        return self.norm(self.one(a)), middle, self.norm(middle)


def trained(block: Any, step: Callable[..., Any]) -> list[np.ndarray]:
    """Parameters and statistics after two steps."""
    trainer = gluon.Trainer(block.collect_params(), "sgd", {"learning_rate": 0.1})
    for _ in range(2):
        step(*BATCHES)
        trainer.step(5, ignore_stale_grad=True)
    return [p.data().asnumpy() for p in block.collect_params().values()]


def by_loop(loss: Loss, *, plan: str | None = None, block: Any = Towers, **flags: Any) -> Any:
    """What a loop trains that computes the ``loss`` of the outputs, planned or not."""
    mx.random.seed(0)
    block = block()
    block.initialize(mx.init.Normal(0.3), ctx=CPU)
    if flags:
        block.hybridize(**flags)
    if plan:
        block = planned(block, strategy="store_all", realisation=plan)

    def step(*inputs: Any) -> None:
        with autograd.record():
            loss_now = loss(*leaves(block(*inputs)))
        loss_now.backward()

    return trained(block, step)


def leaves(outputs: Any) -> Any:
    return outputs if isinstance(outputs, list | tuple) else [outputs]


def by_step(loss: Loss, *, keep: bool = False, block: Any = Towers, **flags: Any) -> Any:
    """What a TrainStep trains, without updates within; it may ``keep`` outputs."""
    mx.random.seed(0)
    block = block()
    block.initialize(mx.init.Normal(0.3), ctx=CPU)
    if flags:
        block.hybridize(**flags)
    step = TrainStep(
        block, lambda outs, _: loss(*leaves(outs)), strategy="store_all", keep_outputs=keep
    )
    return trained(block, lambda *inputs: step(inputs, mx.nd.zeros(5)))


def assert_equal(planned_arrays: Any, arrays: Any) -> None:
    for ours, theirs in zip(planned_arrays, arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def in_order(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a + 2 * b + c * c + d).sum()


def in_another(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (b + 2 * a + c * c + d).sum()


def without_last(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a + 2 * b + c * c).sum()


def stopped_last(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a + 2 * b + c * c + mx.nd.BlockGrad(d)).sum()


def last_alone(a: Any, b: Any, c: Any, d: Any) -> Any:
    return d.sum()


def middle_first(a: Any, middle: Any, b: Any) -> Any:
    return (middle + 2 * a + b * b).sum()


@pytest.mark.parametrize("plan", ["packed", "explicit"])
@pytest.mark.parametrize("loss", [in_order, without_last, stopped_last])
def test_statistics_move_as_in_mxnet(plan: str, loss: Loss) -> None:
    assert_equal(by_loop(loss, plan=plan), by_loop(loss))


@pytest.mark.parametrize("loss", [in_order, in_another, without_last, stopped_last, last_alone])
def test_of_a_graph_all_move_in_the_order_of_its_outputs(loss: Loss) -> None:
    assert_equal(by_loop(loss, plan="packed", **WHOLE), by_loop(loss, **WHOLE))


@pytest.mark.parametrize("loss", [in_another, last_alone])
def test_a_loss_that_moves_them_otherwise_is_refused(loss: Loss) -> None:
    with pytest.raises(UsageError, match=r"share 'towers_batchnorm0_running"):
        by_loop(loss, plan="packed")


def test_a_step_reads_in_the_order_of_the_loss() -> None:
    assert_equal(by_step(in_another), by_loop(in_another))
    assert_equal(by_step(in_order, **WHOLE), by_loop(in_order, **WHOLE))


def test_a_step_of_a_graph_that_is_read_in_another_order_is_refused() -> None:
    with pytest.raises(TraceError, match="in which a hybridized block returns"):
        by_step(in_another, **WHOLE)


def test_a_step_that_drops_what_a_graph_moves_is_refused() -> None:
    with pytest.raises(TraceError, match="do not compute it there, or have the loss read it"):
        by_step(without_last, **WHOLE)
    with pytest.raises(TraceError, match="MXNet moves 'dropping_towers_batchnorm1_running_mean'"):
        by_loop(lambda out: out.sum(), plan="packed", block=Dropping)


def test_gradients_that_mxnet_asks_for_in_another_order_are_refused() -> None:
    # The norms stand in one order in both graphs, and their weights in another.
    with pytest.raises(UsageError, match="share 'apart_batchnorm0_running"):
        by_loop(middle_first, plan="packed", block=Apart)
    with pytest.raises(TraceError, match="in which a hybridized block returns"):
        by_step(middle_first, block=Apart, **WHOLE)
    assert_equal(by_step(middle_first, block=Apart), by_loop(middle_first, block=Apart))


def test_of_outputs_that_are_kept_and_not_read_the_statistics_stay() -> None:
    assert_equal(by_step(without_last, keep=True), by_loop(without_last))
