"""Graphs that keep the arrays for gradients, trained by MXNet before planned steps and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep, planned

LOSS = gluon.loss.L2Loss()


class TwoHeads(gluon.HybridBlock):  # type: ignore[misc]
    """A layer of two operators, each of which MXNet could run alone."""

    def __init__(self) -> None:
        super().__init__(prefix="heads_")
        with self.name_scope():
            self.first, self.second = (nn.Dense(3, in_units=3) for _ in range(2))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.first(x), self.second(x)


STATIC = {"static_alloc": True, "static_shape": True}
PLAN: dict[str, Any] = {"strategy": "chen_sqrt"}


def network() -> Any:
    """Two dense layers with statistics between them, run as one static graph."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(6, in_units=5), nn.BatchNorm(in_channels=6), nn.Dense(3, in_units=6))
    net.initialize(mx.init.Normal(0.5))
    net.hybridize(**STATIC)
    return net


def images(count: int) -> Any:
    return mx.nd.array(np.linspace(-1, 1, 5 * count).reshape(5, count).T)


def backward_of(net: Any, count: int, *, train_mode: bool = True) -> None:
    with autograd.record(train_mode=train_mode):
        loss = LOSS(net(images(count)), mx.nd.ones((count, 3)))
    loss.backward()


def left_by(loop: Callable[..., Any], make: Callable[[], Any], *, plan: bool) -> list[Any]:
    """Gradients after each of the steps of a ``loop``, and values behind the update after it."""
    net = make()
    params = net.collect_params().values()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    found = []
    for _ in loop(net, plan=plan):
        found += [p.grad().asnumpy() for p in params if p.grad_req != "null"]
        trainer.step(4, ignore_stale_grad=True)
        found += [p.data().asnumpy() for p in params]
    return found


def check_equal(loop: Callable[..., Any], make: Callable[[], Any] = network) -> None:
    expected, found = (left_by(loop, make, plan=plan) for plan in (False, True))
    assert len(expected) == len(found) > 0
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_planned_block_that_mxnet_trains_in_between(realisation: str) -> None:
    """MXNet trains it by the statistics, as where they are frozen."""

    def loop(net: Any, *, plan: bool) -> Any:
        yield backward_of(net, 4)
        if plan:
            planned(net, realisation=realisation, **PLAN)
        for count in (4, 8, 4):
            yield backward_of(net, count)
            yield backward_of(net, 4, train_mode=False)

    check_equal(loop)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_loop_of_autograd_beside_steps(realisation: str) -> None:
    def loop(net: Any, *, plan: bool) -> Any:
        step = TrainStep(net, LOSS, realisation=realisation, **PLAN)
        for count in (4, 4, 8):
            yield backward_of(net, 4)
            if plan:
                yield step(images(count), mx.nd.ones((count, 3)))
            else:
                yield backward_of(net, count)
        yield backward_of(net, 4)

    check_equal(loop)


def test_a_loop_of_autograd_that_calls_the_block_twice_behind_a_step() -> None:
    """MXNet sums up what both calls give, in memory that a static graph would keep for later."""

    def loop(net: Any, *, plan: bool) -> Any:
        step = TrainStep(net, LOSS, **PLAN)
        yield backward_of(net, 4)
        for _ in range(2):
            if plan:
                yield step(images(4), mx.nd.ones((4, 3)))
            else:
                yield backward_of(net, 4)
            with autograd.record():
                losses = [LOSS(net(images(n)), mx.nd.ones((n, 3))).sum() for n in (4, 8)]
                loss = losses[0] + losses[1]
            loss.backward()
            yield
            yield backward_of(net, 4)

    check_equal(loop)


def test_a_loop_of_autograd_behind_steps_that_update() -> None:
    """Whose gradients were given up, so that MXNet makes others."""
    results = []
    for plan in (False, True):
        net = network()
        params = net.collect_params()
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1})
        backward_of(net, 4)
        trainer.step(4)
        if plan:
            step = TrainStep(net, LOSS, trainer=trainer, realisation="packed", **PLAN)
            step(images(4), mx.nd.ones((4, 3)))
            assert net[2].weight._grad is None
            for request in ("null", "write"):
                params.setattr("grad_req", request)
        else:
            backward_of(net, 4)
            trainer.step(4)
        backward_of(net, 4)
        trainer.step(4)
        results.append([p.data().asnumpy() for p in params.values()])
    assert all(map(np.array_equal, *results))


def test_a_static_layer_of_a_planned_block_is_called_past_it_and_alone() -> None:
    """Each step has other arrays for what autograd writes beside it, until it is finished."""

    def loop(net: Any, *, plan: bool) -> Any:
        net.hybridize(False)
        net[2].hybridize(**STATIC)
        if plan:
            planned(net, **PLAN)
        for _ in range(3):
            with autograd.record():
                loss = LOSS(net(images(4)), mx.nd.ones((4, 3))) + net[2](mx.nd.ones((4, 6))).mean()
            loss.backward()
            yield
            with autograd.record():
                penalty = net[2](mx.nd.ones((4, 6))).square().mean()
            penalty.backward()
            yield

    check_equal(loop)


def test_a_static_layer_of_two_operators_of_which_a_loss_reads_one() -> None:
    """In MXNet's graph backward goes through both, be they ever so few."""

    def with_heads() -> Any:
        net = network()
        net.hybridize(False)
        net.add(TwoHeads())
        net[3].initialize(mx.init.Normal(0.5))
        net[3].hybridize(**STATIC)
        net[3](mx.nd.ones((4, 3)))
        return net

    def loop(net: Any, *, plan: bool) -> Any:
        if plan:
            planned(net, **PLAN)
        for _ in range(2):
            with autograd.record():
                one, other = net(images(4))
                loss = (one * other).sum()
            loss.backward()
            yield
            with autograd.record():
                alone = net[3](mx.nd.ones((4, 3)))[0].square().sum()
            alone.backward()
            yield

    check_equal(loop, with_heads)


def test_a_graph_stays_while_the_gradients_stay_where_they_are() -> None:
    net = planned(network(), **PLAN)
    graphs = []
    for _ in range(3):
        backward_of(net, 4)
        backward_of(net, 4, train_mode=False)
        graphs.append(net._cached_op)
    assert graphs[1] is graphs[2]


def test_the_graph_of_a_block_that_has_no_plan_is_left_to_mxnet() -> None:
    backward_of(planned(network(), **PLAN), 4)
    net = network()
    backward_of(net, 4)
    graph = net._cached_op
    net.collect_params().reset_ctx(mx.cpu())
    backward_of(net, 4)
    assert net._cached_op is graph
