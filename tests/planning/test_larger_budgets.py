"""A bound that is proved for a budget counts at smaller budgets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

import memplan
from helpers.networks import Network, residual_net
from memplan.planning.larger_budgets import with_shared_bounds
from memplan.planning.plan import Attempt, Plan
from memplan.step.mirroring import flaggable, mirror
from memplan.strategies import Outcome, Status
from memplan.strategies.base import Problem


def network() -> Network:
    return residual_net(batch=16, size=32, units=6, filters=16)


@pytest.fixture(scope="module")
def plan() -> Plan:
    net, shapes = network()
    return memplan.plan(net, strategy="memonger", costs="roofline:v100", **shapes)


def made(plan: Plan, budget: int, share: float | None, *, in_order: bool = False) -> Attempt:
    """An attempt with this plan, whose bound is a share of its overhead."""
    bound = None if share is None else share * plan.overhead
    plan = dataclasses.replace(
        plan, budget_nbytes=budget, lower_bound_overhead=bound, bound_in_order=in_order
    )
    return Attempt("auto", budget, plan.status, plan, 1.0, in_order)


def shares(attempts: list[Attempt]) -> list[float]:
    """The bounds of the plans, by their overhead."""
    plans = [a.plan for a in attempts if a.plan is not None]
    return [pytest.approx((plan.lower_bound_overhead or 0.0) / plan.overhead) for plan in plans]


def test_a_bound_counts_at_smaller_budgets_only(plan: Plan) -> None:
    rows = [made(plan, 70, None), made(plan, 90, 0.0), made(plan, 80, 0.5)]
    assert shares(with_shared_bounds((0, row) for row in rows)) == [0.5, 0.0, 0.5]


def test_a_plan_that_meets_the_bound_of_a_larger_budget_is_optimal(plan: Plan) -> None:
    cut = made(dataclasses.replace(plan, cut_by_clock=True), 70, 0.1)
    cut = dataclasses.replace(cut, cut_by_clock=True)
    _, tight = with_shared_bounds((0, row) for row in (made(plan, 80, 1.0), cut))
    assert tight.plan is not None
    assert tight.status is tight.plan.status is Status.OPTIMAL
    assert tight.cut_by_clock is tight.plan.cut_by_clock is False


def test_other_strategies_and_other_orders_prove_nothing(plan: Plan) -> None:
    """A strategy may search less than another, or prove for schedules in base order alone."""
    rows = [made(plan, 80, 0.5, in_order=True), made(plan, 70, 0.1)]
    assert shares(with_shared_bounds((0, row) for row in rows)) == [0.5, 0.1]
    rows = [made(plan, 80, 0.5), made(plan, 70, 0.1)]
    assert shares(with_shared_bounds(enumerate(rows))) == [0.5, 0.1]
    rows = [made(plan, 80, 0.5), made(plan, 70, 0.1, in_order=True)]
    assert shares(with_shared_bounds((0, row) for row in rows)) == [0.5, 0.5]


def test_where_nothing_fits_nothing_fits_in_less(plan: Plan) -> None:
    nothing = Attempt("auto", 80, Status.INFEASIBLE, None, 1.0)
    less = Attempt("auto", 70, Status.NO_PLAN_FOUND, None, 1.0)
    least = Attempt("auto", None, Status.NO_PLAN_FOUND, None, 1.0)
    more = made(plan, 90, 0.1)
    statuses = [a.status for a in with_shared_bounds((0, a) for a in (more, nothing, less, least))]
    assert statuses == [Status.FEASIBLE, *[Status.INFEASIBLE] * 2, Status.NO_PLAN_FOUND]


def test_what_a_plan_of_any_strategy_denies_is_not_proved(plan: Plan) -> None:
    fitting = made(plan, plan.total_nbytes + 5, None)
    false, true = (
        Attempt("false", plan.total_nbytes + more, Status.INFEASIBLE, None, 1.0) for more in (0, -1)
    )
    in_order = dataclasses.replace(false, in_order=True)
    rows = with_shared_bounds(enumerate([fitting, false, true, in_order]))
    assert [row.status for row in rows[1:]] == [
        Status.NO_PLAN_FOUND,
        Status.INFEASIBLE,
        Status.INFEASIBLE,
    ]
    # Nor does it speak for smaller budgets.
    less = Attempt("false", plan.total_nbytes - 9, Status.NO_PLAN_FOUND, None, 1.0)
    rows = with_shared_bounds([(0, fitting), (1, false), (1, less)])
    assert [row.status for row in rows[1:]] == [Status.NO_PLAN_FOUND] * 2


@dataclass(frozen=True)
class Forgetful:
    """Proves something at the first budget that it is asked for."""

    def solve(self, problem: Problem) -> Outcome:
        assert problem.budget_nbytes is not None
        graph = problem.graph
        flags = {op for op in flaggable(graph) if "add" not in graph.ops[op].name}
        schedule = mirror(graph, frozenset(flags))
        bound = 0.95 * schedule.seconds if not asked else None
        asked.append(problem.budget_nbytes)
        return Outcome(Status.FEASIBLE, schedule, bound)


asked: list[int] = []


def test_comparisons_and_frontiers_know() -> None:
    net, shapes = network()
    for search in (memplan.compare, memplan.frontier):
        asked.clear()
        chosen = "strategies" if search is memplan.compare else "strategy"
        strategy = [Forgetful()] if search is memplan.compare else Forgetful()
        given = {chosen: strategy, "budgets": [0.9, 0.85], "costs": "roofline:v100"}
        schedule = search(net, **given, **shapes)
        rows = schedule.rows if isinstance(schedule, memplan.Comparison) else _all(schedule)
        loose, tight = (row.plan for row in rows if row.plan is not None and row.plan.overhead)
        assert loose is not None
        assert tight is not None
        assert tight.lower_bound_overhead == loose.lower_bound_overhead
        assert tight.lower_bound_overhead == pytest.approx(0.95 * (1 + tight.overhead) - 1)


def _all(curve: memplan.Frontier) -> list[Attempt]:
    """The points, and those that others beat."""
    return sorted((*curve.points, *curve.left_out), key=lambda a: -(a.budget_nbytes or 0))
