"""A mirror plan, or the lack of one, says what another realisation would cost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.clock import TickingClock
from helpers.networks import residual_net
from helpers.planning import NEVER_SECONDS
from memplan.errors import BudgetError
from memplan.planning import alternative, attempt, job
from memplan.planning.job import Job
from memplan.strategies import Outcome, Problem, Status, create

SHAPE = (8, 3, 16, 16)


def test_a_refusal_of_mirroring_says_that_a_packed_plan_fits() -> None:
    net, _ = residual_net(units=1)
    lowest = memplan.plan(net, strategy="search:rounds=1", data=SHAPE).total_nbytes
    options = {"budget": int(0.9 * lowest), "time_limit": NEVER_SECONDS, "data": SHAPE}
    with pytest.raises(
        BudgetError, match=r"A packed plan fits at \+[0-9.]+% time or less"
    ) as error:
        memplan.plan(net, strategy="chen_greedy", **options)
    assert "memplan.mxnet.Module" in str(error.value)
    packed = memplan.plan(net, strategy="evict:patience=50", realisation="packed", **options)
    assert f"{packed.overhead:+.1%}" in str(error.value)
    assert packed.alternative == ""


def test_an_expensive_mirror_plan_says_what_a_packed_one_costs() -> None:
    net, _ = residual_net(units=2)
    plan = memplan.plan(net, strategy="chen_greedy", budget="90%", data=SHAPE)
    assert plan.overhead > alternative.EXPENSIVE
    assert not plan.cut_by_clock
    quick = {"strategy": "evict:patience=50", "realisation": "packed"}
    packed = memplan.plan(net, budget="90%", data=SHAPE, **quick)
    assert plan.overhead > alternative.TIMES * packed.overhead
    assert f"packed plan fits at {packed.overhead:+.1%}" in plan.alternative
    assert plan.alternative in str(plan)
    assert dataclasses.replace(plan, alternative="") == plan  # as in a file of an earlier version


def test_the_other_plan_is_in_the_time_of_planning_and_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounded, bounds = attempt.bounded, list[str]()

    def noting(job: Job, *arguments: Any) -> Outcome:
        bounds.append(job.realisation.name)
        return bounded(job, *arguments)

    monkeypatch.setattr(attempt, "bounded", noting)
    TickingClock(1000.0).replaces_that_of(monkeypatch, alternative)
    net, _ = residual_net(units=2)
    plan = memplan.plan(net, strategy="chen_greedy", budget="90%", data=SHAPE)
    assert "packed plan fits" in plan.alternative
    assert bounds == ["mirror"]
    assert 1000 <= plan.planning_seconds < 2000


def test_the_unplanned_network_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_by, traced = job.trace_by, list[str]()

    def noting(name: str, *arguments: Any, **options: Any) -> Any:
        traced.append(name)
        return trace_by(name, *arguments, **options)

    monkeypatch.setattr(job, "trace_by", noting)
    net, _ = residual_net(units=2)
    plan = memplan.plan(net, strategy="chen_greedy", budget="90%", data=SHAPE)
    assert "packed plan fits" in plan.alternative
    assert traced == ["mirror", "packed"]


def test_a_mirror_plan_does_not_say_that_steps_are_explicit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Packed memory is on cpu(0), so that "auto" would, and the log say so."""
    net, _ = residual_net(units=2)
    plan = memplan.plan(net, strategy="chen_greedy", budget="90%", ctx=mx.cpu(1), data=SHAPE)
    assert "explicit plan fits at" in plan.alternative
    assert not caplog.records


@dataclass(frozen=True)
class Interrupted:
    """Is interrupted, and answers all the same."""

    finds: bool

    def solve(self, problem: Problem) -> Outcome:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        found = create("chen_greedy").solve(problem)
        return found if self.finds else Outcome(Status.INFEASIBLE)


def test_after_an_interrupt_no_other_search_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object, **__: object) -> None:
        pytest.fail("another search has begun")

    monkeypatch.setattr(alternative, "try_strategy", searched)
    monkeypatch.setattr("memplan.planning.planner.refused", searched)
    net, _ = residual_net(units=2)
    plan = memplan.plan(net, strategy=Interrupted(finds=True), budget="90%", data=SHAPE)
    assert plan.overhead > alternative.EXPENSIVE
    assert plan.cut_by_clock
    with pytest.raises(KeyboardInterrupt):
        memplan.plan(net, strategy=Interrupted(finds=False), budget="90%", data=SHAPE)


def test_a_cheap_plan_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, _ = residual_net(units=2)
    assert memplan.plan(net, strategy="store_all", budget="100%", data=SHAPE).alternative == ""
    monkeypatch.setattr(alternative, "TIMES", 1e9)
    assert memplan.plan(net, strategy="chen_greedy", budget="90%", data=SHAPE).alternative == ""


def test_on_a_gpu_a_mirror_plan_says_that_batch_norms_run_without_cudnn() -> None:
    net, _ = residual_net(units=2)
    quick = {"strategy": "chen_greedy", "budget": "90%", "data": SHAPE, "costs": "roofline:v100"}
    on_gpu = memplan.plan(net, ctx=mx.gpu(0), **quick)
    assert "the BatchNorms that are recomputed (" in on_gpu.alternative
    assert on_gpu.alternative in str(on_gpu)
    assert "cuDNN" not in memplan.plan(net, **quick).alternative
    kept = memplan.plan(net, ctx=mx.gpu(0), **quick | {"strategy": "store_all", "budget": "100%"})
    assert kept.alternative == ""
