"""The curve of overhead against bytes."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memplan
from helpers.networks import Network, residual_net
from memplan.errors import ArgumentError
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Outcome, Status
from memplan.strategies.base import Problem

COSTS = "roofline:v100"


def network() -> Network:
    return residual_net(batch=16, size=32, units=6, filters=16)


def frontier(**options: Any) -> memplan.Frontier:
    net, shapes = network()
    return memplan.frontier(net, **{"costs": COSTS, **options}, **shapes)


calls: list[tuple[int | None, float, bool, float]] = []


@dataclass(frozen=True)
class Prefix:
    """Flags as many ops from the front as the budget takes; every answer hangs on it alone."""

    time_limit: float = 60.0
    start: Schedule | None = None

    def solve(self, problem: Problem) -> Outcome:
        started, proved = problem.start is not None, problem.bound_seconds
        calls.append((problem.budget_nbytes, problem.effort, started, proved))
        ops = [op for op in flaggable(problem.graph) if "add" not in problem.graph.ops[op].name]
        for count in range(0, len(ops) + 1, 3):
            schedule = mirror(problem.graph, frozenset(ops[:count]))
            if (
                problem.budget_nbytes is not None
                and simulate(schedule).peak_nbytes <= problem.budget_nbytes
            ):
                return Outcome(Status.FEASIBLE, schedule)
        if problem.budget_nbytes is None:
            return Outcome(Status.FEASIBLE, mirror(problem.graph, frozenset(ops)))
        return Outcome(Status.NO_PLAN_FOUND)


@pytest.fixture(autouse=True)
def no_calls_yet() -> None:
    calls.clear()


@pytest.fixture(scope="module")
def curve() -> memplan.Frontier:
    return frontier(strategy=Prefix(), budgets=6)


def test_it_leads_from_the_unplanned_step_to_the_least_memory(curve: memplan.Frontier) -> None:
    first, last = curve.plans[0], curve.plans[-1]
    assert first.overhead == 0
    assert first.status is Status.OPTIMAL
    assert first.total_nbytes == first.unplanned.total_nbytes
    assert last.budget_nbytes is None
    assert last.total_nbytes < 0.6 * first.total_nbytes
    assert len(curve.points) + len(curve.left_out) == 6
    assert len(curve.points) >= 5


def test_its_points_are_the_plans_of_their_budgets(curve: memplan.Frontier) -> None:
    net, shapes = network()
    for plan in curve.plans[1:]:
        alone = memplan.plan(
            net, strategy=Prefix(), budget=plan.budget_nbytes, costs=COSTS, **shapes
        )
        assert alone.footprint == plan.footprint
        assert alone.schedule == plan.schedule
        assert plan.budget_nbytes is None or plan.total_nbytes <= plan.budget_nbytes


def test_an_executor_gives_the_same_curve(curve: memplan.Frontier) -> None:
    with ThreadPoolExecutor(2) as executor:
        other = frontier(strategy=Prefix(), budgets=6, executor=executor)
    for points, others in ((curve.points, other.points), (curve.left_out, other.left_out)):
        assert [p.budget_nbytes for p in points] == [p.budget_nbytes for p in others]
    for plan, same in zip(curve.plans, other.plans, strict=True):
        assert plan.schedule == same.schedule
        assert plan.footprint == same.footprint


def test_points_between_neighbours_begin_from_these_and_take_half_of_the_others_work() -> None:
    frontier(strategy=Prefix(), budgets=6)
    efforts = {budget: effort for budget, effort, _, _ in calls if budget is not None}
    in_order = [efforts[budget] for budget in sorted(efforts, reverse=True)]
    assert in_order == [0.2, 0.1, 0.2, 0.1]


def test_what_is_proved_for_a_budget_holds_for_smaller_ones() -> None:
    curve = frontier(strategy=Prefix(), budgets=6)
    given = sorted(
        ((budget, bound) for budget, _, _, bound in calls if budget is not None), reverse=True
    )
    _, *inner = sorted(
        (
            (point.budget_nbytes, point.plan.lower_bound_overhead or 0.0)
            for point in (*curve.points, *curve.left_out)
            if point.plan is not None and point.budget_nbytes is not None
        ),
        reverse=True,
    )
    seconds = curve.plans[0].schedule.seconds
    bounds = [bound / seconds - 1.0 for _, bound in given]
    first, _, third, _ = (proved for _, proved in inner)
    assert 0.0 < first < third
    # The first and the third are made before the two between, after the unplanned step.
    assert bounds == pytest.approx([0.0, first, 0.0, third])


@pytest.mark.long
def test_a_better_plan_of_a_neighbour_is_where_a_strategy_starts() -> None:
    @dataclass(frozen=True)
    class FromTheStart(Prefix):
        def solve(self, problem: Problem) -> Outcome:
            if problem.budget_nbytes is None:
                return super().solve(problem)
            calls.append((problem.budget_nbytes, 1.0, True, 0.0))
            assert problem.start is not None
            return Outcome(Status.FEASIBLE, problem.start)

    # Nothing but the least plan fits: what the quick strategies find is above it.
    least = frontier(strategy=Prefix(), budgets=2).plans[-1]
    curve = frontier(strategy=FromTheStart(), budgets=[least.total_nbytes + 4, 0.7])
    assert curve.plans[-1].total_nbytes <= least.total_nbytes + 4


def test_named_budgets_are_the_points(curve: memplan.Frontier) -> None:
    made = frontier(strategy="memonger", budgets=[0.5, "80%", 0.01, 10])
    total = curve.plans[0].total_nbytes
    tried = [point.budget_nbytes for point in (*made.points[1:], *made.left_out)]
    assert sorted(filter(None, tried)) == [10, total // 100, total // 2, total * 4 // 5]
    assert {p.status for p in made.left_out if p.plan is None} == {Status.INFEASIBLE}


def test_a_budget_without_a_plan_is_named_below_the_table() -> None:
    @dataclass(frozen=True)
    class Lost:
        def solve(self, problem: Problem) -> Outcome:
            return Outcome(Status.NO_PLAN_FOUND)

    text = str(frontier(strategy=Lost(), budgets=[10, 0.9, None], realisation="packed"))
    table, _, last = text.rpartition("\n")
    assert len(table.splitlines()) == 2
    assert re.fullmatch(
        r"without a plan: least \(no plan found\), .* MiB \(no plan found\), 10 B \(infeasible\)",
        last,
    )


def test_none_is_the_least_memory(curve: memplan.Frontier) -> None:
    made = frontier(strategy=Prefix(), budgets=[None, 0.9])
    assert [plan.budget_nbytes is None for plan in made.plans] == [False, False, True]
    assert made.plans[-1].schedule == curve.plans[-1].schedule


def test_what_another_plan_beats_is_left_out() -> None:
    curve = frontier(strategy="memonger", budgets=5)
    assert len(curve.points) + len(curve.left_out) == 5
    assert curve.left_out  # memonger minds no budget
    best = curve.plans[-1]
    for attempt in curve.left_out:
        assert attempt.plan is not None
        assert attempt.plan.total_nbytes >= best.total_nbytes
        assert attempt.plan.overhead >= best.overhead


@dataclass(frozen=True)
class Idle:
    """Says for the least memory what recomputes a few ops, as a search that is cut does."""

    def solve(self, problem: Problem) -> Outcome:
        if problem.budget_nbytes is not None:
            return Prefix().solve(problem)
        few = flaggable(problem.graph)[:3]
        return Outcome(Status.FEASIBLE, mirror(problem.graph, frozenset(few)))


def test_the_least_memory_is_the_least_of_all_points() -> None:
    """Of those at no more than one extra forward pass."""
    curve = frontier(strategy=Idle(), budgets=[None, "70%", "75%"])
    [least] = [point.plan for point in curve.points if point.budget_nbytes is None]
    [at_70] = [point.plan for point in frontier(strategy=Idle(), budgets=["70%"]).points[1:]]
    assert least is not None
    assert at_70 is not None
    assert curve.points[-1].plan is least
    assert least.schedule == at_70.schedule
    assert least.budget_nbytes is None
    assert least.lower_bound_overhead is None


def test_a_curve_must_fall() -> None:
    curve = frontier(strategy="memonger", budgets=2)
    with pytest.raises(ArgumentError, match="fewer bytes at more time"):
        memplan.Frontier(tuple(reversed(curve.points)), ())


def test_the_explicit_realisation_has_a_curve_too() -> None:
    curve = frontier(strategy="chen_sqrt:linear", budgets=3, realisation="explicit")
    assert curve.plans[0].overhead == 0
    assert curve.plans[-1].total_nbytes < curve.plans[0].total_nbytes


def test_a_network_that_nothing_can_shrink_has_one_point() -> None:
    curve = frontier(strategy="store_all")
    assert len(curve.points) == 1
    assert curve.plans[0].overhead == 0


def test_table_and_csv(curve: memplan.Frontier) -> None:
    rows = list(csv.DictReader(io.StringIO(curve.to_csv())))
    assert [int(row["total_nbytes"]) for row in rows] == [p.total_nbytes for p in curve.plans]
    lines = str(curve).splitlines()
    assert len(lines) == len(curve.points) + 1
    for plan, line in zip(curve.plans, lines[1:], strict=True):
        assert f"{plan.overhead:.1%}" in line


def test_finished_points_are_kept(tmp_path: Path) -> None:
    first = frontier(strategy=Prefix(), budgets=4, cache=tmp_path)
    ncalls = len(calls)
    second = frontier(strategy=Prefix(), budgets=4, cache=tmp_path)
    assert len(calls) == ncalls == 3
    assert [p.schedule for p in first.plans] == [p.schedule for p in second.plans]


@dataclass(frozen=True)
class InterruptedBelow(Prefix):
    """The user's patience ends at the second budget."""

    def solve(self, problem: Problem) -> Outcome:
        if len(calls) == 2:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                pass
        return super().solve(problem)


