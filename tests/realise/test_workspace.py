"""Operators that are called one by one find one workspace, not each of MXNet's in turn."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import mxnet as mx
import numpy as np
import pytest
from mxnet.base import _LIB, check_call

from helpers.networks import residual_net
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise import packed_memory
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.estimate import matrix_buffers
from memplan.mxnet.realise.imperative import Call
from memplan.mxnet.realise.workspace import OneWorkspace
from memplan.mxnet.train import train_executor
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.util.heap import KEPT_NBYTES


@dataclass
class Asking:
    """A call of an op that asks for this many workspaces; ``found`` gets the first of them."""

    workspace: OneWorkspace
    times: int
    found: list[int]
    skips: int | None = None

    def __call__(self) -> None:
        self.found.extend([self.workspace._next() for _ in range(self.times)][:1])


@pytest.mark.parametrize("asked_before", range(4))
def test_calls_find_the_same_workspace(asked_before: int) -> None:
    workspace, found = OneWorkspace(mx.cpu(0)), list[int]()
    calls = [Asking(workspace, times, found) for times in (1, 0, 1, 3, 2, 1, 4, 1)]
    for _ in range(asked_before):
        workspace._next()
    for _ in range(2):  # what calls ask for is found out at first, then known
        workspace.begin()
        for call in calls:
            workspace.call(call)
    assert found == [0] * 14
    assert [call.skips for call in calls] == [3, 0, 3, 1, 2, 3, 0, 3]


def test_a_packed_step_takes_one_workspace() -> None:
    symbol, shapes = residual_net(batch=2)
    traced = trace(symbol, shapes=shapes, realisation="packed")
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    workspace = OneWorkspace(mx.cpu(0))
    for _ in range(2):
        workspace._next()
        executor.forward(is_train=True)
        # Each op of the step was followed by the last of MXNet's workspaces.
        assert workspace._next() == 0
    calls = executor._training._calls
    convolutions = sum("Convolution" in op.kind for op in traced.graph.ops)
    assert sum(call.skips == 3 for call in calls) >= convolutions > 0
    assert np.isfinite(executor.outputs[0].asnumpy()).all()


@pytest.mark.parametrize("is_train", [True, False], ids=["training", "inference"])
def test_executors_take_one_workspace(is_train: bool) -> None:
    """Steps of several shapes, one bound after another, and what is inferred beside them."""
    workspace, found = OneWorkspace(mx.cpu(0)), []
    for batch in (4, 3, 2):
        symbol, shapes = residual_net(batch=batch)
        traced = trace(symbol, shapes=shapes, realisation="explicit")
        executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
        if not is_train:
            workspace.begin()
            workspace._next()  # what runs between the steps may ask, too
            executor.forward()
        found.append(workspace._next())
    assert found == [1] * 3, "each asks once, and gets the first"


def test_few_bundles_are_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_memory, "WAITING", 2)
    memory, array = packed_memory.PackedMemory(8, mx.cpu(0)), mx.nd.zeros((1 << 20,))
    memory.fence.wait_to_read()
    array.wait_to_read()  # before, its memory holds anything
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    number = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    arrays = Handles([array])
    add = Call("_plus_scalar", {"scalar": "1"}, arrays, arrays)
    for handed_over in range(1, 20):
        memory.in_turn([add])
        assert number[0] >= handed_over - 2, "the engine has more bundles"


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_the_first_steps_leave_no_holes(realisation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(train_executor, "keep_below", kept.append)
    symbol, shapes = residual_net(batch=2)
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    for _ in range(4):
        executor.forward(is_train=True)
    assert kept == [0, 0, KEPT_NBYTES, KEPT_NBYTES]


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_steps_do_not_keep_large_buffers_of_dense_layers(
    realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 20 steps the next ones would lie elsewhere."""
    kept: list[int] = []
    monkeypatch.setattr(train_executor, "keep_below", kept.append)
    monkeypatch.setattr(matrix_buffers, "threads", lambda: 1)
    monkeypatch.setattr(matrix_buffers, "has_avx512", lambda: True)
    dense = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2400)
    net = mx.sym.MakeLoss(mx.sym.mean(dense))
    traced = trace(net, shapes={"data": (1100, 300)}, realisation=realisation)
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    for _ in range(3):
        executor.forward(is_train=True)
    (buffer,) = (
        size for node in traced.nodes for size in matrix_buffers.buffers_nbytes(node) if size
    )
    assert kept == [0, 0, buffer]


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_what_was_freed_before_is_given_back_once(
    realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step: what initialises a Module's parameters may be as large as these."""
    calls: list[None] = []
    symbol, shapes = residual_net(batch=2)
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    monkeypatch.setattr(train_executor, "give_back_what_is_free", lambda: calls.append(None))
    ncalls = []
    for _ in range(3):
        executor.forward(is_train=True)
        ncalls.append(len(calls))
    assert ncalls == [1, 1, 1]
