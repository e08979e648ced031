"""How long tracing takes, and how the simulated peak compares with what MXNet allocates.

    python benchmarks/trace.py [NETWORK ...]

Unplanned steps of Gluon's vision networks, batch 32. The peak of live bytes is what no placement
can go below; MXNet hands out whole blocks, which neither split nor merge, and its total depends on
NNVM_EXEC_MATCH_RANGE: the best of 1, 2, 4, 8, 16 is taken.
"""

from __future__ import annotations

import argparse
import inspect
import time

from mxnet.gluon.model_zoo import vision

from memplan.memory.blocks import allocate
from memplan.mxnet.trace.build import trace
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from networks import network

NETWORKS = sorted(
    name
    for name, value in vars(vision).items()
    if inspect.isfunction(value) and not name.startswith("get_")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS, metavar="NETWORK")
    names = parser.parse_args().networks
    print("| network | ops | trace, s | peak, MB | MXNet at the best range, MB | peak / MXNet |")
    print("|---|---|---|---|---|---|")
    close = 0
    for name in names:
        net = network(name)
        size = 299 if "inception" in name else 224
        begin = time.perf_counter()
        graph = trace(net, shapes={"data": (32, 3, size, size)}).graph
        seconds = time.perf_counter() - begin
        unplanned = Schedule.unplanned(graph)
        peak = simulate(unplanned).peak_nbytes
        best = min(allocate(unplanned, match_range=r).nbytes for r in (1, 2, 4, 8, 16))
        close += peak >= 0.95 * best
        print(
            f"| {name} | {len(graph.ops)} | {seconds:.2f} | {peak >> 20} | {best >> 20} "
            f"| {peak / best:.3f} |",
            flush=True,
        )
    print(f"\nwithin 5%: {close} of {len(names)}")


if __name__ == "__main__":
    main()
