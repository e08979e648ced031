"""Networks and loops in the manner of MXNet's own examples: bit for bit as unplanned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.scripts import BATCHES, STEPS, Script, differing
from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet.gluon import planned

pytestmark = pytest.mark.long

WORDS, LENGTH, BATCH, UNITS = 40, 7, 5, 16


class LanguageModel(gluon.HybridBlock):
    """Words through an LSTM to the next words, by the weights of the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.drop = nn.Dropout(0.2)
            self.embed = nn.Embedding(WORDS, UNITS, weight_initializer=mx.init.Uniform(0.1))
            self.rnn = gluon.rnn.LSTM(UNITS, 2, dropout=0.2, input_size=UNITS)
            self.decode = nn.Dense(WORDS, in_units=UNITS, params=self.embed.params)

    def hybrid_forward(self, F: Any, text: Any, states: Any) -> Any:  # noqa: N803
        output, states = self.rnn(self.drop(self.embed(text)), states)
        return self.decode(self.drop(output).reshape((-1, UNITS))), states


def word_language_model() -> Script:
    """States handed on; gradients clipped by their norm over all parameters."""
    function = gluon.loss.SoftmaxCrossEntropyLoss()
    states: list[Any] = []

    def batches(net: Any) -> Iterator[Any]:
        states[:] = net.rnn.begin_state(func=mx.nd.zeros, batch_size=BATCH)
        draw = np.random.default_rng(2)
        text = mx.nd.array(draw.integers(0, WORDS, (BATCHES * LENGTH + 1, BATCH)))
        return ((text[i : i + LENGTH], text[i + 1 :][:LENGTH]) for i in starts(len(text)))

    def starts(length: int) -> range:
        return range(0, length - LENGTH, LENGTH)

    def losses(net: Any, batch: Any) -> Any:
        text, following = batch
        output, states[:] = net(text, [state.detach() for state in states])
        return function(output, following.reshape((-1,))).sum() / (LENGTH * BATCH)

    def clip(net: Any) -> None:
        gradients = [p.grad() for p in net.collect_params().values()]
        gluon.utils.clip_global_norm(gradients, 0.05)

    return Script(LanguageModel, batches, losses, before_update=clip)


class SuperResolution(gluon.HybridBlock):
    """Four times the pixels, out of the channels of the last convolution."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            for channels, kernel in ((16, 5), (16, 3), (8, 3)):
                layer = nn.Conv2D(channels, kernel, padding=kernel // 2, activation="relu")
                self.body.add(layer)
            self.last = nn.Conv2D(4, 3, padding=1)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = F.reshape(self.last(self.body(x)), (0, -4, -1, 4, 0, 0))
        x = F.reshape(x, (0, 0, -4, 2, 2, 0, 0))
        x = F.transpose(x, (0, 1, 4, 2, 5, 3))
        return F.reshape(x, (0, 0, -3, -3))


def super_resolution() -> Script:
    function = gluon.loss.L2Loss()

    def batches(net: Any) -> Iterator[Any]:
        draw = mx.nd.random.uniform
        return ((draw(shape=(4, 1, 12, 12)), draw(shape=(4, 1, 24, 24))) for _ in range(BATCHES))

    return Script(
        SuperResolution,
        batches,
        lambda net, batch: function(net(batch[0]), batch[1]),
        initializer=mx.init.Orthogonal(),
        optimizer={"learning_rate": 0.1, "momentum": 0.0},
    )


class TwoTasks(gluon.HybridBlock):
    """Layers that two tasks share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.shared = nn.HybridSequential()
            for _ in range(3):
                self.shared.add(nn.Dense(32), nn.BatchNorm(), nn.Activation("relu"))
            self.digit, self.odd = nn.Dense(10), nn.Dense(1)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.shared(x)
        return self.digit(x), self.odd(x)


