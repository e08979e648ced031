"""Extra cost of planned steps on published graphs, against the best published or measured.

    python benchmarks/published.py [--time-limit SECONDS] [--seed SEED] [GRAPH ...]

Graphs are those of ../shared/graphs, or files in their format; any op may run again, the order may
change. The budget is a percentage of the peak of the given order. `auto` counts live bytes here,
and takes all of its time unless it proves an optimum: on one core, and on a second one, where there
is one, for the bound. Printed as Markdown: the extra cost in percent, whether it is proved to be
optimal (for any order) or how far the proved bound is, the time taken, and in brackets, where there
is one, the reference and who has it.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import published_graphs
from memplan.errors import MemplanError
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem

# Extra cost in percent and source, by graph and budget in percent: FastSA (NeurIPS 2023), Moccasin
# (ICML 2023), Checkmate (MLSys 2020) and DTR (ICLR 2021); the U-Net's are proved for its order.
REFERENCES = {
    "rl1_n100": {90: (0.0, "FastSA"), 80: (0.3, "FastSA")},
    "rl2_n250": {90: (0.0, "FastSA"), 80: (0.0, "FastSA")},
    "rl3_n500": {90: (0.03, "FastSA, 21 s"), 80: (2.3, "FastSA, 21 s")},
    "resnet50_b256_train": {
        90: (0.1, "Checkmate, 434 s"),
        80: (0.3, "Checkmate, 485 s"),
        70: (0.75, "DTR"),
        50: (1.87, "DTR"),
        30: (4.79, "DTR"),
    },
    "unet_b32_train": {80: (1.98, "fixed order, proved"), 50: (6.97, "fixed order, proved")},
    "mobilenet_b512_train": {50: (1.65, "Moccasin, 254 s"), 30: (4.69, "DTR")},
}
PERCENTS = (90, 80, 70, 50, 30)


def cell(name: str, graph: TrainingGraph, percent: int, options: argparse.Namespace) -> str:
    """Our extra cost at this budget, beside the reference where there is one."""
    references = REFERENCES.get(name)
    if references is not None and percent not in references:
        return ""
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * percent // 100
    source_text = " ({:g}: {})".format(*references[percent]) if references else ""
    strategy = Auto(
        time_limit=options.time_limit,
        gap=0.0,
        effort=math.inf,
        seed=options.seed,
        recompute_backward=True,
    )
    begin = time.monotonic()
    outcome = strategy.solve(Problem(graph, budget))
    schedule, seconds = outcome.schedule, time.monotonic() - begin
    if schedule is None:
        found = "infeasible" if outcome.status is Status.INFEASIBLE else "none"
        return f"{found} in {seconds:.0f} s{source_text}"
    verdict = validate(schedule, budget)
    if not verdict.valid:
        raise AssertionError(verdict.reason)
    bound = (outcome.lower_bound_seconds or 0.0) / graph.seconds - 1.0
    proof = "optimal" if outcome.status is Status.OPTIMAL else f"bound {100 * bound:.2f}"
    return f"**{100 * schedule.overhead:.2f}** {proof}, {seconds:.1f} s{source_text}"


def graph_of(name: str) -> TrainingGraph:
    """The graph of this name, or of the file."""
    if name in published_graphs.names():
        return published_graphs.load(name)
    if not Path(name).is_file():
        there = ", ".join(published_graphs.names()) or f"none in {published_graphs.FOLDER}"
        raise SystemExit(f"no graph or file {name!r}; graphs are {there}")
    try:
        return published_graphs.in_file(Path(name))
    except MemplanError as error:
        raise SystemExit(f"{name}: {error}") from error


def main() -> None:
    """Print a row per graph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=", ".join(REFERENCES))
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    graphs = {name: graph_of(name) for name in options.graphs or REFERENCES}
    print("| graph | " + " | ".join(f"{percent}%" for percent in PERCENTS) + " |")
    print("|---" * (1 + len(PERCENTS)) + "|", flush=True)
    for name, graph in graphs.items():
        cells = [cell(name, graph, percent, options) for percent in PERCENTS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
