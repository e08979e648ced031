"""A plan says whether the clock cut its search; ``gap`` and ``seed`` reach the strategy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import memplan
from helpers.networks import Network, residual_net
from helpers.planning import ROOFLINE
from memplan.errors import ArgumentError
from memplan.planning import attempt_json
from memplan.planning.attempt import try_strategy
from memplan.planning.job import Job
from memplan.strategies import Outcome, configured, create
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem, Status
from memplan.strategies.memonger import Memonger

PLENTY = 1e5


@pytest.fixture
def network() -> Network:
    return residual_net(batch=16, size=32, units=4, filters=16)


@dataclass(frozen=True)
class Cut:
    """memonger's plan, but for what it says of the clock."""

    cut: bool = True

    def solve(self, problem: Problem) -> Outcome:
        return dataclasses.replace(create("memonger").solve(problem), cut_by_clock=self.cut)


@pytest.mark.parametrize("cut", [True, False])
def test_a_plan_says_whether_the_clock_cut_it(network: Network, tmp_path: Path, cut: bool) -> None:
    net, shapes = network
    options: Any = {"strategy": Cut(cut), "budget": 0.7, "time_limit": PLENTY, "costs": ROOFLINE}
    for _ in range(2):  # the second one is kept
        plan = memplan.plan(net, cache=tmp_path, **options, **shapes)
        assert plan.cut_by_clock is cut
        assert ("cut by the clock" in str(plan)) is cut
        assert ("cut by the clock" in plan.report_html()) is cut
        assert "least memory was cut" not in str(plan)
    least = memplan.plan(net, **{**options, "budget": None}, **shapes)
    assert ("least memory was cut" in str(least).splitlines()[1]) is cut
    assert len(list(tmp_path.iterdir())) == 1
    job = Job.prepare(net, costs=ROOFLINE, time_limit=PLENTY, **shapes)
    none = try_strategy(job, Cut(cut), 1)
    assert none.plan is None
    attempt = try_strategy(job, Cut(cut), plan.budget_nbytes)
    assert attempt.cut_by_clock is cut
    assert attempt_json.from_json(job, attempt_json.to_json(attempt)).cut_by_clock is cut
    assert f"{cut}" in memplan.compare(net, strategies=[Cut(cut)], budgets=0.7, **shapes).to_csv()


@dataclass(frozen=True)
class Proved:
    """memonger's plan, which it says is the cheapest one, although the clock has cut something."""

    in_order: bool

    def solve(self, problem: Problem) -> Outcome:
        schedule = create("memonger").solve(problem).schedule
        assert schedule is not None
        bound = schedule.seconds
        return Outcome(Status.OPTIMAL, schedule, bound, self.in_order, cut_by_clock=True)


@pytest.mark.parametrize("in_order", [True, False])
def test_what_is_proved_to_be_the_cheapest_is_not_cut(network: Network, in_order: bool) -> None:
    """If that holds for any order: else more time may find a cheaper one of another order."""
    net, shapes = network
    job = Job.prepare(net, costs=ROOFLINE, time_limit=PLENTY, **shapes)
    budget = int(0.7 * job.unplanned.total_nbytes)
    attempt = try_strategy(job, Proved(in_order), budget)
    assert attempt.plan is not None
    assert attempt.cut_by_clock is attempt.plan.cut_by_clock is in_order


@pytest.mark.long
def test_gap_and_seed_reach_every_strategy_that_has_them(network: Network) -> None:
    net, shapes = network
    options: Any = {"costs": ROOFLINE, "gap": 0.5, "seed": 3, "time_limit": PLENTY}
    rows = memplan.compare(net, strategies=("auto", "memonger"), budgets=0.8, **options, **shapes)
    assert [row.strategy for row in rows.rows] == ["auto:gap=0.5:seed=3", "memonger"]
    curve = memplan.frontier(net, budgets=[0.8], **options, **shapes)
    assert curve.plans[-1].strategy == "auto:gap=0.5:seed=3"
    shapes = {name: ("N", *shape[1:]) for name, shape in shapes.items()}
    largest = memplan.max_batch_size(net, "4MiB", **{**options, "time_limit": 20}, **shapes)
    assert largest.plan.strategy == "auto:gap=0.5:seed=3"


@pytest.mark.parametrize("realisation", ["mirror", "explicit", "packed"])
def test_equal_calls_give_equal_plans(network: Network, realisation: str) -> None:
    net, shapes = network
    options: Any = {"budget": 0.6, "time_limit": PLENTY, "realisation": realisation}
    strategy = Auto(effort=0.05, gap=0.0)
    first, second = (
        memplan.plan(net, strategy=strategy, costs=ROOFLINE, **options, **shapes) for _ in range(2)
    )
    assert not first.cut_by_clock
    assert first.schedule == second.schedule
    assert first.lower_bound_overhead == second.lower_bound_overhead
    assert first.symbol.tojson() == second.symbol.tojson()


def test_options_go_to_the_strategies_that_have_them() -> None:
    assert configured("auto", gap=0.01, seed=None) == "auto:gap=0.01"
    assert create(configured("auto:rounds=2", gap=0.01, seed=3)) == Auto(rounds=2, gap=0.01, seed=3)
    assert configured("memonger", gap=0.01, seed=3) == "memonger"
    assert configured(Auto(rounds=1), seed=2) == Auto(rounds=1, seed=2)
    assert configured("auto", gap=Fraction(1, 4)) == "auto:gap=0.25"
    assert configured(Auto(), gap=Fraction(1, 4)) == Auto(gap=0.25)
    other = Memonger()
    assert configured(other, gap=0.01) is other


@pytest.mark.parametrize("strategy", ["memonger", Memonger(), "auto", Auto()])
@pytest.mark.parametrize("options", [{"gap": math.nan}, {"gap": -1}, {"seed": "x"}, {"seed": 0.5}])
def test_options_are_looked_at_whether_or_not_the_strategy_has_them(
    strategy: Any, options: dict[str, Any]
) -> None:
    [name] = options
    with pytest.raises(ArgumentError, match=f"^{name} must be "):
        configured(strategy, **options)


def test_a_plan_takes_a_gap_and_a_seed(network: Network) -> None:
    net, shapes = network
    options: Any = {"budget": 0.7, "costs": ROOFLINE, "time_limit": PLENTY}
    plan = memplan.plan(net, strategy="auto:effort=0.05", gap=0.9, seed=5, **options, **shapes)
    assert plan.strategy == "auto:effort=0.05:gap=0.9:seed=5"
    assert plan.lower_bound_overhead is not None
    assert plan.overhead <= plan.lower_bound_overhead + 0.9
