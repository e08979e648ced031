"""Hooks of blocks and of losses are called in every step, as in a loop of autograd's."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.errors import ArgumentError
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}
LOSS = gluon.loss.L2Loss()


def network() -> Any:
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh", in_units=5), nn.Dense(3, in_units=6))
    net.initialize(mx.init.Normal(1), ctx=CPU)
    return net


def batches() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(1)
    return [tuple(mx.nd.array(generator.normal(size=(4, k))) for k in (5, 3)) for _ in range(3)]


def clips(layer: Any, hooked: Any) -> list[Any]:
    """Have a hook of ``hooked`` clip the weights of ``layer``; what it is called with."""
    seen: list[Any] = []

    def clip(_: Any, inputs: Any) -> None:
        assert autograd.is_recording()
        assert autograd.is_training()
        seen.append(inputs[0])
        with autograd.pause():
            layer.weight.set_data(layer.weight.data().clip(-0.3, 0.3))

    hooked.register_forward_pre_hook(clip)
    return seen


def trained(net: Any, way: str) -> list[Any]:
    """Its weights after three steps."""
    step: Any = None
    if way == "planned":
        planned(net, **OPTIONS)
    elif way != "autograd":
        loss, keeps = (LOSS, True) if way == "whole" else (None, False)
        step = TrainStep(net, loss, keep_outputs=keeps, **OPTIONS)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    for x, y in batches():
        if way == "whole":
            step(x, y)
        else:
            with autograd.record():
                loss = LOSS(step.forward(x) if way == "halves" else net(x), y)
            (step.backward if way == "halves" else autograd.backward)(loss)
        trainer.step(4)
    return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "whole", "halves"])
def test_hooks_of_the_block_get_arrays(way: str, hybridized: bool) -> None:
    results = []
    for how in ("autograd", way):
        net = network()
        net.hybridize(hybridized)
        inputs, outputs = clips(net[0], net), []
        net.register_forward_hook(lambda _, x, out, seen=outputs: seen.extend([*x, out]))
        weights = trained(net, how)
        results.append([*weights, *(array.asnumpy() for array in [*inputs, *outputs])])
    for array, wanted in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.filterwarnings("ignore:hooks of block")
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "whole", "halves"])
def test_hooks_of_a_layer_are_called_in_every_step(way: str, hybridized: bool) -> None:
    results = []
    for how in ("autograd", way):
        net = network()
        net[1].hybridize(hybridized)
        seen = clips(net[1], net[1])
        results.append([*trained(net, how), len(seen)])
    for found, wanted in zip(results[1], results[0], strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "whole", "halves"])
def test_a_hook_that_a_block_registers_as_it_runs_is_detached(way: str, hybridized: bool) -> None:
    class Registering(nn.HybridSequential):
        """Has a hook from its first run on, to the second call of it."""

        handle: Any = None

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            self.handle = self.handle or self.register_forward_hook(self.count)
            return super().hybrid_forward(F, x)

        def count(self, *_: Any) -> None:
            self.ncalls = getattr(self, "ncalls", 0) + 1
            if self.ncalls == 2:
                self.handle.detach()

    counts = []
    for how in ("autograd", way):
        net = network()
        net.__class__ = Registering
        net.hybridize(hybridized)
        trained(net, how)
        counts.append((net.ncalls, len(net._forward_hooks)))
    assert counts == [(2, 0)] * 2


@pytest.mark.parametrize("hybridized", [False, True])
def test_hooks_of_a_loss_are_called_in_every_step(hybridized: bool) -> None:
    loss, seen = gluon.loss.L2Loss(prefix="loss_"), []
    loss.hybridize(hybridized)
    loss.register_forward_hook(lambda *_: seen.append(1))
    step = TrainStep(network(), loss, **OPTIONS)
    with pytest.warns(UserWarning, match="hooks of block 'loss_?' get no arrays"):
        step(*batches()[0])
    for x, y in batches()[1:]:
        step(x, y)
    assert len(seen) == 3


def test_a_block_that_computes_its_loss_has_hooks_that_get_labels() -> None:
    class Losing(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
            return F.square(self.net(x) - y).mean(axis=1)

    block, seen = Losing(), []
    block.register_forward_hook(lambda _, inputs, losses: seen.append([*inputs, losses]))
    x, y = batches()[0]
    losses = TrainStep(block, **OPTIONS)(x, y)
    assert seen[0][0] is x
    assert seen[0][1] is y
    assert seen[0][2] is losses


def test_forward_hooks_need_outputs() -> None:
    net = network()
    net.register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="keep_outputs=True"):
        TrainStep(net, LOSS, **OPTIONS)(*batches()[0])


class Calling(nn.HybridSequential):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x / 2)


def test_hooks_behind_a_call_of_the_scripts_are_refused() -> None:
    net = Calling()
    net.add(network())
    net.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match=r"a __call__ of its own"):
        TrainStep(net, LOSS, **OPTIONS)(*batches()[0])


def test_a_hook_that_raises_leaves_no_half_of_a_step() -> None:
    net = network()

    def refuse(*_: Any) -> None:
        raise ValueError("not this one")

    hook = net.register_forward_hook(refuse)
    step = TrainStep(net, **OPTIONS)
    x, y = batches()[0]
    with pytest.raises(ValueError, match="not this one"):
        step.forward(x)
    hook.detach()
    with autograd.record():
        loss = LOSS(step.forward(x), y)
    step.backward(loss)
