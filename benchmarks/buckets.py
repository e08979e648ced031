"""Plans that follow the first plan of a network at other shapes, beside plans of their own.

    .venv/bin/python benchmarks/buckets.py [NAME ...] [--realisations packed explicit]
        [--budget 0.7] [--effort 1] [--time-limit 600]

The budget is the same share of each unplanned step. Seconds are those of the processor, of the
child process that plans, too, tracing and its start included; a plan of its own is made as if its
shapes were the first. Costs are those of a V100's roofline.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

import mxnet as mx
from mxnet.gluon.model_zoo import vision

from memplan.planning.plan import Plan
from memplan.planning.process import PlanningProcess
from memplan.planning.shapes import ShapePlanner
from this_process import processor_seconds

Symbol: TypeAlias = Any  # MXNet has no types
Network = Callable[[int], tuple[Symbol, dict[str, tuple[int, ...]]]]
WORDS, BATCH = 2000, 32


def _scores(outputs: Symbol, units: int) -> Symbol:
    """The loss of the next word, of outputs of any leading dimensions."""
    scores = mx.sym.FullyConnected(
        mx.sym.reshape(outputs, shape=(-1, units)), num_hidden=WORDS, name="scores"
    )
    labels = mx.sym.reshape(mx.sym.Variable("label"), shape=(-1,))
    return mx.sym.SoftmaxOutput(scores, labels, name="softmax")


def _embedded(name: str, units: int) -> Symbol:
    return mx.sym.Embedding(
        mx.sym.Variable(name), input_dim=WORDS, output_dim=units, name=f"{name}_words"
    )


def lstm(length: int) -> Any:
    """Two layers by cells, as in MXNet's example of bucketing."""
    stack = mx.rnn.SequentialRNNCell()
    for layer in range(2):
        stack.add(mx.rnn.LSTMCell(num_hidden=200, prefix=f"lstm_l{layer}_"))
    outputs, _ = stack.unroll(length, inputs=_embedded("data", 200), merge_outputs=True)
    return _scores(outputs, 200), {"data": (BATCH, length), "label": (BATCH, length)}


def fused(length: int) -> Any:
    """A language model of fused RNNs, as in MXNet's example."""
    body = mx.sym.transpose(_embedded("data", 650), axes=(1, 0, 2))
    for layer in range(2):
        cell = mx.rnn.FusedRNNCell(650, num_layers=1, mode="lstm", prefix=f"lstm_l{layer}_")
        body, _ = cell.unroll(length, inputs=body, layout="TNC", merge_outputs=True)
        body = mx.sym.Dropout(body, p=0.5)
    labels = {"data": (BATCH, length), "label": (length, BATCH)}
    return _scores(body, 650), labels


def transformer(length: int, layers: int = 4, units: int = 256, heads: int = 4) -> Any:
    """An encoder whose attention holds the square of the length."""
    body = mx.sym.transpose(_embedded("data", units), axes=(1, 0, 2))
    for layer in range(layers):
        name = f"layer{layer}"

        def dense(data: Symbol, width: int, part: str, name: str = name) -> Symbol:
            return mx.sym.FullyConnected(
                data, num_hidden=width, flatten=False, name=f"{name}_{part}"
            )

        mixed = dense(body, 3 * units, "qkv")
        weights = mx.sym.softmax(mx.sym.contrib.interleaved_matmul_selfatt_qk(mixed, heads=heads))
        weights = mx.sym.Dropout(weights, p=0.1)
        mixed = mx.sym.contrib.interleaved_matmul_selfatt_valatt(mixed, weights, heads=heads)
        body = mx.sym.LayerNorm(body + dense(mixed, units, "out"), name=f"{name}_norm1")
        hidden = mx.sym.LeakyReLU(dense(body, 4 * units, "up"), act_type="gelu")
        body = mx.sym.LayerNorm(body + dense(hidden, units, "down"), name=f"{name}_norm2")
    return _scores(body, units), {"data": (BATCH, length), "label": (length, BATCH)}


def gru(length: int) -> Any:
    """A sequence to a sequence by cells: the last state of one GRU begins another."""
    first, second = mx.rnn.GRUCell(256, prefix="first_"), mx.rnn.GRUCell(256, prefix="second_")
    _, state = first.unroll(length, inputs=_embedded("data", 128), merge_outputs=True)
    outputs, _ = second.unroll(
        length, inputs=_embedded("target", 128), begin_state=state, merge_outputs=True
    )
    shape = (BATCH, length)
    return _scores(outputs, 256), {"data": shape, "target": shape, "label": shape}


def pictures(size: int) -> Any:
    """MobileNet of MXNet's zoo, at pictures of this size."""
    scores = vision.mobilenet0_5(prefix="net_")(mx.sym.Variable("data"))
    net = mx.sym.SoftmaxOutput(scores, mx.sym.Variable("label"), name="softmax")
    return net, {"data": (BATCH, 3, size, size), "label": (BATCH,)}


# The first size is planned first, the others follow it.
NETWORKS: dict[str, tuple[Network, tuple[int, ...]]] = {
    "LSTM by cells": (lstm, (20, 12, 28)),
    "fused LSTM": (fused, (35, 20, 50)),
    "transformer": (transformer, (128, 64, 192)),
    "GRU to GRU": (gru, (14, 8, 20)),
    "MobileNet": (pictures, (192, 128, 224)),
}


def _planned(planner: ShapePlanner, network: Network, size: int) -> tuple[Plan, float]:
    """The plan at this size, and the seconds of the processor that it took."""
    with mx.name.NameManager():
        net, shapes = network(size)
    begin = processor_seconds()
    plan = planner.plan(net, shapes=shapes)
    return plan, processor_seconds() - begin


def _end_the_process() -> None:
    """A first plan has to start the process that plans; it waits for the next one."""
    if (process := PlanningProcess.waiting()) is not None:
        process.end()


def rows(name: str, realisation: str, options: argparse.Namespace) -> None:
    """Print a row for each size of a network that follows its first."""

    def planner() -> ShapePlanner:
        return ShapePlanner(
            budget=options.budget,
            strategy=f"auto:effort={options.effort}",
            realisation=realisation,
            time_limit=options.time_limit,
            share_of_first=False,
        )

    network, (first, *others) = NETWORKS[name]
    shared = planner()
    _end_the_process()
    _, first_seconds = _planned(shared, network, first)
    for size in others:
        follower, seconds = _planned(shared, network, size)
        _end_the_process()
        own, own_seconds = _planned(planner(), network, size)
        cells = (
            f"{name}, {realisation}",
            f"{first}, then {size}",
            f"{first_seconds:.1f}",
            f"{own_seconds:.1f}",
            f"{seconds:.1f}",
            f"{seconds / own_seconds:.2f}",
            f"{follower.overhead:.1%}",
            f"{own.overhead:.1%}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--realisations", nargs="+", default=["packed", "explicit"])
    parser.add_argument("--budget", type=float, default=0.7)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--time-limit", type=float, default=600.0)
    options = parser.parse_args()
    print(
        "| network | sizes | first plan, s | own plan, s | following, s | of its own | overhead | "
        "of its own |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in options.networks:
        for realisation in options.realisations:
            rows(name, realisation, options)


if __name__ == "__main__":
    main()
