"""Schedules to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from helpers.graphs import unit_chain
from memplan.memory import packing
from memplan.memory.memory import Blocks, Packed
from memplan.search.eviction import Evictions
from memplan.search.flag_annealing import keep_more
from memplan.search.online import online_schedules
from memplan.search.segments import threshold_cuts
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import quick
from memplan.strategies.base import Problem
from memplan.strategies.memonger import Memonger
from memplan.strategies.spaces import flags, sequences
from memplan.strategies.spaces.flags import Flags
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Space
from memplan.util.stop import Stop


@pytest.mark.parametrize("space", [Flags(), Sequences()], ids=["flags", "sequences"])
def test_large_graphs_begin_with_cuts_of_memonger(
    monkeypatch: pytest.MonkeyPatch, space: Space
) -> None:
    graph = unit_chain(40)
    problem = Problem(graph, None, space=space)
    monkeypatch.setattr(quick, "LARGE", len(graph.ops) - 1)
    unplanned, *found = quick.candidates(problem, Stop.after(1e6))
    assert len(found) <= sequences.CUTS
    few = {schedule.ops for schedule in Memonger(200).candidates(problem)}
    assert {schedule.ops for schedule in found} <= few
    best = quick.quick_schedule(problem, Stop.after(1e6))
    assert simulate(best).peak_nbytes < 0.5 * simulate(unplanned).peak_nbytes


@pytest.mark.parametrize(("share", "is_dear"), [(0.7, False), (0.1, True)])
def test_huge_graphs_begin_with_drops_and_run_online_where_these_are_dear(
    monkeypatch: pytest.MonkeyPatch, share: float, is_dear: bool
) -> None:
    graph = unit_chain(100)
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    problem, stop = Problem(graph, budget), Stop.after(1e6)
    for limit in ("LARGE", "HUGE"):
        monkeypatch.setattr(quick, limit, len(graph.ops) - 1)
    online: list[Schedule] = []

    def counted(*arguments: Any, **options: Any) -> Iterator[Schedule]:
        online.extend(online_schedules(*arguments, **options))
        yield from online

    monkeypatch.setattr(quick, "online_schedules", counted)
    best = quick.quick_schedule(problem, stop)
    assert bool(online) == is_dear
    assert simulate(best).peak_nbytes <= budget
    dropped = Evictions(graph, budget).fit((), stop)
    assert dropped is not None
    assert best.seconds <= dropped.schedule.seconds


@pytest.mark.parametrize("share", [None, 0.3, 0.6, 0.01])
def test_of_flags_the_best_cut_is_taken(share: float | None) -> None:
    graph = unit_chain(40)
    memory = Blocks((graph.match_range,))
    budget = None if share is None else int(share * memory.nbytes(Schedule.unplanned(graph)))
    problem = Problem(graph, budget, memory, Flags())
    points = range(graph.nforward)
    [found] = problem.space.cut(problem, points, Stop.after(1e6))
    cuts = threshold_cuts(graph, points, at_most=flags.CUTS)
    known = [Schedule.unplanned(graph), *(problem.space.keeping(graph, cut) for cut in cuts)]

    def rank(schedule: Schedule) -> tuple[int, float]:
        return max(0, memory.nbytes(schedule) - (budget or 0)), schedule.seconds

    assert rank(found) == min(map(rank, known))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.01])
def test_as_many_ops_are_kept_as_fit(share: float) -> None:
    graph = unit_chain(40).with_seconds([1.0 + (7 * i) % 11 for i in range(81)])
    memory = Blocks((graph.match_range,))
    budget = int(share * memory.nbytes(Schedule.unplanned(graph)))
    everything = frozenset(range(graph.nforward - 1))
    start = mirror(graph, everything)
    flags = keep_more(graph, everything, budget)
    if memory.nbytes(start) > budget:
        assert flags is None
        return
    assert flags is not None
    assert flags < everything
    assert memory.nbytes(mirror(graph, flags)) <= budget
    kept = everything - flags
    assert min(graph.ops[op].seconds for op in kept) >= max(graph.ops[op].seconds for op in flags)


def test_what_takes_too_many_seconds_is_nothing_and_not_counted() -> None:
    graph = unit_chain(6)
    twice = Schedule.sequence(graph, [*range(4), *range(4), *range(4, len(graph.ops))])
    problem = Problem(graph, 100, memory=Packed(), max_overhead=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "place", lambda *_, **__: pytest.fail("it is packed"))
        assert problem.aim_lower(lambda *_: twice, Stop.after(1e6)) is None


@pytest.mark.parametrize("nleft", [0, 1])
def test_candidates_are_cut_only_if_some_are_left_out(nleft: int) -> None:
    problem = Problem(unit_chain(20), None)
    count = len(list(quick.candidates(problem, Stop(math.inf))))
    stop = Stop(math.inf)
    found = quick.candidates(problem, stop)
    assert len(list(islice(found, count - nleft))) == count - nleft
    stop.deadline = 0.0
    assert next(found, None) is None
    assert stop.cut_by_clock is bool(nleft)


@pytest.mark.parametrize("nleft", [0, 1])
def test_cuts_are_cut_only_if_some_are_left_out(nleft: int) -> None:
    problem = Problem(unit_chain(20), None)
    points = Sequences().points(problem.graph)
    count = len(list(Sequences().cut(problem, points, Stop(math.inf))))
    stop = Stop(math.inf)
    found = Sequences().cut(problem, points, stop)
    assert len(list(islice(found, count - nleft))) == count - nleft
    stop.deadline = 0.0
    assert next(found, None) is None
    assert stop.cut_by_clock is bool(nleft)


@pytest.mark.parametrize("is_late", [False, True])
def test_where_time_is_up_what_does_not_fit_is_not_packed(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """It took a third of a second beyond a limit of three, of a network of 2,000 ops."""
    counted: list[int] = []

    class Counted(Packed):
        def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
            counted.append(budget_nbytes)
            return super().excess(schedule, budget_nbytes, roughly=roughly)

    problem = Problem(unit_chain(20), 1, memory=Counted())
    stop = Stop.after(0.0 if is_late else 1e6)
    assert simulate(quick.quick_schedule(problem, stop)).peak_nbytes > 1
    assert (0 in counted) is not is_late
    assert stop.cut_by_clock is is_late
