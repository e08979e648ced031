"""Losses that are code of a script's: called once in every step, they read what they read then."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU, SOFTMAX, vectors
from helpers.training_runs import differences
from memplan.errors import TraceError, UsageError
from memplan.mxnet.gluon import TrainStep

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Config:
    """Numbers as attributes of a class, which a hybridized block reads once."""

    weight = 1.0
    scale = 1.0


class Slots:
    __slots__ = ("value",)

    @property
    def weight(self) -> float:
        return self.value * 2


def helper() -> float:
    return Config.weight


def left_to_helper(outputs: Any, labels: Any) -> Any:
    return SOFTMAX(outputs, labels) * helper()


class Counting:
    """A loss that weighs by how often it was called."""

    def __init__(self) -> None:
        self.ncalls = 0

    def __call__(self, outputs: Any, labels: Any) -> Any:
        self.ncalls += 1
        return SOFTMAX(outputs, labels) * min(self.ncalls, 3)


class CountingBlock(gluon.loss.Loss):
    """The same as a block."""

    def __init__(self) -> None:
        super().__init__(None, 0)
        self.ncalls, self.inner = 0, gluon.loss.SoftmaxCrossEntropyLoss()

    def hybrid_forward(self, F: Any, outputs: Any, labels: Any) -> Any:  # noqa: N803
        self.ncalls += 1
        return self.inner(outputs, labels) * min(self.ncalls, 3) * Config.weight


NESTED = types.SimpleNamespace(options=types.SimpleNamespace(weight=1.0))
SLOTS = Slots()
ARRAY = mx.nd.ones(1, ctx=CPU)


def set_to(value: float) -> None:
    Config.weight = NESTED.options.weight = SLOTS.value = value
    Config.scale = 1 + value
    ARRAY[:] = value


def given(weighted: Any, outputs: Any, labels: Any) -> Any:
    return SOFTMAX(outputs, labels) * weighted.options.weight


LOSSES: dict[str, Callable[[], Any]] = {
    "class": lambda: lambda o, y: SOFTMAX(o, y) * Config.weight,
    "helper": lambda: left_to_helper,
    "nested": lambda: lambda o, y: given(NESTED, o, y),
    "partial": lambda: functools.partial(given, NESTED),
    "property": lambda: lambda o, y: SOFTMAX(o, y) * SLOTS.weight,
    "array": lambda: lambda o, y: SOFTMAX(o, y) * ARRAY.asscalar(),
    "drawn": lambda: lambda o, y: SOFTMAX(o, y) * float(np.random.randint(1, 3)),
    "counted": Counting,
    "counted by a block": CountingBlock,
}


class Scaled(gluon.HybridBlock):
    """A block of the script's, which reads a class, as does its loss."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body, self.scores = nn.Dense(12, activation="tanh"), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(self.body(x)) * Config.scale


def stacked() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(12, activation="tanh"), nn.Dropout(0.3), nn.Dense(10))
    return net


def left_by(
    make: Any, loss: Any, *, hybridized: bool, is_planned: bool
) -> tuple[list[Any], list[Any]]:
    """Losses and gradients of steps on batches of two shapes, and the plans."""
    set_to(1.0)
    mx.random.seed(3)
    np.random.seed(4)
    net, (x, y) = make(), vectors()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net(x)
    net.hybridize(hybridized)
    step = TrainStep(net, loss, **OPTIONS) if is_planned else None
    found, plans = [], []
    for size, value in ((4, 1.0), (2, 1.0), (4, 5.0), (2, 5.0), (4, 0.5)):
        set_to(value)
        with autograd.record():
            result = step(x[:size], y[:size]) if step else loss(net(x[:size]), y[:size])
        if step is None:
            result.backward()
        found.append({"loss": result.asnumpy(), **gradients(net)})
        plans += [id(plan) for plan in step.plans.values()] if step else []
    return found, plans


READ_BY_ALL = ("class", "counted", "counted by a block")
KINDS = ((stacked, False), (stacked, True), (Scaled, False), (Scaled, True))


@pytest.mark.filterwarnings("ignore:block 'net' has computed something else")
@pytest.mark.parametrize(
    ("way", "make", "hybridized"),
    [
        *((way, stacked, True) for way in LOSSES if way not in READ_BY_ALL),
        *((way, *kind) for way in READ_BY_ALL for kind in KINDS),
    ],
)
def test_a_loss_is_called_once_in_every_step(way: str, make: Any, hybridized: bool) -> None:
    """Whether or not the block is: a hybridized one is a graph of what was there first."""
    expected, _ = left_by(make, LOSSES[way](), hybridized=hybridized, is_planned=False)
    found, plans = left_by(make, LOSSES[way](), hybridized=hybridized, is_planned=True)
    assert not differences(expected, found)
    assert len(set(plans)) > 2


