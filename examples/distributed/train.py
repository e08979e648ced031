"""Planned training on several machines, by MXNet's own ``dist_sync`` kvstore.

A plan belongs to one worker: the kvstore sees the gradients that it would see without. Start it
on this machine by ``python examples/distributed/launch.py``; README.md has the way to real hosts.
"""

from __future__ import annotations

import argparse

import mxnet as mx  # in a scheduler or server this import runs until the workers have finished
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

import memplan
import memplan.mxnet
from memplan.mxnet.gluon import TrainStep

SEED = 1
CLASSES = 10
SGD = {"learning_rate": 0.05, "momentum": 0.9}
Trained = tuple[dict[str, np.ndarray], list[float], memplan.Plan | None]


def network(layers: int, filters: int) -> nn.HybridSequential:
    """Convolutions; the same for Module, as a Symbol, and for Gluon."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(layers):
            net.add(nn.Conv2D(filters, 3, padding=1, use_bias=False), nn.BatchNorm())
            net.add(nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(CLASSES))
    return net


def share_of_data(rank: int, shape: tuple[int, ...], batches: int) -> tuple[np.ndarray, np.ndarray]:
    """This worker's pictures, generated: noise around a colour for each class."""
    colours = np.random.default_rng(SEED).normal(size=(CLASSES, shape[1], 1, 1))
    draw = np.random.default_rng((SEED, rank))
    labels = draw.integers(0, CLASSES, shape[0] * batches)
    return colours[labels] + draw.normal(size=(len(labels), *shape[1:])), labels.astype("f4")


def by_module(
    net: nn.HybridBlock,
    data: mx.io.NDArrayIter,
    kvstore: mx.kv.KVStore,
    options: argparse.Namespace,
) -> Trained:
    """Trains with fit; weights by name, the loss of every epoch, and the plan."""
    symbol = mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax")
    if options.unplanned:
        module = mx.mod.Module(symbol)
    else:
        module = memplan.mxnet.Module(symbol, budget=options.budget, time_limit=options.seconds)
    losses, metric = [], mx.metric.CrossEntropy()
    module.fit(
        data,
        eval_metric=metric,
        num_epoch=options.epochs,
        kvstore=kvstore,
        initializer=mx.init.Xavier(),
        optimizer_params=SGD,
        epoch_end_callback=lambda *_: losses.append(metric.get()[1]),
    )
    weights = {name: array.asnumpy() for name, array in module.get_params()[0].items()}
    return weights, losses, None if options.unplanned else module.plan


def by_gluon(
    net: nn.HybridBlock,
    data: mx.io.NDArrayIter,
    kvstore: mx.kv.KVStore,
    options: argparse.Namespace,
) -> Trained:
    """The same with Trainer."""
    net.initialize(mx.init.Xavier())
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    step = TrainStep(net, loss, budget=options.budget, time_limit=options.seconds)
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore=kvstore)
    net.hybridize()
    losses = []
    for _ in range(options.epochs):
        data.reset()
        values_of_epoch = []
        for batch in data:
            x, y = batch.data[0], batch.label[0]
            if options.unplanned:
                with mx.autograd.record():
                    values = loss(net(x), y)
                values.backward()
            else:
                values = step(x, y)
            trainer.step(x.shape[0] * kvstore.num_workers)
            values_of_epoch.append(values.mean().asscalar())
        losses.append(np.mean(values_of_epoch))
    weights = {
        name: parameter.data().asnumpy()
        for name, parameter in net.collect_params().items()
        if parameter.grad_req != "null"
    }
    return weights, losses, next(iter(step.plans.values()), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api", default="module", choices=["module", "gluon"])
    sizes = {"layers": 6, "filters": 16, "batch": 16, "size": 32, "batches": 8, "epochs": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", default="70%", help="of each worker's unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=10, help="for planning, at most")
    parser.add_argument("--unplanned", action="store_true", help="as MXNet trains, to compare")
    parser.add_argument("--save", help="folder for the weights, worker0.npz and so on")
    options = parser.parse_args()

    kvstore = mx.kv.create("dist_sync")
    shape = (options.batch, 3, options.size, options.size)
    pictures, labels = share_of_data(kvstore.rank, shape, options.batches)
    data = mx.io.NDArrayIter(pictures, labels, options.batch)
    mx.random.seed(SEED)
    train = {"module": by_module, "gluon": by_gluon}[options.api]
    weights, losses, plan = train(network(options.layers, options.filters), data, kvstore, options)

    if kvstore.rank == 0:
        print(plan or "unplanned")
    print(f"worker {kvstore.rank}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    if options.save:
        np.savez(f"{options.save}/worker{kvstore.rank}.npz", **weights)
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    if plan:
        assert plan.total_nbytes <= plan.budget_nbytes < plan.unplanned.total_nbytes, "over budget"
        assert plan.schedule.recomputed, "the budget asks for recomputation"


if __name__ == "__main__":
    main()
