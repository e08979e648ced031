"""What strategies answer, which may be anybody's: an answer that cannot be is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from memplan.errors import ArgumentError
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Problem, Status
from memplan.util.numbers import plain, shown


def checked(answer: Any, problem: Problem, name: str) -> Outcome:
    """``answer`` of the strategy ``name`` to ``problem``; ArgumentError if it is no outcome of it.

    Whether its schedule is valid and keeps the budget is not looked at.
    """
    if not isinstance(answer, Outcome):
        kind = type(answer).__name__
        raise ArgumentError(f"strategy {name} must return an Outcome, but returned {kind}")
    if not isinstance(answer.status, Status):
        raise ArgumentError(
            f"the status that strategy {name} returns must be a Status, got {shown(answer.status)}"
        )
    bound = plain(answer.lower_bound_seconds)
    is_number = type(bound) in (int, float) and not math.isnan(bound)
    if bound is not None and not is_number:
        raise ArgumentError(
            f"the lower bound that strategy {name} returns must be None or a number of seconds, "
            f"got {shown(bound)}"
        )
    schedule, outcome = answer.schedule, dataclasses.replace(answer, lower_bound_seconds=bound)
    if schedule is None:
        return outcome
    if not isinstance(schedule, Schedule) or schedule.graph != problem.graph:
        raise ArgumentError(
            f"strategy {name} must return a Schedule of the graph that it was given; "
            f"it returned {type(schedule).__name__} of something else"
        )
    if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise ArgumentError(
            f"strategy {name} returns a schedule, but says '{answer.status.value}' of it"
        )
    return outcome


def check_bound(outcome: Outcome, problem: Problem, name: str) -> None:
    """ArgumentError where the plan that is the ``outcome`` takes less than was proved that it must.

    A bound for plans in order may be above one that is not.
    """
    bound, schedule = outcome.lower_bound_seconds, outcome.schedule
    if bound is None or schedule is None or outcome.in_order:
        return
    if bound > problem.enough(schedule.seconds):
        raise ArgumentError(
            f"strategy {name} says that no plan within the budget takes less than {bound:.6g} "
            f"seconds, but its own takes {schedule.seconds:.6g}"
        )
