"""A transformer learns the letters of a text with Gluon and Trainer, in less memory.

``TrainStep`` takes the place of autograd.record() and backward(): forward, recomputation and
backward are one call that leaves the gradients in the parameters, where ``trainer.step`` looks for
them. Dropout draws the same numbers as without a plan. The text is Python's manual, as its standard
library has it. ``python examples/transformer.py --help``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep

SEED = 1
LETTERS = 96  # the printable characters of ASCII and one for all others
Batches = list[tuple[mx.nd.NDArray, mx.nd.NDArray]]


class Layer(gluon.HybridBlock):
    """Masked self-attention, then a wider layer; each normalised first, and added to its input."""

    def __init__(self, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        hidden = np.triu(np.full((1, length, length), -1e9), k=1)
        with self.name_scope():
            self.mask = self.params.get_constant("mask", hidden)
            self.norm1, self.norm2 = nn.LayerNorm(), nn.LayerNorm()
            self.qkv = nn.Dense(3 * width, flatten=False)
            self.join = nn.Dense(width, flatten=False)
            self.wide = nn.Dense(4 * width, flatten=False)
            self.narrow = nn.Dense(width, flatten=False)
            self.dropout = nn.Dropout(0.1)

    def hybrid_forward(self, F: Any, x: Any, mask: Any) -> Any:  # noqa: N803
        # (batch, length, 3 x width) to three of (batch x heads, length, width / heads)
        split = F.reshape(self.qkv(self.norm1(x)), shape=(0, 0, -4, 3 * self.heads, -1))
        parts = F.split(F.transpose(split, axes=(0, 2, 1, 3)), num_outputs=3, axis=1)
        query, key, value = (F.reshape(part, shape=(-3, 0, 0)) for part in parts)
        scores = F.batch_dot(query, key, transpose_b=True) * (self.width / self.heads) ** -0.5
        weights = F.softmax(F.broadcast_add(scores, mask))
        mix = F.reshape(F.batch_dot(weights, value), shape=(-4, -1, self.heads, 0, 0))
        mix = F.reshape(F.transpose(mix, axes=(0, 2, 1, 3)), shape=(0, 0, -3))
        x = x + self.dropout(self.join(mix))
        return x + self.dropout(self.narrow(F.LeakyReLU(self.wide(self.norm2(x)), act_type="gelu")))


def language_model(options: argparse.Namespace) -> nn.HybridSequential:
    """Layers between letters and scores of the next letter."""
    mx.random.seed(SEED)
    net = nn.HybridSequential(prefix="transformer_")
    with net.name_scope():
        net.add(nn.Embedding(LETTERS, options.width))
        for _ in range(options.layers):
            net.add(Layer(options.length, options.width, options.heads))
        net.add(nn.LayerNorm(), nn.Dense(LETTERS, flatten=False))
    net.initialize(mx.init.Xavier())
    return net


def passages(count: int, batch: int, length: int) -> Batches:
    """Passages of the manual from places drawn at random, and what follows each letter."""
    text = "".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), dtype="uint8").astype(int) - 32
    codes = np.where((codes >= 0) & (codes < LETTERS - 1), codes, LETTERS - 1)
    starts = np.random.default_rng(SEED).integers(0, len(codes) - length - 1, (count, batch, 1))
    picked = [mx.nd.array(codes[places + np.arange(length + 1)]) for places in starts]
    return [(letters[:, :-1], letters[:, 1:]) for letters in picked]


def train(net: nn.HybridBlock, step: Callable[..., mx.nd.NDArray], data: Batches) -> list[float]:
    """The loss of every step; ``step`` computes loss and gradients of one batch."""
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.003})
    mx.random.seed(SEED)
    losses = []
    for x, y in data:
        loss = step(x, y)
        trainer.step(x.shape[0])
        losses.append(loss.mean().asscalar())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 4, "width": 64, "heads": 4, "length": 128, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", default="50%", help="of the unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=10, help="for planning, at most")
    parser.add_argument("--updates", type=int, default=15)
    options = parser.parse_args()
    data = passages(options.updates, options.batch, options.length)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    net = language_model(options)
    options_of_plan = {"budget": options.budget, "time_limit": options.seconds}
    step = TrainStep(net, loss, realisation="packed", **options_of_plan)
    planned = train(net, step, data)
    [plan] = step.plans.values()
    print(plan)

    def by_autograd(x: mx.nd.NDArray, y: mx.nd.NDArray) -> mx.nd.NDArray:
        with autograd.record():
            values = loss(other(x), y)
        values.backward()
        return values

    other = language_model(options)
    other.hybridize()
    unplanned = train(other, by_autograd, data)
    print(f"\nloss: {planned[0]:.3f} to {planned[-1]:.3f} in {len(planned)} updates")
    assert planned == unplanned, "a plan must leave every loss as it is, bit for bit"
    assert planned[-1] < 0.9 * planned[0], f"the loss does not fall: {planned}"
    assert plan.total_nbytes <= plan.budget_nbytes < plan.unplanned.total_nbytes, "over budget"


if __name__ == "__main__":
    main()
