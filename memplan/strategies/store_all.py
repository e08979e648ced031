"""Keep everything: the step without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.step.schedule import Schedule
from memplan.strategies.base import OneOf, Problem


@dataclass(frozen=True)
class StoreAll(OneOf):
    """Runs every op once, in base order."""

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """That one schedule."""
        yield Schedule.unplanned(problem.graph)
