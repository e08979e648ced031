"""An attempt as JSON text, to keep on disk or to send between processes, and back.

The text holds what the strategy answered, no figures: whoever reads it checks, realises and
measures the schedule again, so that a wrong one cannot become a plan.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from memplan.errors import ScheduleError
from memplan.planning.job import Job
from memplan.planning.plan import Attempt
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Status

FORMAT = "memplan.attempt/2"


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
        "lower_bound": None if plan is None else plan.lower_bound,
        "in_order": attempt.in_order,
    }
    return json.dumps(data)


def from_json(job: Job, text: str) -> Attempt:
    """The attempt on ``job`` that :func:`to_json` wrote; ScheduleError if it is none of it."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ScheduleError(f"not a memplan attempt: format is {data['format']!r}")
        name, budget_nbytes = data["strategy"], data["budget_nbytes"]
        status, seconds = Status(data["status"]), float(data["seconds"])
        in_order = bool(data["in_order"])
        if data["schedule"] is None:
            return Attempt(name, budget_nbytes, status, None, seconds, in_order)
        schedule = Schedule.from_json(job.graph, data["schedule"])
        bound = None if data["lower_bound"] is None else float(data["lower_bound"])
    except (KeyError, TypeError, ValueError) as error:
        raise ScheduleError(f"not a memplan attempt: {error}") from error
    found = dataclasses.replace(job, time_limit=_AT_ONCE).attempt(
        Known(status, schedule), budget_nbytes
    )
    if found.plan is None:
        raise ScheduleError("the recorded schedule does not fit the budget")
    plan = dataclasses.replace(
        found.plan,
        strategy=name,
        status=status,
        lower_bound=bound,
        bound_in_order=in_order,
        planning_seconds=seconds,
    )
    return Attempt(name, budget_nbytes, status, plan, seconds, in_order)


# A recorded schedule that does not fit is not tightened: there is nothing else to try.
_AT_ONCE = 1e-6


@dataclass(frozen=True)
class Known:
    """The strategy whose answer is a schedule that is known already."""

    status: Status
    schedule: Schedule

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        return Outcome(self.status, self.schedule)
