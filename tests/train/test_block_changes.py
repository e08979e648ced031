"""Blocks whose attributes change from step to step: read at every call, or never again."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU, SOFTMAX, vectors
from helpers.training_runs import differences
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}

# As a script keeps numbers that change, which the block reads as a global name.
SCHEDULE = {"shift": 0.0}


class Scaled(gluon.HybridBlock):
    """Scores at a temperature, with as many layers before them as a list says."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.temperature: Any = 1.0
        self.widths = {"used": [True, True, True]}
        with self.name_scope():
            self.body = nn.HybridSequential(prefix="body_")
            with self.body.name_scope():
                self.body.add(*(nn.Dense(12, activation="tanh") for _ in range(3)), nn.Dropout(0.1))
            self.scores = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        for layer, is_used in zip(self.body, [*self.widths["used"], True], strict=True):
            y = layer(x)
            x = y if is_used else x + 0 * y
        return F.broadcast_add(self.scores(x) / self.temperature, SCHEDULE["shift"] * F.sum(x))


def change(net: Scaled, step: int) -> None:
    """What a schedule of the script does before this ``step``."""
    if step == 1:
        net.temperature = 0.5
    elif step == 2:
        net.widths["used"][1] = False
    elif step == 3:
        net.body[-1]._rate = 0.6
    elif step == 4:
        SCHEDULE["shift"] = 0.5
    elif step == 5:
        net.note = "for the log"  # which nobody reads


def begun() -> tuple[Scaled, Any, Any]:
    """A network whose layers have their shapes, and a batch."""
    SCHEDULE["shift"] = 0.0
    mx.random.seed(3)
    net = Scaled()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    x, y = vectors()
    net(x)
    return net, x, y


def left_by(way: str, *, hybridized: bool) -> tuple[list[Any], list[Any]]:
    """Losses and gradients of steps between which attributes change, and the plans."""
    net, x, y = begun()
    if hybridized:
        net.hybridize()
    whole = TrainStep(net, SOFTMAX, **OPTIONS) if way == "TrainStep" else None
    net = planned(net, **OPTIONS) if way == "planned" else net
    found, plans = [], []
    for number in range(7):
        change(net, number)
        if whole is not None:
            loss = whole(x, y)
        else:
            with autograd.record():
                loss = SOFTMAX(net(x), y)
            loss.backward()
        found.append({"loss": loss.asnumpy(), **gradients(net)})
        if way != "autograd":
            plans += (whole or net.planned_step).plans.values()
    return found, plans


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_attributes_are_read_when_mxnet_reads_them(way: str, hybridized: bool) -> None:
    """In every step, or once where the block is hybridized: MXNet keeps its graph there."""
    expected, _ = left_by("autograd", hybridized=hybridized)
    found, plans = left_by(way, hybridized=hybridized)
    assert not differences(expected, found)
    assert len(set(map(id, plans))) == (1 if hybridized else 5)


def another_layer(layers: dict[str, Any]) -> None:
    layers["2"] = nn.Dense(12, in_units=12, prefix="another_")
    layers["2"].initialize(mx.init.Xavier(), ctx=CPU)


def one_of_the_same_name(layers: dict[str, Any]) -> None:
    layers["2"] = nn.Dense(12, activation="tanh", in_units=12, prefix=layers["2"].prefix)
    layers["2"].initialize(mx.init.Xavier(), ctx=CPU)


def one_layer_less(layers: dict[str, Any]) -> None:
    layers.popitem()


def another_order(layers: dict[str, Any]) -> None:
    layers["1"], layers["2"] = layers["2"], layers["1"]


def another_weight(layers: dict[str, Any]) -> None:
    """That of the layer before, in the dict of which MXNet reads it."""
    layers["1"]._reg_params["weight"] = layers["0"].weight


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize(
    "edit",
    [another_layer, one_of_the_same_name, one_layer_less, another_order, another_weight],
)
def test_layers_that_a_script_replaces_past_mxnet(edit: Any, hybridized: bool) -> None:
    def left(is_planned: bool) -> list[Any]:
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(*(nn.Dense(12, activation="tanh", in_units=12) for _ in range(4)))
        net.initialize(mx.init.Xavier(), ctx=CPU)
        if hybridized:
            net.hybridize()
        net = planned(net, **OPTIONS) if is_planned else net
        found = []
        for step in range(3):
            if step == 1:
                edit(net._children)
            with autograd.record():
                loss = (net(mx.nd.ones((3, 12), ctx=CPU)) ** 2).sum()
            loss.backward()
            found.append({"loss": loss.asnumpy(), **gradients(net)})
        return found

    assert not differences(left(False), left(True))


