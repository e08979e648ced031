"""Every set of flags, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from memplan.errors import ArgumentError
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Problem, Status


@dataclass(frozen=True)
class BruteForceFlags:
    """Tries all sets of at most ``max_ops`` ops that may be flagged."""

    max_ops: int = 16

    def solve(self, problem: Problem) -> Outcome:
        """The optimum among all mirrored schedules; ArgumentError if the graph is too large."""
        candidates = flaggable(problem.graph)
        if len(candidates) > self.max_ops:
            raise ArgumentError(
                f"brute force would try 2**{len(candidates)} plans; it takes at most "
                f"{self.max_ops} ops that can be recomputed"
            )
        schedule = problem.cheapest(_all_plans(problem.graph, candidates))
        if schedule is None:
            return Outcome(Status.INFEASIBLE)
        return Outcome(Status.OPTIMAL, schedule, schedule.seconds)


def _all_plans(graph: TrainingGraph, candidates: tuple[int, ...]) -> Iterator[Schedule]:
    for size in range(len(candidates) + 1):
        for flags in combinations(candidates, size):
            yield mirror(graph, frozenset(flags))
