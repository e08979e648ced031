"""Plans of one network for many shapes: what is shared, and what is done with a new shape."""

from __future__ import annotations

import functools
import gc
import math
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mxnet as mx
import pytest

from helpers.buckets import network
from helpers.networks import residual_net
from helpers.planning import NEVER_SECONDS
from memplan.errors import ArgumentError, BudgetError
from memplan.planning import job as planning_job
from memplan.planning import shapes
from memplan.planning.job import Job
from memplan.planning.plan import Attempt, Plan
from memplan.planning.shapes import ShapePlanner
from memplan.planning.transfer import mended, transferred
from memplan.step.costs import CostTable
from memplan.step.schedule import Schedule
from memplan.step.validate import validate
from memplan.strategies import Outcome, Problem
from memplan.strategies.evict import Evict
from memplan.strategies.spaces.sequences import Sequences
from memplan.util.stop import Stop

LATE = Stop(math.inf)
NET = residual_net(units=2)[0]


@dataclass(frozen=True)
class Noted:
    """A quick strategy that can begin with a schedule; it notes what it is asked."""

    start: Schedule | None = None
    asked: ClassVar[list[Problem]] = []

    def solve(self, problem: Problem) -> Outcome:
        self.asked.append(problem)
        return problem.best_of([*problem.starts(), Evict(patience=20).solve(problem).schedule])


def planner(**options: Any) -> ShapePlanner:
    Noted.asked.clear()
    given = {"budget": "80%", "strategy": Noted(), "realisation": "packed"}
    return ShapePlanner(**(given | {"time_limit": NEVER_SECONDS} | options))


def planned(by: ShapePlanner, size: int) -> Plan:
    return by.plan(NET, shapes={"data": (size, 3, 16, 16)}, ctx=mx.cpu())


def own(size: int, budget: int | str) -> Plan:
    return planned(planner(budget=budget), size)


def job(size: int, **options: Any) -> Job:
    return Job.prepare(NET, realisation="packed", data=(size, 3, 16, 16), **options)


def test_a_schedule_of_the_same_ops_is_the_same_sequence() -> None:
    schedule = own(16, "80%").schedule
    assert schedule.recomputed
    other = transferred(schedule, job(24).graph)
    assert other is not None
    assert other.ops == schedule.ops
    assert other.graph != schedule.graph


def unrolled(steps: int) -> Job:
    shapes: Any = {"data": (8, steps), "softmax_label": (8, steps)}
    return Job.prepare(network(steps)[0], realisation="packed", **shapes)


@functools.cache
def of_eight_steps() -> Schedule:
    job = unrolled(8)
    schedule = mended(job.problem(int(0.6 * job.unplanned.total_nbytes)), None, LATE, patience=20)
    assert schedule is not None
    assert schedule.recomputed
    return schedule


@pytest.mark.parametrize("length", [3, 8, 12])
def test_a_schedule_of_another_length(length: int) -> None:
    """It recomputes the same time steps; those beyond run once."""
    schedule = of_eight_steps()
    other = transferred(schedule, unrolled(length).graph)
    assert other is not None
    assert validate(other).valid
    recomputed = len(schedule.ops) - len(schedule.graph.ops)
    assert 0 < len(other.ops) - len(other.graph.ops) <= recomputed
    if length == 8:
        assert other.ops == schedule.ops


def dropping(masked: bool) -> Job:
    """Convolutions; between some a mask that need not be there, as that of a DropBlock."""
    body = mx.sym.Variable("data")
    for place in range(6):
        body = mx.sym.Convolution(body, num_filter=8, kernel=(3, 3), pad=(1, 1))
        body = mx.sym.Activation(mx.sym.BatchNorm(body), act_type="relu")
        if masked and place % 2 == 0:
            mask = mx.sym.random.uniform(shape=(1, 8, 16, 16)) < 0.9
            body = mx.sym.broadcast_mul(body, mask)
    return Job.prepare(mx.sym.MakeLoss(body), realisation="packed", data=(16, 3, 16, 16))


