"""What a process takes that evaluates a block between its steps, or trains a second batch size.

    .venv/bin/python benchmarks/beside_one_step.py [NAME ...] [--budget 0.7]

Three small convolutional networks of Gluon are trained by a TrainStep that updates within, and by
MXNet's hybridized block. By how much the process grows at most, each in one of its own: in three
steps; if batches of the same size are evaluated between further steps; and if steps of three
quarters of the batch come between them instead. A plan counts the first of these alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

from memplan.mxnet.check import promised_growth
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.train.memory_growth import MemoryGrowth

Shape = tuple[int, ...]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
BETWEEN = ("evaluation", "another batch size")


def odd_channels() -> Any:
    """Convolutions that oneDNN multiplies as matrices."""
    net = nn.HybridSequential()
    for channels in (30, 42, 42):
        net.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


NETWORKS: dict[str, tuple[Callable[[], Any], Shape]] = {
    "30, 42 and 42 channels": (odd_channels, (16, 3, 72, 72)),
    "ResNet-18": (lambda: vision.resnet18_v1(classes=10), (16, 3, 96, 96)),
    "MobileNet 0.5": (lambda: vision.mobilenet0_5(classes=10), (16, 3, 112, 112)),
}


def growth(name: str, between: str, budget: float | None) -> tuple[int, int, int]:
    """Bytes that a plan promises, and by which the process grows in steps, and with ``between``.

    Without a ``budget`` MXNet trains the block, and nothing is promised.
    """
    make, shape = NETWORKS[name]
    net = make()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    with autograd.pause():
        net(mx.nd.zeros((1, *shape[1:])))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3, "momentum": 0.9})
    others = (3 * shape[0] // 4, *shape[1:])
    promise, step = 0, _unplanned(net, trainer)
    if budget is not None:
        step = TrainStep(net, LOSS, trainer=trainer, budget=budget, time_limit=20)
        promise = promised_growth(step.plan(shape, shape[:1]).footprint)
    trained = [p for p in net.collect_params().values() if p.grad_req == "write"]
    for parameter in trained:
        parameter.grad_req = "null"  # the gradients of the start are part of the growth
    grown = MemoryGrowth(mx.cpu())
    for parameter in trained:
        parameter.grad_req = "write"
    for _ in range(3):
        step(mx.nd.ones(shape), mx.nd.zeros(shape[:1]))
    of_steps = grown.look()
    for _ in range(3):
        for _ in range(2):
            if between == "evaluation":
                net(mx.nd.ones(shape)).wait_to_read()
            else:
                step(mx.nd.ones(others), mx.nd.zeros(others[:1]))
        step(mx.nd.ones(shape), mx.nd.zeros(shape[:1]))
    return promise, of_steps, grown.look()


def _unplanned(net: Any, trainer: gluon.Trainer) -> Callable[[Any, Any], None]:
    def step(x: Any, y: Any) -> None:
        with autograd.record():
            losses = LOSS(net(x), y)
        losses.backward()
        trainer.step(len(x))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--budget", type=float, default=0.7)
    options = parser.parse_args()
    columns = ["network", "promised, MB", "steps", *BETWEEN]
    columns += ["unplanned: steps", *BETWEEN]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name in options.names:
        cells = [name]
        for budget in (options.budget, None):
            results = []
            for between in BETWEEN:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    results.append(pool.apply(growth, (name, between, budget)))
            [promise, of_steps, evaluated], [*_, of_others] = results
            figures = (of_steps, evaluated, of_others)
            cells += [f"{nbytes / 1e6:.0f}" for nbytes in (*[promise] * bool(promise), *figures)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
