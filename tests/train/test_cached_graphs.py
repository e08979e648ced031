"""A planned block that is hybridized trains and infers by the graph that MXNet has of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from memplan.mxnet.gluon import planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])


class Asks(gluon.HybridBlock):
    """Asks which mode it is in, draws a number of NumPy's, and counts its calls."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.ncalls = 0
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(8, activation="relu"), nn.BatchNorm())
            self.head = nn.Dense(3)

    def hybrid_forward(self, F: Any, x: Any, y: Any = None) -> Any:  # noqa: N803
        self.ncalls += 1
        hidden = self.body(x) * (1 + np.random.rand())
        if autograd.is_training():
            hidden = F.Dropout(hidden, 0.3) * 2
        return [self.head(hidden), (hidden if y is None else F.broadcast_add(hidden, y),)]


def nothing(net: Any) -> None:
    pass


def inferred(net: Any) -> None:
    net(X)


def edited(net: Any) -> None:
    """MXNet is not told of what happens within a child of the block."""
    net(X)
    net.body[0].act = nn.Activation("sigmoid", prefix="net_sigmoid_")


def replaced(net: Any) -> None:
    net(X)
    net.body._children["0"] = nn.Dense(8, in_units=6, prefix="net_other_")
    net.body[0].initialize()


def hybridized_anew(net: Any) -> None:
    net(X)
    net.hybridize()


def steps(net: Any, trainer: gluon.Trainer) -> list[Any]:
    found = []
    for _ in range(3):
        with autograd.record():
            scores, (hidden,) = net(X)
            loss = SOFTMAX(scores, Y) + hidden.mean()
        loss.backward()
        found += [p.grad() for p in trainer._params if p.grad_req != "null"]
        trainer.step(4)
        found += [loss, net(X)[0], mx.nd.array([net.ncalls, np.random.rand()])]
    return [array.asnumpy() for array in found]


@pytest.mark.parametrize("before", [nothing, inferred, edited, replaced, hybridized_anew])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_it_is_that_of_the_first_call(
    before: Callable[[Any], None], realisation: str, tmp_path: Path
) -> None:
    results, files = [], []
    for plan in (False, True):
        mx.random.seed(1)
        np.random.seed(1)
        net = Asks()
        net.initialize(mx.init.Xavier())
        net.hybridize()
        before(net)
        made = [parameter for is_input, parameter in net._cached_op_args if not is_input]
        if plan:
            planned(net, strategy="chen_sqrt", realisation=realisation)
        params = made or list(net.collect_params().values())
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1})
        results.append(steps(net, trainer))
        net.hybridize()  # after which it is made anew
        if before is not replaced:
            results[-1] += steps(net, trainer)
            net.export(str(tmp_path / "net"))
            files.append((tmp_path / "net-symbol.json").read_text())
    assert len(results[0]) == len(results[1])
    assert all(map(np.array_equal, *results))
    assert files[1:] == files[:-1]


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_graph_that_was_not_called_for_a_while_is_called_again(realisation: str) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        np.random.seed(1)
        net = Asks()
        net.initialize(mx.init.Xavier())
        net.hybridize()
        net(X)
        if plan:
            planned(net, strategy="chen_sqrt", realisation=realisation)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        found = steps(net, trainer)
        for is_active in (False, True):
            net.hybridize(is_active, clear=False)
            found += steps(net, trainer)
        results.append(found)
    assert all(map(np.array_equal, *results))


def test_inputs_of_another_form_are_traced() -> None:
    """MXNet's graph takes those of its first call only."""
    net = Asks()
    net.initialize()
    net.hybridize()
    net(X)
    planned(net, strategy="chen_sqrt")
    assert net.planned_step.plan((4, 6), in_halves=True)
    assert net.planned_step.plan(((4, 6), (1, 8)), in_halves=True)
    assert net.ncalls == 2


