"""Keep everything: the step without a plan."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, best_of


@dataclass(frozen=True)
class StoreAll:
    """Runs every op once, in base order."""

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The unplanned schedule, if it fits the budget."""
        return best_of([Schedule.unplanned(graph)], budget_nbytes)
