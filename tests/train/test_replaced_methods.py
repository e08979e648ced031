"""Methods that the user put on a trainer, an optimizer or a class: no step goes past them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.blocks import CPU, SOFTMAX, conv_net, images
from helpers.training_runs import differences
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.gluon import planned as by_plan
from memplan.mxnet.trace.op_gradient import _gradient

BEHIND = "behind the step, .*{} of the {} was replaced"


def clip(trainer: gluon.Trainer) -> float:
    """As a hook does that needs all gradients at once; their norm."""
    trained = [p for p in trainer._params if p.grad_req != "null"]
    return float(gluon.utils.clip_global_norm([p.grad() for p in trained], 0.1))


def replace(patch: Any, owner: Any, name: str, before: Callable[..., None]) -> None:
    """Let the method of this ``name`` call ``before`` first, with its own arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> None:
        before(*arguments)
        method(*arguments, **options)

    patch.setattr(owner, name, call)


def left_by(name: str, *, of: str, first: int, planned: bool, patch: Any) -> list[Any]:
    """What steps leave, before the ``first`` of which a method ``of`` something is replaced."""
    mx.random.seed(3)
    net, (x, y) = conv_net(), images(8)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net(x)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    options: dict[str, Any] = {"strategy": "store_all", "realisation": "packed"}
    step = TrainStep(net, SOFTMAX, trainer=trainer, **options) if planned else None
    found: list[Any] = []
    calls: list[float] = []
    for number in range(3):
        if number == first:
            clips = lambda *_: calls.append(clip(trainer))  # noqa: E731
            notes = lambda *arguments: calls.append(arguments[-4])  # noqa: E731
            owner, before = {
                "trainer": (trainer, clips),
                "class Trainer": (gluon.Trainer, clips),
                "optimizer": (trainer.optimizer, notes),
                "class Adam": (mx.optimizer.Adam, notes),
                "class Updater": (mx.optimizer.Updater, lambda *_: calls.append(0)),
            }[of]
            replace(patch, owner, name, before)
        told = pytest.warns(UserWarning, match=BEHIND.format(name, of))
        with told if planned and number == first else contextlib.nullcontext():
            if step is not None:
                step(x, y)
            else:
                with autograd.record():
                    loss = SOFTMAX(net(x), y)
                loss.backward()
                trainer.step(x.shape[0])
        found.append({str(i): p.data().asnumpy() for i, p in enumerate(trainer._params)})
    return [*found, {str(i): np.array(call) for i, call in enumerate(calls)}]


UPDATES = ("update", "update_multi_precision")
TRAINERS = ("step", "_update", "_allreduce_grads", "update", "allreduce_grads")
METHODS = [
    *[(of, name) for of in ("trainer", "class Trainer") for name in TRAINERS],
    *[(of, name) for of in ("optimizer", "class Adam") for name in UPDATES],
    ("class Updater", "__call__"),
]


@pytest.mark.parametrize(("of", "name"), METHODS)
@pytest.mark.parametrize("first", [0, 1])
def test_steps_call_methods_that_were_replaced(of: str, name: str, first: int) -> None:
    """In the order of the trainer, at the beginning and after steps that updated within."""
    found = []
    for planned in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            found.append(left_by(name, of=of, first=first, planned=planned, patch=patch))
    assert not differences(*found)
    # Two of a trainer's methods are not what its step calls.
    assert bool(found[0][-1]) is (name not in TRAINERS[-2:] or "rainer" not in of)


class Pair(gluon.HybridBlock):
    """An array and its norm, which is an output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = gluon.nn.Dense(5, in_units=6), gluon.nn.BatchNorm(in_channels=5)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.dense(x)
        norm = self.norm(x)
        return x, norm, norm


@pytest.mark.parametrize("is_hybridized", [False, True])
def test_an_index_of_symbols_that_a_script_has_replaced_is_not_asked(
    is_hybridized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As UGATIT's does, by which an index takes a row."""
    _gradient.cache_clear()

    def take(symbol: Any, index: int) -> Any:
        return mx.sym.take(symbol, mx.sym.full(val=index, shape=(1,)), 0)

    monkeypatch.setattr(mx.sym.Symbol, "__getitem__", take)
    found = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = Pair()
        net.initialize(mx.init.Xavier())
        if is_hybridized:
            net.hybridize()
        run = by_plan(net, strategy="store_all", realisation="packed") if is_planned else net
        with autograd.record():
            outputs = run(mx.nd.arange(12).reshape((2, 6)))
            loss = sum((n + 1) * (output**2).sum() for n, output in enumerate(outputs))
        loss.backward()
        found.append([loss.asnumpy(), net.dense.weight.grad().asnumpy()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
