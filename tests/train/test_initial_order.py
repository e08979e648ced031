"""Random numbers for parameters whose shapes the first step finds: those of the script."""

from __future__ import annotations

import re
import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import losses_of_two_steps
from helpers.blocks import CPU, SOFTMAX, vectors
from helpers.training_runs import differences
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Gated(gluon.HybridBlock):
    """Two layers, of which the graph begins with the one that is called last, and one behind."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        with self.name_scope():
            self.first, self.last, self.scores = inner or nn.Dense(12), nn.Dense(12), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        gate = F.sigmoid(self.first(x))
        gate = F.mean(gate, axis=1, keepdims=True)
        return self.scores(F.broadcast_mul(F.tanh(self.last(x)), gate))


def left_by(loop: str, hybridized: str, make: Any = lambda: Gated(Gated())) -> list[Any]:
    """Parameters and the loss of a first step, in whose forward pass they get their shapes."""
    mx.random.seed(3)
    net = make()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    if hybridized:
        (net if hybridized == "all" else net.first).hybridize()
    (x, y), step = vectors(), TrainStep(net, SOFTMAX, **OPTIONS) if loop == "TrainStep" else None
    net = planned(net, **OPTIONS) if loop == "planned" else net
    with autograd.record():
        loss = SOFTMAX(net(x), y) if step is None else step(x, y)
    parameters = net.collect_params().values()
    return [{"loss": loss.asnumpy(), **{str(i): p.data() for i, p in enumerate(parameters)}}]


@pytest.mark.parametrize("hybridized", ["", "a child", "all"])
@pytest.mark.parametrize("loop", ["planned", "TrainStep"])
def test_a_seed_initialises_what_it_does_without_a_plan(loop: str, hybridized: str) -> None:
    expected, found = left_by("autograd", hybridized), left_by(loop, hybridized)
    for values in (*expected, *found):
        values.update({name: v.asnumpy() for name, v in values.items() if name != "loss"})
    assert not differences(expected, found)


class Returning(Gated):
    """Returns what each of its layers computes."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.first(x), self.last(x), self.scores(F.concat(x, x))


class TakingAll(Gated):
    """Uses what its first layer returns."""

    def hybrid_forward(self, _: Any, x: Any) -> Any:
        return self.scores(self.last(self.first(x)))


class TakingOne(Gated):
    """Uses one output of the first layer, which is one that has several."""

    def hybrid_forward(self, _: Any, x: Any) -> Any:
        return self.scores(self.last(self.first(x)[1]))


def two_of(make: Any) -> Any:
    """A block that holds two, to be called by themselves."""
    layers = nn.HybridSequential()
    layers.add(make(), make())
    return layers


class CallingPast(Gated):
    """Calls layers of the first one by themselves, and uses what one of them computes."""

    def hybrid_forward(self, _: Any, x: Any) -> Any:
        self.first[0](x)
        return self.scores(self.last(self.first[1](x)))


@pytest.mark.parametrize(
    ("make", "count"),
    [(lambda: TakingOne(Returning()), 10), (lambda: CallingPast(two_of(Gated)), 16)],
)
@pytest.mark.parametrize("hybridized", ["", "a child"])
@pytest.mark.parametrize("loop", ["planned", "TrainStep"])
def test_so_it_does_for_layers_of_which_nothing_uses_what_they_compute(
    loop: str, hybridized: str, make: Any, count: int
) -> None:
    expected, found = (left_by(how, hybridized, make) for how in ("autograd", loop))
    for values in (*expected, *found):
        values.update({name: v.asnumpy() for name, v in values.items() if name != "loss"})
    assert len(found[0]) == count + 1
    assert not differences(expected, found)


class Alternating(Gated):
    """Calls layers of the first one by themselves, and others between."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        early = self.first[0](x)
        scores = self.scores(early)
        return F.concat(scores, self.last(self.first[1](early)))


class Forwards(gluon.HybridBlock):
    """Calls its layers in a ``forward``, of which MXNet has no graph, whatever is hybridized."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.last, self.first = Gated(), Gated()

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


