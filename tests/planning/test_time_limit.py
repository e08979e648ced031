"""What counts in the time limit of a plan: tracing and the search, not the start of a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import memplan
from helpers.networks import residual_net
from memplan.planning import attempt, planner
from memplan.planning.job import Job
from memplan.strategies import Outcome, Problem, create
from memplan.strategies.spaces.sequences import Sequences
from memplan.util import stop

LIMIT = 60.0


class Clock:
    """Stands in for the module ``time``: it goes on when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (planner, attempt, stop):
        monkeypatch.setattr(module, "time", clock)
    return clock


given: list[float] = []


@dataclass(frozen=True)
class Noting:
    """Notes what it is given of the time."""

    def solve(self, problem: Problem) -> Outcome:
        assert problem.time_limit is not None
        given.append(problem.time_limit)
        return create("evict").solve(problem)


def planned() -> memplan.Plan:
    given.clear()
    net, shapes = residual_net()
    options: dict[str, Any] = {"realisation": "packed", "time_limit": LIMIT, **shapes}
    return memplan.plan(net, budget="80%", strategy=Noting(), **options)


def test_starting_the_process_that_searches_is_in_nobodys_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def started_late(job: Job) -> Iterator[Any]:
        def do(function: Any, *arguments: Any, **options: Any) -> Any:
            clock.now += 2 * LIMIT
            return function(job, *arguments, **options)

        yield do

    monkeypatch.setattr(planner, "apart", started_late)
    plan = planned()
    assert plan.planning_seconds == 0.0
    assert given[0] > 0.5 * LIMIT


def test_tracing_is_in_the_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Job.prepare

    def slowly(*arguments: Any, **options: Any) -> Job:
        clock.now += 2 * LIMIT
        return prepare(*arguments, **options)

    monkeypatch.setattr(planner.Job, "prepare", slowly)
    plan = planned()
    assert plan.planning_seconds == 2 * LIMIT
    assert given[0] == pytest.approx(attempt.LEAST_SHARE_OF_TIME * LIMIT)


@dataclass(frozen=True)
class Drawing(Noting):
    """Draws at random, and so by a search that is compiled."""

    seed: int = 0


def test_loading_the_search_is_in_nobodys_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    solves_before: list[int] = []

    def prepare(_: Sequences) -> None:
        clock.now += 0.0 if solves_before else 50.0
        solves_before.append(len(given))

    monkeypatch.setattr(Sequences, "prepare", prepare)
    net, shapes = residual_net()
    options: dict[str, Any] = {"realisation": "packed", "time_limit": LIMIT, **shapes}
    given.clear()
    memplan.plan(net, budget="80%", strategy=Drawing(), **options)
    assert solves_before[0] == 0
    assert given[0] > 0.8 * LIMIT
    assert 1 in solves_before  # by the strategy itself, which may be called alone
