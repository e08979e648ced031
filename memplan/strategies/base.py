"""What every strategy is: a frozen dataclass of options with one method, ``solve``."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from memplan.memory.blocks import allocate
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule


class Status(enum.Enum):
    """What a strategy can say of its result."""

    OPTIMAL = "optimal"
    """No schedule of the kind that the strategy searches is cheaper within the budget."""
    FEASIBLE = "feasible"
    """A schedule, perhaps not the cheapest."""
    INFEASIBLE = "infeasible"
    """Proved: no schedule of that kind fits the budget."""
    NO_PLAN_FOUND = "no plan found"
    """None was found; one may exist."""


@dataclass(frozen=True)
class Outcome:
    """The answer of a strategy. It never reports its own score.

    ``lower_bound`` is proven: no schedule within the budget takes fewer seconds a step (None if
    nothing was proved). With ``in_order`` that, and an optimum, hold among the schedules that
    keep the order in which ops first run, and run an op once per stage at most.
    """

    status: Status
    schedule: Schedule | None = None
    lower_bound: float | None = None
    in_order: bool = False


class Strategy(Protocol):
    """Picks a schedule. The fields of a strategy are its options.

    A strategy with a field ``time_limit`` is given the seconds that it may take, one with a field
    ``start`` the best schedule that is known already (or None).
    """

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """A schedule of ``graph`` that :func:`memplan.memory.blocks.allocate` fits in the budget.

        Without a budget: the schedule with the least memory.
        """


def best_of(candidates: Iterable[Schedule], budget_nbytes: int | None) -> Outcome:
    """Of ``candidates``, the cheapest that MXNet places within the budget.

    Without a budget, the one placed in the fewest bytes (and, of equal ones, the cheapest).
    """
    best: tuple[tuple[float, float], Schedule] | None = None
    for schedule in candidates:
        nbytes = allocate(schedule).nbytes
        if budget_nbytes is None:
            rank = (float(nbytes), schedule.seconds)
        elif nbytes <= budget_nbytes:
            rank = (schedule.seconds, float(nbytes))
        else:
            continue
        if best is None or rank < best[0]:
            best = rank, schedule
    if best is None:
        return Outcome(Status.NO_PLAN_FOUND)
    return Outcome(Status.FEASIBLE, best[1])