class Within(gluon.HybridBlock):
    """Holds a hybridized block, and is not hybridized itself."""

    def __init__(self) -> None:
        super().__init__(prefix="within_")
        with self.name_scope():
            self.inner, self.head = Asks(), nn.Dense(3, in_units=3)
        self.inner.hybridize()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        scores, (hidden,) = self.inner(x)
        return self.head(F.relu(scores)) * F.sigmoid(F.slice_axis(hidden, axis=1, begin=0, end=3))


@pytest.mark.parametrize("before", [nothing, inferred, edited])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_hybridized_block_within_keeps_its_graph(
    before: Callable[[Any], None], realisation: str
) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        np.random.seed(1)
        net = Within()
        net.initialize(mx.init.Xavier())
        net(X)  # else random numbers would be drawn between those for the parameters
        net.inner.hybridize()
        vars(net)["body"] = net.inner.body  # for what edits it
        before(net)
        if plan:
            planned(net, strategy="chen_sqrt", realisation=realisation)
        trainer = gluon.Trainer(net.inner.collect_params(), "sgd", {"learning_rate": 0.1})
        found = []
        for _ in range(3):
            with autograd.record():
                loss = SOFTMAX(net(X), Y)
            loss.backward()
            trainer.step(4)
            found += [loss, net(X), mx.nd.array([net.inner.ncalls, np.random.rand()])]
        found += [p.data() for p in net.collect_params().values()]
        results.append([array.asnumpy() for array in found])
    assert all(map(np.array_equal, *results))