@pytest.mark.parametrize("first", [False, True])
def test_a_schedule_of_a_network_with_other_ops_in_between(first: bool) -> None:
    """The scheduler of a DropBlock begins without any, and ends it for evaluation."""
    before, after = dropping(first), dropping(not first)
    problem = before.problem(int(0.8 * before.unplanned.total_nbytes))
    schedule = mended(problem, None, LATE, patience=20)
    assert schedule is not None
    other = transferred(schedule, after.graph)
    assert other is not None
    assert validate(other).valid
    layers = ("Convolution", "BatchNorm", "Activation")
    one, two = (
        [op.kind for op in map(s.graph.ops.__getitem__, s.recomputed) if op.kind in layers]
        for s in (schedule, other)
    )
    assert one == two != []


def test_no_schedule_of_another_network() -> None:
    schedule = own(16, "80%").schedule
    assert transferred(schedule, unrolled(4).graph) is None


def test_mending_drops_until_the_budget_is_met() -> None:
    small, large = own(16, "80%"), job(24)
    schedule = transferred(small.schedule, large.graph)
    problem = large.problem(large.holds(schedule) - (64 << 10))
    assert problem.memory.nbytes(schedule) > problem.budget_nbytes
    found = mended(problem, schedule, LATE, patience=0)
    assert problem.memory.nbytes(found) <= problem.budget_nbytes
    assert mended(large.problem(large.graph.fixed_nbytes), schedule, LATE, patience=0) is None


@pytest.mark.parametrize("size", [12, 17, 18])
def test_another_plan_is_as_good_as_one_of_its_own(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "ABOVE", math.inf)  # plans of a quick strategy may be poor
    by = planner()
    first, other = planned(by, 16), planned(by, size)
    assert [problem.time_limit <= 0.1 * NEVER_SECONDS for problem in Noted.asked] == [False, True]
    assert Noted.asked[1].start is not None
    assert other.total_nbytes <= other.budget_nbytes == first.budget_nbytes
    assert other.overhead <= own(size, first.budget_nbytes).overhead + 0.01


def test_where_the_other_schedule_never_fits_the_strategy_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memplan.planning.shapes.mended", lambda *_, **__: None)
    by = planner()
    planned(by, 16)
    planned(by, 18)
    assert [problem.time_limit > 0.1 * NEVER_SECONDS for problem in Noted.asked] == [True, True]


@pytest.mark.parametrize(("dearer", "nsearches"), [(math.inf, 1), (-math.inf, 2)])
def test_where_a_plan_is_far_above_its_bound_the_strategy_begins_anew(
    monkeypatch: pytest.MonkeyPatch, dearer: float, nsearches: int
) -> None:
    monkeypatch.setattr(shapes, "ABOVE", dearer)
    tried: list[Schedule | None] = []
    try_strategy = shapes.try_strategy

    def trying(*given: Any, **options: Any) -> Attempt:
        tried.append(options["start"])
        return try_strategy(*given, **options)

    monkeypatch.setattr(shapes, "try_strategy", trying)
    by = planner(strategy="search:effort=0.1", time_limit=1e4)
    planned(by, 16)
    tried.clear()
    plan = planned(by, 18)
    assert [start is not None for start in tried] == nsearches * [True]
    assert plan.overhead <= tried[-1].overhead + 1e-9


