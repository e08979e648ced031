"""The errors memplan raises: each says what is wrong, which node or argument, and what to do."""

from __future__ import annotations

from functools import partial
from typing import Any


class MemplanError(Exception):
    """Base of every error that memplan raises on purpose."""


class ArgumentError(MemplanError, ValueError):
    """An argument has a value that memplan cannot use; the message names the argument."""


class UsageError(MemplanError, RuntimeError):
    """Something was called out of turn; the message says what to call instead, or before."""


class GraphError(MemplanError, ValueError):
    """A training graph is inconsistent; the message names the op or tensor."""


class ScheduleError(MemplanError, ValueError):
    """A schedule cannot be executed; the message names the step."""


class CostError(MemplanError, ValueError):
    """Costs are missing, or belong to another device; the message names the ops."""


class TraceError(MemplanError, ValueError):
    """A network cannot be turned into a training graph; the message names the node or argument."""


class SizeError(TraceError):
    """An array of a network has more elements than MXNet can hold; the message names it."""


class DependencyError(MemplanError, ImportError):
    """An optional package is missing or unusable; the message names the extra to install."""


class PlanningError(MemplanError, RuntimeError):
    """The process that plans has ended, or failed in a way that cannot be handed on."""


class BudgetError(MemplanError, ValueError):
    """No plan within the budget.

    ``proved`` tells whether no plan can exist (INFEASIBLE) or none was found in the time given
    (NO_PLAN_FOUND); ``lowest_nbytes`` is the least ``total_nbytes`` that memplan can reach, or
    None if it found no plan at all.
    """

    def __init__(self, message: str, *, proved: bool, lowest_nbytes: int | None) -> None:
        super().__init__(message)
        self.proved = proved
        self.lowest_nbytes = lowest_nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is made anew from its message alone, and what cannot be made anew ends the
        # pool of processes to whose caller it was to go.
        rebuilt = partial(type(self), proved=self.proved, lowest_nbytes=self.lowest_nbytes)
        return rebuilt, self.args, vars(self)
