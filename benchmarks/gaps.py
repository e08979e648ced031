"""How far plans are from their proven bounds, by network and budget.

    python benchmarks/gaps.py [--budgets 60,50,40,30] [--seconds 30] [--memory packed] [NAME ...]

A NAME is a network of benchmarks/gap_networks.py, one of its sets (tuned, held-out, long), a
published graph of ../shared/graphs, or a file: a graph that memplan wrote or one in the format of
../shared/graphs, or a network of MXNet with shapes (net-symbol.json:data=32,3,224,224). Without
names: the twenty of tuned and held-out. Roofline of a V100. A budget is a percentage of the
unplanned step, arguments and gradients included; of a graph in a file, of its bytes in the given
order.

Printed as Markdown, a row per network. A cell: overhead in percent, the proven bound, the gap
between them in points, which strategy found it. "proved": no plan is cheaper. "cut": the clock
ended a search. Several --strategies are given the same time each: the cheapest plan counts, and the
highest bound of all. A bound counts at the tighter budgets that come after it.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import gap_networks
import published_graphs
from memplan.errors import MemplanError
from memplan.memory.memory import Blocks, Live, Memory, Packed
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.validate import first_violation
from memplan.strategies import Outcome, Status, configured, create, options_of
from memplan.strategies.base import MOST_OVERHEAD, SEQUENCES, Problem

MEMORIES = {"packed": Packed(), "live": Live(), "blocks": Blocks()}


@dataclass(frozen=True)
class Step:
    """A step to plan: all that its unplanned run holds, and what of it no plan can change."""

    graph: TrainingGraph
    memory: Memory
    total_nbytes: int
    beside_nbytes: int

    def limit(self, percent: float) -> int:
        """The bytes for tensors at this percentage of the unplanned step."""
        return int(self.total_nbytes * percent / 100.0) - self.beside_nbytes


@dataclass(frozen=True)
class Cell:
    """What was found at one budget, in percent of the unplanned step's time.

    ``overhead`` is None without a plan; an infinite ``bound`` means that there is none.
    """

    overhead: float | None
    bound: float
    strategy: str
    cut: bool
    seconds: float

    @property
    def gap(self) -> float | None:
        """Points between plan and bound; None where there is no plan."""
        return None if self.overhead is None else max(0.0, self.overhead - self.bound)

    def __str__(self) -> str:
        ending = f"{', cut' if self.cut else ''}, {self.seconds:.0f} s"
        if self.overhead is None and math.isinf(self.bound):
            return f"none: proved{ending}"
        if self.overhead is None:
            return f"**none**, bound {self.bound:.2f}{ending}"
        proof = "proved" if self.gap == 0.0 else f"bound {self.bound:.2f}, gap **{self.gap:.2f}**"
        return f"{self.overhead:.2f}, {proof}, {self.strategy}{ending}"


def of_network(network: gap_networks.Made, memory: str, seconds: float) -> Step:
    """The step of a network of MXNet."""
    from memplan.planning.job import Job

    net, shapes = network
    job = Job.prepare(
        net, realisation="packed", costs="roofline:v100", time_limit=seconds, **shapes
    )
    counted_memory = job.memory if memory == "packed" else MEMORIES[memory]
    return Step(job.graph, counted_memory, job.unplanned.total_nbytes, job.unplanned.beside_nbytes)


def of_graph(graph: TrainingGraph, memory: str) -> Step:
    """The step of a graph."""
    counted_memory = MEMORIES[memory]
    total = counted_memory.nbytes(Schedule.unplanned(graph)) + graph.fixed_nbytes
    return Step(graph, counted_memory, total, graph.fixed_nbytes)


def step_of(name: str, memory: str, seconds: float) -> Step:
    """The step of a network, published graph or file by name."""
    networks = gap_networks.NETWORKS | gap_networks.LONG
    if name in networks:
        return of_network(networks[name](), memory, seconds)
    if name in published_graphs.names():
        return of_graph(published_graphs.load(name), memory)
    file, _, shapes = name.partition(":")
    if not Path(file).is_file():
        sets = (*gap_networks.SETS, *networks, *published_graphs.names())
        raise SystemExit(f"no network or file {name!r}; networks and sets are {', '.join(sets)}")
    if gap_networks.is_symbol(Path(file)):
        return of_network(gap_networks.load(file, shapes), memory, seconds)
    return of_graph(published_graphs.in_file(Path(file)), memory)


def answer(step: Step, percent: float, strategy: str, options: argparse.Namespace) -> Outcome:
    """What a strategy finds, its schedule checked."""
    solver = create(strategy)
    if options.any_op_again and "recompute_backward" in options_of(solver):
        solver = create(configured(solver, recompute_backward=True))
    limit = step.limit(percent)
    if limit < 0:
        return Outcome(Status.INFEASIBLE)
    problem = Problem(
        step.graph,
        limit,
        memory=step.memory,
        max_overhead=MOST_OVERHEAD,
        time_limit=options.seconds,
    )
    outcome = solver.solve(problem)
    if outcome.schedule is not None:
        reason = first_violation(outcome.schedule)
        if reason is not None or step.memory.nbytes(outcome.schedule) > limit:
            raise AssertionError(f"{strategy} at {percent}%: {reason or 'too many bytes'}")
    return outcome


def cell(step: Step, percent: float, options: argparse.Namespace, looser: float) -> Cell:
    """The cheapest plan and the highest bound; one of ``looser`` percent is known."""
    begin, unplanned = time.monotonic(), step.graph.seconds
    best: tuple[float, str] | None = None
    bound, cut = looser, False
    for strategy in options.strategies:
        outcome = answer(step, percent, strategy, options)
        cut |= outcome.cut_by_clock
        proves = not outcome.in_order
        if outcome.status is Status.INFEASIBLE and proves:
            bound = math.inf
        elif proves and outcome.lower_bound_seconds is not None:
            bound = max(bound, 100.0 * (outcome.lower_bound_seconds / unplanned - 1.0))
        if outcome.schedule is not None:
            overhead = 100.0 * outcome.schedule.overhead
            if outcome.status is Status.OPTIMAL and proves:
                bound = max(bound, overhead)
            best = min(best or (overhead, strategy), (overhead, strategy))
    seconds = time.monotonic() - begin
    if best is not None and bound > best[0] + 1e-3:
        raise AssertionError(f"{percent}%: bound {bound} above the plan of {best}")
    if best is None:
        return Cell(None, bound, "", cut, seconds)
    return Cell(best[0], bound, best[1], cut, seconds)


def summary(cells: list[Cell]) -> str:
    """Mean and worst gap, and how many have no plan, or none that is proved."""
    gaps = [cell.gap for cell in cells if cell.gap is not None]
    lost = sum(cell.gap is None and math.isfinite(cell.bound) for cell in cells)
    text = f"{len(cells)} plans: {lost} neither found nor excluded"
    if gaps:
        closed = sum(gap == 0.0 for gap in gaps)
        mean, worst = sum(gaps) / len(gaps), max(gaps)
        text += f", {closed} proved; gap {mean:.2f} points in the mean, {worst:.2f} at worst"
    return text


def percents(text: str) -> list[float]:
    """The numbers in ``text``, separated by commas."""
    found = [float(number) for number in text.split(",")]
    if not all(0.0 < number < math.inf for number in found):
        raise argparse.ArgumentTypeError(f"percentages are positive, got {text!r}")
    return found


def strategies(text: str) -> list[str]:
    """The strategies that ``text`` names, separated by commas."""
    try:
        for name in text.split(","):
            create(name)
    except MemplanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text.split(",")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--budgets", type=percents, default="60,50,40,30", help="percent of the unplanned step"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="for each plan")
    parser.add_argument("--memory", choices=sorted(MEMORIES), default="packed")
    parser.add_argument("--strategies", type=strategies, default="auto", help="separated by commas")
    parser.add_argument("--any-op-again", action="store_true", help="backward ops, too")
    options = parser.parse_args()
    names = [
        name
        for argument in options.names or ("tuned", "held-out")
        for name in gap_networks.SETS.get(argument, (argument,))
    ]
    SEQUENCES.prepare()  # compiling is not to be in anybody's time
    print("| network | ops |" + "".join(f" {percent:g}% |" for percent in options.budgets))
    print("|---" * (2 + len(options.budgets)) + "|", flush=True)
    cells: list[Cell] = []
    for name in names:
        try:
            step = step_of(name, options.memory, options.seconds)
        except MemplanError as error:
            raise SystemExit(f"{name}: {error}") from error
        print(f"| {name} | {len(step.graph.ops)} |", end="", flush=True)
        highest: dict[float, float] = {}
        for percent in options.budgets:
            looser = max((b for p, b in highest.items() if p >= percent), default=0.0)
            cells.append(cell(step, percent, options, looser))
            highest[percent] = cells[-1].bound
            print(f" {cells[-1]} |", end="", flush=True)
        print(flush=True)
    print(f"\n{summary(cells)}")


if __name__ == "__main__":
    main()
