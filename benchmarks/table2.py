"""Table 2 of the Checkmate paper, made anew: how far each strategy is from the optimum.

    python benchmarks/table2.py                # all, about 20 minutes on 2 cores
    python benchmarks/table2.py vgg16 unet     # two

Jain et al. 2020 (arXiv:1910.02653), section 6.4. Batch 32 at 224 x 224, roofline of a V100, peak
of live bytes, explicit realisation. Budgets are evenly spaced between the lowest peak that
``evict`` reaches and the unplanned one. A strategy's figure is the geometric mean, over the
budgets that it meets, of its seconds a step over the optimum's, or, where no optimum is proved,
over the best proven bound. The bounds hold for what all these strategies make: schedules that
advance the frontier in base order and run backward ops once.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.planning.realisation import trace
from memplan.programs.solver import TOLERANCE
from memplan.step.costs import with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Outcome, Status, create
from memplan.strategies.base import Problem
from networks import SHAPE, network

NETWORKS = ("mobilenet1_0", "vgg16", "vgg19", "unet", "resnet50_v1")
# Checkmate's rounding alone; under its own name it is followed by a search.
ROUNDING = "checkmate_lp, rounding alone"
STRATEGIES = (
    "chen_sqrt",
    "chen_sqrt:linear",
    "chen_greedy",
    "chen_greedy:linear",
    "griewank",
    "griewank:linear",
    "evict",
    "search",
    ROUNDING,
    "checkmate_lp",
    "checkmate",
)

# What all bounds hold for, where a strategy has the choice.
KIND = {"reorder": False, "recompute_backward": False}

# Seconds for each plan: the relaxation of ResNet-50 alone takes about 20.
LIMIT = 10.0
LIMITS = {"resnet50_v1": 40.0}


@dataclass(frozen=True)
class Cell:
    """The answers of all strategies at one budget; ``bound`` is the best that one has proved."""

    budget_nbytes: int
    seconds: dict[str, float]
    bound: float
    proved: bool

    def ratio(self, strategy: str) -> float | None:
        """Seconds over those of the optimum or of its bound; None without a schedule."""
        own_seconds = self.seconds.get(strategy)
        return None if own_seconds is None else own_seconds / self.bound


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product of n positive ``values``."""
    product = 1.0
    for value in values:
        product *= value ** (1.0 / len(values))
    return product


def budgets(graph: TrainingGraph, count: int, seconds: float) -> list[int]:
    """``count`` budgets, evenly spaced between the lowest peak found and the unplanned one."""
    high = simulate(Schedule.unplanned(graph)).peak_nbytes
    least = create("evict", realisation="explicit", time_limit=seconds).solve(Problem(graph, None))
    assert least.schedule is not None
    low = simulate(least.schedule).peak_nbytes
    return [low + (high - low) * k // (count + 1) for k in range(1, count + 1)]


def solve(name: str, graph: TrainingGraph, budget_nbytes: int, options: dict[str, Any]) -> Outcome:
    """What the strategy finds, ``options`` taken as far as it has them."""
    strategy: Any = create(name.split(",")[0], realisation="explicit")
    fields = {key: value for key, value in options.items() if hasattr(strategy, key)}
    if name == ROUNDING:
        fields["patience"] = 0
    outcome: Outcome = replace(strategy, **fields).solve(Problem(graph, budget_nbytes))
    return outcome


def measure(
    graph: TrainingGraph, budget_nbytes: int, strategies: Iterable[str], options: dict[str, Any]
) -> Cell:
    """All strategies at one budget; AssertionError for a bound or a plan that cannot be true."""
    seconds: dict[str, float] = {}
    bound, is_proved = graph.seconds, False
    for name in strategies:
        outcome = solve(name, graph, budget_nbytes, options)
        bound = max(bound, outcome.lower_bound_seconds or 0.0)
        if outcome.schedule is not None:
            assert simulate(outcome.schedule).peak_nbytes <= budget_nbytes, name
            seconds[name] = outcome.schedule.seconds
            is_proved |= outcome.status is Status.OPTIMAL
    least = min(seconds.values(), default=bound)
    assert least >= bound * (1.0 - TOLERANCE), (seconds, bound)
    return Cell(budget_nbytes, seconds, min(bound, least), is_proved)


def table(columns: Sequence[tuple[str, Sequence[Cell]]], strategies: Sequence[str]) -> str:
    """Strategies down, networks across; in parentheses how many budgets a strategy met."""
    lines = ["| strategy | " + " | ".join(name for name, _ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    counts = [f"{sum(cell.proved for cell in cells)} of {len(cells)}" for _, cells in columns]
    lines.append("| optimum proved | " + " | ".join(counts) + " |")
    for strategy in strategies:
        texts = []
        for _, cells in columns:
            ratios = [r for r in (cell.ratio(strategy) for cell in cells) if r is not None]
            texts.append(f"{geometric_mean(ratios):.3f} ({len(ratios)})" if ratios else "– (0)")
        lines.append(f"| {strategy} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def details(name: str, cell: Cell, strategies: Iterable[str]) -> str:
    """A line: the budget, and what every strategy takes there."""
    ratios = (cell.ratio(strategy) for strategy in strategies)
    texts = ["–" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    reference = "optimum" if cell.proved else "bound"
    return f"| {name} | {cell.budget_nbytes >> 20} | {reference} | " + " | ".join(texts) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=", ".join(NETWORKS))
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--budgets", type=int, default=5, help="of each network")
    parser.add_argument("--solver", default="HIGHS", help="HIGHS or CBC")
    parser.add_argument("--time-limit", type=float, help="seconds for each plan")
    arguments = parser.parse_args()

    columns = []
    print("| network | budget, MB | over the | " + " | ".join(arguments.strategies) + " |")
    print("|---" * (len(arguments.strategies) + 3) + "|", flush=True)
    for name in arguments.networks or NETWORKS:
        limit = arguments.time_limit or LIMITS.get(name, LIMIT)
        options = {"solver": arguments.solver, "time_limit": limit, **KIND}
        traced = trace(network(name), realisation="explicit", shapes={"data": SHAPE})
        graph = with_costs(traced.graph, "roofline:v100")
        cells = []
        for budget in budgets(graph, arguments.budgets, limit):
            cells.append(measure(graph, budget, arguments.strategies, options))
            print(details(name, cells[-1], arguments.strategies), flush=True)
        columns.append((name, cells))
    print()
    print(table(columns, arguments.strategies))


if __name__ == "__main__":
    main()
