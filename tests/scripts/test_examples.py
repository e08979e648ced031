"""More loops in the manner of MXNet's examples: networks that draw, count, align and compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import Estimator

from helpers.scripts import BATCHES, Script, differing
from helpers.training_runs import differences
from memplan.mxnet.gluon import planned

pytestmark = pytest.mark.long

# For networks of which the cuts of other strategies drop nothing.
LEAST = {"strategy": "evict:patience=20"}

BATCH, PICTURES, LATENT = 16, 256, 5
USERS, ITEMS = 60, 90
SIGNS, STRETCH, LABEL = 12, 20, 4


class Autoencoder(gluon.HybridBlock):
    """A variational autoencoder, which computes its own loss and keeps its picture."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.encoder, self.decoder = nn.HybridSequential(), nn.HybridSequential()
            for _ in range(2):
                self.encoder.add(nn.Dense(64, activation="relu"))
                self.decoder.add(nn.Dense(64, activation="relu"))
            self.encoder.add(nn.Dense(2 * LATENT))
            self.decoder.add(nn.Dense(64, activation="sigmoid"))

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        mean, log_variance = F.split(self.encoder(x), axis=1, num_outputs=2)
        drawn = F.random_normal(loc=0, scale=1, shape=(PICTURES, LATENT))
        y = self.output = self.decoder(mean + F.exp(0.5 * log_variance) * drawn)
        apart = 0.5 * F.sum(1 + log_variance - mean * mean - F.exp(log_variance), axis=1)
        likely = F.sum(x * F.log(y + 1e-10) + (1 - x) * F.log(1 - y + 1e-10), axis=1)
        return -likely - apart


def autoencoder() -> Script:
    def batches(net: Any) -> Iterator[Any]:
        return (mx.nd.random.uniform(shape=(PICTURES, 64)) for _ in range(BATCHES))

    rate = {"learning_rate": 1e-4}
    return Script(Autoencoder, batches, lambda net, x: net(x), rate, options=LEAST)


class Recommender(gluon.HybridBlock):
    """Users and items as sums of sparse factors, and two more layers on each."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.users = nn.Embedding(USERS, 16, sparse_grad=True)
            self.items = nn.Embedding(ITEMS, 16, sparse_grad=True)
            self.of_users, self.of_items = nn.HybridSequential(), nn.HybridSequential()
            for tower in (self.of_users, self.of_items):
                tower.add(nn.Dense(16, activation="relu"), nn.Dropout(0.2), nn.Dense(16))

    def hybrid_forward(self, F: Any, user: Any, item: Any) -> Any:  # noqa: N803
        user, item = self.of_users(self.users(user)), self.of_items(self.items(item))
        return F.sum(user * item, axis=1)


def matrix_factorization() -> Script:
    function = gluon.loss.L2Loss()

    def batches(net: Any) -> Iterator[Any]:
        draw = np.random.default_rng(3)
        for _ in range(BATCHES):
            pair = [mx.nd.array(draw.integers(0, n, BATCH)) for n in (USERS, ITEMS)]
            yield (*pair, mx.nd.array(draw.integers(1, 6, BATCH)))

    def losses(net: Any, batch: Any) -> Any:
        user, item, score = batch
        return function(net(user, item), score)

    return Script(Recommender, batches, losses)


class Reader(gluon.HybridBlock):
    """Strips of a picture through two recurrent layers to signs."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.rnn = gluon.rnn.LSTM(24, 2, layout="NTC", bidirectional=True, input_size=16)
            self.sign = nn.Dense(SIGNS + 1, flatten=False)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.sign(F.tanh(self.rnn(x)))


def text_recognition() -> Script:
    """The loss of all alignments; gradients clipped by their norm."""
    function = gluon.loss.CTCLoss()

    def batches(net: Any) -> Iterator[Any]:
        draw = np.random.default_rng(4)
        for _ in range(BATCHES):
            strips = mx.nd.random.normal(shape=(BATCH, STRETCH, 16))
            yield strips, mx.nd.array(draw.integers(0, SIGNS, (BATCH, LABEL)))

    def losses(net: Any, batch: Any) -> Any:
        strips, text = batch
        return function(net(strips), text)

    def clip(net: Any) -> None:
        gradients = [p.grad() for p in net.collect_params().values()]
        gluon.utils.clip_global_norm(gradients, 1.0)

    return Script(Reader, batches, losses, before_update=clip)


