"""Steps in the order of MXNet's engine: what reads the moving statistics waits, and is waited for.

Held up, the engine gets step and readers together; so these tests depend on no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import memplan.mxnet
from helpers.around import AROUND
from helpers.held import held
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.realise.engine import Marker
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

SHAPES = {"data": (4, 3, 8, 8), "softmax_label": (4,)}
VALUES = {
    "data": np.random.default_rng(1).normal(1, 3, SHAPES["data"]).astype("float32"),
    "softmax_label": np.zeros(4, "float32"),
}
MODES = ["trained", "frozen"]

Arrays = dict[str, Any]
Numbers = dict[str, Any]


def network(mode: str) -> mx.sym.Symbol:
    """Two BatchNorms among convolutions; where they are frozen, none of their own is an output."""
    body = mx.sym.Variable("data")
    options = {"lr_mult": 0} if mode == "frozen" else {}
    for i in range(2):
        body = mx.sym.Convolution(body, kernel=(3, 3), num_filter=8, name=f"conv{i}")
        gamma, beta = (mx.sym.Variable(f"bn{i}_{name}", **options) for name in ("gamma", "beta"))
        body = mx.sym.BatchNorm(body, gamma, beta, fix_gamma=False, name=f"bn{i}")
        body = mx.sym.Activation(body, act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=5), name="softmax")


def requests(symbol: mx.sym.Symbol, mode: str) -> dict[str, str]:
    """``grad_req`` of the arguments."""
    unwanted = {*SHAPES, *(f"bn{i}_{n}" for i in range(2) for n in ("gamma", "beta"))}
    null = unwanted if mode == "frozen" else set(SHAPES)
    return {name: "null" if name in null else "write" for name in symbol.list_arguments()}


def arrays(symbol: mx.sym.Symbol) -> tuple[Arrays, Arrays]:
    """Arguments and states, the same ones every time."""
    random = np.random.default_rng(0)
    shapes, _, states = symbol.infer_shape(**SHAPES)
    arguments = {
        name: mx.nd.array(VALUES.get(name, random.normal(size=shape)))
        for name, shape in zip(symbol.list_arguments(), shapes, strict=True)
    }
    found = zip(symbol.list_auxiliary_states(), states, strict=True)
    return arguments, {name: mx.nd.ones(shape) for name, shape in found}


def numbers(values: Arrays) -> Numbers:
    return {name: value.asnumpy() for name, value in values.items()}


def equal(one: Numbers, other: Numbers) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def states_by_mxnet(mode: str, nsteps: int) -> Numbers:
    """The moving statistics after steps by MXNet's own executor, which is waited for."""
    symbol = network(mode)
    arguments, states = arrays(symbol)
    request = requests(symbol, mode)
    gradients = {n: mx.nd.zeros_like(arguments[n]) for n in request if request[n] != "null"}
    executor = symbol.bind(mx.cpu(), arguments, gradients, request, states)
    for _ in range(nsteps):
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
    return numbers(states)


def train_executor(mode: str, *, states: Arrays | None = None) -> TrainExecutor:
    symbol = network(mode)
    traced = trace(symbol, shapes=SHAPES, grad_req=requests(symbol, mode), realisation="explicit")
    arguments, own = arrays(symbol)
    return TrainExecutor(
        traced, Schedule.unplanned(traced.graph), args=arguments, aux_states=states or own
    )


def by_executor(mode: str) -> tuple[Callable[[], object], Callable[[], Arrays]]:
    """What runs a step, and what reads the states, which waits for nothing."""
    executor = train_executor(mode)
    data = mx.nd.array(VALUES["data"])

    def read() -> Arrays:
        return {name: array.copy() for name, array in executor.aux_dict.items()}

    return lambda: executor.forward(is_train=True, data=data), read


