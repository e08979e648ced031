"""Equal calls give equal plans, however slow the machine is: work is counted, not seconds."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from typing import Any

import pytest

from helpers.graphs import UNIT, in_mxnets_order, uneven_chain
from helpers.paths import ROOT
from memplan.errors import ArgumentError
from memplan.memory.blocks import allocate
from memplan.memory.memory import Blocks, Live, Packed
from memplan.memory.packing import ALIGNMENT
from memplan.step.graph import Tensor
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Status
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.checkmate import Checkmate
from memplan.strategies.evict import Evict
from memplan.strategies.search import Search
from memplan.strategies.spaces.flags import Flags
from memplan.util.stop import JUDGED_AFTER, Pace, Stop

PLENTY = 1e5


def mirrored_chain() -> Problem:
    graph = dataclasses.replace(in_mxnets_order(uneven_chain(24)), match_range=2)
    budget = allocate(Schedule.unplanned(graph)).nbytes * 2 // 3
    return Problem(graph, budget, memory=Blocks((2,)), space=Flags(), time_limit=PLENTY)


def problems() -> dict[str, Problem]:
    graph = uneven_chain(32)
    times = ALIGNMENT // UNIT  # so that packed memory has no gaps
    tensors = [Tensor(t.name, times * t.nbytes, times * t.nelements) for t in graph.tensors]
    graph = dataclasses.replace(graph, tensors=tuple(tensors))
    kinds = {"live": Live(), "blocks": Blocks((1, 2)), "packed": Packed()}
    made = {
        name: Problem(graph, 12 * ALIGNMENT, memory=memory, time_limit=PLENTY)
        for name, memory in kinds.items()
    }
    return made | {"mirror": mirrored_chain()}


STRATEGIES = {
    "live": (Auto(gap=0.0, effort=0.3, seed=3), Search(effort=0.2), Evict(), Checkmate(effort=0.1)),
    "blocks": (Auto(gap=0.0, effort=0.1),),
    "packed": (Auto(gap=0.0, effort=0.1),),
    "mirror": (Auto(gap=0.0, effort=0.1), Checkmate(gap=0.0, effort=0.1)),
}


def answers() -> list[Any]:
    """What strategies find: the ops of their schedules, bounds, and whether the clock cut them."""
    result = []
    for name, problem in problems().items():
        for strategy in STRATEGIES[name]:
            outcome = strategy.solve(problem)
            assert outcome.schedule is not None, (name, strategy)
            bound = outcome.lower_bound_seconds
            result.append([name, list(outcome.schedule.ops), bound, outcome.cut_by_clock])
    return result


SCRIPT = """
import json, sys, time
sys.path.insert(0, "tests")
from memplan.util.stop import Stop
from strategies import test_same_tomorrow as tests

rests = 0
if sys.argv[1] == "slow":
    spend = Stop.spend
    def slowly(stop, work):
        global rests
        if stop._part_of is None:
            rests += 1
            time.sleep(0.0005 * (rests % 7))
        spend(stop, work)
    Stop.spend = slowly
found = tests.answers()
print(json.dumps({"rests": rests, "answers": found}))
"""


@pytest.mark.long
def test_a_slow_process_finds_the_same() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, speed], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for speed in ("usual", "slow")
    ]
    usual, slow = (json.loads(process.communicate()[0]) for process in processes)
    assert usual["rests"] == 0
    assert slow["rests"] > 300
    assert not any(cut for *_, cut in usual["answers"])
    assert usual["answers"] == slow["answers"]


def test_another_seed_is_another_search() -> None:
    problem = Problem(uneven_chain(64), 12 * UNIT, time_limit=PLENTY)
    found = {Search(rounds=1, seed=seed).solve(problem).schedule for seed in (0, 0, 1, 2, 3)}
    assert 1 < len(found) <= 4


def solved(**options: Any) -> Outcome:
    return Auto(**options).solve(problems()["live"])


def test_a_gap_ends_what_is_proved_to_be_good_enough() -> None:
    exact, rough = solved(gap=0.0), solved(gap=0.9)
    assert exact.schedule is not None
    assert rough.schedule is not None
    assert rough.lower_bound_seconds is not None
    seconds = rough.schedule.graph.seconds
    assert rough.schedule.seconds <= rough.lower_bound_seconds + 0.9 * seconds
    assert exact.schedule.seconds <= rough.schedule.seconds
    assert exact.lower_bound_seconds is not None
    assert exact.lower_bound_seconds > rough.lower_bound_seconds
    assert rough.status is Status.FEASIBLE
    with pytest.raises(ArgumentError, match="gap"):
        Auto(gap=-0.1)
    with pytest.raises(ArgumentError, match="effort"):
        Checkmate(effort=0.0)


def test_a_search_ends_by_itself() -> None:
    """Without a number of rounds, too; and twice the effort is about twice the work."""
    problem = problems()["blocks"]
    for effort in (0.1, 0.2):
        stop = problem.stop(None, effort=effort)
        begin = stop.work_left
        assert math.isfinite(begin)
        assert begin == pytest.approx(effort * problem.stop(None, effort=1.0).work_left)
    assert not Search(effort=0.1).solve(problem).cut_by_clock


def test_without_time_the_clock_has_cut() -> None:
    for name, problem in problems().items():
        for strategy in STRATEGIES[name]:
            outcome = strategy.solve(dataclasses.replace(problem, time_limit=0.0))
            assert outcome.cut_by_clock, (name, strategy)


def test_what_is_shared_is_spent_by_the_whole() -> None:
    whole = Stop.after(PLENTY, work=100.0)
    part = whole.share(0.5)
    assert part.work_left == 50.0
    part.spend(50.0)
    assert part.is_over()
    assert not whole.is_over()
    assert whole.work_left == 50.0
    assert not whole.cut_by_clock


def test_a_pace_is_not_judged_by_one_busy_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = Stop(100.0)
    pace = Pace(stop, 1000)
    now = 100.0 * JUDGED_AFTER - 1.0
    assert pace.left(1) == 999, "too early to tell"
    now = 50.0
    assert pace.left(500) == 500, "in time"
    assert not stop.cut_by_clock
    assert pace.left(100) == 100, "as many as in the first half"
    assert stop.cut_by_clock