def test_a_plan_made_anew_may_hold_what_the_largest_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget: it is not one of the least memory."""
    monkeypatch.setattr(shapes, "ABOVE", -math.inf)
    limits: list[int | None] = []
    try_strategy = shapes.try_strategy

    def trying(job: Any, solver: Any, limit: Any, **options: Any) -> Attempt:
        limits.append(limit)
        return try_strategy(job, solver, limit, **options)

    monkeypatch.setattr(shapes, "try_strategy", trying)
    by = planner(strategy="search:effort=0.1", budget=None, time_limit=1e4)
    first = planned(by, 18)
    planned(by, 16)
    assert limits == [None, first.total_nbytes, first.total_nbytes]


def test_a_plan_made_anew_that_is_dearer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ABOVE", -math.inf)
    try_strategy, found = shapes.try_strategy, []

    def trying(job: Any, solver: Any, limit: Any, **options: Any) -> Attempt:
        other = Evict(patience=0) if len(found) == 2 else solver  # the third begins anew
        found.append(try_strategy(job, other, limit, **options))
        return found[-1]

    monkeypatch.setattr(shapes, "try_strategy", trying)
    by = planner(strategy="search:effort=0.1", time_limit=1e4)
    planned(by, 16)
    plan = planned(by, 18)
    followed, anew = (attempt.plan.overhead for attempt in found[1:])
    assert followed < anew
    assert plan.overhead == followed


def test_without_a_budget_others_hold_what_the_largest_does() -> None:
    by = planner(budget=None)
    first, smaller = planned(by, 16), planned(by, 12)
    assert smaller.total_nbytes <= first.total_nbytes == smaller.budget_nbytes
    assert smaller.overhead < first.overhead
    larger = planned(by, 32)
    assert larger.total_nbytes > first.total_nbytes
    assert larger.budget_nbytes is None


def test_of_plans_of_one_size_the_last_is_kept() -> None:
    """A block may compute something else in every step: its plans would fill the memory."""
    by = planner(budget=None)
    sizes = (4, 8, 4, 8, 4)
    *others, _, _ = plans = [weakref.ref(planned(by, size)) for size in sizes]
    gc.collect()
    assert [plan() is None for plan in plans] == [True] * len(others) + [False] * 2


def test_without_a_budget_plans_may_hold_what_those_that_went_did() -> None:
    large, small = (
        planned(planner(budget=None, strategy=name), 8) for name in ("store_all", "evict")
    )
    assert small.total_nbytes < large.total_nbytes
    by = planner(budget=None)
    by.adopt(large)
    by.adopt(small)
    assert small.total_nbytes < planned(by, 8).total_nbytes <= large.total_nbytes


@pytest.mark.long
def test_a_step_that_is_too_small_for_its_share_holds_what_the_largest_does() -> None:
    """A last batch of few examples, of which most bytes are those of the parameters."""
    by = planner(share_of_first=False, budget="74%")
    first, last = planned(by, 16), planned(by, 4)
    assert last.total_nbytes > 0.74 * last.unplanned.total_nbytes
    assert last.budget_nbytes == first.total_nbytes
    with pytest.raises(BudgetError):
        planned(planner(share_of_first=False, budget="74%"), 4)


def test_a_strategy_that_cannot_begin_with_a_schedule_plans_each() -> None:
    by = planner(strategy="chen_greedy:linear", budget="90%")
    assert planned(by, 16).strategy == planned(by, 12).strategy == "chen_greedy:linear"


def test_the_nearest_schedule_is_taken_without_a_search() -> None:
    by = planner(unseen="nearest")
    first = planned(by, 16)
    with pytest.warns(UserWarning, match=r"data=\(18, 3, 16, 16\): not seen before.*nearest"):
        other = planned(by, 18)
    assert len(Noted.asked) == 1
    assert other.total_nbytes <= first.budget_nbytes
    assert set(first.schedule.recomputed) <= set(other.schedule.recomputed)
    with pytest.warns(UserWarning, match="unplanned in"):
        assert not planned(by, 4).schedule.recomputed  # which fits as it is


def test_it_is_said_where_the_nearest_schedule_cannot_fit() -> None:
    by = planner(unseen="nearest", budget=None)
    planned(by, 16)
    begun = len(Noted.asked)
    with pytest.warns(
        UserWarning, match=r"data=\(24, 3, 16, 16\): .* planned anew, as the nearest"
    ):
        planned(by, 24)  # more than the least memory of the first, in which others are trained
    assert len(Noted.asked) > begun


def test_unplanned_steps_may_exceed_the_budget() -> None:
    by = planner(unseen="unplanned")
    first = planned(by, 16)
    with pytest.warns(UserWarning, match="unplanned in .*, more than the budget of"):
        other = planned(by, 24)
    assert other.schedule == Schedule.unplanned(other.schedule.graph)
    assert other.total_nbytes > other.budget_nbytes == first.budget_nbytes


def test_planning_warns_of_nothing() -> None:
    by = planner()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(by, 16)
        planned(by, 12)


def test_what_to_do_with_new_shapes_is_checked() -> None:
    with pytest.raises(ArgumentError, match="'plan', 'nearest', 'unplanned', got 'skip'"):
        planner(unseen="skip")


def test_a_table_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may change its folder between two shapes."""
    monkeypatch.chdir(tmp_path)
    seconds = {op.signature: 1.0 for size in (2, 4) for op in job(size).trace.graph.ops}
    stock = (Job.prepare(NET, data=(size, 3, 16, 16)) for size in (2, 4))
    seconds |= {op.signature: 1.0 for one in stock for op in one.trace.graph.ops}
    CostTable("cpu(x)", seconds).save("costs.json")
    monkeypatch.setattr(planning_job, "device_of", lambda _: None)
    by = planner(costs="costs.json")
    Path("costs.json").unlink()
    assert [planned(by, size).costs for size in (4, 2)] == ["measured on cpu(x)"] * 2


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The work of searches."""
    spent: list[float] = []
    spend = Stop.spend

    def counted(stop: Stop, work: float) -> None:
        if stop._part_of is None and math.isfinite(stop.work_left):
            spent.append(work)
        spend(stop, work)

    monkeypatch.setattr(Stop, "spend", counted)
    return spent


@pytest.mark.parametrize(("realisation", "share"), [("packed", 0.1), ("explicit", 0.2)])
def test_another_plan_takes_a_tenth_of_the_work(
    spent: list[float], realisation: str, share: float
) -> None:
    """In blocks a fifth. The budgets leave room for code and calls, which no plan lowers."""
    by = planner(strategy="search", realisation=realisation, time_limit=1e4, budget="85%")
    planned(by, 16)
    usual = job(16).problem(0).stop(None, effort=1.0).work_left
    assert 0.0 < sum(spent) <= 1.1 * usual
    spent.clear()
    other = planned(by, 18)
    # Every round of a search makes some moves, however little work is left.
    assert 0.0 < sum(spent) <= 1.3 * share * usual
    assert not other.cut_by_clock
    assert other.total_nbytes <= other.budget_nbytes


def test_in_blocks_a_search_that_finds_nothing_begins_with_what_fits(
    spent: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    by = planner(strategy="search:effort=0.2", realisation="explicit", time_limit=1e4, budget="85%")
    planned(by, 16)
    improve = Sequences.improve

    def improving(space: Any, problem: Any, start: Any, *rest: Any) -> Any:
        found = improve(space, problem, start, *rest)
        return None if problem.cheapest([start]) is None else found

    monkeypatch.setattr(Sequences, "improve", improving)
    spent.clear()
    other = planned(by, 18)
    assert other.total_nbytes <= other.budget_nbytes
    usual = job(18).problem(0).stop(None, effort=0.2).work_left
    assert 0.2 * usual < sum(spent) <= 0.6 * usual


def test_a_schedule_that_is_proved_to_be_good_takes_no_search(spent: list[float]) -> None:
    by = planner(strategy="auto", time_limit=1e4, share_of_first=False)
    planned(by, 16)
    spent.clear()
    other = planned(by, 20)
    assert 0.0 < sum(spent) <= 0.02 * job(20).problem(0).stop(None, effort=1.0).work_left
    assert other.lower_bound_overhead is not None
    assert 0.0 < other.overhead <= other.lower_bound_overhead + 0.005