def by_train_step(mode: str) -> tuple[Callable[[], object], Callable[[], Arrays]]:
    symbol = network(mode)
    inputs = [mx.sym.Variable(name) for name in SHAPES]
    block = gluon.SymbolBlock(symbol, inputs)
    arguments, states = arrays(symbol)
    parameters = block.collect_params()
    request = requests(symbol, mode)
    for name, value in {**arguments, **states}.items():
        if name not in SHAPES:
            parameters[name].shape = value.shape
            parameters[name].initialize()
            parameters[name].set_data(value)
            if request.get(name) == "null":
                parameters[name].grad_req = "null"
    step = TrainStep(block, strategy="store_all", realisation="explicit")
    x, y = (mx.nd.array(VALUES[name]) for name in SHAPES)
    return lambda: step(x, y), lambda: {name: parameters[name].data().copy() for name in states}


def by_module(mode: str) -> tuple[Callable[[], object], Callable[[], Arrays]]:
    symbol = network(mode)
    fixed = [name for name, request in requests(symbol, mode).items() if request == "null"]
    module = memplan.mxnet.Module(
        symbol,
        fixed_param_names=[n for n in fixed if n not in SHAPES],
        strategy="store_all",
        realisation="explicit",
    )
    module.bind([("data", SHAPES["data"])], [("softmax_label", SHAPES["softmax_label"])])
    module.set_params(*arrays(symbol), allow_extra=True)
    batch = mx.io.DataBatch(*([mx.nd.array(VALUES[name])] for name in SHAPES))

    def read() -> Arrays:
        module._params_dirty = True  # as update() says
        return dict(module.get_params()[1])

    return lambda: module.forward_backward(batch), read


FACES = {"executor": by_executor, "step": by_train_step, "module": by_module}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("face", FACES)
def test_statistics_are_read_after_the_step_that_was_asked_for_before(face: str, mode: str) -> None:
    step, read = FACES[face](mode)
    step()
    mx.nd.waitall()
    with held():
        step()
        found = read()
    assert equal(numbers(found), states_by_mxnet(mode, 2))
    assert not equal(numbers(found), states_by_mxnet(mode, 1)), "too like to tell"


@pytest.mark.parametrize("mode", MODES)
def test_a_step_waits_for_what_reads_the_statistics_of_before(mode: str) -> None:
    executor = train_executor(mode)
    executor.forward(is_train=True)
    mx.nd.waitall()
    before = numbers(executor.aux_dict)
    late = mx.nd.zeros((1,))
    with held():
        # Each of these is ready when the one before has run: by then a step could have, too.
        for _ in range(50):
            late += 1
        found = {name: array + late * 0 for name, array in executor.aux_dict.items()}
        executor.forward(is_train=True)
    assert equal(numbers(found), before)
    assert equal(numbers(executor.aux_dict), states_by_mxnet(mode, 2))


@pytest.mark.parametrize("around", AROUND)
def test_states_may_be_parts_of_one_array(around: str, tmp_path: Path) -> None:
    """To the engine they are one: an operation that wrote it twice would wait for itself."""
    _, own = arrays(network("trained"))
    memory = mx.nd.ones((len(own), 8))
    executor = train_executor("trained", states=dict(zip(own, memory, strict=True)))
    data = mx.nd.array(VALUES["data"])
    with AROUND[around](tmp_path), held():
        executor.forward(is_train=True, data=data)
        found = memory.copy()
    values = dict(zip(own, found.asnumpy(), strict=True))
    assert equal(values, states_by_mxnet("trained", 1))


def test_a_step_that_is_interrupted_leaves_the_bundles_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, in a notebook that goes on: MXNet would go on bundling what is called there."""
    executor = train_executor("trained")

    def interrupted(marker: Marker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Marker, "__call__", interrupted)
    with mx.engine.bulk(7):
        with pytest.raises(KeyboardInterrupt):
            executor.forward(is_train=True)
        assert mx.engine.set_bulk_size(7) == 7
