"""What fits in a budget fits in every larger one, whatever the realisation."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.amounts import is_whole, long_except
from helpers.networks import residual_net
from helpers.planning import NEVER_SECONDS
from memplan.errors import BudgetError
from memplan.planning import least as planning_least
from memplan.planning.attempt import budget_error, try_strategy
from memplan.planning.job import Job
from memplan.planning.least import LeastSearch
from memplan.planning.plan import Attempt
from memplan.planning.realised import realise
from memplan.step.schedule import Schedule
from memplan.strategies import REALISATIONS, Outcome, Status
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.quick import candidates, quick_schedule
from memplan.strategies.search import Search
from memplan.util.stop import Stop


def _network(seed: int) -> mx.sym.Symbol:
    """A few convolutions of random widths, some of them added to an earlier one."""
    draw = random.Random(seed)
    body = mx.sym.Variable("data")
    before = None
    for n in range(draw.randint(3, 6)):
        body = mx.sym.Convolution(
            body, num_filter=draw.choice((4, 8)), kernel=(3, 3), pad=(1, 1), name=f"conv{n}"
        )
        body = mx.sym.relu(mx.sym.BatchNorm(body, name=f"norm{n}"))
        if before is not None and draw.random() < 0.5:
            body = mx.sym.Concat(body, before)
        before = body
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=5), name="softmax")


def _job(seed: int, realisation: str, ctx: mx.Context | None = None) -> Job:
    return Job.prepare(
        _network(seed),
        realisation=realisation,
        ctx=ctx,
        time_limit=NEVER_SECONDS,
        costs="roofline:v100",
        data=(4, 3, 16, 16),
    )


@dataclasses.dataclass(frozen=True)
class Unlucky:
    """A search that finds nothing in the time that it gets."""

    start: Schedule | None = None

    def solve(self, problem: Problem) -> Outcome:
        return Outcome(Status.NO_PLAN_FOUND)


@pytest.mark.long
@pytest.mark.parametrize("realisation", REALISATIONS)
def test_an_unlucky_search_does_not_lose_what_is_known(realisation: str) -> None:
    job = _job(0, realisation)
    lowest = job.least_by(Auto())[1].total_nbytes
    assert lowest < job.unplanned.total_nbytes
    for budget_nbytes in (lowest, lowest + 1, lowest + 5000):
        plan = try_strategy(job, Unlucky(), budget_nbytes).plan
        assert plan is not None
        assert plan.status is Status.FEASIBLE
        assert plan.total_nbytes <= budget_nbytes
    refused = try_strategy(job, Unlucky(), lowest * 9 // 10)
    error = budget_error(job, refused, Unlucky())
    assert refused.plan is None
    assert error.lowest_nbytes == lowest


def test_what_a_refusal_names_is_a_plan_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"strategy": Unlucky(), "data": (4, 3, 16, 16)}
    monkeypatch.setattr(planning_least, "candidates", cut_by_the_clock)
    with pytest.raises(BudgetError) as caught:
        memplan.plan(_network(0), budget=1, **options)
    lowest = caught.value.lowest_nbytes
    assert lowest is not None
    # As where it ends a search before it has found anything.
    monkeypatch.setattr(Search, "solve", Unlucky.solve)
    monkeypatch.setattr(planning_least, "candidates", lambda problem, _: unplanned(problem))
    assert memplan.plan(_network(0), budget=lowest, **options).total_nbytes <= lowest
    with pytest.raises(BudgetError):
        memplan.plan(_network(1), budget=lowest // 2, **options)


def cut_by_the_clock(problem: Problem, stop: Stop) -> list[Schedule]:
    schedules = list(candidates(problem, stop))
    stop.cut()
    return schedules


def unplanned(problem: Problem) -> list[Schedule]:
    return [Schedule.unplanned(problem.graph)]


@pytest.mark.parametrize("realisation", long_except(REALISATIONS, ["mirror", "packed"]))
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_what_fits_a_budget_fits_every_larger_one(realisation: str, seed: int) -> None:
    _check_budgets(_job(seed, realisation), 6 if is_whole() else 12)


@pytest.mark.long
@pytest.mark.parametrize("realisation", long_except(["mirror", "explicit"], ["mirror"]))
def test_so_it_does_with_what_executors_take(realisation: str) -> None:
    job = _job(0, realisation, mx.cpu())
    assert job.beside.workspace_nbytes > 0
    _check_budgets(job, 12)


def _check_budgets(job: Job, percents: int) -> None:
    """Those of so many percents, and so many more again and again."""
    top = job.unplanned.total_nbytes
    budgets = [top * percent // 100 for percent in range(30, 103, percents)]
    attempts: list[Attempt] = []
    for budget_nbytes in budgets:
        fresh = dataclasses.replace(job)  # which knows nothing of the other budgets
        attempt = try_strategy(fresh, "auto:effort=0.02", budget_nbytes)
        attempts.append(attempt)
        if attempt.plan is None:
            error = budget_error(fresh, attempt, "auto:effort=0.02")
            assert error.lowest_nbytes is not None
            assert error.lowest_nbytes > budget_nbytes
    fits = [attempt.plan is not None for attempt in attempts]
    assert fits == sorted(fits)
    assert True in fits
    assert False in fits


@pytest.mark.long
def test_a_strategy_that_cannot_go_so_low_is_refused_with_one_that_can() -> None:
    job = _job(1, "packed")
    budget_nbytes = job.least_by(Auto())[1].total_nbytes
    attempt = try_strategy(job, "store_all", budget_nbytes)
    error: BudgetError = budget_error(job, attempt, "store_all")
    assert "strategy='auto' plans within this budget" in str(error)
    assert try_strategy(job, "auto:effort=0.02", budget_nbytes).plan is not None


def test_where_the_clock_cuts_all_searches_quick_strategies_are_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They get little of the time first, and what takes the least memory is far dearer."""
    net, shapes = residual_net(batch=16, size=32, units=6, filters=16)
    whole = memplan.plan(net, realisation="packed", budget="100%", **shapes)
    asked: list[Schedule] = []

    def quick(problem: Problem, stop: Stop, **options: bool) -> Schedule:
        unplanned = Schedule.unplanned(whole.schedule.graph)
        found = quick_schedule(problem, stop, **options) if asked else unplanned
        asked.append(found)
        return found

    def solve(_: Auto, problem: Problem) -> Outcome:
        return Outcome(Status.NO_PLAN_FOUND, cut_by_clock=True)

    monkeypatch.setattr("memplan.planning.attempt.quick_schedule", quick)
    monkeypatch.setattr(Auto, "solve", solve)
    monkeypatch.setattr(Job, "least_by", lambda *_: pytest.fail("a plan is known already"))
    plan = memplan.plan(net, realisation="packed", budget="70%", **shapes)
    assert plan.schedule == asked[1]


