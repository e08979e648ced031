"""Attempts of strategies, to compare."""

from __future__ import annotations

from typing import Any

from memplan.planning.plan import Attempt


def answer(attempt: Attempt) -> tuple[Any, ...]:
    """All of an attempt but how long it took."""
    found = (attempt.strategy, attempt.budget_nbytes, attempt.status)
    plan = attempt.plan
    if plan is None:
        return found
    figures = (plan.status, plan.strategy, plan.costs, plan.realisation, plan.lower_bound_overhead)
    sizes = (plan.footprint, plan.unplanned, plan.budget_nbytes)
    return (*found, *figures, *sizes, plan.schedule, plan.symbol.tojson())
