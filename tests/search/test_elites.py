"""Several good sequences at once: which are kept, which is improved next, what is not lost."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import UNIT, training_graphs, unit_chain
from memplan.search import elites
from memplan.search.elites import MOST, Elite, Elites
from memplan.search.kernels.annealing import BEST_SECONDS, Best
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequence_search import cheapest
from memplan.search.sequences import Rules
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())
BUDGET = 7 * UNIT


def searching(graph: TrainingGraph, *, seed: int = 0) -> Rounds:
    return Rounds(graph, RULES, seed=seed, stop=Stop.after(1e6))


def found_in(search: Rounds, seconds: float) -> Best:
    """The unplanned sequence, said to take so long."""
    best = search.nothing()
    best.sequence[: search.nops] = search.unplanned
    best.figures[:] = search.nops, seconds, BUDGET
    return best


@examples(30)
@given(training_graphs(), st.integers(0, 100), st.floats(0.5, 1.0))
def test_turns_find_what_is_valid_and_within_the_budget(
    graph: TrainingGraph, seed: int, share: float
) -> None:
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    search = searching(graph, seed=seed)
    kept = Elites(search)
    for number in range(3):
        kept.turn(number, budget)
    best = search.best()
    if best is None:
        return
    assert validate(best).valid
    assert simulate(best).peak_nbytes <= budget
    assert best.seconds == pytest.approx(min(elite.seconds for elite in kept.members))


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_turn_leaves_work_to_mend_what_does_not_fit(is_packed: bool) -> None:
    """One turn of a large graph would take all work, and what it has found be lost."""
    graph = unit_chain(30)
    stop = Stop.after(1e6, work=2000.0)
    excess = (lambda *_, **__: 0) if is_packed else None
    search = Rounds(graph, RULES, seed=0, stop=stop, excess=excess)
    Elites(search).turn(0, BUDGET)
    assert (stop.work_left > 500.0) == is_packed


def test_the_cheapest_are_kept_and_each_once() -> None:
    search = searching(unit_chain(16))
    kept = Elites(search)
    for seconds in (9.0, 5.0, 5.0, 8.0, 7.0, 6.0):
        kept.add(found_in(search, seconds))
    assert [elite.seconds for elite in kept.members] == [5.0, 6.0, 7.0, 8.0][:MOST]


def test_the_cheapest_is_improved_until_it_has_stalled_more_often_than_the_others() -> None:
    search = searching(unit_chain(16))
    kept = Elites(search)
    for seconds in (5.0, 6.0, 7.0, 8.0):
        kept.add(found_in(search, seconds))
    improved = []
    for _ in range(6):
        elite = kept.next()
        improved.append(elite.seconds)
        elite.nstalled += 1
    assert improved == [5.0, 6.0, 5.0, 7.0, 6.0, 5.0]


def test_what_the_search_did_not_take_is_not_gone_on_from() -> None:
    """It was cheaper than what fits the memory that counts."""
    search = searching(unit_chain(16))
    search.offer(search.unplanned, 100 * UNIT)
    seconds = search.seconds(search.unplanned)
    kept = Elites(search)
    kept.add(found_in(search, seconds - 1.0))
    kept.add(found_in(search, seconds + 1.0))
    kept.take_found()
    assert [elite.seconds for elite in kept.members] == [seconds, seconds + 1.0]


def test_elites_are_as_dear_as_the_search_counts_them() -> None:
    """Summed in another order the cheapest would seem not to fit, and be entered anew."""
    graph = unit_chain(16)
    ops = tuple(dataclasses.replace(op, seconds=0.1 + 0.01 * k) for k, op in enumerate(graph.ops))
    search = searching(dataclasses.replace(graph, ops=ops))
    kept = Elites(search)
    for number in range(12):
        kept.turn(number, BUDGET)
        assert kept.members[0].seconds == pytest.approx(float(search.found.figures[BEST_SECONDS]))
        costs = [elite.seconds for elite in kept.members]
        assert all(after - before > 1e-6 for before, after in pairwise(costs))
    assert sum(elite.nstalled for elite in kept.members) >= 3


def test_an_interrupted_turn_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(unit_chain(16))
    kept = Elites(search)
    do, nrounds = search.round, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal nrounds
        nrounds += 1
        if nrounds == 3:
            raise KeyboardInterrupt
        return do(*arguments, **options)

    monkeypatch.setattr(search, "round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.turn(0, BUDGET)
    best = search.best()
    assert best is not None
    assert simulate(best).peak_nbytes <= BUDGET


def test_what_fits_is_improved_within_the_bytes_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where less was aimed at, because something else was packed badly."""
    search = searching(unit_chain(16))
    kept, aims = Elites(search), []
    search.offer(search.unplanned, 100 * UNIT)

    def noted(kind: Any, budget_nbytes: int, **options: Any) -> Any:
        aims.append(budget_nbytes)
        return np.zeros(0, dtype=np.int64)

    kept.take_found()
    monkeypatch.setattr(search, "round", noted)
    monkeypatch.setattr(elites, "TURNS", (elites.Turn.IMPROVE,))
    kept.turn(0, BUDGET)
    nbytes = simulate(Schedule.unplanned(search.graph)).peak_nbytes
    assert nbytes > BUDGET
    assert set(aims) == {nbytes}
    assert kept.members == [Elite(kept.members[0].best, nstalled=1)]
    assert len(best_sequence(kept.members[0].best))


def test_a_search_makes_turns_behind_its_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(Elites, "turn", lambda elites, number, budget_nbytes: made.append(number))
    cheapest(searching(unit_chain(16)), BUDGET, 4)
    assert made == [0, 1, 2]