def test_the_cheapest_is_taken_that_the_search_for_the_least_memory_has_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all else finds nothing, what takes the least memory may cost many times as much."""
    job = _job(0, "packed")
    unplanned = Schedule.unplanned(job.graph)
    kept = (range(0, job.graph.nforward, every) for every in range(2, job.graph.nforward))
    schedules = (job.space.keeping(job.graph, some) for some in kept)
    of_total = {realise(job, schedule).footprint.total_nbytes: schedule for schedule in schedules}
    limit = realise(job, unplanned).footprint.total_nbytes * 9 // 10
    fitting = [schedule for nbytes, schedule in of_total.items() if nbytes <= limit]
    cheap, *_, dear = sorted(fitting, key=_seconds)
    assert cheap.seconds < dear.seconds
    monkeypatch.setattr(LeastSearch, "_quick_least", lambda *_: dear)
    monkeypatch.setattr(LeastSearch, "_least_from", lambda _, schedule, *others: schedule)
    monkeypatch.setattr(planning_least, "schedule_without_budget", lambda *_: cheap)
    monkeypatch.setattr(Problem, "cheapest", lambda _, schedules, **options: next(iter(schedules)))
    least = job.least_by(Unlucky())
    monkeypatch.undo()
    assert least.schedule == dear
    monkeypatch.setattr("memplan.planning.attempt.quick_schedule", lambda *_, **options: unplanned)
    plan = try_strategy(job, Unlucky(), limit).plan
    assert plan is not None
    assert plan.schedule == cheap


def _seconds(schedule: Schedule) -> float:
    return schedule.seconds
