"""The two extremes: keep everything, or nothing but what the op before has written.

Baselines of Jain et al. 2020 (arXiv:1910.02653), table 1, as schedules of any training graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.search.rematerialize import cheapest, rematerialize
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Status


@dataclass(frozen=True)
class CheckpointAll:
    """Runs every op once, in base order."""

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The unplanned schedule, if its peak is within the budget: none is cheaper."""
        schedule = cheapest([Schedule.unplanned(graph)], budget_nbytes)
        if schedule is None:
            return Outcome(Status.NO_PLAN_FOUND)
        return Outcome(Status.OPTIMAL if budget_nbytes is not None else Status.FEASIBLE, schedule)


@dataclass(frozen=True)
class CheckpointLast:
    """Carries of the forward values only those of the op before; recomputes the others, each time.

    Values that later forward ops read are no exception: they are recomputed, too.
    """

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """That one schedule, if its peak is within the budget."""
        producer = graph.producer
        schedule = cheapest(
            [rematerialize(graph, lambda t, a: producer[a] == t - 1)], budget_nbytes
        )
        if schedule is None:
            return Outcome(Status.NO_PLAN_FOUND)
        return Outcome(Status.FEASIBLE, schedule)
