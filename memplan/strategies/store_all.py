"""Keep everything: the step without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Problem


@dataclass(frozen=True)
class StoreAll:
    """Runs every op once, in base order."""

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """That one schedule."""
        yield Schedule.unplanned(problem.graph)

    def solve(self, problem: Problem) -> Outcome:
        """The unplanned schedule, if it fits the budget: none is cheaper."""
        return problem.best_of(self.candidates(problem))
