"""Methods that the user put on a trainer or an optimizer: a step must not go past them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.block_runs import differences
from helpers.blocks import CPU, SOFTMAX, conv_net, images
from memplan.mxnet.gluon import TrainStep

BEHIND = "behind the step, .*{} of the {} was replaced"


def clip(trainer: gluon.Trainer) -> float:
    """As a hook does that needs all gradients at once; their norm."""
    trained = [p for p in trainer._params if p.grad_req != "null"]
    return float(gluon.utils.clip_global_norm([p.grad() for p in trained], 0.1))


def replace(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Let the method of this ``name`` call ``before`` first, with its own arguments."""
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> None:
        before(*arguments)
        method(*arguments, **options)

    setattr(owner, name, call)


def left_by(name: str, *, of: str, first: int, planned: bool) -> list[Any]:
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
        if number == first and of == "trainer":
            replace(trainer, name, lambda *_: calls.append(clip(trainer)))
        elif number == first:
            replace(trainer.optimizer, name, lambda index, *_: calls.append(index))
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


METHODS = [
    *[("trainer", name) for name in ("step", "_update", "_allreduce_grads")],
    *[("trainer", name) for name in ("update", "allreduce_grads")],  # which step does not call
    *[("optimizer", name) for name in ("update", "update_multi_precision")],
]


@pytest.mark.parametrize(("of", "name"), METHODS)
@pytest.mark.parametrize("first", [0, 1])
def test_steps_call_methods_that_were_replaced(of: str, name: str, first: int) -> None:
    """In the order of the trainer, at the beginning and after steps that updated within."""
    expected, found = (left_by(name, of=of, first=first, planned=p) for p in (False, True))
    assert not differences(expected, found)
    assert bool(expected[-1]) is (name not in ("update", "allreduce_grads") or of == "optimizer")
