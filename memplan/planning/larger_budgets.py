"""A bound that is proved for a budget holds for smaller ones: what fits these, fits that, too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from memplan.planning.plan import Attempt, Plan
from memplan.programs.solver import TOLERANCE
from memplan.strategies.base import Status

Kind = TypeVar("Kind", bound=Hashable)


def with_shared_bounds(attempts: Iterable[tuple[Kind, Attempt]]) -> list[Attempt]:
    """The attempts, each with the highest bound that is proved for its budget or a larger one.

    Each comes with its kind: a bound holds for attempts of the same kind, those of one strategy on
    one network. A plan that meets its bound by this is optimal, and where nothing fits a larger
    budget, nothing fits. A proof that a plan of any kind denies counts for nothing.
    """
    pairs = list(attempts)
    plans = [attempt.plan for _, attempt in pairs if attempt.plan is not None]
    pairs = [(kind, _undenied(attempt, plans)) for kind, attempt in pairs]
    return [_raised(attempt, [a for k, a in pairs if k == kind]) for kind, attempt in pairs]


def _undenied(attempt: Attempt, plans: Iterable[Plan]) -> Attempt:
    """``attempt``, which proves nothing of its budget if one of the ``plans`` is within that.

    A plan in another order does not deny what is proved for schedules in base order.
    """
    budget = math.inf if attempt.budget_nbytes is None else attempt.budget_nbytes
    is_denied = attempt.status is Status.INFEASIBLE and not attempt.in_order
    if is_denied and any(plan.total_nbytes <= budget for plan in plans):
        return dataclasses.replace(attempt, status=Status.NO_PLAN_FOUND)
    return attempt


def _raised(attempt: Attempt, others: Sequence[Attempt]) -> Attempt:
    bounds = [
        _bound(a) for a in others if _has_larger_budget(a, attempt) and _speaks_for(a, attempt)
    ]
    highest = max(bounds, default=0.0)
    plan = attempt.plan
    if plan is None:
        if attempt.status is Status.NO_PLAN_FOUND and math.isinf(highest):
            return dataclasses.replace(attempt, status=Status.INFEASIBLE)
        return attempt
    if highest <= (plan.lower_bound_overhead or 0.0):
        return attempt
    status = Status.OPTIMAL if plan.overhead <= highest + 2 * TOLERANCE else plan.status
    bound = min(highest, plan.overhead)
    is_cheapest = status is Status.OPTIMAL and not plan.bound_in_order
    cut = attempt.cut_by_clock and not is_cheapest
    plan = dataclasses.replace(
        plan, lower_bound_overhead=bound, status=status, cut_by_clock=plan.cut_by_clock and cut
    )
    return dataclasses.replace(attempt, plan=plan, status=status, cut_by_clock=cut)


def _bound(attempt: Attempt) -> float:
    """The overhead below which there is no plan."""
    if attempt.plan is not None:
        return attempt.plan.lower_bound_overhead or 0.0
    return math.inf if attempt.status is Status.INFEASIBLE else 0.0


def _has_larger_budget(other: Attempt, attempt: Attempt) -> bool:
    if attempt.budget_nbytes is None or other.budget_nbytes is None or other.error is not None:
        return False
    return other.budget_nbytes >= attempt.budget_nbytes


def _speaks_for(other: Attempt, attempt: Attempt) -> bool:
    """Does what is proved of ``other`` hold for the schedules that ``attempt`` speaks of?

    What holds in any order, holds for schedules in base order; but not the other way round.
    """
    in_order = other.in_order if other.plan is None else other.plan.bound_in_order
    return not in_order or (attempt.plan is not None and attempt.plan.bound_in_order)
