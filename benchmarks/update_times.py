"""Small steps that update the parameters within, by Module: as fast as MXNet's own?

    python benchmarks/update_times.py [--pairs 41] [NETWORK ...]

NETWORK is one of benchmarks/process_networks.py whose steps take milliseconds; without any, all.
The same script's forward and backward pass, update and metric, by `mx.mod.Module` and by memplan's
with `realisation="updating"` and nothing recomputed. Twenty steps of each run in turn, and the
median of the ratios of neighbours counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

import memplan.mxnet
from process_networks import SMALL
from training import load, paired_ratio

STEPS = 20

OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "SGD": ("sgd", {"learning_rate": 1e-3}),
    "SGD with momentum": ("sgd", {"learning_rate": 1e-3, "momentum": 0.9}),
    "Adam": ("adam", {"learning_rate": 1e-3}),
}


def trained(module: Any, shapes: dict[str, tuple[int, ...]], optimizer: str) -> Callable[[], float]:
    """Trains ``module`` for some steps and gives the seconds of one."""
    size = shapes["data"][0]
    module.bind([("data", shapes["data"])], [("softmax_label", (size,))])
    module.init_params(mx.init.Xavier())
    name, options = OPTIMIZERS[optimizer]
    module.init_optimizer(kvstore=None, optimizer=name, optimizer_params=options)
    random = np.random.RandomState(0)
    data, labels = random.normal(size=shapes["data"]), random.randint(0, 10, size)
    batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(labels)])
    metric = mx.metric.create("acc")

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            module.forward_backward(batch)
            module.update()
            module.update_metric(metric, batch.label)
        mx.nd.waitall()
        return (time.perf_counter() - begin) / STEPS

    return seconds


def main() -> None:
    """Print a row per network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(SMALL))
    parser.add_argument("--pairs", type=int, default=41)
    options = parser.parse_args()
    for name in options.networks:
        if name not in SMALL:
            parser.error(f"argument NETWORK: no network {name!r}; they are {', '.join(SMALL)}")
    print("| network | stock step, ms |" + "".join(f" {name} |" for name in OPTIMIZERS) + " load |")
    print("|---" * (3 + len(OPTIMIZERS)) + "|", flush=True)
    for name in options.networks or SMALL:
        net, shapes = SMALL[name]()
        cells = []
        for optimizer in OPTIMIZERS:
            stock = trained(mx.mod.Module(net, context=mx.cpu()), shapes, optimizer)
            module = memplan.mxnet.Module(
                net, context=mx.cpu(), realisation="updating", strategy="store_all"
            )
            planned = trained(module, shapes, optimizer)
            cells.append(f"{paired_ratio(stock, planned, options.pairs):.3f}")
        milliseconds = 1000.0 * stock()
        print(f"| {name} | {milliseconds:.1f} | {' | '.join(cells)} | {load()} |", flush=True)


if __name__ == "__main__":
    main()