class Capsules(gluon.HybridBlock):
    """Capsules, routed by agreement, whose lengths say what is there."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(16, 3, activation="relu"), nn.Conv2D(32, 3, strides=2))
            self.votes = self.params.get("votes", shape=(1, 72, 10, 8, 4))

    def hybrid_forward(self, F: Any, x: Any, votes: Any) -> Any:  # noqa: N803
        capsules = squashed(F, self.body(x).reshape((0, 72, 4)), axis=2)
        capsules = capsules.reshape((0, 72, 1, 1, 4))
        said = F.sum(F.broadcast_mul(capsules, votes), axis=4)
        agreed = F.BlockGrad(F.sum(said, axis=3, keepdims=True) * 0)
        for turn in range(3):
            weighed = F.broadcast_mul(said, F.softmax(agreed, axis=2))
            found = squashed(F, F.sum(weighed, axis=1, keepdims=True), axis=3)
            if turn < 2:
                agreed = agreed + F.sum(F.broadcast_mul(said, found), axis=3, keepdims=True)
        return F.sqrt(F.sum(F.square(found), axis=3) + 1e-9).reshape((0, 10))


def squashed(F: Any, x: Any, axis: int) -> Any:  # noqa: N803
    squares = F.sum(F.square(x), axis=axis, keepdims=True)
    return F.broadcast_mul(x, F.broadcast_div(F.sqrt(squares + 1e-9), 1 + squares))


def capsules() -> Script:
    """The margins are computed by the loop."""

    def batches(net: Any) -> Iterator[Any]:
        digits = mx.nd.one_hot(mx.nd.array(np.arange(BATCH) % 10), 10)
        return ((mx.nd.random.uniform(shape=(BATCH, 1, 10, 10)), digits) for _ in range(BATCHES))

    def losses(net: Any, batch: Any) -> Any:
        x, digits = batch
        lengths = net(x)
        there = digits * mx.nd.square(mx.nd.maximum(0, 0.9 - lengths))
        absent = (1 - digits) * mx.nd.square(mx.nd.maximum(0, lengths - 0.1))
        return (there + 0.5 * absent).sum(axis=1)

    return Script(Capsules, batches, losses, options=LEAST)


class Compared(gluon.HybridBlock):
    """Three pictures through the same layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            for channels in (8, 16):
                self.body.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm())
                self.body.add(nn.Activation("relu"), nn.MaxPool2D())
            self.body.add(nn.Dense(12))

    def hybrid_forward(self, F: Any, *pictures: Any) -> Any:  # noqa: N803
        return [F.L2Normalization(self.body(x)) for x in pictures]


def triplets() -> Script:
    function = gluon.loss.TripletLoss()

    def batches(net: Any) -> Iterator[Any]:
        for _ in range(BATCHES):
            yield [mx.nd.random.uniform(shape=(BATCH, 3, 12, 12)) for _ in range(3)]

    return Script(Compared, batches, lambda net, pictures: function(*net(*pictures)))


SCRIPTS = {
    "variational autoencoder": autoencoder,
    "matrix factorization": matrix_factorization,
    "text recognition (CTC)": text_recognition,
    "capsules": capsules,
    "triplets": triplets,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_equal_to_the_plain_loop(name: str) -> None:
    found, plan = differing(SCRIPTS[name]())
    assert not found
    assert plan.schedule.recomputed


def test_an_estimator() -> None:
    """MXNet's own loop around a network: metrics, validation and all."""
    results = []
    for plan in (False, True):
        mx.random.seed(6)
        np.random.seed(6)
        net = nn.HybridSequential()
        with net.name_scope():
            for _ in range(3):
                net.add(nn.Dense(32), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.2))
            net.add(nn.Dense(4))
        net.initialize(mx.init.Xavier())
        numbers = np.random.normal(size=(64, 10)).astype("float32")
        data = gluon.data.ArrayDataset(numbers, np.arange(64).astype("float32") % 4)
        net(mx.nd.array(numbers[:2]))
        net.hybridize()
        if plan:
            planned(net, realisation="packed", strategy="chen_sqrt")
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
        accuracy = mx.metric.Accuracy()
        estimator = Estimator(
            net, gluon.loss.SoftmaxCrossEntropyLoss(), train_metrics=accuracy, trainer=trainer
        )
        mx.random.seed(7)
        batches = gluon.data.DataLoader(data, batch_size=16)
        estimator.fit(batches, val_data=batches, epochs=2)
        found = {n.partition("_")[2]: p.data().asnumpy() for n, p in net.collect_params().items()}
        metrics = [m.get()[1] for m in (*estimator.train_metrics, *estimator.val_metrics)]
        if plan:
            (made,) = net.planned_step.plans.values()
            assert made.schedule.recomputed
        results.append([found | {"metrics": np.array(metrics)}])
    assert not differences(*results)