def test_an_interrupt_ends_it_with_the_points_so_far() -> None:
    curve = frontier(strategy=InterruptedBelow(), budgets=6)
    assert len(calls) == 3
    assert len(curve.points) == 4  # the two ends, one before, and the one that was cut short
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_budget_at_all() -> None:
    with pytest.raises(ArgumentError, match="budgets: none is named"):
        frontier(budgets=[])


def test_numpys_numbers_are_a_count() -> None:
    curve = frontier(strategy="chen_sqrt", budgets=np.int64(2))
    assert len(curve.points) + len(curve.left_out) == 2


@pytest.mark.parametrize(
    "budgets", [1, 0, True, 0.5, "4GiB", b"60%", bytearray(b"60%"), np.array(0.8)]
)
def test_what_budgets_may_be(budgets: Any) -> None:
    with pytest.raises(ArgumentError, match="budgets must be"):
        frontier(budgets=budgets)


def test_an_unknown_strategy_is_said_first() -> None:
    with pytest.raises(ArgumentError, match="choose from"):
        frontier(strategy="chekmate")


@pytest.mark.parametrize("budgets", [1024, 4 * 2**30, 10**30])
def test_bytes_are_no_number_of_points(budgets: int) -> None:
    """So many points would be more than any memory holds."""
    net, shapes = residual_net(units=1)
    with pytest.raises(ArgumentError, match=r"how many points the curve is to have \(2 to 1023\)"):
        memplan.frontier(net, strategy="store_all", budgets=budgets, **shapes)
