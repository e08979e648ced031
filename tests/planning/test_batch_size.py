"""The largest batch within a budget."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.networks import dropout_net, residual_net
from helpers.planning import NEVER_SECONDS
from memplan.errors import ArgumentError, BudgetError
from memplan.planning.batch_size import FIRST_SHARE, HOPELESS_SHARE, LAST_TIMES
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, create
from memplan.strategies.base import MOST_OVERHEAD, Problem

COSTS = "roofline:v100"


@pytest.fixture(autouse=True)
def little_time_to_look_for_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.least.SEARCH_SECONDS", 0.2)


def largest(budget: Any = "16MiB", **options: Any) -> memplan.BatchSize:
    net, _ = residual_net(size=32, units=3)
    given = {"strategy": "memonger", "costs": COSTS, "data": ("N", 3, 32, 32)}
    given |= {"time_limit": NEVER_SECONDS} | options
    return memplan.max_batch_size(net, budget, **given)


@functools.cache
def usual(**options: Any) -> memplan.BatchSize:
    """As ``largest``, and once for all tests that ask for the same."""
    return largest(**options)


def plan(size: int, **options: Any) -> memplan.Plan:
    net, _ = residual_net(size=32, units=3)
    given = {"strategy": "memonger", "costs": COSTS, **options}
    return memplan.plan(net, data=(size, 3, 32, 32), **given)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "realisation"),
    [("store_all", "mirror"), ("memonger", "mirror"), ("chen_greedy", "explicit")],
)
def test_one_more_does_not_fit(strategy: str, realisation: str) -> None:
    options = {"strategy": strategy, "realisation": realisation}
    result = largest(**options)
    assert result.too_large == result.batch_size + 1
    assert result.plan.budget_nbytes == 16 << 20
    assert result.plan.total_nbytes <= 16 << 20
    assert result.plan.strategy == strategy
    alone = plan(result.batch_size, budget="16MiB", **options)
    assert result.plan.overhead <= alone.overhead
    with pytest.raises(BudgetError):
        plan(result.batch_size + 1, budget="16MiB", **options)


def paired() -> mx.sym.Symbol:
    """Reads a batch as pairs, so that it must be even."""
    one, other = mx.sym.split(mx.sym.Variable("data"), num_outputs=2, axis=0)
    return mx.sym.MakeLoss(mx.sym.FullyConnected(one - other, num_hidden=4))


def test_a_network_that_takes_some_sizes_only_is_said_to_be_one() -> None:
    with pytest.raises(
        ArgumentError, match=r"takes a batch of \d*[02468], but none of \d*[13579], and"
    ):
        memplan.max_batch_size(paired(), "9999B", strategy="store_all", data=("N", 32))


def test_it_is_the_largest_that_least_memory_allows() -> None:
    result = usual()
    least = plan(result.batch_size + 1)
    assert least.total_nbytes > 16 << 20 >= plan(result.batch_size).total_nbytes
    assert result.batch_size > 1.3 * usual(strategy="store_all").batch_size


def test_an_overhead_may_be_too_much() -> None:
    everything = usual(strategy="store_all").batch_size
    assert largest(max_overhead=0.0).batch_size == everything
    assert usual(max_overhead=0.1).batch_size == everything  # memonger's plans take more
    assert largest(max_overhead=1.0).batch_size == usual().batch_size


def test_more_overhead_than_usual_may_be_accepted() -> None:
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=256)
    for _ in range(24):
        hidden = mx.sym.sin(hidden)
    options = {"strategy": "evict:patience=20", "realisation": "packed", "data": ("N", 16)}
    options["time_limit"] = NEVER_SECONDS
    net = mx.sym.MakeLoss(mx.sym.sum(hidden))
    less = memplan.max_batch_size(net, "256KiB", **options)
    more = memplan.max_batch_size(net, "256KiB", max_overhead=20.0, **options)
    assert more.batch_size > less.batch_size
    assert more.plan.overhead > MOST_OVERHEAD


def test_sizes_that_were_tried_are_told() -> None:
    result = usual(max_overhead=0.1)
    sizes = [trial.batch_size for trial in result.tried]
    assert sizes == sorted(set(sizes))
    assert {True, False} == {trial.fits for trial in result.tried}
    assert max(t.batch_size for t in result.tried if t.fits) == result.batch_size
    assert min(t.batch_size for t in result.tried if not t.fits) == result.too_large
    for trial in result.tried:
        plan = trial.attempt.plan
        assert trial.fits == (plan is not None and plan.overhead <= 0.1)
        if plan is not None:
            assert plan.trace.shapes["data"] == (trial.batch_size, 3, 32, 32)
    lines = str(result).splitlines()
    assert lines[0].startswith(f"Batch size {result.batch_size}: ")
    [attempt] = [t.attempt for t in result.tried if t.batch_size == result.too_large]
    assert attempt.plan is not None
    overhead = f"{attempt.plan.overhead:+.1%}"
    assert lines[0].endswith(f"; {result.too_large} was found to fit only at {overhead} time.")
    assert [int(line.split()[0]) for line in lines[3:]] == sizes
    rows = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert [(int(r["batch_size"]), r["fits"] == "1") for r in rows] == [
        (t.batch_size, t.fits) for t in result.tried
    ]


def test_an_executor_finds_the_same() -> None:
    here = usual(max_overhead=0.1)
    with ThreadPoolExecutor(2) as executor:
        there = largest(max_overhead=0.1, executor=executor)
    assert there.batch_size == here.batch_size
    assert there.too_large == here.too_large
    assert there.plan.schedule == here.plan.schedule
    assert {t.batch_size for t in here.tried} <= {t.batch_size for t in there.tried}


def test_the_batch_may_be_in_several_shapes_and_places() -> None:
    net, _ = dropout_net(features=200)
    options: dict[str, Any] = {"strategy": "store_all", "data": ["N", 200]}
    result = memplan.max_batch_size(net, 400_000, softmax_label=("N",), **options)
    assert result.plan.trace.shapes["softmax_label"] == (result.batch_size,)
    assert result.plan.trace.shapes["data"] == (result.batch_size, 200)


@pytest.mark.long
def test_not_even_one_sample() -> None:
    with pytest.raises(BudgetError, match=r"not even a batch of 1 fits: .*least memory") as caught:
        largest(plan(1).total_nbytes, strategy="store_all")
    lowest = caught.value.lowest_nbytes
    assert lowest is not None
    assert not caught.value.proved
    assert largest(lowest, strategy="search:effort=0.02", time_limit=NEVER_SECONDS).batch_size == 1
    with pytest.raises(BudgetError, match="proved") as caught:
        largest("1KiB")
    assert caught.value.proved


def test_one_sample_fits_only_slowly() -> None:
    least = plan(1).total_nbytes
    with pytest.raises(
        BudgetError, match=r"batches of 1 fit in .* only at .*max_overhead"
    ) as caught:
        largest(least, max_overhead=0.01)
    assert caught.value.lowest_nbytes == least


@dataclass(frozen=True)
class Recorded:
    """Chen's segments, or the schedule to start from if that is cheaper."""

    start: Schedule | None = None

    def solve(self, problem: Problem) -> Outcome:
        asked.append(problem)
        return problem.best_of([problem.start, create("chen_greedy").solve(problem).schedule])


