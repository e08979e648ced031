"""What a schedule is as a network of MXNet's: checked, and measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memplan.errors import ScheduleError
from memplan.memory.packing import Packing
from memplan.planning.plan import Footprint
from memplan.step.schedule import Schedule
from memplan.step.validate import first_violation
from memplan.util.garbage import no_collections

if TYPE_CHECKING:
    from memplan.planning.job import Job


@dataclass(frozen=True)
class Realised:
    """What a schedule holds as a network, and where its tensors lie, if in one array."""

    footprint: Footprint
    packing: Packing | None


def realise(job: Job, schedule: Schedule, packing: Packing | None = None) -> Realised:
    """What the schedule holds as a network; ScheduleError for one that cannot run.

    ``packing`` is that of the schedule, if it is known.
    """
    with no_collections():
        reason = first_violation(schedule)
        if reason is not None:
            raise ScheduleError(f"the strategy's schedule is invalid: {reason}")
        return job.realised(schedule, packing)
