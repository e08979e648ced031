"""Every optimizer of MXNet's: training by turns with evaluation leaves the bits of MXNet.

Inference leaves weights in layouts of oneDNN's, in which an optimizer may compute something else.
MXNet's own training puts them back, unless something overtakes that: so MXNet's loop evaluates a
copy of the network here, and is waited for. memplan's is not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import memplan.mxnet
from helpers.amounts import long_unless
from helpers.held import held
from memplan.mxnet.gluon import TrainStep

OPTIMIZERS = sorted(mx.optimizer.Optimizer.opt_registry)
# Not dcasgd: MXNet cannot run it with a momentum, for it asks whether an array is true.
MOMENTUM = {"ccsgd", "lars", "lbsgd", "nag", "sgd", "signum"}
# Their update reads a number of the gradients, and would wait for an engine that is held up.
READERS = {"lars", "lbsgd"}

RANDOM = np.random.default_rng(1)
X = RANDOM.normal(size=(4, 16, 6, 6)).astype("float32")
Y = np.arange(4, dtype="float32")
SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss()

Numbers = dict[str, Any]


def network(optimizer: str) -> nn.HybridSequential:
    """Layers of as many channels as oneDNN lays out in blocks."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        if optimizer == "groupadagrad":  # it takes matrices, and no others
            net.add(nn.Dense(32, use_bias=False), nn.Dense(10, use_bias=False))
            return net
        for channels in (16, 32):
            net.add(
                nn.Conv2D(channels, 3, padding=1, use_bias=False),
                nn.BatchNorm(),
                nn.Activation("tanh"),
            )
        net.add(nn.Conv2DTranspose(8, 2, strides=2), nn.Dense(32), nn.Dense(10))
    return net


def options(optimizer: str) -> dict[str, Any]:
    if optimizer == "test":  # it adds the gradients: small ones, or nothing stays finite
        return {"rescale_grad": 1e-3}
    momentum = {"momentum": 0.9} if optimizer in MOMENTUM else {}
    wd = 0 if optimizer == "groupadagrad" else 0.01
    return {"learning_rate": 0.05, "wd": wd, **momentum}


class Loop:
    """A training loop with Gluon: by autograd, or by a plan of ``realisation``.

    With "updating" the step has the trainer, and updates.
    """

    def __init__(self, optimizer: str, realisation: str | None) -> None:
        self.optimizer, self.realisation = optimizer, realisation
        self.x, self.y = mx.nd.array(X), mx.nd.array(Y)
        self.net = network(optimizer)
        self.net.initialize(mx.init.Xavier())
        with autograd.record():  # and not in inference, which would change layouts
            self.net(self.x)
        mx.nd.waitall()
        self.net.hybridize()
        self.trainer = gluon.Trainer(self.net.collect_params(), optimizer, options(optimizer))
        if realisation:
            given: dict[str, Any] = {"strategy": "store_all", "realisation": realisation}
            if realisation == "updating":
                given |= {"realisation": "packed", "trainer": self.trainer}
            self.step = TrainStep(self.net, SOFTMAX, **given)

    def train(self, nsteps: int = 1) -> None:
        for _ in range(nsteps):
            if self.realisation:
                self.step(self.x, self.y)
            else:
                with autograd.record():
                    losses = SOFTMAX(self.net(self.x), self.y)
                losses.backward()
                mx.nd.waitall()
            if self.realisation != "updating":
                self.trainer.step(4)

    def evaluate(self) -> Any:
        return (self.net if self.realisation else self._copy())(self.x).asnumpy()

    def _copy(self) -> nn.HybridSequential:
        """The same network in arrays of its own: MXNet's loop loses the race now and then."""
        net = network(self.optimizer)
        net.initialize(mx.init.Zero())  # which draws no random numbers
        net(self.x)
        net.hybridize()
        params = self.net.collect_params()
        for name, parameter in net.collect_params().items():
            parameter.set_data(params[name].data().copy())
        return net

    def train_at_once(self) -> None:
        """A step, and its update, which the engine gets together where neither waits."""
        waits = self.realisation != "explicit" or self.optimizer in READERS
        with contextlib.nullcontext() if waits else held():
            self.train()


