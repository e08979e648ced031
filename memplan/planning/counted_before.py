"""What a plan that was made before counts beside activations, for plans of other shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from memplan.memory.temporary import NOTHING
from memplan.planning.beside import Beside
from memplan.planning.job import Job
from memplan.planning.plan import NOT_COUNTED, Footprint, Plan
from memplan.planning.realisation import Context, load
from memplan.step.costs import table_of

Counted = TypeVar("Counted", Beside, Footprint)


@dataclass(frozen=True)
class CountedBefore:
    """How a given plan counts what jobs of other shapes are to count in the same way.

    ``figures``: the bytes that are the same at all shapes, by the fields of a Footprint.
    ``more_nbytes``: how much more workspace it counts than its schedule would be counted here, as
    for the updates of an optimizer; None: it counts none, so that its budget has no room for any.
    """

    figures: Mapping[str, Any]
    more_nbytes: int | None

    @classmethod
    def by(
        cls, given: Plan, ctx: Context, *, has_own_bytes: bool, options: Mapping[str, Any]
    ) -> CountedBefore:
        """What plans count as ``given`` does, where the ``options`` of their planner name nothing.

        On ``ctx`` workspace can be counted. It is where the planner ``has_own_bytes`` for a budget,
        which are for all that a step holds there; a share is one of what ``given`` counts.
        """
        named = {name: options[name] for name in ("reserve", "optimizer")}
        way, table = load(given.realisation), table_of(options["costs"])
        here = Beside.of(given.trace, way, ctx=ctx, table=table, **named)
        footprint = given.footprint
        figures: dict[str, Any] = {}
        if not here.reserve_nbytes:
            figures["reserve_nbytes"] = footprint.reserve_nbytes
        if named["optimizer"] is None:
            figures["optimizer_nbytes"] = footprint.optimizer_nbytes
        if footprint.workspace_source == NOT_COUNTED:
            return cls(figures, 0 if has_own_bytes else None)
        if here.workspace_source == NOT_COUNTED or named["optimizer"] is not None:
            return cls(figures, 0)  # of the arrays of its updates the plan does not say
        again = here.parts(given.schedule)["workspace_nbytes"]
        # What it counts less, as measured, would be less at other shapes by another number.
        return cls(figures, max(0, footprint.workspace_nbytes - again))

    def applied_to(self, job: Job) -> Job:
        """``job``, which counts what it holds in this way, as its unplanned step does."""
        beside = self._applied(job.beside)
        if self.more_nbytes is None:
            beside = dataclasses.replace(beside, workspace_of_run=(), layouts=(), temporary=NOTHING)
        return dataclasses.replace(job, beside=beside, unplanned=self._applied(job.unplanned))

    def _applied(self, counted: Counted) -> Counted:
        nbytes, source = 0, NOT_COUNTED
        if self.more_nbytes is not None:
            nbytes = counted.workspace_nbytes + self.more_nbytes
            source = counted.workspace_source
        return dataclasses.replace(
            counted, **self.figures, workspace_nbytes=nbytes, workspace_source=source
        )