asked: list[Problem] = []


@dataclass(frozen=True)
class Slow:
    """Takes twenty seconds of a clock for a plan."""

    def solve(self, problem: Problem) -> Outcome:
        later.append(20.0)
        return create("memonger").solve(problem)


later: list[float] = []


def test_time_may_end_before_the_search_does(monkeypatch: pytest.MonkeyPatch) -> None:
    later.clear()
    monkeypatch.setattr(time, "monotonic", lambda: sum(later))
    result = largest("64MiB", strategy=Slow(), time_limit=50)
    assert result.plan.total_nbytes <= 64 << 20
    assert result.too_large is not None
    assert result.too_large > result.batch_size + 1
    assert len(result.tried) == 2


def test_what_is_known_of_other_sizes_is_used() -> None:
    asked.clear()
    result = largest(strategy=Recorded(), realisation="packed", max_overhead=0.02)
    of_sizes = [problem for problem in asked if problem.budget_nbytes is not None]
    hopeless = [p for p in of_sizes if p.bound_seconds > 1.02 * p.graph.seconds]
    assert 0 < len(hopeless) < len(of_sizes)
    for problem in of_sizes:
        assert problem.effort in ((HOPELESS_SHARE,) if problem in hopeless else (FIRST_SHARE, 1.0))
    made = [trial.attempt.plan for trial in result.tried]
    of_larger = {plan.schedule.ops for plan in made[1:] if plan is not None}
    assert any(problem.start is not None and problem.start.ops in of_larger for problem in asked)