def run(optimizer: str, realisation: str | None, folder: Path) -> Numbers:
    """What a script sees that trains, evaluates, stops and is resumed."""
    mx.random.seed(3)
    result: Numbers = {}
    loop = Loop(optimizer, realisation)
    for part in ("first", "resumed"):
        for epoch in range(2):
            loop.train()
            result[f"scores of {epoch}, {part}"] = loop.evaluate()
            loop.train_at_once()
        loop.net.save_parameters(str(folder / "parameters"))
        loop.trainer.save_states(str(folder / "states"))
        result[f"states, {part}"] = (folder / "states").read_bytes()
        loop = Loop(optimizer, realisation)
        loop.net.load_parameters(str(folder / "parameters"))
        loop.trainer.load_states(str(folder / "states"))
    for name, parameter in loop.net.collect_params().items():
        result[name] = parameter.data().asnumpy()
    return result


@functools.lru_cache(maxsize=2)  # one run serves all realisations
def plain_run(optimizer: str) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        return run(optimizer, None, Path(folder))


def differing(one: Numbers, other: Numbers) -> list[str]:
    assert one.keys() == other.keys()
    assert all(np.isfinite(v).all() for v in one.values() if isinstance(v, np.ndarray))
    return [name for name in one if not np.array_equal(one[name], other[name])]


@pytest.mark.filterwarnings("ignore:parameters are updated behind the step")
@pytest.mark.parametrize(
    ("optimizer", "realisation"),
    # Behind the step no optimizer knows what the step is.
    long_unless(
        itertools.product(OPTIMIZERS, ["explicit", "packed", "updating"]),
        lambda case: case[1] == "updating" or case[0] in ("adam", "sgd"),
    ),
)
def test_train_evaluate_train(optimizer: str, realisation: str, tmp_path: Path) -> None:
    assert differing(run(optimizer, realisation, tmp_path), plain_run(optimizer)) == []


def fit(optimizer: str, module: mx.mod.Module, *, together: bool) -> Numbers:
    """Weights and states after training and scoring by turns."""
    mx.random.seed(3)
    np.random.seed(3)
    data = [("data", X.shape)], [("softmax_label", Y.shape)]
    batch = mx.io.DataBatch([mx.nd.array(X)], [mx.nd.array(Y)])
    module.bind(*data)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer=optimizer, optimizer_params=options(optimizer))
    for _ in range(3):
        module.forward_backward(batch)
        mx.nd.waitall()
        module.update()
        module.forward(batch, is_train=False)
        module.get_outputs()[0].asnumpy()
        with held() if together else contextlib.nullcontext():
            module.forward_backward(batch)
            if not together:
                mx.nd.waitall()
            module.update()
    arguments, states = module.get_params()
    return {name: array.asnumpy() for name, array in {**arguments, **states}.items()}


@pytest.mark.filterwarnings("ignore:parameters are updated behind the step")
@pytest.mark.parametrize(
    ("optimizer", "realisation"),
    long_unless(
        itertools.product(OPTIMIZERS, ["explicit", "updating"]),
        lambda case: case[1] == "updating" or case[0] in ("adam", "sgd"),
    ),
)
def test_module_trains_and_scores_by_turns(optimizer: str, realisation: str) -> None:
    scores = network(optimizer)(mx.sym.Variable("data"))
    symbol = mx.sym.SoftmaxOutput(scores, name="softmax")
    planned = memplan.mxnet.Module(symbol, strategy="store_all", realisation=realisation)
    together = realisation == "explicit" and optimizer not in READERS
    found = fit(optimizer, planned, together=together)
    assert differing(found, fit(optimizer, mx.mod.Module(symbol), together=False)) == []
