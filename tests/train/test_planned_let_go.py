"""Planned blocks that nobody has but the loss: they stay for its backward, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from helpers.amounts import long_except
from helpers.blocks import CPU
from helpers.let_go import is_let_go
from memplan.errors import UsageError
from memplan.mxnet.gluon import planned
from memplan.mxnet.train.arrays import array_memory
from memplan.mxnet.train.first_half import FirstHalf, State

X = mx.nd.ones((4, 6), CPU)


def network(*, plan: bool = True, grad_req: str = "write") -> Any:
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(8, activation="relu", in_units=6, prefix="first_"))
    net.add(nn.Dense(3, in_units=8, prefix="second_"))
    net.initialize(ctx=CPU)
    net.collect_params().setattr("grad_req", grad_req)
    return planned(net, strategy="chen_sqrt", realisation="packed") if plan else net


def outputs_of(net: Any) -> Any:
    with autograd.record():
        return net(X)


def loss_of(net: Any) -> Any:
    with autograd.record():
        return (net(X) ** 2).sum()


def with_penalty(net: Any) -> Any:
    with autograd.record():
        return (net(X) ** 2).sum(), (net[0].weight.data() ** 2).sum()


def after_steps(call: Callable[[Any], Any], nsteps: int, *, plan: bool) -> tuple[Any, list[Any]]:
    """What a ``call`` after so many steps returns, and the parameters; nothing else is kept."""
    net = network(plan=plan)
    for _ in range(nsteps):
        loss_of(net).backward()
    return call(net), list(net.collect_params().values())


@pytest.mark.parametrize("call", [loss_of, outputs_of])
@pytest.mark.parametrize("nsteps", [0, 1])
def test_a_block_stays_for_backward(nsteps: int, call: Callable[[Any], Any]) -> None:
    results = []
    for plan in (False, True):
        head, parameters = after_steps(call, nsteps, plan=plan)
        gc.collect()
        head.backward()
        results.append([parameter.grad().asnumpy() for parameter in parameters])
    for expected, gradient in zip(*results, strict=True):
        assert expected.any()
        assert np.array_equal(expected, gradient)


def test_a_block_stays_for_what_was_recorded_beside() -> None:
    """Between the halves of its step, and differentiated behind both."""
    results = []
    for plan in (False, True):
        (loss, penalty), parameters = after_steps(with_penalty, 1, plan=plan)
        loss.backward()
        gc.collect()
        penalty.backward()
        results.append([parameter.grad().asnumpy() for parameter in parameters])
    for expected, gradient in zip(*results, strict=True):
        assert np.array_equal(expected, gradient)


def test_several_blocks_stay_for_one_backward() -> None:
    losses, parameters = zip(*(after_steps(loss_of, 0, plan=True) for _ in range(12)), strict=True)
    gc.collect()
    autograd.backward(losses)
    assert all(p.grad().asnumpy().any() for of_block in parameters for p in of_block)


@pytest.mark.long
def test_what_cannot_be_differentiated_is_still_said() -> None:
    def retained(net: Any) -> Any:
        loss = loss_of(net)
        loss.backward(retain_graph=True)
        return loss

    loss, _ = after_steps(retained, 0, plan=True)
    gc.collect()
    with pytest.raises(UsageError, match="second time"):
        loss.backward()

    def earlier(net: Any) -> Any:
        loss = loss_of(net)
        loss_of(net).backward()
        return loss

    loss, _ = after_steps(earlier, 0, plan=True)
    gc.collect()
    with pytest.raises(UsageError, match="an earlier call"):
        loss.backward()

    loss, parameters = after_steps(loss_of, 0, plan=True)
    gc.collect()
    with pytest.raises(UsageError, match="does not reach"):
        autograd.grad(loss, [p.data() for p in parameters])


def left(net: Any) -> None:
    for _ in range(3):
        loss_of(net)


def finished(net: Any) -> Any:
    outputs = outputs_of(net)
    outputs.backward()
    return outputs


def beside(net: Any) -> Any:
    loss, penalty = with_penalty(net)
    loss.backward()
    penalty.backward()
    return loss, penalty


def failed(net: Any) -> None:
    loss_of(net)
    with autograd.record(), pytest.raises(mx.MXNetError):
        (net(X) + mx.nd.ones((7, 7))).sum()


@pytest.mark.parametrize("call", long_except([left, finished, beside, failed], [finished]))
def test_a_block_goes_with_its_loss(call: Callable[[Any], Any]) -> None:
    """However many are called, of which no backward comes, or has come."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    kept = []
    for _ in range(50):
        net = network()
        kept.append(call(net))
        alive.add(net)
        del net
    assert is_let_go(lambda: not alive)


def test_a_block_stays_until_backward_where_mxnets_objects_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(array_memory, "_are_nodes_known", lambda: False)
    head, parameters = after_steps(loss_of, 0, plan=True)
    gc.collect()
    head.backward()
    assert all(parameter.grad().asnumpy().any() for parameter in parameters)
    net = network()
    loss_of(net).backward()
    gone = weakref.ref(net)
    del net
    assert is_let_go(lambda: gone() is None)


def test_a_step_is_begun_then_left_or_finished() -> None:
    net = network()

    def begun() -> tuple[Any, FirstHalf]:
        return loss_of(net), net.planned_step.unfinished[CPU]

    _, left = begun()
    assert left.state is State.BEGUN
    loss, retained = begun()  # in the place of the one before
    assert left.state is State.LEFT
    loss.backward(retain_graph=True)
    assert retained.state is State.RETAINED
    loss, finished = begun()
    loss.backward()
    assert finished.state is State.FINISHED
    _, abandoned = begun()
    net.planned_step.abandon()
    assert abandoned.state is State.LEFT
    states = [half.state for half in (left, retained, finished)]
    assert states == [State.LEFT, State.RETAINED, State.FINISHED]  # to the end