@pytest.mark.long
def test_sizes_that_fit_with_little_work_get_no_more() -> None:
    asked.clear()
    result = largest(strategy=Recorded(), realisation="packed")
    searched = [(p.graph, p.effort) for p in asked if p.budget_nbytes is not None]
    plans = [trial.attempt.plan for trial in result.tried if trial.fits]
    with_little = [
        p.schedule.graph for p in plans if p and (p.schedule.graph, FIRST_SHARE) in searched
    ]
    at_length = [graph for graph in with_little if (graph, 1.0) in searched]
    assert len(with_little) > 1
    assert at_length == [result.plan.schedule.graph]
    # That plan may take half of the time: what is proved of it often needs more than an eighth.
    limits = {(p.graph, p.effort): p.time_limit for p in asked if p.budget_nbytes is not None}
    last = limits.pop((result.plan.schedule.graph, 1.0))
    assert last is not None
    assert last > 0.9 * LAST_TIMES * max(limit or 0.0 for limit in limits.values())


@dataclass(frozen=True)
class Interrupted:
    """The user's patience ends at the third search."""

    def solve(self, problem: Problem) -> Outcome:
        searches.append(problem.budget_nbytes)
        if len(searches) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return create("memonger").solve(problem)


searches: list[int | None] = []


def test_an_interrupt_ends_it_with_the_largest_found() -> None:
    searches.clear()
    result = largest(strategy=Interrupted(), max_overhead=0.5)
    assert len(searches) == 3
    assert result.plan.total_nbytes <= 16 << 20
    assert result.batch_size <= usual().batch_size


@dataclass(frozen=True)
class AnswersWhenInterrupted:
    """Is interrupted at one of its searches, and answers with its best so far."""

    search: int
    start: Schedule | None = None

    def solve(self, problem: Problem) -> Outcome:
        searches.append(problem.budget_nbytes)
        if len(searches) == self.search:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
        return create("memonger").solve(problem)


@pytest.mark.parametrize("search", [1, 2, 3])  # for the guess, and a size with little and all work
def test_an_interrupt_that_is_answered_before_a_size_fits_is_raised(search: int) -> None:
    searches.clear()
    with pytest.raises(KeyboardInterrupt):
        largest(strategy=AnswersWhenInterrupted(search))
    assert len(searches) == search


def test_an_interrupt_that_is_answered_ends_it_with_the_largest_found() -> None:
    searches.clear()
    result = largest(strategy=AnswersWhenInterrupted(4))
    assert len(searches) == 4
    assert result.interrupted
    assert "not tried, as Ctrl-C ended the search" in str(result)
    assert "time was up" not in str(result)


@pytest.mark.parametrize(
    "budget",
    ["", "least", "4Gb", "0.6", 0, True, 0.6, "60%", [], pytest.param(10**5000, id="huge")],
)
def test_no_share_is_advised_for_a_budget_that_cannot_be_used(budget: Any) -> None:
    with pytest.raises(ArgumentError, match=r"must be bytes or a string such as '4GiB'") as refusal:
        largest(budget)
    assert "a share of the unplanned step (0.6 or '60%')" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": (4, 3, 32, 32)}, "put 'N' in its place"),
        ({"budget": 0.5}, "a share of the unplanned step grows"),
        ({"budget": "50%"}, "a share of the unplanned step grows"),
        ({"budget": None}, "the budget None cannot be used; it must be bytes"),
        ({"budget": "4 potatoes"}, "potatoes"),
        ({"max_overhead": -0.1}, "max_overhead"),
        ({"max_overhead": "10%"}, "max_overhead"),
        ({"time_limit": 0}, "time_limit"),
        ({"strategy": "chekmate"}, "choose from"),
        ({"realisation": "wish"}, "realisation"),
        ({"data": ("M", 3, 32, 32)}, "put 'N' in its place"),
        ({"executor": 3}, "executor"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        largest(**options)
