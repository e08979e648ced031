"""What updates within the step save: the whole step of three networks, planned, never run.

    .venv/bin/python benchmarks/updates.py [--time-limit 20] [NAME ...]

and one small network that does run: the growth of the process in its first steps.

    .venv/bin/python benchmarks/updates.py --process

and the arrays that optimizers of several operators make, in parts of a parameter, as one of 64 MB
is updated within a step, and as 1, 4, 16 and 64 equal ones of 64 MB together are behind it:

    .venv/bin/python benchmarks/updates.py --arrays adagrad adadelta adamax dcasgd test groupadagrad

and the same of parameters in float16, with ``multi_precision``, in parts of the copy in float32:

    .venv/bin/python benchmarks/updates.py --arrays --half adam rmsprop ftrl adagrad

Bytes are those of the parameters, activations and gradients; the optimizer's states come on top,
the same in every column, and so does the operators' workspace.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from typing import Any

import mxnet as mx
from mxnet.gluon.model_zoo import vision

import memplan
from memplan.errors import BudgetError
from memplan.planning.job import Job
from this_process import memory_nbytes

Network = tuple[mx.sym.Symbol, dict[str, Any]]  # and shapes
BUDGETS = (0.5, None)


def zoo(name: str, batch: int) -> Network:
    """A network of MXNet's zoo for pictures of 224 by 224."""
    scores = getattr(vision, name)()(mx.sym.Variable("data"))
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (batch, 3, 224, 224)}


def bert(batch: int = 8, length: int = 128, layers: int = 12, units: int = 768) -> Network:
    """As BERT-base: its layers, embeddings of 30522 words, and the words to be found again."""
    heads = 12

    def dense(data: Any, width: int, name: str) -> Any:
        return mx.sym.FullyConnected(data, num_hidden=width, flatten=False, name=name)

    words = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=30522, output_dim=units, name="words"
    )
    places = mx.sym.Variable("places_weight", shape=(1, length, units))
    body = mx.sym.LayerNorm(mx.sym.broadcast_add(words, places), name="first")
    body = mx.sym.transpose(body, axes=(1, 0, 2))
    for layer in range(layers):
        name = f"layer{layer}"
        mixed = dense(body, 3 * units, f"{name}_qkv")
        scores = mx.sym.contrib.interleaved_matmul_selfatt_qk(mixed, heads=heads)
        weights = mx.sym.Dropout(mx.sym.softmax(scores), p=0.1)
        mixed = mx.sym.contrib.interleaved_matmul_selfatt_valatt(mixed, weights, heads=heads)
        mixed = mx.sym.Dropout(dense(mixed, units, f"{name}_out"), p=0.1)
        body = mx.sym.LayerNorm(body + mixed, name=f"{name}_norm1")
        hidden = mx.sym.LeakyReLU(dense(body, 4 * units, f"{name}_up"), act_type="gelu")
        hidden = mx.sym.Dropout(dense(hidden, units, f"{name}_down"), p=0.1)
        body = mx.sym.LayerNorm(body + hidden, name=f"{name}_norm2")
    scores = dense(body, 30522, "scores")
    net = mx.sym.SoftmaxOutput(scores, preserve_shape=True, name="softmax")
    return net, {"data": (batch, length)}


NETWORKS: dict[str, Callable[[], Network]] = {
    "VGG-16, 32": lambda: zoo("vgg16", 32),
    "BERT-base, 8 x 128": bert,
    "ResNet-50, 32": lambda: zoo("resnet50_v1", 32),
}


def row(name: str, time_limit: float) -> str:
    """Of one network: bytes and overhead at each budget, without and with updates within."""
    symbol, shapes = NETWORKS[name]()
    unplanned = Job.prepare(symbol, **shapes).unplanned
    cells = [f"{(unplanned.total_nbytes - unplanned.workspace_nbytes) / 1e6:.0f}"]
    for budget in BUDGETS:
        for realisation in ("packed", "updating"):
            try:
                plan = memplan.plan(
                    symbol,
                    budget=budget,
                    realisation=realisation,
                    costs="roofline:v100",
                    time_limit=time_limit,
                    **shapes,
                )
                nbytes = plan.total_nbytes - plan.workspace_nbytes
                cells.append(f"{nbytes / 1e6:.0f} at {plan.overhead:+.1%}")
            except BudgetError as error:
                cells.append(f"no plan (least {(error.lowest_nbytes or 0) / 1e6:.0f})")
    return " | ".join(["", name, *cells, ""]).strip()


