"""What a process takes that trains a network of next to no bytes: code, and the calls of operators.

    python benchmarks/code_memory.py
    DNNL_MAX_CPU_ISA=AVX2 python benchmarks/code_memory.py

From this come the constants of memplan/mxnet/realise/estimate/code_in_memory.py. Each figure is the
growth of a process of its own in three steps without recomputation. The first table is of the
smallest networks, the second of what a further operator adds: an LSTM cell of two units by the
number of its steps, each of which calls the same operators, and convolutions that differ in their
channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import mxnet as mx

from memplan.mxnet.train.trial import run_apart
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from process_networks import classified, conv

Network = tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--realisations", default="mirror,explicit,packed")
    parser.add_argument("--lengths", default="4,64", help="steps of the LSTM")
    parser.add_argument("--convolutions", default="16,64")
    options = parser.parse_args()
    realisations = options.realisations.split(",")
    header = f"| {' | '.join(realisations)} |\n{'|---' * (len(realisations) + 1)}|"
    print(f"| network, MB {header}")
    smallest = {"a dense layer": dense, "an LSTM cell": lambda: lstm(1), "a convolution": picture}
    for name, network in smallest.items():
        cells = [f"{grown(network(), realisation)[0] / 1e6:.1f}" for realisation in realisations]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n| a further operator, kB {header}")
    rows: tuple[tuple[str, Callable[[int], Network], str], ...] = (
        ("alike: of an LSTM cell", lstm, options.lengths),
        ("another: of a convolution, a BatchNorm, a ReLU", pictures, options.convolutions),
    )
    for name, of_size, sizes in rows:
        few, many = (of_size(int(size)) for size in sizes.split(","))
        cells = [f"{of_one_more(few, many, realisation) / 1e3:.1f}" for realisation in realisations]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def grown(network: Network, realisation: str) -> tuple[int, int]:
    """By how many bytes a process grows that trains it, and the number of its operators."""
    symbol, shapes = network
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    trial = run_apart(Schedule.unplanned(traced.graph), traced, ctx=mx.cpu())
    return trial.grown_nbytes, len(traced.graph.ops)


def of_one_more(few: Network, many: Network, realisation: str) -> float:
    """By how many bytes it grows for each further operator."""
    (less, fewer), (more, others) = (grown(network, realisation) for network in (few, many))
    return (more - less) / (others - fewer)


def dense() -> Network:
    """One dense layer."""
    out = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (2, 4)}


def picture() -> Network:
    """A convolution, a BatchNorm, a ReLU."""
    return classified(conv(mx.sym.Variable("data"), 16)), {"data": (2, 16, 8, 8)}


def pictures(number: int) -> Network:
    """So many of them, of which no two have one shape."""
    out = mx.sym.Variable("data")
    for place in range(number):
        out = conv(out, 8 * (1 + place % 8), kernel=1 + 2 * (place // 8 % 4), stride=1)
        out = mx.sym.Pooling(out, kernel=(2, 1), stride=(1, 1)) if place % 32 == 31 else out
    return classified(out), {"data": (1, 16, 8, 8)}


def lstm(steps: int) -> Network:
    """A cell of two units, called so many times."""
    cell = mx.rnn.LSTMCell(2, prefix="cell_")
    states = [mx.sym.zeros((2, 2)), mx.sym.zeros((2, 2))]
    outputs, _ = cell.unroll(steps, mx.sym.Variable("data"), begin_state=states, layout="NTC")
    out = mx.sym.FullyConnected(outputs[-1], num_hidden=4)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (2, steps, 2)}


if __name__ == "__main__":
    main()
