"""Blocks that are not hybridized, and read in every step what no look at attributes finds."""

from __future__ import annotations

import types
import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU, SOFTMAX, vectors
from helpers.training_runs import differences
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.train import block_plans

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}

# As a script keeps what it reads in a helper.
SCHEDULE = {"temperature": 1.0}


def temperature() -> float:
    return SCHEDULE["temperature"]


class Read(gluon.HybridBlock):
    """Scores at a temperature, which is found as ``way`` says."""

    def __init__(self, way: str) -> None:
        super().__init__(prefix="net_")
        self.way = way
        self.options = types.SimpleNamespace(schedule=types.SimpleNamespace(temperature=1.0))
        self.options.ncalls = 0
        self.array = np.ones(1)
        with self.name_scope():
            self.body = nn.Dense(12, activation="tanh")
            self.other = nn.Dense(12, activation="tanh")
            self.scores = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        self.options.ncalls += 1
        x = self.other(self.body(x))
        if self.way == "drawn":
            return self.scores(x) * float(np.random.rand() < 0.5) + self.scores(x)
        if self.way == "of an object":
            return self.scores(x) / self.options.schedule.temperature
        return self.scores(x) / (float(self.array[0]) if self.way == "array" else temperature())

    def set_to(self, value: float) -> None:
        self.options.schedule.temperature = self.array[0] = SCHEDULE["temperature"] = value


def left_by(loop: str, way: str) -> tuple[list[Any], int, list[Any]]:
    """Losses and gradients of some steps, how often the block ran in them, and the plans."""
    mx.random.seed(3)
    np.random.seed(4)
    net = Read(way)
    net.set_to(1.0)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    x, y = vectors()
    net(x)
    step = TrainStep(net, SOFTMAX, **OPTIONS) if loop == "TrainStep" else None
    net = planned(net, **OPTIONS) if loop == "planned" else net
    net.options.ncalls, found, plans = 0, [], []
    for number, size in enumerate([4, 4, 4, 2, 4, 2]):
        net.set_to([1.0, 1.0, 0.5, 0.5, 2.0, 2.0][number])
        with autograd.record():
            loss = step(x[:size], y[:size]) if step else SOFTMAX(net(x[:size]), y[:size])
        if step is None:
            loss.backward()
        found.append({"loss": loss.asnumpy(), **gradients(net)})
        if loop != "autograd":
            plans += (step or net.planned_step).plans.values()
    return found, net.options.ncalls, plans


@pytest.mark.filterwarnings("ignore:block 'net' has computed something else")
@pytest.mark.parametrize("way", ["of an object", "array", "by a function", "drawn"])
@pytest.mark.parametrize("loop", ["planned", "TrainStep"])
def test_a_block_runs_once_in_every_step_and_reads_what_it_reads(loop: str, way: str) -> None:
    expected, ncalls, _ = left_by("autograd", way)
    found, ncalls_of_loop, plans = left_by(loop, way)
    assert not differences(expected, found)
    assert ncalls_of_loop == ncalls
    assert len(set(map(id, plans))) > 2


def test_a_warning_says_that_what_the_block_draws_or_reads_changes() -> None:
    net = Read("by a function")
    net.initialize(ctx=CPU)
    step, batch = TrainStep(net, SOFTMAX, **OPTIONS), vectors()
    for number in range(4):
        net.set_to(1.0 + number)
        step(*batch)
    net.set_to(0.5)
    with pytest.warns(UserWarning, match="because of something that hybrid_forward"):
        step(*batch)


class Stepping(gluon.HybridBlock):
    """A cell that is called time by time: MXNet counts its calls in the names of its ops."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.cell = gluon.rnn.GRUCell(5, input_size=3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        state = F.zeros((4, 5))
        for time in range(3):
            state, _ = self.cell(F.slice_axis(x, axis=1, begin=3 * time, end=3 * time + 3), [state])
        return state


class Looping(gluon.HybridBlock):
    """MXNet counts the loops that it makes, in an attribute of what is in them."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            return row * state, state + row

        return F.contrib.foreach(body, x, F.zeros((9,)))[0]


@pytest.mark.parametrize("kind", ["cell", "loop"])
def test_a_block_whose_calls_are_counted_is_planned_once(kind: str) -> None:
    net = nn.HybridSequential()
    net.add(Stepping() if kind == "cell" else Looping(), nn.Dense(2))
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net = planned(net, **OPTIONS)
    plans = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*runs its loop looping0__foreach0 as an operator")
        for _ in range(6):
            with autograd.record():
                loss = net(mx.nd.ones((4, 9))).square().sum()
            loss.backward()
            plans += net.planned_step.plans.values()
    assert len(set(map(id, plans))) == 1


class Factor:
    """A number that is an attribute of a class."""

    value = 1.0


class Times(gluon.HybridBlock):
    """Multiplies what a block within it returns by that."""

    def __init__(self, inner: Any) -> None:
        super().__init__(prefix="net_")
        self.inner = inner

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.inner(x) * Factor.value


@pytest.mark.parametrize("runs_first", [False, True])
def test_a_planned_block_runs_beside_a_hybridized_one_within(runs_first: bool) -> None:
    """Both are the script's: the outer one reads what there is, the inner one is a graph."""

    def left(is_planned: bool) -> list[Any]:
        Factor.value = 2.0
        mx.random.seed(3)
        net = Times(Times(nn.Dense(4, in_units=12, prefix="dense_")))
        net.initialize(mx.init.Xavier(), ctx=CPU)
        net.inner.hybridize()
        x, found = vectors()[0], []
        if runs_first:
            net(x)
        net = planned(net, **OPTIONS) if is_planned else net
        for Factor.value in (1.0, 1.0, 5.0, 3.0):
            with autograd.record():
                loss = net(x).sum()
            loss.backward()
            found.append({"loss": loss.asnumpy(), **gradients(net)})
        return found

    assert not differences(left(False), left(True))


@pytest.mark.parametrize("error", [TraceError("no such activation"), KeyboardInterrupt()])
@pytest.mark.parametrize("loop", ["planned", "TrainStep"])
def test_a_step_after_one_that_was_not_composed_is_of_what_there_is(
    loop: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet's own layers are looked at, and not run; a notebook goes on after an error."""

    def left(loop: str) -> list[Any]:
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Dense(12), nn.Activation("relu"), nn.Dense(10))
        net.initialize(mx.init.Xavier(), ctx=CPU)
        x, y = vectors()
        step = TrainStep(net, SOFTMAX, **OPTIONS) if loop == "TrainStep" else None
        net = planned(net, **OPTIONS) if loop == "planned" else net
        found: list[Any] = []

        def run(size: int) -> None:
            with autograd.record():
                loss = step(x[:size], y[:size]) if step else SOFTMAX(net(x[:size]), y[:size])
            if step is None:
                loss.backward()
            found.append({"loss": loss.asnumpy(), **gradients(net)})

        def fail(*_: Any, **__: Any) -> None:
            raise error

        run(4)
        run(2)
        net[1]._act_type = "tanh"
        with monkeypatch.context() as patch:
            patch.setattr(block_plans, "compose", fail)
            for size in () if loop == "autograd" else (4, 4, 2):
                with pytest.raises(type(error)):
                    run(size)
        run(4)
        run(2)
        return found

    assert not differences(left("autograd"), left(loop))
