"""Simulated annealing over the flags, scored by MXNet's own allocator (replayed)."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.search.flag_annealing import anneal
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flags_of
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, best_of


@dataclass(frozen=True)
class Anneal:
    """Improves ``start`` (or the unplanned step) by random changes for ``time_limit`` seconds.

    The same ``seed`` gives the same moves; how many are made depends on the machine.
    """

    time_limit: float = 60.0
    seed: int = 0
    start: Schedule | None = None

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest plan met within the budget; without one, that with the least memory."""
        first = Schedule.unplanned(graph) if self.start is None else self.start
        found = anneal(
            graph, flags_of(first), budget_nbytes, seconds=self.time_limit, seed=self.seed
        )
        return best_of([first] if found is None else [first, found], budget_nbytes)