def two_tasks() -> Script:
    """The losses of both tasks, weighed and added."""
    which = gluon.loss.SoftmaxCELoss()
    whether = gluon.loss.SigmoidBCELoss()

    def batches(net: Any) -> Iterator[Any]:
        digits = mx.nd.array(np.arange(128) % 10)
        return ((mx.nd.random.uniform(shape=(128, 1, 8, 8)), digits) for _ in range(BATCHES))

    def losses(net: Any, batch: Any) -> Any:
        x, digits = batch
        digit, odd = net(x)
        return which(digit, digits) * 0.7 + whether(odd, digits % 2) * 0.3

    return Script(TwoTasks, batches, losses)


SCRIPTS = {
    "word_language_model": word_language_model,
    "super_resolution": super_resolution,
    "multi-task": two_tasks,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_equal_to_the_plain_loop(name: str) -> None:
    found, plan = differing(SCRIPTS[name]())
    assert not found
    assert plan.schedule.recomputed


def generator(colours: int) -> Any:
    net = nn.HybridSequential()
    with net.name_scope():
        for stride, padding in ((1, 0), (2, 1)):
            net.add(nn.Conv2DTranspose(16, 4, stride, padding, use_bias=False))
            net.add(nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Conv2DTranspose(colours, 4, 2, 1, use_bias=False), nn.Activation("tanh"))
    return net


def discriminator() -> Any:
    net = nn.HybridSequential()
    with net.name_scope():
        for channels in (8, 16):
            net.add(nn.Conv2D(channels, 4, 2, 1, use_bias=False), nn.BatchNorm(), nn.LeakyReLU(0.2))
        net.add(nn.Conv2D(1, 4, 1, 0, use_bias=False))
    return net


def adversaries(plan: Any, colours: int = 3) -> list[dict[str, Any]]:
    """Two networks in the manner of MXNet's DCGAN, after some steps; ``plan`` is called first."""
    mx.random.seed(1)
    nets = generator(colours), discriminator()
    for net in nets:
        net.initialize(mx.init.Normal(0.02))
    pictures = [mx.nd.random.uniform(-1, 1, shape=(4, colours, 16, 16)) for _ in range(STEPS)]
    noise = [mx.nd.random.normal(shape=(4, 16, 1, 1)) for _ in range(STEPS + 1)]
    nets[1](nets[0](noise[-1]))
    for net in nets:
        net.hybridize()
    options = {"learning_rate": 0.01, "beta1": 0.5}
    trainers = [gluon.Trainer(net.collect_params(), "adam", options) for net in nets]
    plan(*nets)
    function = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    real, made = mx.nd.ones((4,)), mx.nd.zeros((4,))
    result = []
    for x, z in zip(pictures, noise[:-1], strict=True):
        with autograd.record():
            picture = nets[0](z)
            loss = function(nets[1](x), real) + function(nets[1](picture.detach()), made)
        loss.backward()
        trainers[1].step(4)
        with autograd.record():
            other = function(nets[1](picture), real)
        other.backward()
        trainers[0].step(4)
        result.append({"discriminator": loss.asnumpy(), "generator": other.asnumpy()})
    for i, net in enumerate(nets):
        params = net.collect_params().values()
        result[-1] |= {f"{i} {k}": p.data().asnumpy() for k, p in enumerate(params)}
    return result


@pytest.mark.parametrize("colours", [3, 16])
def test_adversarial_networks(colours: int) -> None:
    """The generator's pictures are differentiated after the discriminator's update."""
    options = {"realisation": "packed", "strategy": "chen_sqrt"}
    expected = adversaries(lambda *nets: None, colours)
    found = adversaries(lambda made, judge: planned(made, **options), colours)
    assert not differences(expected, found)


def test_a_discriminator_that_is_called_twice_is_refused() -> None:
    """It is called for true and for made pictures, and one backward goes through both calls."""
    with pytest.raises(UsageError, match="call a planned block once"):
        adversaries(lambda made, judge: planned(judge, strategy="chen_sqrt"))
