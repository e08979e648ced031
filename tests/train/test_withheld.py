"""The gradients of a planned block that was called, and which no backward has reached."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.let_go import is_let_go
from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

Nets = list[Any]


def two_nets(plan: bool) -> Nets:
    mx.random.seed(3)
    nets = [nn.HybridSequential(prefix=f"net{place}_") for place in range(2)]
    for net in nets:
        with net.name_scope():
            net.add(nn.Dense(6, activation="tanh"), nn.Dense(6, activation="tanh"), nn.Dense(2))
        net.initialize()
        net(mx.nd.ones((2, 4)))
        net.hybridize()
        if plan:
            planned(net, realisation="packed", strategy="chen_sqrt")
    return nets


def freeze(net: Any) -> None:
    net[0].collect_params().setattr("grad_req", "null")


def make_anew(net: Any) -> None:
    net[0].initialize(force_reinit=True)


def params_of(nets: Nets) -> list[Any]:
    return [p for net in nets for p in net.collect_params().values()]


def call_both(nets: Nets, *reached: int) -> None:
    x = mx.nd.arange(12).reshape((3, 4)) / 8
    with autograd.record():
        outputs = [net(x) for net in nets]
        loss = sum((outputs[place] ** 2).sum() for place in reached)
    loss.backward()


def clipped(nets: Nets) -> None:
    """What a backward has never reached has zeros, and may be clipped with the rest."""
    for _ in range(2):
        call_both(nets, 0)
        gluon.utils.clip_global_norm([p.grad() for p in params_of(nets)], 0.1)


def zeroed(nets: Nets) -> None:
    """In the manner of PyTorch, though MXNet overwrites gradients by itself."""
    call_both(nets, 0, 1)
    for _ in range(2):
        for net in nets:
            net.collect_params().zero_grad()
        nets[1][0].weight.zero_grad()
        call_both(nets, 0)
        nets[1][1].bias.grad()[:] = 0
    nets[1].collect_params().zero_grad()


def reached_later(nets: Nets) -> None:
    for _ in range(2):
        with autograd.record():
            losses = [(net(mx.nd.ones((3, 4))) ** 2).sum() for net in nets]
        for loss in losses:
            loss.backward()
            assert nets[1][0].weight.grad().shape == (6, 4)


def written_by_a_penalty(nets: Nets) -> None:
    call_both(nets, 0, 1)
    with autograd.record():
        for net in nets:
            net(mx.nd.ones((3, 4)))
        penalty = sum((p.data() ** 2).sum() for p in params_of(nets[1:]))
    penalty.backward()
    call_both(nets[:1], 0)


@pytest.mark.parametrize("train", [clipped, zeroed, reached_later, written_by_a_penalty])
def test_as_without_a_plan(train: Callable[[Nets], None]) -> None:
    left = []
    for plan in (False, True):
        nets = two_nets(plan)
        train(nets)
        left.append([gradients(net) for net in nets])
    assert not differences(*left)


def test_what_was_overwritten_cannot_be_read() -> None:
    nets = two_nets(plan=True)
    call_both(nets, 0, 1)
    call_both(nets, 0)
    gradient = nets[1][0].weight.grad()
    with pytest.raises(UsageError, match=r"'net1_dense0_weight' is not there: .* no backward"):
        gluon.utils.clip_global_norm([p.grad() for p in params_of(nets)], 0.1)
    with pytest.raises(UsageError, match="'net1_dense0_weight' is not there"):
        gradient.asnumpy()
    nets[1].hybridize(active=False)
    copy.deepcopy(nets[1])(mx.nd.ones((2, 4)))
    call_both(nets, 1)
    assert np.isfinite(gradient.asnumpy()).all()


def test_what_was_overwritten_and_written_in_part_cannot_be_read() -> None:
    """The rest is what lies in memory; where it is zeros for certain it stays so."""
    nets = two_nets(plan=True)
    call_both(nets, 0)
    gradient = nets[1][2].weight.grad()
    gradient[0] = 1
    assert gradient.asnumpy()[:, 0].tolist() == [1, 0]
    call_both(nets, 0, 1)
    call_both(nets, 0)
    gradient[0] = 1
    with pytest.raises(UsageError, match="'net1_dense2_weight' is not there"):
        gradient.asnumpy()
    gradient[:] = 2
    gradient[0] = 1
    assert gradient.asnumpy()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_have_none_of_what_lies_in_memory(copied: Callable[[Any], Any]) -> None:
    nets = two_nets(plan=True)
    nets[1].hybridize(active=False)
    for values in ({0.0}, {None}):
        with autograd.record():
            loss = (nets[1](mx.nd.ones((3, 4))) ** 2).sum()
        found = np.concatenate([g.ravel() for g in gradients(copied(nets[1])).values()])
        assert {None if np.isnan(value) else value for value in found} == values
        loss.backward()
        assert np.isfinite(nets[1][0].weight.grad().asnumpy()).all()


@pytest.fixture
def _numpy_semantics() -> Iterator[None]:
    mx.npx.set_np()
    try:
        yield
    finally:
        mx.npx.reset_np()


@pytest.mark.usefixtures("_numpy_semantics")
@pytest.mark.parametrize("is_trained", [False, True])
def test_those_of_mx_np_are_copied_and_cast_as_such(is_trained: bool) -> None:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh"), nn.Dense(2))
    net.initialize()
    x = mx.np.ones((3, 4))
    net(x)
    expected = copy.deepcopy(net)
    planned(net, realisation="packed", strategy="chen_sqrt")
    if is_trained:
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
    with autograd.record():
        net(x)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        for parameter in params_of([copied]):
            assert isinstance(parameter.grad(), mx.np.ndarray)
            assert np.isnan(parameter.grad().asnumpy()).all() == is_trained
    gradient = net[0].weight.grad()
    assert gradient.ctx == gradient.context == x.ctx
    with autograd.record():
        net(x)
    for block in (expected, net):
        block.cast("float64")
        assert all(isinstance(p.grad(), mx.np.ndarray) for p in params_of([block]))
        with autograd.record():
            loss = (block(x.astype("float64")) ** 2).sum()
        loss.backward()
    assert not differences([gradients(expected)], [gradients(net)])


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_those_of_a_step_that_was_left_cannot_be_read(realisation: str) -> None:
    """Until something else computes them."""
    net = two_nets(plan=False)[0]
    step = TrainStep(net, realisation=realisation, strategy="chen_sqrt")
    x = mx.nd.ones((3, 4))
    for is_last in (False, True):
        with autograd.record():
            loss = (step.forward(x) ** 2).sum()
        if not is_last:
            step.backward(loss)
    step.abandon()
    with pytest.raises(UsageError, match="'net0_dense0_weight' is not there"):
        net[0].weight.grad().asnumpy()
    with autograd.record():
        loss = sum((p.data() ** 2).sum() for p in params_of([net]))
    loss.backward()
    for parameter in params_of([net]):
        assert np.array_equal(parameter.grad().asnumpy(), 2 * parameter.data().asnumpy())


def test_one_class_for_a_gradient_serves_batches_of_all_shapes() -> None:
    """Python's classes take kilobytes each, and would be as many as there are shapes."""
    net, _ = two_nets(True)
    kinds = []
    for nrows in (2, 3, 4, 2):
        with autograd.record():
            loss = net(mx.nd.ones((nrows, 4))).sum()
        kinds.append([type(p._grad[0]) for p in params_of([net])])
        loss.backward()
    assert all(hasattr(kind, "_withheld") for kind in kinds[0])
    assert kinds == [kinds[0]] * 4


@pytest.mark.parametrize("change", [freeze, make_anew])
def test_the_memory_of_a_step_is_free_without_python_s_collector(
    change: Callable[[Any], None],
) -> None:
    """Autograd knows a gradient in it by the array that a parameter had before the change."""
    net, _ = two_nets(True)
    x = mx.nd.ones((3, 4))
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    [segment] = net.planned_step._pools[x.ctx].memory._segments
    gc.disable()
    try:
        change(net)
        for _ in range(2):
            with autograd.record():
                loss = net(x).sum()
            loss.backward()
        assert is_let_go(lambda: sys.getrefcount(segment) == 2, collects=False)
    finally:
        gc.enable()