def a_layer_more(body: Any) -> None:
    body.add(nn.Activation("relu"))


def a_layer_less(body: Any) -> None:
    body._children.popitem()


def another_activation(body: Any) -> None:
    body[0].act = nn.Activation("relu")


@pytest.mark.parametrize("edit", [a_layer_more, a_layer_less, another_activation])
@pytest.mark.parametrize("hybridized", ["net", "body"])
def test_layers_within_a_graph_are_those_of_its_first_run(hybridized: str, edit: Any) -> None:
    """MXNet keeps the graph, for batches of all shapes; that of the body it makes anew for add."""

    def left(is_planned: bool) -> list[Any]:
        mx.random.seed(3)
        body, net = nn.HybridSequential(prefix="body_"), nn.HybridSequential(prefix="net_")
        body.add(*(nn.Dense(12, activation="tanh", in_units=12, prefix=f"{i}_") for i in range(3)))
        net.add(body, nn.Dense(10, in_units=12, prefix="scores_"))
        net.initialize(mx.init.Xavier(), ctx=CPU)
        layers, (x, y) = [*net.collect_params().values()], vectors()
        (net if hybridized == "net" else body).hybridize()
        net = planned(net, **OPTIONS) if is_planned else net
        found = []
        for step, size in enumerate((64, 64, 3, 64)):
            if step == 1:
                edit(body)
            with autograd.record():
                loss = SOFTMAX(net(x[:size]), y[:size])
            loss.backward()
            found.append({"loss": loss.asnumpy(), **{p.name: p.grad().asnumpy() for p in layers}})
        return found

    assert not differences(left(False), left(True))


@pytest.mark.parametrize("hybridized", ["net", "body", "net, planned before"])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_batches_of_all_shapes_are_of_one_graph(way: str, hybridized: str) -> None:
    """MXNet keeps the graph of the first batch; another shape was planned by later attributes."""

    def run(way: str) -> list[Any]:
        net, x, y = begun()
        (net.body if hybridized == "body" else net).hybridize()
        step = TrainStep(net, SOFTMAX, **OPTIONS) if way == "TrainStep" else None
        net = planned(net, **OPTIONS) if way == "planned" else net
        if step is not None and "before" in hybridized:
            step.plan(x, y)
        net.temperature = 0.7
        found = []
        for number, size in enumerate([4, 2, 2, 4]):
            if number == 1:
                net.body.note, net.body[-1]._rate = "for the log", 0.6
            if number == 2:
                net.temperature = 0.3
            with autograd.record():
                loss = step(x[:size], y[:size]) if step else SOFTMAX(net(x[:size]), y[:size])
            if step is None:
                loss.backward()
            found.append({"loss": loss.asnumpy(), **gradients(net)})
        assert net.body[-1]._rate == 0.6
        return found

    assert not differences(run("autograd"), run(way))


