"""Gradients of packed steps that have gone: the parameters keep them, and not the array."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU
from helpers.training_runs import differences
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.train.arrays import moved_out

LOSS = gluon.loss.L2Loss()
X, Y = mx.nd.ones((64, 4), CPU), mx.nd.ones((64, 3), CPU)
OPTIONS = {"realisation": "packed", "strategy": "store_all"}


def network() -> nn.HybridSequential:
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="tanh", in_units=4), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier(), CPU)
    return net


def array_of(step: TrainStep) -> Any:
    """The one in which the steps run."""
    memory = step._pools[CPU].memory
    assert memory is not None
    (segment,) = memory._segments
    return segment


def is_free(segment: Any) -> bool:
    """Has nobody the array but the test, as ``segment`` and as the argument of these two?"""
    mx.nd.waitall()
    return sys.getrefcount(segment) == 3


def assert_same(net: Any, before: dict[str, Any]) -> None:
    assert any(gradient.any() for gradient in before.values())
    assert not differences([before], [gradients(net)])


def whole(net: Any) -> TrainStep:
    step = TrainStep(net, LOSS, **OPTIONS)
    step(X, Y)
    return step


def in_halves(net: Any) -> TrainStep:
    step = TrainStep(net, **OPTIONS)
    with autograd.record():
        loss = LOSS(step.forward(X), Y)
    step.backward(loss)
    return step


def by_mxnet(net: Any) -> None:
    with autograd.record():
        loss = LOSS(net(X), Y)
    loss.backward()


@pytest.mark.parametrize("run", [whole, in_halves])
def test_the_array_is_free_and_the_parameters_keep_their_gradients(
    run: Callable[[Any], TrainStep],
) -> None:
    net = network()
    step = run(net)
    segment, before = array_of(step), gradients(net)
    held = {p.name: p.grad() for p in net.collect_params().values()}
    del step
    assert is_free(segment)
    assert_same(net, before)
    assert all(p.grad() is held[p.name] for p in net.collect_params().values())


@pytest.mark.parametrize("run", [whole, in_halves])
def test_a_trainer_updates_by_them_and_autograd_writes_the_next(
    run: Callable[[Any], TrainStep],
) -> None:
    found = []
    for go in (by_mxnet, run):
        net = network()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        step = go(net)
        del step
        trainer.step(64)
        with pytest.raises(UserWarning, match="stale"):
            trainer.step(64)
        by_mxnet(net)
        trainer.step(64)
        found.append([p.data().asnumpy() for p in net.collect_params().values()])
    assert all(map(np.array_equal, *found))


def test_an_array_that_autograd_has_given_stays_what_it_was() -> None:
    net = network()
    step = whole(net)
    given = net[0].weight.data().grad
    before = given.asnumpy()
    del step
    mx.nd.random.normal(shape=(64, 64)).wait_to_read()
    assert before.any()
    assert np.array_equal(given.asnumpy(), before)


def test_what_was_recorded_before_writes_where_the_parameters_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moved_out, "LOOKS", 20)
    found = []
    for go in (by_mxnet, whole):
        net = network()
        step = go(net)
        with autograd.record():
            penalty = (net[0].weight.data() ** 2).sum()
        del step
        penalty.backward()
        found.append(net[0].weight.grad().asnumpy())
    assert np.array_equal(*found)


def test_they_move_while_a_script_records() -> None:
    net = network()
    step = whole(net)
    segment, before = array_of(step), gradients(net)
    with autograd.record():
        del step
    assert is_free(segment)
    assert_same(net, before)


def test_they_stay_where_the_collector_finds_the_step() -> None:
    """It comes at any place, such as in a call of MXNet's that has their handles already."""
    net = network()
    cycle: list[Any] = [whole(net)]
    cycle.append(cycle)
    segment, before = array_of(cycle[0]), gradients(net)
    del cycle
    gc.collect()
    assert not is_free(segment)
    assert_same(net, before)


def test_they_stay_where_another_thread_lets_go_of_the_step() -> None:
    net = network()
    steps = [whole(net)]
    segment = array_of(steps[0])
    thread = threading.Thread(target=steps.clear)
    thread.start()
    thread.join()
    assert not is_free(segment)


def test_they_move_where_the_thread_that_trained_has_ended() -> None:
    net = network()
    steps: list[TrainStep] = []
    thread = threading.Thread(target=lambda: steps.append(whole(net)))
    thread.start()
    thread.join()
    segment = array_of(steps[0])
    steps.clear()
    assert is_free(segment)


def test_they_stay_where_there_is_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    step = whole(net)
    segment, before = array_of(step), gradients(net)

    def without_room(*_: Any, **__: Any) -> Any:
        raise mx.MXNetError("out of memory")

    monkeypatch.setattr(moved_out.mx.nd, "empty", without_room)
    del step
    monkeypatch.undo()
    assert not is_free(segment)
    assert_same(net, before)