class OfNumpy(gluon.HybridBlock):
    """Computes with mx.np, and counts the calls of what is hybridized in it."""

    def __init__(self) -> None:
        super().__init__(prefix="numpy_")
        self.ncalls = 0
        with self.name_scope():
            self.inner = nn.HybridLambda(self.hidden)
            self.head = nn.Dense(3, in_units=6)
        self.inner.hybridize()

    def hidden(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.ncalls += 1
        hidden = F.np.tanh(x * np.random.rand())
        return F.npx.dropout(hidden, 0.5) if autograd.is_training() else hidden

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.head(self.inner(x))


@pytest.mark.parametrize("before", [nothing, inferred])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_one_of_numpy_keeps_its_graph_within_another(
    before: Callable[[Any], None], realisation: str
) -> None:
    results = []
    mx.npx.set_np()
    try:
        for plan in (False, True):
            mx.random.seed(1)
            np.random.seed(1)
            net = OfNumpy()
            net.initialize(mx.init.Xavier())
            before(lambda x, net=net: net(x.as_np_ndarray()))
            if plan:
                planned(net, strategy="chen_sqrt", realisation=realisation)
            found = []
            for _ in range(2):
                with autograd.record():
                    loss = (net(X.as_np_ndarray()) ** 2).sum()
                loss.backward()
                found += [loss.item(), net(X.as_np_ndarray()).sum().item(), net.ncalls]
            results.append([*found, np.random.rand(), net.head.weight.grad().tolist()])
    finally:
        mx.npx.reset_np()
    assert results[0] == results[1]


class Ignoring(gluon.HybridBlock):
    """Ignores the first of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.scores = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F: Any, mask: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(x)


class HoldingIgnoring(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__(prefix="holding_")
        with self.name_scope():
            self.child = Ignoring()
        self.child.hybridize()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.child(x, x * 2)


def loss_and_gradients(net: Any) -> list[Any]:
    with autograd.record():
        loss = SOFTMAX(net(X), Y)
    loss.backward()
    arrays = [loss, *(p.grad() for p in net.collect_params().values())]
    return [array.asnumpy() for array in arrays]


@pytest.mark.filterwarnings("ignore:The 0-th input to HybridBlock is not used")
@pytest.mark.parametrize("before", [nothing, inferred])
def test_a_hybridized_child_ignores_an_input(before: Callable[[Any], None]) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        net = HoldingIgnoring()
        net.initialize(mx.init.Xavier())
        before(net)
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        results.append(loss_and_gradients(net))
    assert all(map(np.array_equal, *results))


class HandsOn(gluon.HybridBlock):
    """Returns the inputs at these places, and computes nothing."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__()
        self.places = places

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:  # noqa: N803
        found = tuple(inputs[place] for place in self.places)
        return found if len(found) > 1 else found[0]


class HoldingHandsOn(gluon.HybridBlock):
    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(prefix="holding_")
        with self.name_scope():
            self.body, self.child = nn.Dense(6, in_units=6), HandsOn(places)
            self.head = nn.Dense(3, in_units=6)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        handed_on = self.child(self.body(x), x * 2)
        first, *others = handed_on if isinstance(handed_on, list | tuple) else [handed_on]
        return self.head(F.tanh(first) + sum(others))


@pytest.mark.filterwarnings("ignore:The .*-th input to HybridBlock is not used")
@pytest.mark.parametrize("places", [(0,), (1,), (0, 0), (1, 0)])
def test_a_hybridized_child_may_return_nothing_but_inputs(places: tuple[int, ...]) -> None:
    """As one does that is not hybridized: MXNet's has zeros for gradients through such a graph."""
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        net = HoldingHandsOn(places)
        net.initialize(mx.init.Xavier())
        if plan:
            net.child.hybridize()
            planned(net, strategy="chen_sqrt", realisation="packed")
        results.append(loss_and_gradients(net))
    assert all(map(np.array_equal, *results))


class InLoops(gluon.HybridBlock):
    """Calls a hybridized block in loops, and in a branch, in which others read parameters, too."""

    def __init__(self, kind: str) -> None:
        super().__init__(prefix="loops_")
        self.kind = kind
        with self.name_scope():
            self.inner = nn.HybridSequential()
            self.inner.add(nn.Dense(6, activation="tanh"), nn.Dense(6))
            self.head = nn.Dense(3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            out = self.inner(row + state) * 2
            return out, F.sigmoid(out)

        def body_of_bodies(row: Any, state: Any) -> Any:
            rows, state = F.contrib.foreach(body, F.stack(row, 2 * row), state)
            return rows, self.inner(state)

        def step(k: Any, state: Any) -> Any:
            return state, [k + 1, self.inner(state)]

        before = F.relu(x)
        if self.kind == "foreach":
            found = F.contrib.foreach(body, F.stack(x, x * x), before)[0]
        elif self.kind == "foreach in foreach":
            found = F.contrib.foreach(body_of_bodies, F.stack(x, x * x), before)[0]
        elif self.kind == "while_loop":
            begin = [F.zeros((1,)), self.inner(before)]
            found = F.contrib.while_loop(lambda k, _: k < 3, step, begin, max_iterations=3)[1][1]
        else:
            inner = functools.partial(self.inner, before)
            found = F.contrib.cond(x.sum() < 99, inner, lambda: inner() * 2)
        return self.head(F.reshape(found, (-1, 6)))


@pytest.mark.filterwarnings("ignore:.*runs its loop .* as an operator")
@pytest.mark.parametrize("before", [nothing, inferred])
@pytest.mark.parametrize("kind", ["foreach", "foreach in foreach", "while_loop", "cond"])
def test_a_hybridized_block_is_called_in_a_loop_of_another(
    kind: str, before: Callable[[Any], None]
) -> None:
    results, graphs = [], []
    for plan in (False, True):
        mx.random.seed(1)
        net = InLoops(kind)
        net.initialize(mx.init.Xavier())
        net(X)
        net.inner.hybridize()
        before(net)
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        found = []
        for _ in range(3):
            with autograd.record():
                loss = (net(X) ** 2).mean()
            loss.backward()
            trainer.step(4)
            found += [loss, *(p.grad() for p in net.collect_params().values())]
        results.append([array.asnumpy() for array in found])
        graphs.append(net.inner._cached_graph[1].tojson())
    assert graphs[0] == graphs[1]
    for plain, by_plan in zip(*results, strict=True):
        np.testing.assert_allclose(by_plan, plain, rtol=1e-5, atol=1e-6)
