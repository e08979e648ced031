"""Networks of mx.np, in the manner of the books that newcomers meet it by; and their batches.

They are called with mx.npx.set_np() on.
"""

from __future__ import annotations

import math
from typing import Any

from mxnet import gluon, np
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX, Case


def lenet() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 5, padding=2, activation="sigmoid"), nn.AvgPool2D(2, 2))
        net.add(nn.Conv2D(16, 5, activation="sigmoid"), nn.AvgPool2D(2, 2))
        net.add(nn.Dense(32, activation="sigmoid"), nn.Dense(10))
    return net


class Residual(gluon.HybridBlock):
    """Two convolutions beside a way around them."""

    def __init__(self, channels: int, narrows: bool = False) -> None:
        super().__init__()
        with self.name_scope():
            self.one = nn.Conv2D(channels, 3, padding=1, strides=2 if narrows else 1)
            self.two = nn.Conv2D(channels, 3, padding=1)
            self.around = nn.Conv2D(channels, 1, strides=2) if narrows else None
            self.norm_one, self.norm_two = nn.BatchNorm(), nn.BatchNorm()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        y = self.norm_two(self.two(F.npx.relu(self.norm_one(self.one(x)))))
        return F.npx.relu(y + (x if self.around is None else self.around(x)))


def resnet() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(Residual(8), Residual(16, narrows=True), nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


class Dense(gluon.HybridBlock):
    """Every layer reads all before it."""

    def __init__(self, nlayers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.HybridSequential()
        for _ in range(nlayers):
            layer = nn.HybridSequential()
            layer.add(nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(growth, 3, padding=1))
            self.layers.add(layer)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        for layer in self.layers:
            x = F.np.concatenate([x, layer(x)], axis=1)
        return x


def densenet() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), Dense(2, 4))
        net.add(nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(8, 1), nn.AvgPool2D(2, 2))
        net.add(Dense(2, 4), nn.BatchNorm(), nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


class Translator(gluon.HybridBlock):
    """An encoder and a decoder of GRUs: the last state of the one begins the other."""

    def __init__(self, words: int = 20, size: int = 8) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.source, self.target = nn.Embedding(words, size), nn.Embedding(words, size)
            self.encoder = gluon.rnn.GRU(size, 2, dropout=0.1, input_size=size)
            self.decoder = gluon.rnn.GRU(size, 2, dropout=0.1, input_size=2 * size)
            self.scores = nn.Dense(words, flatten=False, in_units=size)

    def hybrid_forward(self, F: Any, source: Any, target: Any, state: Any) -> Any:  # noqa: N803
        _, states = self.encoder(self.source(source).swapaxes(0, 1), [state])
        x = self.target(target).swapaxes(0, 1)
        context = F.np.broadcast_to(F.np.split(states[0], 2, axis=0)[1], (6, 4, 8))
        found, states = self.decoder(F.np.concatenate([x, context], axis=2), states)
        return self.scores(found).swapaxes(0, 1), states


class MaskedLoss(gluon.loss.SoftmaxCELoss):
    """The loss of the words within their sentences' lengths."""

    def hybrid_forward(self, F: Any, outputs: Any, labels: Any) -> Any:  # noqa: N803
        label, lengths = labels
        weight = F.np.expand_dims(F.np.ones_like(label), axis=-1)
        weight = F.npx.sequence_mask(weight, lengths, True, axis=1)
        return super().hybrid_forward(F, outputs[0], label, weight)


class Attention(gluon.HybridBlock):
    """Of several heads, over the valid words only."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        with self.name_scope():
            for name in ("query", "key", "value", "output"):
                setattr(self, name, nn.Dense(size, use_bias=False, flatten=False))
            self.dropout = nn.Dropout(0.1)

    def hybrid_forward(self, F: Any, x: Any, lengths: Any) -> Any:  # noqa: N803
        def split(y: Any) -> Any:
            y = F.npx.reshape(y, (-2, -2, self.heads, -1))
            return F.npx.reshape(y.transpose(0, 2, 1, 3), (-1, -2, -2), reverse=True)

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = F.npx.batch_dot(query, key, transpose_b=True) / math.sqrt(self.size / self.heads)
        lengths = F.np.repeat(lengths, repeats=self.heads, axis=0)
        scores = scores.transpose(0, 2, 1)
        scores = F.npx.sequence_mask(scores, lengths, True, value=-1e6, axis=1)
        weights = self.dropout(F.npx.softmax(scores.transpose(0, 2, 1)))
        y = F.npx.reshape(F.npx.batch_dot(weights, value), (-1, self.heads, -2, -2), reverse=True)
        return self.output(F.npx.reshape(y.transpose(0, 2, 1, 3), (-2, -2, -1)))


class EncoderLayer(gluon.HybridBlock):
    """Attention and two dense layers, each added to what it reads and normalised."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        with self.name_scope():
            self.attention = Attention(size, heads)
            self.inner = nn.Dense(2 * size, flatten=False, activation="relu")
            self.outer = nn.Dense(size, flatten=False)
            self.norm_one, self.norm_two = nn.LayerNorm(), nn.LayerNorm()
            self.dropout = nn.Dropout(0.1)

    def hybrid_forward(self, F: Any, x: Any, lengths: Any) -> Any:  # noqa: N803
        x = self.norm_one(x + self.dropout(self.attention(x, lengths)))
        return self.norm_two(x + self.dropout(self.outer(self.inner(x))))


class Encoder(gluon.HybridBlock):
    """A transformer's encoder, whose mean word is classified."""

    def __init__(self, words: int = 20, size: int = 16, length: int = 6) -> None:
        super().__init__(prefix="net_")
        self.size = size
        with self.name_scope():
            self.embedding = nn.Embedding(words, size)
            angles = np.arange(length).reshape(-1, 1) / 10 ** (np.arange(0, size, 2) / 4)
            places = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(1, length, size)
            self.places = self.params.get_constant("places", places)
            self.one, self.two = EncoderLayer(size, 2), EncoderLayer(size, 4)
            self.scores = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any, lengths: Any, places: Any) -> Any:  # noqa: N803
        x = self.embedding(x) * math.sqrt(self.size) + places
        x = self.two(self.one(x, lengths), lengths)
        return self.scores(F.np.mean(x, axis=1))


