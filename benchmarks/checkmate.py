"""Golden values of Checkmate on the published graphs, and how long it takes to prove them.

    python benchmarks/checkmate.py [--solver HIGHS|CBC] [--time-limit SECONDS] [GRAPH@PERCENT ...]

The budget of GRAPH@PERCENT is that part of the unplanned peak. Without arguments: the 17-op unit
chain at 4 tensors, where the optimum is 26, and the U-Net, whose optima are 31620 at 80% and 33165
at 50%. Graphs are those of ../shared/graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import published_graphs
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Strategy
from memplan.strategies.base import Problem
from memplan.strategies.checkmate import Checkmate
from memplan.strategies.checkmate_lp import CheckmateLP
from memplan.strategies.chen import ChenGreedy, ChenSqrt
from memplan.strategies.evict import Evict
from memplan.strategies.griewank import Griewank

GOLDEN = {"unit_chain": 26.0, "unet_b32_train@80": 31620.0, "unet_b32_train@50": 33165.0}


def unit_chain() -> TrainingGraph:
    """17 ops: op i reads op i - 1, for i > 8 also op 16 - i; every cost and size is 1."""
    inputs = [tuple(dict.fromkeys((i - 1, 16 - i)[: 1 + (i > 8)])) if i else () for i in range(17)]
    return TrainingGraph(
        tuple(Op(f"op{i}", "op", inputs[i], (i,), 1.0) for i in range(17)),
        tuple(Tensor(f"op{i}", 1, 1) for i in range(17)),
        heads=(16,),
        nforward=9,
    )


def cases(names: list[str]) -> Iterator[tuple[str, TrainingGraph, int]]:
    """Name, graph and budget of every case."""
    for name in names or GOLDEN:
        if name == "unit_chain":
            yield name, unit_chain(), 4
            continue
        graph = published_graphs.load(name.split("@")[0])
        peak = simulate(Schedule.unplanned(graph)).peak_nbytes
        yield name, graph, peak * int(name.split("@")[1]) // 100


def main() -> None:
    """Print a line per case and strategy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--solver", default="HIGHS")
    parser.add_argument("--time-limit", type=float, default=120.0)
    options = parser.parse_args()
    limits = {"time_limit": options.time_limit, "solver": options.solver}
    strategies: dict[str, Strategy] = {
        "chen_sqrt:linear": ChenSqrt(linear=True),
        "chen_greedy": ChenGreedy(),
        "chen_greedy:linear": ChenGreedy(linear=True),
        "griewank": Griewank(),
        "griewank:linear": Griewank(linear=True),
        "evict": Evict(),
        "checkmate_lp": CheckmateLP(**limits),
        "checkmate": Checkmate(**limits),
    }
    for name, graph, budget in cases(options.cases):
        print(f"{name}: budget {budget}, once {graph.seconds:g}, golden {GOLDEN.get(name, '-')}")
        for label, strategy in strategies.items():
            begin = time.monotonic()
            outcome = strategy.solve(Problem(graph, budget))
            seconds = time.monotonic() - begin
            line = f"  {label:20} {outcome.status.value:14} {seconds:7.2f} s"
            if outcome.schedule is not None:
                peak = simulate(outcome.schedule).peak_nbytes
                line += f"  cost {outcome.schedule.seconds:10g}  peak {peak / budget:7.2%}"
            if outcome.lower_bound_seconds is not None:
                line += f"  bound {outcome.lower_bound_seconds:10.1f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
