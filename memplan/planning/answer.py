"""What strategies answer, which may be anybody's: an answer that cannot be is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from memplan.errors import ArgumentError
from memplan.step.schedule import Schedule
from memplan.step.validate import first_violation
from memplan.strategies import Outcome, Problem, Status
from memplan.util.numbers import plain, shown


def checked(answer: Any, problem: Problem, name: str) -> Outcome:
    """``answer`` of the strategy ``name`` to ``problem``; ArgumentError if it is no outcome of it.

    Whether its schedule is valid and keeps the budget is not looked at. Runs of it that are left
    out of the step are left out here.
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
    schedule, flags = answer.schedule, dict[str, Any]()
    for flag in ("in_order", "cut_by_clock"):
        value = getattr(answer, flag)
        if not isinstance(value, bool | np.bool_):
            raise ArgumentError(
                f"strategy {name} must return true or false as {flag}, got {shown(value)}"
            )
        flags[flag] = bool(value)  # JSON does not take NumPy's
    outcome = dataclasses.replace(answer, lower_bound_seconds=bound, **flags)
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
    return _as_executed(outcome, problem)


def _as_executed(outcome: Outcome, problem: Problem) -> Outcome:
    """``outcome`` with its schedule as it is executed, so that no run counts that is left out.

    Without such runs a schedule may be in another order, and cheaper than any in order: then what
    was proved of those says nothing of it.
    """
    assert outcome.schedule is not None
    if first_violation(outcome.schedule) is not None:
        return outcome  # refused when it is realised
    seconds, schedule = outcome.schedule.seconds, problem.memory.executed(outcome.schedule)
    if schedule is not outcome.schedule:
        outcome = dataclasses.replace(outcome, schedule=schedule)
    bound = seconds if outcome.lower_bound_seconds is None else outcome.lower_bound_seconds
    if not outcome.in_order or schedule.seconds >= min(seconds, bound):
        return outcome
    return Outcome(Status.FEASIBLE, schedule, cut_by_clock=outcome.cut_by_clock)


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
