"""What does planning leave in the process that then trains?

    python benchmarks/planning_memory.py
    python benchmarks/planning_memory.py --networks resnext,densenet121 --realisation mirror
    python benchmarks/planning_memory.py --networks lstm_108,transformer_63,high_resolution_33

Every figure is of a process of its own: by how many MB its resident set has grown when there is a
plan, since before memplan was imported. MXNet was loaded then, and had run an operator with
temporary space: for the first one, as any step has some, it makes its generators of random numbers.
"searched there" is how memplan plans, with the search in a child process; "searched here" is
without one.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
from functools import partial

import mxnet as mx

from networks import SHAPE, network_and_shapes
from process_networks import NETWORKS, high_resolution, lstm, transformer
from this_process import memory_nbytes

# Steps of 3,500 ops.
LARGE = {
    "lstm_108": partial(lstm, 108),
    "transformer_63": partial(transformer, 63),
    "high_resolution_33": partial(high_resolution, 33),
}


def main() -> None:
    """Print a table, or the figure of this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--realisation", default="packed")
    parser.add_argument("--budget", type=float, default=0.8, help="a share of the unplanned step")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each plan")
    parser.add_argument("--process", choices=("there", "here"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        print(*left_behind(options))
        return
    print("| network | training ops | searched there, MB | searched here, MB |\n|---|---|---|---|")
    for name in options.networks.split(","):
        (nops, there), (_, here) = (measured(name, where, options) for where in ("there", "here"))
        print(f"| {name} | {nops} | {there / 1e6:.0f} | {here / 1e6:.0f} |", flush=True)


def measured(name: str, where: str, options: argparse.Namespace) -> tuple[int, int]:
    """The ops of a step, and what planning leaves in a new process."""
    command = [sys.executable, __file__, "--networks", name, "--realisation", options.realisation]
    command += ["--budget", str(options.budget), "--time-limit", str(options.time_limit)]
    process = subprocess.run(
        [*command, "--process", where], check=True, stdout=subprocess.PIPE, text=True
    )
    nops, nbytes = map(int, process.stdout.split())
    return nops, nbytes


def left_behind(options: argparse.Namespace) -> tuple[int, int]:
    """The ops of a step, and by how much this process grows as it plans."""
    name = options.networks
    net, shapes = LARGE[name]() if name in LARGE else network_and_shapes(name, SHAPE)
    gc.collect()  # a block of Gluon, of which the network was made, goes before
    mx.nd.ones((2, 2)).sum().asnumpy()
    mx.nd.waitall()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_nbytes("VmRSS")
    import memplan
    from memplan.planning import apart

    apart.IN_A_CHILD = options.process == "there"
    plan = memplan.plan(
        net,
        budget=options.budget,
        realisation=options.realisation,
        ctx=mx.cpu(),
        time_limit=options.time_limit,
        **shapes,
    )
    return len(plan.schedule.graph.ops), memory_nbytes("VmRSS") - before


if __name__ == "__main__":
    main()
