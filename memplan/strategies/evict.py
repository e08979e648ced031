"""Drops what is cheapest to recompute wherever the peak is, and improves that by search."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memplan.search.eviction import Evictions, lowest
from memplan.search.rematerialize import cheapest
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Status


@dataclass(frozen=True)
class Evict:
    """The search of :mod:`memplan.search.eviction`, for graphs that are too large for the program.

    It ends after ``time_limit`` seconds, or ``patience`` attempts in a row that found no cheaper
    schedule. Backward ops run once unless ``recompute_backward``.
    """

    time_limit: float = 20.0
    patience: int = 500
    seed: int = 0
    recompute_backward: bool = False

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest schedule found within the budget.

        Without one: the least memory found at no more than one extra forward pass.
        """
        deadline = time.monotonic() + self.time_limit
        if budget_nbytes is None:
            return Outcome(Status.FEASIBLE, lowest(graph, deadline))
        unplanned = cheapest([Schedule.unplanned(graph)], budget_nbytes)
        if unplanned is not None:
            return Outcome(Status.OPTIMAL, unplanned, graph.seconds)
        search = Evictions(graph, budget_nbytes, recompute_backward=self.recompute_backward)
        found = search.fit((), deadline)
        if found is None:
            return Outcome(Status.NO_PLAN_FOUND)
        found = search.improve(found, deadline, patience=self.patience, seed=self.seed)
        return Outcome(Status.FEASIBLE, found.schedule)
