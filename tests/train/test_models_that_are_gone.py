"""The memory of models that nobody has any more, which goes before the next one has its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.module import Module
from memplan.mxnet.train import bound_step
from memplan.mxnet.train.modules import module_executor

QUICKLY = {"strategy": "chen_sqrt"}
DATA = [("data", (4, 6))]


@pytest.fixture(autouse=True)
def _garbage_stays() -> Iterator[None]:
    """Python looks for none by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def network() -> Any:
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(ctx=CPU)
    return net


def trained_block(realisation: str) -> Any:
    net = planned(network(), realisation=realisation, **QUICKLY)
    for nrows in (4, 8):
        with autograd.record():
            loss = net(mx.nd.ones((nrows, 6), CPU)).sum()
        loss.backward()
    return net


def trained_by_a_step(realisation: str) -> Any:
    net = network()
    step = TrainStep(net, gluon.loss.L2Loss(), realisation=realisation, **QUICKLY)
    for nrows in (4, 8):
        step(mx.nd.ones((nrows, 6), CPU), mx.nd.ones((nrows, 3), CPU))
    return net


def trained_module(realisation: str) -> Any:
    net = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3))
    (label,) = (name for name in net.list_arguments() if name.endswith("label"))
    module = Module(net, label_names=[label], context=CPU, realisation=realisation, **QUICKLY)
    module.bind(DATA, [(label, (4, 3))])
    module.init_params()
    for nrows in (4, 8):
        batch = mx.io.DataBatch([mx.nd.ones((nrows, 6))], [mx.nd.ones((nrows, 3))])
        module.forward(batch, is_train=True)
    module.of_a_script = module  # it refers to itself, as a block does
    return module


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("train", [trained_block, trained_by_a_step, trained_module])
def test_a_model_goes_before_the_next_one_has_memory(
    train: Callable[[str], Any], realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    found: list[int] = []
    for module in (bound_step, module_executor):
        bind = module.TrainExecutor

        def counted(*args: Any, bind: Any = bind, **options: Any) -> Any:
            found.append(len(alive))
            return bind(*args, **options)

        monkeypatch.setattr(module, "TrainExecutor", counted)
    for _ in range(3):
        alive.add(train(realisation))
    assert found == [0] * 6
    assert len(alive) == 1


@pytest.mark.parametrize("train", [trained_block, trained_by_a_step, trained_module])
def test_garbage_is_looked_for_once(train: Callable[[str], Any]) -> None:
    """Not for batches of another shape, of which there may be many, nor in every step."""
    looks: list[str] = []

    def seen(phase: str, _: Any) -> None:
        looks.append(phase)

    gc.callbacks.append(seen)
    try:
        train("packed")
    finally:
        gc.callbacks.remove(seen)
    assert looks == ["start", "stop"]
