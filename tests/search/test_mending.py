"""Short rounds that mend what is too large: their aims, what they begin with and what is kept."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from helpers.graphs import UNIT, unit_chain
from memplan.memory.memory import Live
from memplan.search import mending, rounds
from memplan.search.kernels.arrays import Array
from memplan.search.mending import mend
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequence_search import search
from memplan.search.sequences import Rules
from memplan.search.settling import settle
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_first_look_is_brief_where_something_fits_and_mending_packs(
    monkeypatch: pytest.MonkeyPatch, is_begun: bool, is_packed: bool
) -> None:
    """Close ones took most of three seconds; where nothing fits a brief one could lose a plan."""
    monkeypatch.setattr("memplan.search.rounds.MOST_RECREATED", 1000 if is_packed else 0)
    graph, budget, looks = unit_chain(16), 4000, list[bool]()
    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=lambda *_, **__: 100)
    if is_begun:  # with what costs twice as much
        rounds.fitting = Schedule.sequence(graph, [0, *range(33)])

    def noted(search: Rounds, budget: int, *, briefly: bool = False, **options: bool) -> int:
        looks.append(briefly)
        return settle(search, budget, briefly=briefly, **options)

    monkeypatch.setattr(mending, "settle", noted)
    rounds.round = (  # type: ignore[method-assign, assignment]
        lambda *_, **__: rounds.offer(rounds.unplanned, budget)
    )
    rounds.offer(rounds.unplanned, budget)
    mend(rounds, budget, budget)
    assert looks[0] is (is_begun and is_packed)
    assert not any(looks[1:])


@pytest.mark.parametrize(
    ("fitting", "is_packed", "over", "falls"),
    [
        (None, True, 100, [40, 39, 39, 38, *4 * [100]]),
        (None, False, 100, 8 * [100]),
        ("dear", True, 100, [40, 39, 39, 38]),
        ("dear", True, 59, 4 * [30]),
        ("dear", False, 100, [100, 200, 300, 400]),
        ("near", True, 100, [40]),
        ("near", False, 100, [20, 39, 59, 77]),
    ],
)
def test_aims_fall_by_what_is_over_and_by_half_of_it_at_first_where_mending_packs(
    monkeypatch: pytest.MonkeyPatch,
    fitting: str | None,
    is_packed: bool,
    over: int,
    falls: list[int],
) -> None:
    """By a percent of the aim at most; where what fits is nearly as cheap, once."""
    monkeypatch.setattr("memplan.search.rounds.MOST_RECREATED", 1000 if is_packed else 0)
    graph, budget = unit_chain(16), 4000
    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=lambda *_, **__: over)
    near, dear = rounds.schedule(rounds.unplanned), Schedule.sequence(graph, [0, *range(33)])
    rounds.fitting = {"near": near, "dear": dear}[fitting] if fitting else None
    aims = [budget]

    def noted(_: Round, aim: int, start: Array, packed_nbytes: int) -> None:
        assert packed_nbytes == budget
        aims.append(aim)
        rounds.offer(rounds.unplanned, budget)

    rounds.round = noted  # type: ignore[method-assign, assignment]
    rounds.offer(rounds.unplanned, budget)
    next_aim = mend(rounds, budget, budget)
    assert next_aim == ((aims[-1] + budget + 1) // 2 if is_packed else aims[-1])
    assert [one - other for one, other in pairwise(aims)] == falls


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        (False, [4000, 3901, 3802, 3852, 3753, 3803, 3828, 3840, 3846]),
        (True, [4000, 3901, 3703, 3802, 3852]),
    ],
)
def test_where_a_round_finds_nothing_the_next_one_has_bytes_halfway_back(
    monkeypatch: pytest.MonkeyPatch, fits: bool, expected: list[int]
) -> None:
    """Else the search went on with more bytes than that in which the last one did not fit."""
    monkeypatch.setattr("memplan.search.rounds.MOST_RECREATED", 0)
    graph, budget, aims = unit_chain(16), 4000, [4000]
    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=lambda *_, **__: 99)
    if fits:  # what costs twice as much
        rounds.fitting = Schedule.sequence(graph, [0, *range(33)])

    def noted(_: Round, aim: int, start: Array, packed_nbytes: int) -> None:
        aims.append(aim)
        if aim > 3850:
            rounds.offer(rounds.unplanned, budget)

    rounds.round = noted  # type: ignore[method-assign, assignment]
    rounds.offer(rounds.unplanned, budget)
    assert mend(rounds, budget, budget) == aims[-1]
    assert aims == expected


def test_what_finds_nothing_twice_goes_on_from_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what is too large it may find nothing in any aim."""
    monkeypatch.setattr("memplan.search.rounds.MOST_RECREATED", 0)
    graph, starts, dear = (
        unit_chain(16),
        list[list[int]](),
        [*range(16), *range(15), *range(16, 33)],
    )

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        return 99 if len(schedule.ops) == len(graph.ops) else 0

    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=excess)
    rounds.round = lambda *_, start, **__: starts.append(start.tolist())  # type: ignore[method-assign, assignment]
    rounds.offer(np.array(dear), 4000)
    assert settle(rounds, 4000) == 0
    rounds.offer(rounds.unplanned, 4000)
    mend(rounds, 4000, 4000)
    assert starts == [rounds.unplanned.tolist()] * 2 + [best_sequence(rounds.found).tolist()] * 2


