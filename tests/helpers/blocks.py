"""Gluon blocks, batches and losses to train by a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import planned

CPU = mx.cpu(0)
QUICK = {"strategy": "evict"}
SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss()


def conv_net() -> nn.HybridSequential:
    """Shapes unknown before the first batch; something to recompute."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Dense(10))
    return net


def chain_net(picture: mx.nd.NDArray) -> nn.HybridSequential:
    """Convolutions one after the other, initialised for ``picture`` from a seed."""
    mx.random.seed(7)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(9):
            net.add(nn.Conv2D(4, 3, padding=1, activation="tanh"))
    net.initialize(mx.init.Xavier())
    net(picture)
    return net


def dense(plan: bool) -> nn.HybridSequential:
    """Two hybridized layers, planned or not, initialised from a seed."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return planned(net, strategy="chen_sqrt", realisation="packed") if plan else net


def dropout_net() -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.4))
        net.add(nn.Dense(10))
    return net


class Recurrent(gluon.HybridBlock):
    """An LSTM with dropout between its layers, and a Dense layer on every step."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.lstm = gluon.rnn.LSTM(8, num_layers=2, dropout=0.3, input_size=6)
            self.dense = nn.Dense(10, flatten=False)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.dense(self.lstm(F.tanh(x)))


class Cells(gluon.HybridBlock):
    """A cell unrolled, whose weights every step shares; the states are inputs and outputs."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.cell = gluon.rnn.LSTMCell(8, input_size=6)
            self.dense = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any, states: Any) -> Any:  # noqa: N803
        outputs, states = self.cell.unroll(5, x, states, layout="TNC", merge_outputs=False)
        return self.dense(outputs[-1]), states


class Siamese(gluon.HybridBlock):
    """Two inputs through one body, two outputs; a layer shares its weights with another."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = nn.Dense(12, activation="tanh")
            self.twin = nn.Dense(12, activation="tanh", params=self.body.params)
            self.scores = nn.Dense(10)
            self.distance = nn.Dense(1)
            self.factor = self.params.get("factor", shape=(1, 12), init="ones")
            self.shift = self.params.get_constant("shift", [[0.5] * 12])

    def hybrid_forward(self, F: Any, a: Any, b: Any, factor: Any, shift: Any) -> Any:  # noqa: N803
        a, b = self.body(a), self.twin(self.body(b) * 0.5)
        a = F.broadcast_add(F.broadcast_mul(a, factor), shift)
        return self.scores(a), self.distance(a - b)


class Half(gluon.HybridBlock):
    """What MXNet computes in float16 on CPUs: no matrix products."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            for name in ("one", "two", "three"):
                made = self.params.get(name, shape=(1, 3, 1, 1), init=mx.init.Uniform(2))
                setattr(self, name, made)
            self.norm = nn.BatchNorm()

    def hybrid_forward(self, F: Any, x: Any, **scales: Any) -> Any:  # noqa: N803
        for scale in scales.values():
            x = F.relu(F.broadcast_mul(F.tanh(x), scale) + 0.1)
        return F.mean(self.norm(x), axis=3)


class WithLoss(gluon.HybridBlock):
    """A block that returns its loss."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.net = conv_net()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return F.softmax_cross_entropy(self.net(x), y)


def images(size: int, batch: int = 4) -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(batch, 3, size, size), ctx=CPU)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(batch,), ctx=CPU))


def images_and_rest() -> Callable[[], tuple[Any, Any]]:
    """Every other batch is smaller."""
    sizes = itertools.cycle([6, 4])
    return lambda: images(8, next(sizes))


def pictures() -> tuple[Any, Any]:
    x, _ = images(8)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 3, shape=(4, 8), ctx=CPU))


def vectors() -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(64, 12), ctx=CPU)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(64,), ctx=CPU))


def pairs() -> tuple[Any, Any]:
    (a, y), (b, _) = vectors(), vectors()
    return (a, b), [y, mx.nd.random.uniform(shape=(64, 1), ctx=CPU)]


def sequences() -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(5, 3, 6), ctx=CPU)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(5, 3), ctx=CPU))


def with_states() -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(5, 32, 6), ctx=CPU)
    states = [mx.nd.random.uniform(shape=(32, 8), ctx=CPU) for _ in range(2)]
    return (x, states), mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(32,), ctx=CPU))


def two_losses(outputs: Any, labels: Any) -> list[Any]:
    return [SOFTMAX(outputs[0], labels[0]), gluon.loss.L2Loss()(outputs[1], labels[1])]


def first_output(outputs: Any, label: Any) -> Any:
    return SOFTMAX(outputs[0], label)


def first_of_rows(outputs: Any, labels: Any) -> Any:
    return SOFTMAX(outputs.swapaxes(1, 2), labels)


@dataclass(frozen=True)
class Case:
    """A block to train with a loss on batches."""

    block: Callable[[], Any]
    batch: Callable[[], Any]
    loss: Any = SOFTMAX
    prepare: Callable[[Any], Any] = lambda net: None
    contexts: tuple[mx.Context, ...] = (CPU,)
    micro_batches: int = 1
    initializer: Any = field(default_factory=mx.init.Xavier)
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    recomputes: bool = True


def freeze(net: Any) -> None:
    for name, parameter in net.collect_params().items():
        if "conv0" in name or "batchnorm1" in name:
            parameter.grad_req = "null"


def accumulate(net: Any) -> None:
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad_req = "add"


CASES = {
    "conv": Case(conv_net, lambda: images(8)),
    "dropout": Case(dropout_net, vectors),
    "lstm": Case(Recurrent, sequences),
    "cells": Case(Cells, with_states, first_output, options=QUICK),
    "two_losses": Case(Siamese, pairs, two_losses),
    "list_of_losses": Case(Siamese, pairs, [SOFTMAX, gluon.loss.L1Loss(weight=0.3)]),
    "own_loss": Case(WithLoss, lambda: images(8), None),
    "frozen": Case(conv_net, lambda: images(8), prepare=freeze),
    "added": Case(conv_net, lambda: images(8), prepare=accumulate, micro_batches=2),
    "two_contexts": Case(conv_net, lambda: images(8), contexts=(mx.cpu(0), mx.cpu(1))),
    "half": Case(Half, pictures, first_of_rows, dtype="float16"),
    "shapes": Case(conv_net, images_and_rest(), micro_batches=2, prepare=accumulate),
}


class Computing(gluon.HybridBlock):
    """Computes something ``of`` what a layer makes of its input."""

    def __init__(self, of: Callable[[Any, Any], Any], prefix: str = "net_") -> None:
        super().__init__(prefix=prefix)
        self._of = of
        with self.name_scope():
            self.body = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self._of(F, self.body(x))


def trained(net: Any, x: Any, y: Any) -> None:
    """Gradients of the cross-entropy, by autograd."""
    with autograd.record():
        loss = SOFTMAX(net(x), y)
    loss.backward()
