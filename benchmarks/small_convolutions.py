"""Networks of many small convolutions that differ: what a process takes, beside what is promised.

    python benchmarks/small_convolutions.py

Most of what such a network takes is code that oneDNN writes for its operators, and what their calls
take (memplan/mxnet/realise/estimate/code_in_memory.py). Each is trained without recomputation, in a
process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import mxnet as mx

import memplan
from memplan.mxnet.check import promised_growth
from memplan.mxnet.train.trial import run_apart
from process_networks import Shapes, Symbol

Network = tuple[Symbol, Shapes]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--realisations", default="mirror,explicit,packed")
    options = parser.parse_args()
    realisations = options.realisations.split(",")
    print(f"| promised, measured, MB | {' | '.join(realisations)} |")
    print("|---" * (len(realisations) + 1) + "|")
    for name in options.networks.split(","):
        cells = [compared(*NETWORKS[name](), realisation) for realisation in realisations]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def compared(net: Symbol, shapes: Shapes, realisation: str) -> str:
    """The promise for a network, and the growth."""
    options: dict[str, Any] = {"realisation": realisation, "strategy": "store_all"}
    plan = memplan.plan(net, ctx=mx.cpu(), **options, **shapes)
    grown = run_apart(plan.schedule, plan.trace, ctx=mx.cpu()).grown_nbytes
    return f"{promised_growth(plan.footprint) / 1e6:.1f}, {grown / 1e6:.1f}"


def inverted(nblocks: int) -> Network:
    """So many inverted residual blocks of small pictures."""
    out = mx.sym.Variable("data")
    for place in range(nblocks):
        wide = 24 + 4 * (place % 12)
        out = conv(conv(out, wide), wide, kernel=3, groups=wide)
        out = conv(out, 8 + 4 * (place % 7), is_active=False)
    return classified(out), {"data": (1, 16, 8, 8)}


def zoo(name: str) -> Network:
    """A network of Gluon's zoo on small pictures."""
    net = mx.gluon.model_zoo.vision.get_model(name, classes=10)
    net.initialize()
    return mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax"), {
        "data": (1, 3, 64, 64)
    }


def grouped() -> Network:
    """Twelve residual blocks of convolutions in eight groups."""
    out = conv(mx.sym.Variable("data"), 16, kernel=3)
    for place in range(12):
        nfilter = 16 + 8 * (place // 2)
        body = conv(conv(out, 2 * nfilter), 2 * nfilter, kernel=3, groups=8)
        short_cut = conv(out, nfilter, is_active=False)
        out = conv(body, nfilter, is_active=False) + short_cut
        out = mx.sym.Activation(out, act_type="relu")
    return classified(out), {"data": (4, 3, 16, 16)}


def conv(
    data: Symbol, nfilter: int, *, kernel: int = 1, groups: int = 1, is_active: bool = True
) -> Symbol:
    """A convolution, a BatchNorm and, if it ``is_active``, a ReLU."""
    sizes = {"num_filter": nfilter, "num_group": groups, "kernel": (kernel, kernel)}
    out = mx.sym.Convolution(data, **sizes, pad=(kernel // 2, kernel // 2), no_bias=True)
    out = mx.sym.BatchNorm(out, fix_gamma=False)
    return mx.sym.Activation(out, act_type="relu") if is_active else out


def classified(data: Symbol) -> Symbol:
    """Ten classes of it."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=10), name="softmax")


NETWORKS: dict[str, Callable[[], Network]] = {
    "one inverted residual block": lambda: inverted(1),
    "40 inverted residual blocks": lambda: inverted(40),
    "120 inverted residual blocks": lambda: inverted(120),
    "mobilenet0.25": lambda: zoo("mobilenet0.25"),
    "mobilenetv2_0.25": lambda: zoo("mobilenetv2_0.25"),
    "12 blocks of grouped convolutions": grouped,
}

if __name__ == "__main__":
    main()
