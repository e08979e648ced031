"""Calls of operators that go past MXNet's C API once it has found no fault with them."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd

from helpers.interrupted import Interrupted
from helpers.networks import dense, loss, var
from helpers.training_runs import (
    Values,
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise import direct_call, imperative, step_scope
from memplan.mxnet.realise.step_scope import StepScope
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


class Counted:
    """MXNet's library, which counts the operators that its C API calls."""

    def __init__(self, library: Any) -> None:
        self.library, self.ncalls = library, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def MXImperativeInvokeEx(self, *arguments: Any) -> Any:  # noqa: N802  # as MXNet calls it
        self.ncalls += 1
        return self.library.MXImperativeInvokeEx(*arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(imperative._LIB)
    monkeypatch.setattr(imperative, "_LIB", counted)
    return counted


def traced(net: mx.sym.Symbol) -> Trace:
    return trace(net, shapes={"data": (2, 8, 6, 6)}, realisation="packed")


def layers() -> mx.sym.Symbol:
    """Operators with and without oneDNN, among them one that writes states."""
    with mx.name.NameManager():
        out = mx.sym.Convolution(var("data"), num_filter=16, kernel=(3, 3))
        out = mx.sym.BatchNorm(out, fix_gamma=False)
        out = mx.sym.Concat(mx.sym.relu(out), mx.sym.sigmoid(out))
        return loss(dense(mx.sym.Pooling(out, kernel=(2, 2), stride=(2, 2)), 5))


def with_state() -> mx.sym.Symbol:
    """An operator of which MXNet makes a state in every call, and that is not differentiated."""
    with mx.name.NameManager():
        return loss(dense(mx.sym.L2Normalization(var("data")), 5))


def counts(executor: TrainExecutor, library: Counted) -> list[int]:
    """The calls of the C API in each of three steps."""
    result = []
    for _ in range(3):
        library.ncalls = 0
        executor.forward(is_train=True)
        result.append(library.ncalls)
    return result


def test_after_the_first_step_none_is_of_the_c_api(library: Counted) -> None:
    network = traced(layers())
    values = random_values(network)
    executor = bound(network, Schedule.unplanned(network.graph), values)
    first, *others = counts(executor, library)
    assert first > len(network.graph.ops) // 2
    assert others == [0, 0]
    again = bound(network, Schedule.unplanned(network.graph), values)
    assert not differences(stock_steps(network, values), planned_steps(again))


def test_those_of_operators_with_a_state_stay(
    library: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_call, "_WITH_STATE", set())
    network = traced(with_state())
    values = random_values(network)
    executor = bound(network, Schedule.unplanned(network.graph), values)
    first, second, third = counts(executor, library)
    assert first > 1
    assert (second, third) == (0, 1)  # in the second one it is seen that a state is made
    again = bound(network, Schedule.unplanned(network.graph), values)
    assert counts(again, library)[1:] == [1, 1]  # that is seen once
    again = bound(network, Schedule.unplanned(network.graph), values)
    assert not differences(stock_steps(network, values), planned_steps(again))


def scalars() -> tuple[Trace, Values]:
    """A network of NumPy's, of which MXNet's own semantics do not know the shapes."""
    data, weight = (mx.sym.var(name).as_np_ndarray() for name in ("data", "weight"))
    mean = mx.sym.np.mean(mx.sym.np.tanh(mx.sym.np.dot(data, weight)))
    shapes = {"data": (4, 6), "weight": (6, 3)}
    requests = {"data": "null", "weight": "write"}
    network = trace(mx.sym.np.exp(mean), shapes=shapes, grad_req=requests, realisation="packed")
    return network, random_values(network)


def test_steps_in_other_semantics_than_the_first_are_an_error_of_mxnets() -> None:
    """Which would end the process, had it been raised within a direct call."""
    with mx.util.np_shape(True), mx.util.np_array(True):
        network, values = scalars()
        executor = bound(network, Schedule.unplanned(network.graph), values)
        executor.forward(is_train=True)
    with pytest.raises(mx.MXNetError, match="shape"):
        executor.forward(is_train=True)
    with mx.util.np_shape(True), mx.util.np_array(True):
        executor.forward(is_train=True)
        again = bound(network, Schedule.unplanned(network.graph), values)
        assert not differences(stock_steps(network, values), planned_steps(again))


@pytest.mark.parametrize("shape", [(4, 5, 5), (4, 5, 6)])
def test_norms_of_equal_attributes_and_other_dimensions(shape: tuple[int, ...]) -> None:
    """MXNet counts the axis from the front, and writes that into the attributes of the call."""
    with mx.util.np_shape(True), mx.util.np_array(True), mx.name.NameManager():
        data, other = (mx.sym.var(name).as_np_ndarray() for name in ("data", "other"))
        norms = [mx.sym.np.linalg.norm(mx.sym.np.sin(x), axis=-1) for x in (data, other)]
        total = mx.sym.np.sum(norms[0]) + mx.sym.np.sum(mx.sym.np.sin(norms[1]))
        shapes = {"data": (4, 6), "other": shape}
        network = trace(total, shapes=shapes, grad_req="write", realisation="packed")
        values = random_values(network)
        executor = bound(network, Schedule.unplanned(network.graph), values)
        assert not differences(stock_steps(network, values, 3), planned_steps(executor, 3))


def test_with_an_engine_that_computes_within_the_call_all_stay(
    library: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors would end the process."""
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NaiveEngine")
    network = traced(layers())
    executor = bound(network, Schedule.unplanned(network.graph), random_values(network))
    assert len(set(counts(executor, library))) == 1


@pytest.mark.parametrize("is_training", [False, True])
def test_a_step_leaves_modes_bundles_and_garbage_as_they_were(is_training: bool) -> None:
    scope = StepScope()
    gc.disable()
    try:
        with autograd.record(train_mode=is_training), mx.engine.bulk(7):
            with contextlib.suppress(ZeroDivisionError), scope:
                assert scope.was_training is is_training
                assert (autograd.is_recording(), autograd.is_training()) == (False, True)
                assert mx.engine.set_bulk_size(0) == 0
                1 / 0  # noqa: B018
            assert (autograd.is_recording(), autograd.is_training()) == (True, is_training)
            assert mx.engine.set_bulk_size(7) == 7
            assert not gc.isenabled()
    finally:
        gc.enable()
    with scope:
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("ncalls", range(1, 7))
def test_ctrl_c_leaves_nothing_as_it_is_within_a_step(
    monkeypatch: pytest.MonkeyPatch, ncalls: int
) -> None:
    monkeypatch.setattr(step_scope, "_LIB", Interrupted(step_scope._LIB, ncalls))
    with autograd.record(train_mode=False), mx.engine.bulk(7):
        with pytest.raises(KeyboardInterrupt), StepScope():
            pass
        assert (autograd.is_recording(), autograd.is_training()) == (True, False)
        assert mx.engine.set_bulk_size(7) == 7
        assert gc.isenabled()


def test_ctrl_c_on_the_way_out_of_a_step_does_not_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    network = traced(layers())
    executor = bound(network, Schedule.unplanned(network.graph), random_values(network))
    monkeypatch.setattr(StepScope, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.forward(is_train=True)
    assert gc.isenabled()
    assert not autograd.is_training()
