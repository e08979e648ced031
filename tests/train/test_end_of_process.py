"""MXNet may abort a process that ends during a step: the last one of a script, say."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.other_threads import amid_weak_dictionaries
from helpers.schedules import random_schedule
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.train.arrays import end_of_process
from memplan.planning.process import IDLE_TIMER
from memplan.planning.realisation import trace

# A thread asks for operators until Python has ended it.
ENDLESS = """
import threading
import mxnet as mx
from memplan.mxnet.gluon import planned
net = mx.gluon.nn.Dense(2, in_units=2)
net.initialize()
planned(net, strategy="store_all")
with mx.autograd.record():
    loss = net(mx.nd.ones((2, 2))).sum()
loss.backward()
begun = threading.Event()
def ask():
    array = mx.nd.ones((300, 300))
    while True:
        mx.nd.dot(array, array)
        begun.set()
threading.Thread(target=ask, daemon=True).start()
begun.wait()
"""

# Networks whose graphs have an operator of the script's own, as they are made fold by fold.
FOLDS = """
from memplan.mxnet.gluon import planned
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
class Same(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])
    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])
@mx.operator.register("same")
class SameProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Same()
class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.last = nn.Dense(16), nn.Dense(4)
    def hybrid_forward(self, F, x):
        return self.last(F.Custom(self.first(x), op_type="same"))
for fold in range(2):
    net = Net()
    net.initialize()
    net.hybridize()
    net = planned(net, strategy="chen_sqrt")
    for _ in range(3):
        with autograd.record():
            loss = net(mx.nd.ones((2, 8))).sum()
        loss.backward()
"""


def bound() -> TrainExecutor:
    symbol = mx.sym.MakeLoss(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3))
    traced = trace(symbol, shapes={"data": (4, 8)}, realisation="explicit")
    return TrainExecutor(traced, random_schedule(traced.graph, 1))


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What was registered for the end since."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", registered.append)
    end_of_process._register.cache_clear()
    return registered


def test_it_waits_for_mxnet(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    executors = [bound(), bound()]
    assert len(at_exit) == 1
    waits: list[None] = []
    monkeypatch.setattr(mx.nd, "waitall", lambda: waits.append(None))
    timer = threading.Thread(daemon=True, name=IDLE_TIMER)  # of a planning process
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), timer])
    at_exit[0]()
    assert executors
    assert waits == [None]


def test_it_waits_for_steps_where_a_thread_goes_on(
    at_exit: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = bound()
    waits: list[int] = []
    monkeypatch.setattr(mx.nd, "waitall", lambda: pytest.fail("waits for the thread"))
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.Thread(daemon=True)])
    monkeypatch.setattr(mx.nd.NDArray, "wait_to_read", lambda array: waits.append(id(array)))
    at_exit[0]()
    written = [*executor.outputs, *executor.grad_dict.values(), *executor.arg_dict.values()]
    assert written
    assert {id(array) for array in written} <= set(waits)


def test_a_thread_may_bind_meanwhile(at_exit: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    executors = [bound()]
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.Thread(daemon=True)])
    with amid_weak_dictionaries(lambda: executors.append(bound()) if len(executors) < 3 else None):
        at_exit[0]()
    assert len(executors) == 3


@pytest.mark.long
@pytest.mark.parametrize("script", [ENDLESS, FOLDS], ids=["a thread goes on", "graphs are held"])
def test_a_process_ends(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=600)
    assert done.returncode == 0
