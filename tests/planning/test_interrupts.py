"""Ctrl-C before the first search, where something swallows it, and behind the last."""

from __future__ import annotations

import contextlib
import importlib
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.networks import residual_net
from memplan.planning.job import Job
from memplan.strategies import Outcome, create
from memplan.strategies.base import Problem

COSTS = "roofline:v100"

searches: list[int | None] = []


@dataclass(frozen=True)
class Counting:
    """Answers as memonger's search does."""

    def solve(self, problem: Problem) -> Outcome:
        searches.append(problem.budget_nbytes)
        return create("memonger").solve(problem)


def swallowed() -> None:
    """Ctrl-C, of which only the handlers of signals know: so it is in a __del__."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def plan(**options: Any) -> object:
    return memplan.plan(strategy=Counting(), budget="80%", data=(2, 3, 32, 32), **options)


def compare(**options: Any) -> object:
    strategies = [Counting(), Counting()]
    return memplan.compare(strategies=strategies, budgets="80%", data=(2, 3, 32, 32), **options)


def frontier(**options: Any) -> object:
    return memplan.frontier(strategy=Counting(), budgets=3, data=(2, 3, 32, 32), **options)


def max_batch_size(**options: Any) -> object:
    return memplan.max_batch_size(
        budget="16MiB", strategy=Counting(), data=("N", 3, 32, 32), **options
    )


FUNCTIONS = [plan, compare, frontier, max_batch_size]


def interrupt_while_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Job.prepare

    def prepared(*arguments: Any, **options: Any) -> Job:
        swallowed()
        return prepare(*arguments, **options)

    monkeypatch.setattr(Job, "prepare", prepared)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_interrupt_that_is_swallowed_before_the_first_search_is_raised(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, _ = residual_net(size=32, units=3)
    searches.clear()
    interrupt_while_preparing(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        function(net=net, costs=COSTS)
    assert not searches
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_rows_that_are_kept_are_there_after_an_interrupt_that_was_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, shapes = residual_net(size=32, units=3)
    options: dict[str, Any] = {"costs": COSTS, "cache": tmp_path, **shapes}
    before = memplan.compare(net, strategies="chen_sqrt", budgets="80%", **options)
    interrupt_while_preparing(monkeypatch)
    strategies = ["chen_sqrt", Counting()]
    searches.clear()
    after = memplan.compare(net, strategies=strategies, budgets="80%", **options)
    assert [row.strategy for row in after.rows] == [row.strategy for row in before.rows]
    assert not searches


@pytest.mark.parametrize(
    "moment",
    [
        "planner.remember",
        "apart.give_back_what_is_free",
        "planner.alternative",
        "alternative.try_strategy",
    ],
)
def test_an_interrupt_behind_the_search_leaves_the_plan(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other kind of plan is searched for then, but what is known of this one is said."""
    net, shapes = residual_net(units=2)
    module, _, name = moment.partition(".")
    place = importlib.import_module(f"memplan.planning.{module}")
    function, times = getattr(place, name), list[str]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        times.append(name)
        if len(times) == 1:
            signal.raise_signal(signal.SIGINT)
        return function(*arguments, **options)

    options: dict[str, Any] = {"strategy": "chen_greedy", "budget": "90%", "ctx": mx.gpu(0)}
    whole = memplan.plan(net, costs=COSTS, **options, **shapes)
    assert "packed plan fits" in whole.alternative
    monkeypatch.setattr(place, name, interrupted)
    plan = memplan.plan(net, costs=COSTS, **options, **shapes)
    assert times
    assert plan == whole
    assert "plan fits" not in plan.alternative
    assert "the BatchNorms that are recomputed" in plan.alternative


def test_a_second_interrupt_behind_the_search_leaves_the_plan_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    net, shapes = residual_net(units=2)
    monkeypatch.setattr("memplan.planning.planner.alternative", interrupted)
    plan = memplan.plan(net, costs=COSTS, strategy="chen_greedy", budget="90%", **shapes)
    assert plan.overhead > 0
    assert plan.alternative == ""