class Celled(gluon.HybridBlock):
    """Reads parameters of its own in another order than it has them; no step keeps its graph."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            options = {"shape": (12, 0), "allow_deferred_init": True}
            self.late, self.early = (self.params.get(n, **options) for n in ("late", "early"))
            self.cell = gluon.rnn.ZoneoutCell(gluon.rnn.RNNCell(12))

    def hybrid_forward(self, F: Any, x: Any, late: Any, early: Any) -> Any:  # noqa: N803
        self.cell.reset()
        x = F.FullyConnected(x, early, num_hidden=12, no_bias=True)
        return F.FullyConnected(self.cell(x, [x])[0], late, num_hidden=12, no_bias=True)


def imported() -> Any:
    """A block that is made of a Symbol, before others."""
    data = mx.sym.Variable("data", dtype="float32")
    hidden = mx.sym.FullyConnected(data, num_hidden=12, no_bias=True, name="late")
    hidden = mx.sym.FullyConnected(hidden, num_hidden=12, no_bias=True, name="early")
    return TakingAll(gluon.SymbolBlock(hidden, data))


@pytest.mark.parametrize(
    "make",
    [lambda: Alternating(two_of(Gated)), lambda: TakingAll(Celled()), Forwards, imported],
)
@pytest.mark.parametrize("hybridized", ["", "a child", "all"])
@pytest.mark.parametrize("loop", ["planned", "TrainStep"])
def test_every_graph_is_initialised_where_it_is_called(
    loop: str, hybridized: str, make: Any
) -> None:
    """In the order in which the graph reads its parameters."""
    expected, found = (left_by(how, hybridized, make) for how in ("autograd", loop))
    for values in (*expected, *found):
        values.update({name: v.asnumpy() for name, v in values.items() if name != "loss"})
    assert not differences(expected, found)


class Dropping(Gated):
    """The same with numbers drawn in both layers."""

    def __init__(self, rates: tuple[float, float]) -> None:
        super().__init__()
        with self.name_scope():
            self.drops = nn.HybridSequential(prefix="")
            self.drops.add(*map(nn.Dropout, rates))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        gate = F.mean(F.sigmoid(self.drops[0](self.first(x))), axis=1, keepdims=True)
        return self.scores(F.broadcast_mul(F.tanh(self.drops[1](self.last(x))), gate))


class DroppingTwice(Dropping):
    """One layer draws twice, and nothing needs what it draws first."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.drops[0](self.first(x))
        return self.scores(self.drops[0](F.tanh(self.last(x))))


