"""A plan to start from: the best of strategies that are fast, and unlike each other."""

from __future__ import annotations

import time
from collections.abc import Callable

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies import Strategy, create

NAMES = {
    "mirror": ("store_all", "memonger", "chen_greedy", "chen_greedy_linear", "chen_sqrt"),
    "explicit": ("store_all", "chen_greedy", "chen_greedy_linear", "chen_sqrt", "griewank"),
}
NAMES["packed"] = NAMES["explicit"]

# On graphs with more ops than this they are not quick.
LARGE = 3000

# Quick strategies of the explicit realisation mind live bytes, and MXNet's blocks need more: these
# shares of the budget are tried until one fits.
SHARES = {
    "mirror": (1.0,),
    "explicit": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5),
    "packed": (1.0, 0.98, 0.95),
}


def quick_schedule(
    graph: TrainingGraph,
    realisation: str,
    budget_nbytes: int | None,
    deadline: float,
    nbytes_of: Callable[[Schedule], int],
) -> Schedule:
    """The cheapest schedule that fits.

    If none does, the one that needs fewest bytes at no more than one extra forward pass.
    ``nbytes_of`` says what a schedule needs. Strategies that have not begun at ``deadline``, a
    time of time.monotonic(), are left out.
    """
    strategies = _strategies(graph, realisation)
    targets: list[int | None] = [None]
    if budget_nbytes is not None:
        targets = [*(int(share * budget_nbytes) for share in SHARES[realisation]), None]
    unplanned = Schedule.unplanned(graph)
    plans = [unplanned]
    for target in targets:
        outcomes = [
            strategy.solve(graph, target) for strategy in strategies if time.monotonic() < deadline
        ]
        plans = [found.schedule for found in outcomes if found.schedule is not None] or plans
        for plan in sorted(plans, key=lambda schedule: schedule.seconds):
            if budget_nbytes is not None and nbytes_of(plan) <= budget_nbytes:
                return plan
    most_seconds = graph.seconds + graph.forward_seconds
    plans = [unplanned, *(plan for plan in plans if plan.seconds <= most_seconds)]
    return min(plans, key=nbytes_of)


def fewest_bytes(
    graph: TrainingGraph,
    realisation: str,
    deadline: float,
    nbytes_of: Callable[[Schedule], int],
) -> Schedule:
    """Of the quick strategies' schedules, the one that needs fewest bytes, whatever it costs.

    Arguments are those of :func:`quick_schedule`.
    """
    plans = [Schedule.unplanned(graph)]
    for strategy in _strategies(graph, realisation):
        outcome = strategy.solve(graph, None) if time.monotonic() < deadline else None
        if outcome is not None and outcome.schedule is not None:
            plans.append(outcome.schedule)
    return min(plans, key=nbytes_of)


def _strategies(graph: TrainingGraph, realisation: str) -> list[Strategy]:
    names = NAMES[realisation] if len(graph.ops) <= LARGE else ("store_all",)
    return [create(name, realisation=realisation) for name in names]
