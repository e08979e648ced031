"""What a step holds beside activations, arguments and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.errors import ArgumentError
from memplan.memory.layouts import Rule
from memplan.memory.memory import further_nbytes
from memplan.memory.temporary import NOTHING, Temporary
from memplan.planning.plan import NOT_COUNTED
from memplan.planning.realisation import (
    Context,
    Optimizer,
    Realisation,
    optimizer_nbytes,
    update_nbytes,
)
from memplan.step.costs import CostTable
from memplan.step.schedule import Schedule
from memplan.util.nbytes import is_no_byte, parse_budget
from memplan.util.numbers import plain, shown

if TYPE_CHECKING:
    from memplan.mxnet.trace.build import Trace


@dataclass(frozen=True)
class Beside:
    """What a step holds beside activations, arguments and gradients.

    ``reserve_nbytes``: the room that the user asked to leave. ``optimizer_nbytes``: the states of
    the optimizer. ``workspace_nbytes``: what operators, those of its updates included, take beside
    activations if each runs once; ``workspace_of_run``: the bytes that they keep for each further
    run, op by op, or nothing; ``layouts``: in which of these they leave arrays, of which copies are
    kept, or nothing; ``temporary``: the space that they take by some schedules;
    ``workspace_source``: how all this is known.
    """

    reserve_nbytes: int = 0
    optimizer_nbytes: int = 0
    workspace_nbytes: int = 0
    workspace_source: str = NOT_COUNTED
    workspace_of_run: tuple[int, ...] = ()
    layouts: tuple[Rule, ...] = ()
    temporary: Temporary = NOTHING

    @property
    def nbytes(self) -> int:
        """All of it, if each op runs once."""
        return self.reserve_nbytes + self.optimizer_nbytes + self.workspace_nbytes

    def parts(self, schedule: Schedule) -> dict[str, Any]:
        """What ``schedule`` adds to a :class:`memplan.planning.plan.Footprint`, by its fields."""
        return {
            "reserve_nbytes": self.reserve_nbytes,
            "optimizer_nbytes": self.optimizer_nbytes,
            "workspace_nbytes": self.workspace_nbytes
            + further_nbytes(schedule, self.workspace_of_run, self.layouts, self.temporary),
            "workspace_source": self.workspace_source,
        }

    @classmethod
    def of(
        cls,
        traced: Trace,
        realisation: Realisation,
        *,
        ctx: Context | None,
        table: CostTable | None,
        reserve: int | str | None,
        optimizer: Optimizer | None,
    ) -> Beside:
        """What a step of ``traced`` holds so.

        The workspace is what ``table`` has measured, else an estimate for ``ctx``. ArgumentError
        for a ``reserve`` or an ``optimizer`` that cannot be used.
        """
        workspace, source = 0, NOT_COUNTED
        of_run: tuple[int, ...] = ()
        layouts: tuple[Rule, ...] = ()
        temporary = NOTHING
        estimate = None if ctx is None else realisation.workspace(traced, ctx.device_type)
        if estimate is not None:
            (workspace, of_run, layouts, temporary), source = estimate, "estimated from shapes"
        if table is not None and realisation.name in table.workspace_nbytes:
            workspace = table.workspace_nbytes[realisation.name]
            source = f"measured on {table.device}"
        states = 0 if optimizer is None else optimizer_nbytes(traced, optimizer)
        if optimizer is not None and source != NOT_COUNTED:
            workspace += update_nbytes(traced, optimizer)  # profiles update by one operator each
        return cls(parse_reserve(reserve), states, workspace, source, of_run, layouts, temporary)


def parse_reserve(reserve: int | str | None) -> int:
    """The bytes that a ``reserve`` stands for; ArgumentError for one that cannot be used."""
    number = plain(reserve)
    if reserve is None or (isinstance(number, int | float) and number == 0):
        return 0
    if isinstance(reserve, str) and is_no_byte(reserve):
        return 0
    try:
        return parse_budget(reserve, 0) or 0
    except ArgumentError:
        raise ArgumentError(
            f"the reserve {shown(reserve)} cannot be used; it is a whole number of bytes "
            f"or a string with a unit of bytes ('200MiB')"
        ) from None