class Weighted(gluon.loss.Loss):
    """Weighs by what a class says."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def hybrid_forward(self, F: Any, outputs: Any, labels: Any) -> Any:  # noqa: N803
        return F.abs(outputs * Config.weight).sum() + labels.sum()


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_hybridized_loss_is_a_graph_of_what_was_there_first(hybridized: bool) -> None:
    x, y = vectors()
    net = nn.Dense(10, in_units=12)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    loss = Weighted()
    loss.hybridize(hybridized)
    step, found = TrainStep(net, [loss], **OPTIONS), []
    for Config.weight in (1.0, 3.0):
        found.append(step(x, [y])[0].asscalar())
    assert bool(found[0] == found[1]) is hybridized


def test_calls_that_change_nothing_make_one_plan_for_a_shape() -> None:
    loss = lambda outputs, labels: SOFTMAX(outputs, labels)  # noqa: E731
    _, plans = left_by(stacked, loss, hybridized=False, is_planned=True)
    assert len(set(plans)) == 2


class Several(gluon.HybridBlock):
    """Returns what it got, an operator's several outputs as one, and nested ones."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.scores, self.table = nn.Dense(10, in_units=12), nn.Dense(12, in_units=12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        hidden = self.table(x)
        return x, F.split(self.scores(hidden), num_outputs=2), [hidden, (hidden * 2, None)]


def test_whatever_a_block_returns_and_a_loss_reads() -> None:
    """Outputs as they are, parameters, and of a Symbol more than a variable has."""

    def run(kind: str, is_planned: bool) -> list[Any]:
        Config.weight = 1.0
        mx.random.seed(3)
        net, (x, _) = Several(), vectors()
        net.initialize(mx.init.Xavier(), ctx=CPU)

        def loss(outputs: Any) -> Any:
            data, (first, second), nested = outputs
            hidden, (twice, _) = nested
            nested.append(nested.pop(0))
            is_symbol = isinstance(data, mx.sym.Symbol)
            if is_symbol and kind == "inner":
                hidden.get_internals()["net_dense1_fwd_output"]
            weight = net.table.weight.var() if is_symbol else net.table.weight.data()
            penalty = (weight * weight).sum() * Config.weight
            return twice, (first * second).sum() + (hidden * data).mean() * Config.weight + penalty

        step = TrainStep(net, loss, **OPTIONS) if is_planned else None
        found = []
        for Config.weight in (1.0, 1.0, 0.5, 2.0):
            with autograd.record():
                losses = step(x) if step else loss(net(x))
            if step is None:
                autograd.backward(list(losses))
            arrays = {str(k): array.asnumpy() for k, array in enumerate(losses)}
            found.append({**arrays, **gradients(net)})
        return found

    for kind in ("outputs", "inner"):
        assert not differences(run(kind, False), run(kind, True))


def test_a_loss_that_fails_does_so_until_it_does_not() -> None:
    options = types.SimpleNamespace(labels=1)

    def loss(outputs: Any, labels: Any) -> Any:
        return SOFTMAX(outputs, labels[options.labels])

    net, (x, y) = nn.Dense(10, in_units=12), vectors()
    net.initialize(ctx=CPU)
    step = TrainStep(net, loss, **OPTIONS)
    first = step(x, [y, y])
    options.labels = 2
    with pytest.raises(Exception, match="index out of range"):
        step(x, [y, y])
    options.labels = 0
    assert (step(x, [y, y]).asnumpy() == first.asnumpy()).all()


class Keeping(gluon.HybridBlock):
    """Keeps what a loss reads, and does not return it."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.table, self.scores = nn.Dense(12, in_units=12), nn.Dense(10, in_units=12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.kept = self.table(x)
        return self.scores(F.relu(self.kept))


class Noting:
    """Counts its calls, the third of which raises; it reads what the block keeps, if that does."""

    def __init__(self, net: Any) -> None:
        self.net, self.ncalls = net, 0

    def __call__(self, outputs: Any, labels: Any) -> Any:
        self.ncalls += 1
        if self.ncalls == 3:
            raise KeyError("the third call")
        kept = (self.net.kept**2).sum(axis=1) if hasattr(self.net, "kept") else 0
        return SOFTMAX(outputs, labels) * self.ncalls + kept


@pytest.mark.filterwarnings("ignore:block 'net' has computed something else")
@pytest.mark.parametrize("make", [stacked, Keeping])
def test_losses_are_called_once_that_raise_where_blocks_change_and_shapes_take_turns(
    make: Any,
) -> None:
    net, (x, y) = make(), vectors()
    net.initialize(ctx=CPU)
    loss = Noting(net)
    step = TrainStep(net, loss, **OPTIONS)
    for number in range(1, 9):
        if number in (5, 7) and make is stacked:
            net.hybridize(number == 5)
        data = x[: 2 + number % 2], y[: 2 + number % 2]
        if number == 3:
            with pytest.raises((KeyError, TraceError), match="the third call"):
                step(*data)
        else:
            step(*data)
        assert loss.ncalls == number


@pytest.mark.parametrize("name", ["block", "loss", "keep_outputs"])
def test_what_a_step_was_made_with_is_not_replaced(name: str) -> None:
    net = nn.Dense(10, in_units=12)
    step = TrainStep(net, SOFTMAX, **OPTIONS)
    with pytest.raises(UsageError, match=f"{name} of a TrainStep.*make another"):
        setattr(step, name, None)
    assert (step.block, step.loss, step.keep_outputs) == (net, SOFTMAX, False)