def test_what_is_over_by_a_rough_count_is_looked_at_closely_with_the_aim_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closely it may be over by less: from what the rough count aimed at that would be too low."""
    monkeypatch.setattr("memplan.search.rounds.MOST_RECREATED", 0)
    graph, budget, aims = unit_chain(16), 4000, [4000]

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        return 500 if roughly else 99

    def noted(_: Round, aim: int, start: Array, packed_nbytes: int) -> None:
        aims.append(aim)
        if aim > 3850:
            rounds.offer(rounds.unplanned, budget)

    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=excess)
    rounds.round = noted  # type: ignore[method-assign, assignment]
    rounds.offer(rounds.unplanned, budget)
    mend(rounds, budget, budget, roughly=True)
    assert aims[:4] == [4000, 3500, 3901, 3802]


def test_where_a_round_packs_nothing_what_it_ends_with_is_looked_at_closely() -> None:
    graph, budget, asked = unit_chain(16), 4000, []

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        asked.append(schedule)
        return 99 if schedule.ops == tuple(range(33)) else 0

    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=excess)
    end = np.array([*range(16), 15, *range(16, 33)])
    rounds.round = lambda *_, **__: end  # type: ignore[method-assign, assignment]
    rounds.offer(rounds.unplanned, budget)
    mend(rounds, budget, budget)
    best = rounds.best()
    assert best is not None
    assert best.ops == tuple(end)


def test_what_is_over_by_a_rough_count_only_is_not_lost() -> None:
    """In so much less memory no round finds anything."""

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        return 5 * UNIT if roughly else Live().excess(schedule, budget_nbytes)

    graph, budget = unit_chain(16), 7 * UNIT
    rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6), excess=excess)
    rounds.round(Round(False, 2.0, 0.3, recreates=True), budget)
    mend(rounds, budget, budget, roughly=True)
    best = rounds.best()
    assert best is not None
    assert simulate(best).peak_nbytes <= budget


def test_what_is_over_by_a_rough_count_only_is_not_lost_by_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first round that mends it is interrupted, before anything else is found."""
    graph, budget, looks, recreate = unit_chain(16), 7 * UNIT, list[bool](), rounds.recreate

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        looks.append(roughly)
        return 5 * UNIT if roughly else Live().excess(schedule, budget_nbytes)

    def interrupted(*arguments: Any) -> float:
        if looks:
            raise KeyboardInterrupt
        return recreate(*arguments)

    monkeypatch.setattr(rounds, "recreate", interrupted)
    stop = Stop.after(1e6, work=1e6)
    options: dict[str, Any] = {"rules": RULES, "starts": [], "seed": 0, "stop": stop}
    best = search(graph, budget, **options, rounds=None, excess=excess)
    assert looks == [True, True, False]
    assert best is not None
    assert simulate(best).peak_nbytes <= budget
