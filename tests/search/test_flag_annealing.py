"""Annealing over flags: in chains, with replays that end as soon as they decide."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from helpers.graphs import tensors, unit_chain
from memplan.memory.blocks import allocate
from memplan.search import flag_annealing
from memplan.search.flag_annealing import HOT, PENALTIES, REHEATED, anneal, mirrored_schedule
from memplan.search.kernels.mirroring import Evaluator
from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

PLENTY = 1e6


class Whole(Evaluator):
    """Replays every step to its end."""

    ncut = 0

    def allocated_nbytes(self, steps: flag_annealing.Array, enough: float) -> int:
        nbytes = super().allocated_nbytes(steps, math.inf)
        Whole.ncut += super().allocated_nbytes(steps, enough) < nbytes
        return nbytes


def test_a_replay_that_ends_early_decides_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = dataclasses.replace(unit_chain(30), match_range=2)
    graph = graph.with_seconds([0.1 + 0.3 * (i * 7 % 11) for i in range(len(graph.ops))])
    unplanned = allocate(Schedule.unplanned(graph)).nbytes
    for budget in (None, unplanned // 3, unplanned // 2, unplanned * 3 // 4):
        found = []
        for evaluator in (Evaluator, Whole):
            monkeypatch.setattr(flag_annealing, "Evaluator", evaluator)
            found.append(anneal(graph, frozenset(), budget, stop=Stop.after(PLENTY), moves=1000))
        assert found[0] == found[1]
    assert Whole.ncut > 100


def chains_of(monkeypatch: pytest.MonkeyPatch, stop: Stop, moves: int | None) -> list[float]:
    """The temperatures at which chains over 20 flags begin."""
    hot: list[float] = []
    begin = flag_annealing._Search.begin

    def noted(self: flag_annealing._Search, chain: int, heat: float, penalty: float) -> None:
        assert chain == len(hot)
        assert penalty in PENALTIES
        hot.append(heat)
        begin(self, chain, heat, penalty)

    monkeypatch.setattr(flag_annealing._Search, "begin", noted)
    graph = dataclasses.replace(unit_chain(20), match_range=2)
    budget = allocate(Schedule.unplanned(graph)).nbytes * 2 // 3
    schedule = anneal(graph, frozenset(), budget, stop=stop, moves=moves)
    assert schedule is not None
    assert allocate(schedule).nbytes <= budget
    monkeypatch.undo()
    return hot


def test_many_moves_are_made_in_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = len(Evaluator(unit_chain(20)).flaggable)
    monkeypatch.setattr(flag_annealing, "MOVES_BY_FLAG", 20)
    few, many = 39 * flags, 80 * flags
    assert chains_of(monkeypatch, Stop.after(PLENTY), few) == [HOT]
    monkeypatch.setattr(flag_annealing, "MOVES_BY_FLAG", 20)
    assert chains_of(monkeypatch, Stop.after(PLENTY), many) == [HOT, HOT, REHEATED, REHEATED]


@pytest.mark.parametrize("budget", [None, 1000])
def test_enough_bytes_are_those_at_which_the_cost_is_too_high(budget: int | None) -> None:
    graph = unit_chain(5)
    evaluate = Evaluator(graph)
    search = flag_annealing._Search(evaluate, evaluate.flags(()), budget, graph.seconds, 0)
    decided = set()
    for nbytes, overhead in itertools.product((500, 990, 1001, 1010, 1300), (0.0, 0.1, 0.25)):
        for most in (search._cost(1005, 0.05), search._cost(1200, 0.2), search._cost(1, 0.12)):
            enough = nbytes <= search._enough_nbytes(most, overhead)
            assert enough == (search._cost(nbytes, overhead) <= most)
            decided.add(enough)
    assert decided == {True, False}


def test_what_no_head_depends_on_runs_all_the_same() -> None:
    """MXNet would not run it, but a sequence has every op of its graph."""
    ops = (
        Op("first", "op", (), (0,)),
        Op("unread", "op", (0,), (1,)),
        Op("second", "op", (0,), (2,)),
        Op("back", "op", (2, 0), (3,), differentiates=2),
    )
    graph = TrainingGraph(ops, tensors(first=1, unread=1, second=1, back=1), (3,), 3)
    stop = Stop.after(PLENTY)
    schedule = mirrored_schedule(graph, None, match_range=2, stop=stop, moves=10, seed=0)
    assert schedule is not None
    assert set(schedule.ops) == set(range(4))
