"""Whether MXNet adds up gradients in another order than a planned step is said, and only then."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.amounts import long_except
from helpers.blocks import CPU
from memplan.mxnet.gluon import planned
from memplan.mxnet.train import first_half

# How often the block reads, how often the loss does; does the loss read before the block's output?
CALLS = list(itertools.product([1, 2, 3, 4], [1, 2, 3, 5], [False, True]))
SOME = [(1, 1, False), (1, 2, False), (4, 1, False), (2, 1, True), (2, 1, False), (2, 5, False)]


class Reading(gluon.HybridBlock):
    """Reads its weight, or an output of its own, so many times."""

    def __init__(self, times: int, of_weight: bool) -> None:
        super().__init__(prefix="net_")
        self.times, self.of_weight = times, of_weight
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(7, 6))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        read = weight if self.of_weight else F.dot(x, weight)
        terms = [F.sin(read * (n + 1)) for n in range(self.times)]
        output = terms[0] if self.times == 1 else F.add_n(*terms)
        return (F.dot(x, output), x) if self.of_weight else (output, read)


def trained(
    times: int, past: int, loss_first: bool, of_weight: bool, hybrid: bool | dict[str, Any]
) -> tuple[list[Any], list[Any], list[str]]:
    """Gradients of some steps in MXNet and planned, and what was warned of."""
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for plan in (False, True):
            net, draw = Reading(times, of_weight), np.random.default_rng(5)
            net.initialize(ctx=CPU)
            net.weight.set_data(mx.nd.array(draw.normal(size=(7, 6)), ctx=CPU))
            if hybrid:
                net.hybridize(**(hybrid if isinstance(hybrid, dict) else {}))
            if plan:
                planned(net, strategy="store_all")
            gradients = []
            for _ in range(3):
                x = mx.nd.array(draw.normal(size=(5, 7)), ctx=CPU)
                with autograd.record():
                    output, read = net(x)
                    read = net.weight.data() if of_weight else read
                    terms = [mx.nd.cos(read * (n + 0.5)).sum() for n in range(past)]
                    own = [(output**2).sum()]
                    loss = sum(terms + own if loss_first else own + terms)
                loss.backward()
                gradients.append(net.weight.grad().asnumpy())
            results.append(gradients)
    return results[0], results[1], [str(w.message) for w in caught if "last bits" in str(w.message)]


@pytest.mark.parametrize("hybrid", [False, True, {"inline_limit": 0}])
@pytest.mark.parametrize("of_weight", [False, True])
@pytest.mark.parametrize(("times", "past", "loss_first"), long_except(CALLS, SOME))
def test_last_bits_differ_where_it_is_said(
    times: int, past: int, loss_first: bool, of_weight: bool, hybrid: bool | dict[str, Any]
) -> None:
    expected, found, said = trained(times, past, loss_first, of_weight, hybrid)
    pairs = zip(expected, found, strict=True)
    assert bool(said) != all(np.array_equal(a, b) for a, b in pairs)
    if said and "Call hybridize(inline_limit=0)" in said[0]:
        *_, said = trained(times, past, loss_first, of_weight, {"inline_limit": 0})
        assert not said


def test_it_is_said_once() -> None:
    *_, said = trained(1, 2, False, True, False)
    assert len(said) == 1
    assert "the loss reads net_weight past a planned block that reads it, too" in said[0]


def test_it_is_said_of_a_later_loss_that_reads_otherwise() -> None:
    """Which of them differ depends on how often a loss reads, not on which arrays it reads."""
    net = Reading(1, of_weight=False)
    net.initialize(ctx=CPU)
    planned(net, strategy="store_all")
    said = []
    for past in (1, 1, 2, 2, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with autograd.record():
                output, read = net(mx.nd.ones((5, 7), ctx=CPU))
                loss = (output**2).sum() + sum(mx.nd.cos(read).sum() for _ in range(past))
            loss.backward()
        said.append(sum("last bits" in str(w.message) for w in caught))
    assert said == [0, 0, 1, 0, 0]


class InForward(gluon.HybridBlock):
    """Reads its output in a forward of its own, which MXNet runs in Python."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.layer = gluon.nn.Dense(6, in_units=7)
        self.hybridize()

    def forward(self, x: Any) -> Any:
        read = self.layer(x)
        return (read * 2).sin() + (read * 3).sin() + (read * 4).sin(), read


def test_sums_of_a_forward_of_its_own_are_those_of_no_graph() -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        net, draw = InForward(), np.random.default_rng(5)
        net.initialize(mx.init.Normal(1), ctx=CPU)
        x = mx.nd.array(draw.normal(size=(5, 7)), ctx=CPU)
        net = planned(net, strategy="store_all") if plan else net
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with autograd.record():
                output, read = net(x)
                loss = (output**2).sum() + read.cos().sum() + (read * 1.5).cos().sum()
            loss.backward()
        results.append(net.layer.weight.grad().asnumpy())
    said = [str(w.message) for w in caught if "last bits" in str(w.message)]
    assert bool(said) != np.array_equal(*results)
    assert all("hybrid_forward and no forward of its own" in text for text in said)


def penalised(nsteps: int) -> Any:
    """A step of a planned block after losses with a penalty, of which three at a time are alike."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(3, in_units=3), gluon.nn.Dense(3, in_units=3), gluon.nn.Dense(2))
    net.initialize(ctx=CPU)
    net.hybridize()
    planned(net, strategy="store_all")
    weights = [p for p in net.collect_params().values() if p.name.endswith("weight")]
    for number in range(nsteps):
        with autograd.record():
            loss = net(mx.nd.ones((2, 3))).sum()
            for weight in weights:
                loss = loss + (weight.data() ** 2).sum() * 0.1
            for _ in range(number // 3):
                loss = loss + 1
        loss.backward()
    return next(iter(net.planned_step._bound.values()))


def test_a_loss_is_looked_at_once() -> None:
    """Whatever numbers autograd gives to what it reads."""
    step = penalised(12)
    assert len(step.losses_seen) == 4


def test_only_so_many_losses_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_half, "MOST_LOSSES", 2)
    step = penalised(12)
    assert len(step.losses_seen) == 2