def test_a_block_that_changes_in_every_step_is_warned_of() -> None:
    net = Scaled()
    net.initialize(ctx=CPU)
    step, batch = TrainStep(net, SOFTMAX, **OPTIONS), vectors()
    net(batch[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            net.temperature = 1.0 + number
            step(*batch)
    net.temperature = 0.5
    with pytest.warns(UserWarning, match="anew each time, because of temperature of 'net'; make"):
        step(*batch)


WEIGHT = 1.0
ARGUMENTS = types.SimpleNamespace(weight=1.0)


def by_global(outputs: Any, labels: Any) -> Any:
    return WEIGHT * SOFTMAX(outputs, labels)


def by_attribute(outputs: Any, labels: Any) -> Any:
    return sum(ARGUMENTS.weight * part for part in [SOFTMAX(outputs, labels)])


class Weighted:
    """A loss that is an object, or a method of one."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, outputs: Any, labels: Any) -> Any:
        return self.weight * SOFTMAX(outputs, labels)

    def loss(self, outputs: Any, labels: Any) -> Any:
        return self(outputs, labels) * self.weight


def closing_over() -> tuple[Any, Callable[[float], None]]:
    weight, inner = 1.0, gluon.loss.SoftmaxCrossEntropyLoss(weight=1.0)

    def set_to(value: float) -> None:
        nonlocal weight
        weight = inner._weight = value

    return lambda outputs, labels: weight * inner(outputs, labels), set_to


def loss_that_is(kind: str) -> tuple[Any, Callable[[float], None]]:
    """A loss, and what sets its weight."""
    weighted = Weighted()
    return {
        "global": (by_global, lambda value: globals().update(WEIGHT=value)),
        "attribute": (by_attribute, lambda value: setattr(ARGUMENTS, "weight", value)),
        "closure": closing_over(),
        "object": (weighted, lambda value: setattr(weighted, "weight", value)),
        "method": (weighted.loss, lambda value: setattr(weighted, "weight", value)),
        "partial": (functools.partial(by_global), lambda value: globals().update(WEIGHT=value)),
    }[kind]


@pytest.mark.parametrize("kind", ["global", "attribute", "closure", "object", "method", "partial"])
def test_a_function_for_a_loss_reads_what_it_reads_in_every_step(kind: str) -> None:
    """A weight that a script raises from step to step is no constant of the first one."""
    found, plans = [], []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = nn.Dense(10, in_units=12)
        net.initialize(mx.init.Xavier(), ctx=CPU)
        (x, y), (loss_function, set_to) = vectors(), loss_that_is(kind)
        step = TrainStep(net, loss_function, **OPTIONS) if is_planned else None
        for weight in (1.0, 1.0, 0.5, 2.0):
            set_to(weight)
            if step is not None:
                loss = step(x, y)
                plans.append(id(next(iter(step.plans.values()))))
            else:
                with autograd.record():
                    loss = loss_function(net(x), y)
                loss.backward()
            gradient = net.weight.grad().asnumpy()
            found.append({"loss": loss.asnumpy(), "gradient": gradient})
        set_to(1.0)
    assert not differences(found[:4], found[4:])
    assert plans[0] == plans[1]


@pytest.mark.parametrize("hybridized", [False, True])
def test_what_the_function_of_a_lambda_block_reads_is_looked_at(hybridized: bool) -> None:
    """A number that it closes over, and the function itself; a hybridized block keeps its graph."""

    def losses(make: Callable[[Any], Any]) -> list[float]:
        mx.random.seed(1)
        factor = {"now": 1.0}
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            scaled = nn.HybridLambda(lambda F, x: F.tanh(x * factor["now"]))  # noqa: N803
            net.add(nn.Dense(5, in_units=6), scaled)
        net.initialize(mx.init.Normal(1))
        net.hybridize(hybridized)
        net = make(net)
        trainer, found = gluon.Trainer(net.collect_params(), "sgd"), []
        for step in range(4):
            factor["now"] = [1.0, 0.5, 0.5, 0.5][step]
            if step == 3:
                net[1]._func = lambda F, x: F.sigmoid(x)  # noqa: N803
            with autograd.record():
                loss = net(mx.nd.ones((2, 6))).sum()
            loss.backward()
            trainer.step(2)
            found.append(loss.asscalar())
        return found

    assert losses(lambda net: planned(net, **OPTIONS)) == losses(lambda net: net)


class Factors(gluon.HybridBlock):
    """Has a factor for every output, or one for all."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.body = nn.Dense(5, in_units=6, prefix="body_")
        self.factors = self.params.get("factors", shape=(1, 5), init=mx.init.Constant(0.3))

    def hybrid_forward(self, F: Any, x: Any, factors: Any) -> Any:  # noqa: N803
        return F.broadcast_mul(self.body(x), factors)


@pytest.mark.parametrize("hybridized", [False, True])
def test_a_parameter_may_get_another_shape(hybridized: bool) -> None:
    found = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = Factors()
        net.initialize()
        net.hybridize(active=hybridized)
        if is_planned:
            planned(net, strategy="chen_sqrt", realisation="packed")
        for shape in ((1, 5), (1, 1), (1, 5)):
            net.factors._shape = shape
            net.factors.initialize(mx.init.Constant(0.7), force_reinit=True)
            with autograd.record():
                loss = (net(mx.nd.arange(24).reshape((4, 6)) / 9) ** 2).sum()
            loss.backward()
            found.append(gradients(net))
        if is_planned:
            assert len(net.planned_step._plans.made) == 2
    assert not differences(found[:3], found[3:])
