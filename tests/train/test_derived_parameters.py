"""Parameters of which a block gets something computed: GluonNLP drops weights so."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import by_autograd, by_plan, train
from helpers.blocks import SOFTMAX, Case, accumulate, vectors
from helpers.halves import by_halves, by_planned
from helpers.interrupted import Interrupted
from helpers.training_runs import differences
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.realise import step_scope

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Clipped(gluon.Parameter):
    """A block gets twice what is left of the weight."""

    def data(self, ctx: mx.Context | None = None) -> Any:
        return super().data(ctx).clip(-0.2, 0.2) * 2


class ClippedDense(gluon.HybridBlock):
    def __init__(self, units: int, in_units: int) -> None:
        super().__init__()
        name = f"{self.prefix}weight"
        self.weight = self.params._params[name] = Clipped(name, shape=(units, in_units))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        return F.tanh(F.dot(x, weight, transpose_b=True))


def clipped_net() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for units, in_units in ((16, 12), (16, 16), (10, 16)):
            net.add(ClippedDense(units, in_units), nn.Dropout(0.3), nn.LayerNorm())
    return net


def freeze_the_first(net: Any) -> None:
    net[0].weight.grad_req = "null"


@pytest.mark.parametrize("way", [by_plan, by_halves, by_planned])
@pytest.mark.parametrize("prepare", [len, accumulate, freeze_the_first])
def test_identical_to_autograd(way: Any, prepare: Any) -> None:
    micro_batches = 2 if prepare is accumulate else 1
    options = {"realisation": "packed"}
    case = Case(
        clipped_net,
        lambda: vectors(),
        prepare=prepare,
        micro_batches=micro_batches,
        options=options,
    )
    run = way(case) if way is by_planned else way(case, [])
    assert not differences(train(case, by_autograd(case)), train(case, run))


def test_ctrl_c_does_not_leave_gradients_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """After whichever call of MXNet's that sets modes it comes."""
    net = ClippedDense(3, 4)
    net.initialize()
    step = TrainStep(net, lambda outputs, _: outputs.sum(), strategy="store_all")
    x, y = mx.nd.ones((2, 4)), mx.nd.ones((2,))
    step(x, y)
    for ncalls in itertools.count(1):
        library = Interrupted(autograd._LIB, ncalls)
        is_interrupted = False
        with monkeypatch.context() as patch:
            patch.setattr(autograd, "_LIB", library)
            patch.setattr(step_scope, "_LIB", library)
            try:
                step(x, y)
            except KeyboardInterrupt:
                is_interrupted = True
        modes = autograd.is_recording(), autograd.is_training(), gc.isenabled()
        autograd.set_recording(False)
        autograd.set_training(False)
        assert modes == (False, False, True), ncalls
        if not is_interrupted:
            break
    assert ncalls > 6


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("request_", ["write", "null"])
def test_what_a_script_has_replaced_on_the_object_is_read(
    request_: str, first: int, hybridized: bool
) -> None:
    """From the step on before which it is, and no longer when it is deleted."""

    def left(is_planned: bool) -> list[Any]:
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            # MXNet writes no gradient of a bias beside a weight that wants none.
            net.add(nn.Dense(16, activation="tanh", in_units=12, use_bias=False))
            net.add(nn.Dense(10, in_units=16))
        net.initialize(mx.init.Xavier())
        net.hybridize(hybridized)
        weight, (x, y) = net[0].weight, vectors()
        weight.grad_req = request_
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
        step = TrainStep(net, SOFTMAX, **OPTIONS) if is_planned else None
        found = []
        for number in range(5):
            if number == first:
                weight.data = lambda ctx=None: gluon.Parameter.data(weight, ctx) * 0.5
            if number == 4:
                del weight.data
            if step is not None:
                loss = step(x, y)
            else:
                with autograd.record():
                    loss = SOFTMAX(net(x), y)
                loss.backward()
            trainer.step(len(x))
            arrays = {p.name: p.list_data()[0] for p in net.collect_params().values()}
            found.append({name: array.asnumpy() for name, array in {**arrays, "": loss}.items()})
        return found

    assert not differences(left(False), left(True))