class DroppingInForward(gluon.HybridBlock):
    """Draws in two layers, which it calls in a ``forward``: the parameters of one come between."""

    def __init__(self, rates: tuple[float, float]) -> None:
        super().__init__()
        with self.name_scope():
            self.first, self.last = Dropping(rates), Dropping(rates)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def warned_of(
    rates: tuple[float, float], *, hybridized: bool, begun: bool, net: Any = Dropping
) -> list[str]:
    net, (x, y) = net(rates), vectors()
    net.initialize(ctx=CPU)
    net.hybridize(hybridized)
    if begun:
        net(x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with autograd.record():
            loss = SOFTMAX(planned(net, **OPTIONS)(x), y)
    loss.backward()
    return [str(warning.message).partition(" the same seed")[0] for warning in found]


def test_a_warning_says_where_the_same_seed_gives_other_numbers() -> None:
    order = "draws random numbers in another order, for .*dropout0_fwd and 1 more:"
    early = "initialises parameters before random numbers are drawn for .*dropout[01]_fwd"
    (found,) = warned_of((0.5, 0.3), hybridized=False, begun=True)
    assert re.search(order, found)
    first, second = warned_of((0.5, 0.3), hybridized=False, begun=False)
    assert re.search(order, first)
    assert re.search(early, second)
    (found,) = warned_of((0.5, 0.3), hybridized=False, begun=True, net=DroppingTwice)
    assert re.search("draws no random numbers for [a-z0-9_]*dropout0_fwd, of which", found)
    (found,) = warned_of((0.0, 0.3), hybridized=False, begun=False)
    assert re.search(early, found)
    assert not warned_of((0.0, 0.3), hybridized=False, begun=True)
    for begun in (False, True):
        assert not warned_of((0.5, 0.3), hybridized=True, begun=begun)
        net = DroppingInForward
        found = warned_of((0.5, 0.3), hybridized=True, begun=begun, net=net)
        assert [bool(re.search(early, text)) for text in found] == [True] * (not begun)


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_graph_that_draws_is_there_before_the_parameters_behind_it(is_imported: bool) -> None:
    """As in fine-tuning: MXNet has the graph, so that its operators are not called by name."""
    body = nn.HybridSequential()
    body.add(nn.Dense(6, in_units=4), nn.Dropout(0.5))
    if is_imported:
        data = mx.sym.Variable("data", dtype="float32")
        body = gluon.SymbolBlock(mx.sym.Dropout(data * 2, p=0.5), data)
    body.initialize()
    body.hybridize()
    x, y = mx.nd.ones((2, 4)), mx.nd.zeros((2,))
    body(x)
    net = InTurns(body)
    net.head.initialize()
    with pytest.warns(UserWarning, match="initialises parameters before random numbers are drawn"):
        TrainStep(net, SOFTMAX, **OPTIONS)(x, y)


class InTurns(gluon.HybridBlock):
    def __init__(self, body: Any) -> None:
        super().__init__()
        with self.name_scope():
            self.body, self.head = body, nn.Dense(3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.head(self.body(x))


class Scaled(gluon.HybridBlock):
    """Its ``forward`` calls its ``hybrid_forward`` with a number where others have parameters."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(6, in_units=4)

    def forward(self, x: Any) -> Any:
        is_symbol = isinstance(x, mx.sym.Symbol)
        return self.hybrid_forward(mx.sym if is_symbol else mx.nd, x, scale=2.0)

    def hybrid_forward(self, F: Any, x: Any, scale: float) -> Any:  # noqa: N803
        return self.dense(x) * scale


def test_a_hybridized_child_may_call_its_hybrid_forward_with_numbers() -> None:
    net = InTurns(Scaled())
    net.initialize()
    net.body.hybridize()
    x, y = mx.nd.ones((2, 4)), mx.nd.zeros((2,))
    expected = SOFTMAX(net(x), y)
    assert np.array_equal(TrainStep(net, SOFTMAX, **OPTIONS)(x, y).asnumpy(), expected.asnumpy())


class Dropped(gluon.Parameter):
    """GluonNLP drops weights so."""

    def data(self, ctx: mx.Context | None = None) -> Any:
        return mx.nd.Dropout(super().data(ctx), p=0.5)


class WeightDropped(gluon.HybridBlock):
    """A layer whose weights are drawn, ``after`` another mask or before, so many ``times``."""

    def __init__(self, after: bool, times: int) -> None:
        super().__init__()
        self.after, self.times = after, times
        with self.name_scope():
            self.drop, self.inner = nn.Dropout(0.5), Inner()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.drop(x) if self.after else x
        for _ in range(self.times):
            x = self.inner(x)
        return x if self.after else self.drop(x)


class Inner(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        name = f"{self.prefix}weight"
        self.weight = self.params._params[name] = Dropped(name, shape=(12, 12))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        return F.dot(x, weight)


def dropped_losses(net: Any, plan: bool) -> list[Any]:
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    return losses_of_two_steps(planned(net, **OPTIONS) if plan else net, *vectors())


@pytest.mark.parametrize(("after", "times"), [(False, 1), (True, 1), (False, 2)])
def test_a_warning_tells_of_weights_that_are_drawn_in_another_order(
    after: bool, times: int
) -> None:
    expected = dropped_losses(WeightDropped(after, times), False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        losses = dropped_losses(WeightDropped(after, times), True)
    texts = [str(w.message) for w in found if "weight once, and first: if random" in str(w.message)]
    assert bool(texts) is (losses != expected)
    assert bool(texts) is (after or times > 1)
    net = WeightDropped(after, times)
    net.hybridize()
    other = WeightDropped(after, times)
    other.hybridize()
    assert dropped_losses(net, False) == dropped_losses(other, True)


class Summed(gluon.HybridBlock):
    """A loop that reads a parameter in every iteration."""

    def __init__(self, rates: Any = None) -> None:
        super().__init__()
        with self.name_scope():
            self.scores = nn.Dense(10)
            self.weight = self.params.get("weight", shape=(12, 12))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            state = F.tanh(F.dot(row.expand_dims(0), weight) + state)
            return state, state

        found, _ = F.contrib.foreach(body, x, F.zeros((1, 12)))
        return self.scores(found.reshape((64, 12)))


def test_a_warning_tells_of_loops_that_mxnet_runs_in_python() -> None:
    (found,) = warned_of((0, 0), hybridized=False, begun=True, net=Summed)
    assert re.search("runs its loop summed0__foreach0 as an operator.*last bits may differ", found)
    assert not warned_of((0, 0), hybridized=True, begun=True, net=Summed)
    outer = nn.HybridSequential()
    outer.add(Summed())
    outer[0].hybridize()
    assert not warned_of((0, 0), hybridized=False, begun=True, net=lambda _: _hybridized_in(outer))
    outer = nn.HybridSequential()
    with outer.name_scope():  # the first of its layers has no name of its own
        outer.add(nn.HybridSequential(prefix=""), Summed())
    outer[0].add(nn.Dense(12, activation="tanh"), nn.Dense(12))
    outer[0].hybridize()
    assert warned_of((0, 0), hybridized=False, begun=True, net=lambda _: _hybridized_in(outer))


def _hybridized_in(outer: Any) -> Any:
    """``outer``, of which :func:`warned_of` must not change what is hybridized."""
    outer.hybridize = lambda active: None
    return outer
