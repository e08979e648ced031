"""A TrainStep of a hybridized block leaves MXNet's graph behind, as a call of the block does.

It does where there is none: it trains what blocks compute in training, whatever inference has.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.amounts import long_except
from helpers.blocks import SOFTMAX
from helpers.let_go import is_let_go
from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])
OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Draws(gluon.HybridBlock):
    """Draws a number of NumPy's, asks which mode it is in, and counts its calls."""

    def __init__(self) -> None:
        super().__init__(prefix="draws_")
        self.ncalls, self.slope = 0, 1.0
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Dense(8, activation="relu"), nn.BatchNorm(), nn.Dropout(0.3))
            self.head = nn.Dense(3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.ncalls += 1
        hidden = self.body(x) * (self.slope + np.random.rand())
        return self.head(F.sigmoid(hidden) if autograd.is_training() else hidden)


class Outer(gluon.HybridBlock):
    """Holds it, and is not hybridized."""

    def __init__(self) -> None:
        super().__init__(prefix="outer_")
        with self.name_scope():
            self.inner = Draws()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.tanh(self.inner(x))


def nothing(net: Any, step: TrainStep | None) -> None:
    pass


def planned_before(net: Any, step: TrainStep | None) -> None:
    """No call of the block: what is drawn and counted for the plan is none of the script's."""
    if step is not None:
        state, ncalls = np.random.get_state(), net.ncalls
        step.plan(X, None if step.loss is None else Y)
        np.random.set_state(state)
        net.ncalls = ncalls


def of_numpys(inner: Any, count: int) -> list[Any]:
    return [mx.nd.array([inner.ncalls, np.random.rand(), count])]


def left_by(way: str, make: Any, before: Callable[..., None], path: Path) -> Any:
    """What steps leave between which there is inference, and another slope, and what is saved."""
    mx.random.seed(1)
    np.random.seed(1)
    net = make()
    inner = net if isinstance(net, Draws) else net.inner
    net.initialize(mx.init.Xavier())
    if make is Outer:
        net(X)  # else random numbers would be drawn between those for the parameters
    inner.hybridize()
    step = None
    if way in ("whole", "halves"):
        step = TrainStep(net, SOFTMAX if way == "whole" else None, **OPTIONS)
    elif way == "planned":
        planned(net, **OPTIONS)
    before(inner, None if make is Outer else step)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    found: list[Any] = []
    for number in range(4):
        if way == "whole":
            loss = step(X, Y)
        else:
            with autograd.record():
                loss = SOFTMAX(step.forward(X) if way == "halves" else net(X), Y)
            step.backward(loss) if way == "halves" else loss.backward()
        trainer.step(4)
        found += [loss, *of_numpys(inner, number)]
        if number == 0:
            inner.export(str(path / way))
        inner.slope, inner.body[2]._rate = number + 2.0, 0.1 * number
        found += [net(X), *of_numpys(inner, number)] if number % 2 else []
    saved = mx.nd.load(str(path / f"{way}-0000.params"))
    found += [saved[name] for name in sorted(saved)]
    nodes = json.loads((path / f"{way}-symbol.json").read_text())["nodes"]
    for node in nodes:  # the third number counts how often the variable was composed in all
        node["inputs"] = [entry[:2] for entry in node["inputs"]]
    return [array.asnumpy() for array in found], nodes


@pytest.mark.parametrize("before", [nothing, planned_before])
@pytest.mark.parametrize("make", [Draws, Outer])
@pytest.mark.parametrize("way", ["whole", "halves", "planned"])
def test_it_is_the_graph_of_the_first_call(
    way: str, make: Any, before: Callable[..., None], tmp_path: Path
) -> None:
    expected, graph = left_by("autograd", make, before, tmp_path)
    found, graph_of_steps = left_by(way, make, before, tmp_path)
    assert graph == graph_of_steps
    assert len(expected) == len(found)
    assert all(map(np.array_equal, expected, found))


def test_an_imported_block_can_be_exported_after_steps(tmp_path: Path) -> None:
    net = nn.Dense(3, in_units=6)
    net.initialize()
    net.hybridize()
    net(X)
    net.export(str(tmp_path / "net"))
    files = [str(tmp_path / f"net-{name}") for name in ("symbol.json", "0000.params")]
    net = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    TrainStep(net, SOFTMAX, **OPTIONS)(X, Y)
    net.export(str(tmp_path / "net"))
    assert len(mx.nd.load(files[1])) == 2


@pytest.mark.parametrize("has_cells", [False, True])
@pytest.mark.parametrize("way", ["planned", "step"])
def test_a_block_may_have_a_hybridized_child_twice(way: str, has_cells: bool) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        child: Any = Unrolled() if has_cells else nn.Dense(6, activation="tanh", in_units=6)
        net = nn.HybridSequential(prefix="net_")
        net.add(child, nn.Dense(6, in_units=6), child)
        net.initialize(mx.init.Normal(1))
        child.hybridize()
        if plan and way == "step":
            TrainStep(net, SOFTMAX, **OPTIONS)(X, Y)
        else:
            if plan:
                planned(net, **OPTIONS)
            with autograd.record():
                loss = SOFTMAX(net(X), Y)
            loss.backward()
        results.append([p.grad().asnumpy().tobytes() for p in net.collect_params().values()])
    assert results[0] == results[1]


class Unrolled(gluon.HybridBlock):
    """Has a cell that keeps something from call to call."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            base = gluon.rnn.RNNCell(6, input_size=6)
            self.cell = gluon.rnn.ZoneoutCell(base, zoneout_outputs=0.0, zoneout_states=0.1)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.cell.reset()
        steps, begin = F.expand_dims(x, axis=1), [F.zeros_like(x)]
        return self.cell.unroll(1, steps, merge_outputs=False, begin_state=begin)[0][-1]


class Headed(gluon.HybridBlock):
    """Has layers of MXNet's, one of which is hybridized."""

    def __init__(self) -> None:
        super().__init__(prefix="headed_")
        with self.name_scope():
            self.body, self.head = nn.Dense(6, in_units=6), nn.Dense(3, in_units=6)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.head(F.tanh(self.body(x)))


def test_layers_that_are_replaced_go() -> None:
    """Though a step has made their graphs."""
    net = Headed()
    net.initialize()
    step, heads = TrainStep(net, SOFTMAX, **OPTIONS), []
    for _ in range(5):
        net.head.hybridize()
        step(X, Y)
        heads.append(weakref.ref(net.head))
        net.head = nn.Dense(3, in_units=6)
        net.head.initialize()
    step(X, Y)
    # One may be in what Python keeps.
    assert is_let_go(lambda: sum(head() is not None for head in heads) <= 1)


class Scales(gluon.HybridBlock):
    """Scales what a layer returns, by a number of NumPy's if it ``draws``; counts its calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.ncalls, self.scale, self.draws = 0, 1.0, kind == "draws"
        with self.name_scope():
            self.layer = Unrolled() if kind == "has cells" else nn.Dense(6, in_units=6)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.ncalls += 1
        return self.layer(x) * (self.scale + np.random.rand() if self.draws else self.scale)


class Holds(gluon.HybridBlock):
    """Calls another block with what it computes."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(6, in_units=6)
        self.inner = inner

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.inner(F.tanh(self.first(x)))


class Uses(gluon.HybridBlock):
    """Calls its hybridized children, one of which is within the other, too, as a script says."""

    def __init__(self, kind: str) -> None:
        super().__init__(prefix="uses_")
        self.kind, self.used = kind, ""
        with self.name_scope():
            self.head, self.inner = nn.Dense(6, in_units=6), Scales(kind)
            self.outer = Holds(self.inner)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.head(x)
        if self.used == "layer":
            return self.inner.layer(x)
        if "inner" in self.used:
            x = x + self.inner(x) * (self.inner.scale if self.kind == "is read" else 1)
        return x + self.outer(x) if "outer" in self.used else x


# What is used in each step, and the scale then.
Steps = list[tuple[str, float]]

LATER: Steps = [("", 1), ("", 3), ("inner", 3), ("inner", 2), ("", 4), ("inner", 5)]
BOTH: Steps = [("inner", 1), ("inner, outer", 3), ("inner, outer", 2), ("outer", 2)]
OUTER_FIRST: Steps = [("outer", 1), ("inner, outer", 3), ("inner, outer", 2)]
LAYER_FIRST: Steps = [("layer", 1), ("inner", 3), ("inner", 2)]


@pytest.mark.parametrize("steps", [LATER, BOTH, OUTER_FIRST, LAYER_FIRST])
@pytest.mark.parametrize("kind", ["plain", "draws", "has cells", "is read"])
@pytest.mark.parametrize("way", long_except(["planned", "step"], ["planned"]))
def test_the_graph_of_a_child_is_of_its_first_call_by_itself(
    way: str, kind: str, steps: Steps, tmp_path: Path
) -> None:
    """Until then its attributes may change, and within another graph MXNet composes it anew."""
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        np.random.seed(1)
        net = Uses(kind)
        net.initialize(mx.init.Xavier())
        net.inner.hybridize()
        net.outer.hybridize()
        step = TrainStep(net, SOFTMAX, **OPTIONS) if plan and way == "step" else None
        if plan and way == "planned":
            planned(net, **OPTIONS)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        found = []
        for net.used, net.inner.scale in steps:
            with autograd.record():
                loss = step(X, Y) if step else SOFTMAX(net(X), Y)
            if step is None:
                loss.backward()
            trainer.step(4, ignore_stale_grad=True)
            found += [loss.asnumpy().tobytes(), np.random.get_state()[2]]
        if kind != "has cells":  # of which a step makes no graph
            found.append(net.inner.ncalls)
            net.inner.export(str(tmp_path / "inner"))
            for name, array in mx.nd.load(str(tmp_path / "inner-0000.params")).items():
                found += [name, array.asnumpy().tobytes()]
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.parametrize("make", [Draws, Outer])
def test_two_steps_train_by_one_graph(make: Any) -> None:
    """That of the first; and by a new one, whichever of them made it, after ``hybridize()``."""
    losses = [SOFTMAX, gluon.loss.L2Loss()]
    results = []
    for plan in (False, True):
        mx.random.seed(1)
        np.random.seed(1)
        net = make()
        inner = net if make is Draws else net.inner
        net.initialize(mx.init.Xavier())
        net(X)  # else random numbers would be drawn between those for the parameters
        inner.hybridize()
        steps = [TrainStep(net, loss, **OPTIONS) for loss in losses] if plan else []
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        found = []
        for number, turn in enumerate([0, 1, 0, 1, 1, 0]):
            y = mx.nd.one_hot(Y, 3) if turn else Y
            with autograd.record():
                loss = steps[turn](X, y) if plan else losses[turn](net(X), y)
            if not plan:
                loss.backward()
            trainer.step(4)
            inner.slope += 1
            found += [loss, net(X), *of_numpys(inner, number)]
            if number == 2:
                inner.hybridize()
        results.append([array.asnumpy().tobytes() for array in found])
    assert results[0] == results[1]


@pytest.mark.parametrize("make", [Draws, Outer])
@pytest.mark.parametrize("way", ["planned", "step"])
def test_it_stays_where_the_current_context_is_another(way: str, make: Any, tmp_path: Path) -> None:
    options = {**OPTIONS, "realisation": "explicit"}
    contexts = [mx.cpu(1), mx.cpu(2)]
    xs, ys = (gluon.utils.split_and_load(array, contexts) for array in (X, Y))
    net = make()
    inner = net if make is Draws else net.inner
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net(xs[0])
    inner.hybridize()
    if way == "step":
        TrainStep(net, SOFTMAX, **options)(xs, ys)
    else:
        planned(net, **options)
        with autograd.record():
            losses = [SOFTMAX(net(x), y) for x, y in zip(xs, ys, strict=True)]
        autograd.backward(losses)
    inner.export(str(tmp_path / "net"))
    saved = mx.nd.load(str(tmp_path / "net-0000.params"))
    assert len(saved) == len(inner.collect_params().values())
    ncalls = inner.ncalls
    net(xs[0])
    assert inner.ncalls == ncalls