def growth(way: str) -> tuple[int, int]:
    """Bytes promised, and by which a planned process grows in three steps beyond parameters."""
    from mxnet import autograd, gluon
    from mxnet.gluon import nn

    from memplan.mxnet.gluon import TrainStep

    net = nn.HybridSequential()
    for _ in range(12):
        net.add(nn.Dense(2048, activation="tanh", in_units=2048))
    net.initialize(mx.init.Xavier())
    loss = gluon.loss.L2Loss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    x = mx.nd.ones((32, 2048))
    mx.nd.waitall()
    trainers = {"trainer": trainer} if way == "updating" else {}
    step = TrainStep(net, loss, realisation="packed", strategy="store_all", **trainers)
    if way != "unplanned":
        step.plan(x, x)
    for parameter in net.collect_params().values():
        parameter.grad_req = "null"  # the gradients of the start are part of the growth
    before = memory_nbytes("VmRSS")
    for parameter in net.collect_params().values():
        parameter.grad_req = "write"
    nbytes = sum(p.data().size * 4 for p in net.collect_params().values())
    if way == "unplanned":
        net.hybridize(static_alloc=True, static_shape=True)
        for _ in range(3):
            with autograd.record():
                losses = loss(net(x), x)
            losses.backward()
            trainer.step(32)
        mx.nd.waitall()
        return 0, memory_nbytes("VmRSS") - before
    for _ in range(3):
        step(x, x)
        if way == "packed":
            trainer.step(32)
    mx.nd.waitall()
    [plan] = step.plans.values()
    return plan.total_nbytes - nbytes, memory_nbytes("VmRSS") - before


def arrays(optimizer: str, half: bool, number: int, within: bool) -> float:
    """By how many arrays as large as a parameter a process grows in three updates.

    Of parameters in half precision these are as large as the copy in single precision.
    """
    from memplan.mxnet.train.memory_growth import MemoryGrowth

    shape = ((1 << 24) // number // 1024, 1024)
    dtype = "float16" if half else "float32"
    weights, gradients = ([mx.nd.ones(shape, dtype=dtype) for _ in range(number)] for _ in range(2))
    updater = mx.optimizer.get_updater(mx.optimizer.create(optimizer, multi_precision=half))
    for place, weight in enumerate(weights):
        updater.states[place] = updater.optimizer.create_state_multi_precision(place, weight)
        updater.states_synced[place] = True
    small = mx.nd.ones((64, 1024), dtype=dtype)
    updater(number, small, small)  # code that is used for the first time
    grown = MemoryGrowth(mx.cpu())
    for _ in range(3):
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            own = gradient.copy() if within else gradient
            own.wait_to_read()
            updater(place, own, weight)
        grown.look()
    return float(grown.nbytes / (4 * weights[0].size))


def rows_of_arrays(optimizers: list[str], half: bool) -> None:
    """What :func:`arrays` says of each, in processes of their own."""
    cases = [(1, True), (1, False), (4, False), (16, False), (64, False)]
    print("| optimizer | within | 1 | 4 | 16 | 64 |\n|---|---|---|---|---|---|")
    for name in optimizers:
        cells = []
        for case in cases:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                cells.append(f"{pool.apply(arrays, (name, half, *case)):.1f}")
        print(" | ".join(["", name, *cells, ""]).strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--time-limit", type=float, default=20)
    parser.add_argument("--process", action="store_true")
    parser.add_argument("--arrays", action="store_true")
    parser.add_argument("--half", action="store_true")
    options = parser.parse_args()
    if options.arrays:
        rows_of_arrays(options.names, options.half)
        return
    if options.process:
        print("| way | promised, MB | growth of the process, MB |\n|---|---|---|")
        for way in ("unplanned", "packed", "updating"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                promise, grown = pool.apply(growth, (way,))
            cell = "" if way == "unplanned" else f"{promise / 1e6:.0f}"
            print(f"| {way} | {cell} | {grown / 1e6:.0f} |")
        return
    ways = "half, packed | half, updating | least, packed | least, updating"
    print(f"| network, batch | unplanned | {ways} |\n|---|---|---|---|---|---|")
    for name in options.names or NETWORKS:
        print(row(name, options.time_limit), flush=True)


if __name__ == "__main__":
    main()