class Scalars(gluon.HybridBlock):
    """Scalars, arrays without elements, and what mx.np has that mx.nd has not."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body, self.scores = nn.Dense(16), nn.Dense(10)
            self.factor = self.params.get("factor", shape=(1,), init="ones")

    def hybrid_forward(self, F: Any, x: Any, factor: Any) -> Any:  # noqa: N803
        x = F.np.tanh(self.body(x)) * factor
        x = F.np.concatenate([x, F.np.zeros((0, 16))], axis=0)
        y = F.np.einsum("ij,kj->ik", x, x) / F.np.sqrt(F.np.sum(x * x) + 1)
        z = F.np.where(x > 0, F.np.exp(-x), x**2)
        x = F.np.concatenate(
            [F.npx.leaky_relu(z, act_type="gelu"), F.np.split(y, 2, axis=1)[0]], axis=1
        )
        return self.scores(F.npx.layer_norm(x, F.np.ones(48), F.np.zeros(48)))


def total(outputs: Any, labels: Any) -> Any:
    """A loss that is a scalar."""
    return SOFTMAX(outputs, labels).mean()


def labels(batch: int, classes: int = 10) -> Any:
    return np.floor(np.random.uniform(0, classes, size=(batch,)))


def images(size: int, channels: int = 3) -> tuple[Any, Any]:
    return np.random.uniform(size=(4, channels, size, size)), labels(4)


def vectors() -> tuple[Any, Any]:
    return np.random.uniform(size=(64, 12)), labels(64)


def words(batch: int = 4, length: int = 6) -> Any:
    return np.floor(np.random.uniform(0, 20, size=(batch, length)))


def pairs_of_sentences() -> tuple[Any, Any]:
    source, target = words(), words()
    return (source, target, np.zeros((2, 4, 8))), (words(), np.array([6.0, 3.0, 1.0, 5.0]))


def sentences() -> tuple[Any, Any]:
    return (words(), np.array([6.0, 3.0, 1.0, 5.0])), labels(4)


CASES = {
    "lenet": Case(lenet, lambda: images(28, 1)),
    "resnet": Case(resnet, lambda: images(8)),
    "densenet": Case(densenet, lambda: images(8)),
    "translator": Case(Translator, pairs_of_sentences, MaskedLoss()),
    "encoder": Case(Encoder, sentences),
    "scalars": Case(Scalars, vectors, total),
}
