"""An attempt as JSON text, to keep on disk or to send between processes, and back.

The text holds what the strategy answered, no figures: whoever reads it checks, realises and
measures the schedule again, so that a wrong one cannot become a plan.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from memplan.errors import ScheduleError
from memplan.planning.attempt import plan_of
from memplan.planning.job import Job
from memplan.planning.plan import Attempt
from memplan.planning.realised import realise
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Status
from memplan.util.files import parse_json
from memplan.util.numbers import is_finite, is_whole, shown

FORMAT = "memplan.attempt/5"


def to_json(attempt: Attempt) -> str:
    """``attempt`` as text, read back by :func:`from_json`."""
    plan = attempt.plan
    data = {
        "format": FORMAT,
        "strategy": attempt.strategy,
        "budget_nbytes": attempt.budget_nbytes,
        "status": attempt.status.value,
        "seconds": attempt.seconds,
        "schedule": None if plan is None else plan.schedule.to_json(),
        "lower_bound_overhead": None if plan is None else plan.lower_bound_overhead,
        "in_order": attempt.in_order,
        "cut_by_clock": attempt.cut_by_clock,
    }
    return json.dumps(data)


def from_json(job: Job, text: str) -> Attempt:
    """The attempt on ``job`` that :func:`to_json` wrote; ScheduleError if it is none of it."""
    try:
        data = parse_json(text)
        if data["format"] != FORMAT:
            raise ScheduleError(f"not a memplan attempt: format is {data['format']!r}")
        name, budget_nbytes = data["strategy"], data["budget_nbytes"]
        status, seconds, in_order = Status(data["status"]), data["seconds"], data["in_order"]
        cut = data["cut_by_clock"]
        _check_figures(name, budget_nbytes, seconds, in_order, cut)
        if (status in (Status.OPTIMAL, Status.FEASIBLE)) == (data["schedule"] is None):
            raise ScheduleError(f"its status {status.value!r} and its schedule do not fit together")
        if data["schedule"] is None:
            return Attempt(name, budget_nbytes, status, None, seconds, in_order, cut_by_clock=cut)
        schedule = Schedule.from_json(job.graph, data["schedule"])
        bound = data["lower_bound_overhead"]
        if bound is not None and not is_finite(bound):
            raise ScheduleError(f"its lower bound is {shown(bound)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ScheduleError(f"not a memplan attempt: {error}") from error
    realised = realise(job, schedule)
    is_late = schedule.seconds > job.problem(budget_nbytes).most_seconds
    is_large = budget_nbytes is not None and realised.footprint.total_nbytes > budget_nbytes
    if is_late or is_large:
        raise ScheduleError("the recorded schedule does not fit the budget")
    if (bound or 0.0) > schedule.overhead:
        raise ScheduleError(f"its lower bound is {bound}, its overhead {schedule.overhead}")
    outcome = Outcome(status, schedule, in_order=in_order, cut_by_clock=cut)
    plan = plan_of(job, name, outcome, realised, budget_nbytes, seconds)
    plan = dataclasses.replace(plan, lower_bound_overhead=bound)
    return Attempt(name, budget_nbytes, status, plan, seconds, in_order, cut_by_clock=cut)


def _check_figures(name: Any, budget_nbytes: Any, seconds: Any, in_order: Any, cut: Any) -> None:
    if not isinstance(name, str) or not isinstance(in_order, bool):
        raise ScheduleError(f"its strategy is {shown(name)}, its in_order {shown(in_order)}")
    if not isinstance(cut, bool):
        raise ScheduleError(f"its cut_by_clock is {shown(cut)}")
    if budget_nbytes is not None and not is_whole(budget_nbytes):
        raise ScheduleError(f"its budget is {shown(budget_nbytes)}")
    if not is_finite(seconds):
        raise ScheduleError(f"its seconds are {shown(seconds)}")
