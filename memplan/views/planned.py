"""What pictures and reports read of a plan: result.py has the plan itself, and shows it by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from memplan.errors import ArgumentError
from memplan.step.schedule import Schedule
from memplan.strategies.base import Status


class Figures(Protocol):
    """Bytes of a training step: see :class:`memplan.planning.plan.Footprint`."""

    @property
    def peak_nbytes(self) -> int: ...
    @property
    def allocated_nbytes(self) -> int: ...
    @property
    def fixed_nbytes(self) -> int: ...
    @property
    def reserve_nbytes(self) -> int: ...
    @property
    def total_nbytes(self) -> int: ...


@runtime_checkable
class Planned(Protocol):
    """What is shown of a :class:`memplan.planning.plan.Plan`; its ``str`` is its summary."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def status(self) -> Status: ...
    @property
    def strategy(self) -> str: ...
    @property
    def costs(self) -> str: ...
    @property
    def realisation(self) -> str: ...
    @property
    def budget_nbytes(self) -> int | None: ...
    @property
    def footprint(self) -> Figures: ...
    @property
    def unplanned(self) -> Figures: ...
    @property
    def lower_bound(self) -> float | None: ...
    @property
    def planning_seconds(self) -> float: ...
    @property
    def total_nbytes(self) -> int: ...
    @property
    def overhead(self) -> float: ...


class Tried(Protocol):
    """A row of a comparison: see :class:`memplan.planning.plan.Attempt`."""

    @property
    def plan(self) -> Planned | None: ...


@runtime_checkable
class Compared(Protocol):
    """See :class:`memplan.planning.plan.Comparison`."""

    @property
    def rows(self) -> Sequence[Tried]: ...


@runtime_checkable
class Curve(Protocol):
    """See :class:`memplan.planning.frontier.Frontier`."""

    @property
    def plans(self) -> Sequence[Planned]: ...


Plans = Compared | Curve | Iterable[Planned]


def plans_of(plans: Plans) -> list[Planned]:
    """The plans in a comparison or frontier, or those given; ArgumentError for anything else."""
    if isinstance(plans, Compared):
        chosen = [row.plan for row in plans.rows if row.plan is not None]
    elif isinstance(plans, Curve):
        chosen = list(plans.plans)
    elif isinstance(plans, Iterable):
        chosen = list(plans)
    else:
        raise ArgumentError(f"plans must be a Comparison or several plans, got {plans!r}")
    for plan in chosen:
        if not isinstance(plan, Planned):
            raise ArgumentError(f"plans must be a Comparison or plans, got {plan!r} among them")
    if not chosen:
        raise ArgumentError("plans: there is no plan to be drawn")
    return chosen
