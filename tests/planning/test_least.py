"""The least memory that memplan says it reaches, where further runs of ops take some, too."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.planning import NEVER_SECONDS
from memplan.errors import BudgetError
from memplan.planning import known
from memplan.planning import least as planning_least
from memplan.planning.job import Job
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.auto import Auto
from memplan.strategies.search import Search


def _relu(data: mx.sym.Symbol, nfilter: int) -> mx.sym.Symbol:
    out = mx.sym.Convolution(data, num_filter=nfilter, kernel=(3, 3), pad=(1, 1), no_bias=True)
    return mx.sym.relu(mx.sym.BatchNorm(out, fix_gamma=False))


@pytest.mark.long
def test_the_least_counts_the_copies_of_further_runs() -> None:
    out = mx.sym.Variable("data")
    for _ in range(4):
        out = _relu(out, 8)
    out = mx.sym.FullyConnected(mx.sym.mean(out, axis=(2, 3)), num_hidden=10)
    job = Job.prepare(
        mx.sym.SoftmaxOutput(out),
        realisation="explicit",
        ctx=mx.cpu(),
        time_limit=NEVER_SECONDS,
        data=(4, 8, 32, 32),
    )
    # Every relu that runs again keeps copies: the fewest blocks are no less than 0.95 with them.
    footprint = job.least_by(Auto()).footprint
    assert footprint.total_nbytes < 0.93 * job.unplanned.total_nbytes


@pytest.mark.long
def test_searches_go_on_from_the_least_until_they_find_no_less() -> None:
    """A U-Net, of which the first search is seen to leave 5% for the next."""
    out, before = mx.sym.Variable("data"), []
    for width in (8, 16, 32):
        before.append(out := _relu(out, width))
        out = mx.sym.Pooling(out, kernel=(2, 2), stride=(2, 2), pool_type="max")
    for beside, width in zip(reversed(before), (32, 16, 8), strict=True):
        out = mx.sym.UpSampling(out, scale=2, sample_type="nearest")
        out = _relu(mx.sym.concat(out, beside, dim=1), width)
    job = Job.prepare(
        mx.sym.MakeLoss(mx.sym.mean(out)),
        realisation="explicit",
        time_limit=NEVER_SECONDS,
        data=(2, 3, 32, 32),
    )
    schedule = job.least_by(Auto()).schedule
    problem = dataclasses.replace(job.problem(None), max_overhead=math.inf)
    again = Search(rounds=1, seed=1, start=schedule).solve(problem).schedule
    assert again is not None
    assert job.memory.nbytes(again) >= job.memory.nbytes(schedule)


def _broad_end() -> mx.sym.Symbol:
    """Of which a round of search, packed, is seen to end 2.5% above a plan without a budget."""
    out = mx.sym.Variable("data")
    for n in range(3):
        out = mx.sym.Convolution(out, num_filter=16, kernel=(3, 3), pad=(1, 1), name=f"conv{n}")
        out = mx.sym.relu(out, name=f"relu{n}")
    out = mx.sym.Pooling(out, global_pool=True, kernel=(1, 1), pool_type="avg", name="pool")
    out = mx.sym.FullyConnected(out, num_hidden=4000, name="dense")
    return mx.sym.SoftmaxOutput(out, name="softmax")


BROAD_END: Any = {
    "realisation": "packed",
    "costs": "roofline:v100",
    "time_limit": NEVER_SECONDS,
    "data": (2, 3, 40, 40),
}


def _least_of_refusal(budget_nbytes: int = 1, **options: Any) -> tuple[int, str]:
    with pytest.raises(BudgetError) as caught:
        memplan.plan(_broad_end(), budget=budget_nbytes, **BROAD_END, **options)
    assert caught.value.lowest_nbytes is not None
    return caught.value.lowest_nbytes, str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["auto:effort=0.3", "search:effort=0.3"])
def test_a_refusal_names_no_more_than_a_plan_without_a_budget_takes(strategy: str) -> None:
    lowest, text = _least_of_refusal(strategy=strategy)
    assert "another process" not in text
    assert memplan.plan(_broad_end(), strategy=strategy, budget=lowest, **BROAD_END)
    known._KNOWN.clear()
    assert memplan.plan(_broad_end(), strategy=strategy, **BROAD_END).total_nbytes >= lowest
    known._KNOWN.clear()
    assert _least_of_refusal(strategy=strategy) == (lowest, text)


def test_a_refusal_names_no_more_than_an_earlier_plan_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = memplan.plan(_broad_end(), strategy="auto:effort=0.3", **BROAD_END)
    monkeypatch.setattr(planning_least, "schedule_without_budget", lambda *_: None)
    lowest, text = _least_of_refusal()
    assert lowest == plan.total_nbytes
    assert "An earlier plan of this process takes these bytes" in text
    again = memplan.plan(_broad_end(), strategy="auto:effort=0.02", budget=lowest, **BROAD_END)
    assert again.total_nbytes <= lowest
    # What takes longer than is allowed is nothing, though it is known.
    lowest, text = _least_of_refusal(max_overhead=0.9 * plan.overhead)
    assert lowest > plan.total_nbytes
    assert "An earlier plan" not in text


def test_what_has_cut_the_search_for_the_least_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(planning_least, "schedule_without_budget", interrupted)
    _, text = _least_of_refusal()
    assert "An interrupt (Ctrl-C) has cut the search for it, so that another process" in text
    assert "time limit" not in text


def test_what_is_known_is_compared_by_its_overhead() -> None:
    """It may be of other costs, by which all that a plan takes is less than a second."""
    ops = (Op("a", "op", (), (0,), 1.0), Op("b", "op", (0,), (1,), 1.0))
    graph = TrainingGraph(ops, (Tensor("a", 4, 1), Tensor("b", 4, 1)), (1,), 2)
    fast, slow = graph.with_seconds([1e-6, 1e-6]), graph.with_seconds([2.0, 2.0])
    for more, nbytes in ((9, 90), (10, 89), (11, 88), (12, 87)):
        known.remember(Schedule.sequence(fast, [0] * (more + 1) + [1]), nbytes)
    known.remember(Schedule.sequence(slow, [0, 0, 1]), 95)
    overheads = [schedule.overhead for schedule in known.known(graph)]
    assert overheads == [0.5, 6.0, 5.5, 5.0]
