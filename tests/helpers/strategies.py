"""Strategies that tell the tests what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Problem, Status


@dataclass(frozen=True)
class Counting:
    """A strategy that counts how often it is asked."""

    asked: list[int | None]

    def solve(self, problem: Problem) -> Outcome:
        self.asked.append(problem.budget_nbytes)
        return Outcome(Status.FEASIBLE, Schedule.unplanned(problem.graph))
