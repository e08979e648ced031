"""Searches are bounded by moves or rounds; where the clock cuts them, they say so."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from helpers.graphs import UNIT, uneven_chain, unit_chain
from memplan.memory.blocks import allocate
from memplan.search import flag_annealing, round_kinds, rounds
from memplan.search.evicted_least import evicted_least
from memplan.search.eviction import Evictions
from memplan.search.flag_annealing import anneal
from memplan.search.kernels.annealing import LIVE, Task
from memplan.search.kernels.annealing import anneal as anneal_sequences
from memplan.search.kernels.sequence import load
from memplan.search.sequence_search import compile_search, search
from memplan.search.sequences import Rules
from memplan.step.schedule import Schedule
from memplan.util import stop as stop_module
from memplan.util.stop import Pace, Stop

PLENTY = 1e6


def test_a_stop_says_whether_it_was_reached() -> None:
    stop = Stop.after(PLENTY)
    assert not stop.is_over()
    assert not stop.cut_by_clock
    late = Stop.after(-1.0)
    assert not late.cut_by_clock, "nobody had more to do"
    assert late.is_over()
    assert late.cut_by_clock


def test_what_cuts_a_part_cuts_the_whole() -> None:
    whole = Stop.after(PLENTY)
    part = whole.share(0.5).share(0.5)
    assert PLENTY * 0.2 < part.seconds_left <= PLENTY * 0.25
    assert Stop(part.deadline + 3.0 * PLENTY, part_of=whole).deadline == whole.deadline
    other = whole.share(0.0)
    assert other.is_over()
    assert whole.cut_by_clock
    assert not part.cut_by_clock


@pytest.mark.parametrize(("seconds", "given"), [(4.0, 1.0), (60.0, 37.5)])
def test_a_part_that_its_work_ends_has_all_but_little_of_much_time(
    seconds: float, given: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than 30 seconds; what takes a few, of more than 24."""
    monkeypatch.setattr(stop_module, "time", Hand())
    whole, endless = Stop.after(seconds, work=100.0), Stop.after(seconds)
    part = whole.share_of_work(0.25)
    assert part.seconds_left == pytest.approx(given)
    assert part.work_left == 25.0
    assert part.share_of_work(1.0).deadline == part.deadline
    assert endless.share_of_work(0.25).seconds_left == pytest.approx(0.25 * seconds)
    little_given = max(0.25 * seconds, seconds - 18.0)
    assert endless.share_for_little(0.25).seconds_left == pytest.approx(little_given)
    whole.end()
    assert whole.share_of_work(0.25).is_ended


class Hand:
    """A clock that stands still unless it is told to go on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_after_a_busy_moment_more_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 seconds; the first 16 moves take 1.2 seconds, from then on there are 5000 a second."""
    clock = Hand()
    monkeypatch.setattr(stop_module, "time", clock)
    for amount, nmade in ((10_000, 10_000), (100_000, 44_016)):
        clock.now = 0.0
        stop = Stop(10.0)
        pace, made = Pace(stop, amount), 0
        while (left := pace.left(made)) > 0:
            made += min(16, left)
            clock.now = 1.2 + (made - 16) / 5000.0
        assert made == pytest.approx(nmade, abs=20)
        assert stop.cut_by_clock, "for some moves the search has hurried"


def test_work_that_is_left_out_for_want_of_work_is_not_cut() -> None:
    """A round of this kind has no time for all of its moves, but for those of the work left."""
    search = rounds.Rounds(
        uneven_chain(20), Rules(False, True, ()), seed=0, stop=Stop.after(PLENTY)
    )
    speed = search.speeds[LIVE] = rounds.Speed(moves=1000, seconds=0.2 * PLENTY)
    stop = Stop.after(PLENTY, work=100.0)
    kind = round_kinds.ANNEALING_ROUNDS[1]
    assert speed.seconds / speed.moves * search._moves_of(kind) > PLENTY
    assert search._moves(kind, LIVE, stop) == 100
    assert not stop.cut_by_clock


def annealed(nmoves: int, chunk: int) -> tuple[float, list[float]]:
    """The seconds of the state, and what the annealing remembers, after moves made in chunks."""
    graph = unit_chain(20)
    graph = graph.with_seconds([1.0 + math.sin(i) for i in range(len(graph.ops))])
    search = rounds.Rounds(graph, Rules(False, True, ()), seed=5, stop=Stop.after(PLENTY))
    load(search.model, search.state, search.first, len(search.first), 9 * UNIT)
    control = np.array([1.0, 0.0, 0.0, 0.0, np.inf, np.inf])
    task = Task(search.unit, LIVE, 0.0, False, 0.01, 0.001, nmoves, 10**9)
    for _ in range(nmoves // chunk):
        anneal_sequences(
            *(search.model, search.state, search.arrays, search.arrays, search.memory),
            *(search.room, task, search.found, control, chunk),
        )
    return float(search.state.seconds[0]), control.tolist()


def test_how_often_the_search_looks_at_the_clock_changes_nothing() -> None:
    """Not even the last bit of the seconds, which are added up as moves are made."""
    assert annealed(4000, 10) == annealed(4000, 4000)


@pytest.mark.parametrize("match_ranges", [(), (1, 2)])
def test_the_same_rounds_give_the_same_schedule(match_ranges: tuple[int, ...]) -> None:
    results = []
    for _ in range(2):
        stop = Stop.after(PLENTY)
        rules = Rules(False, True, match_ranges)
        results.append(
            search(uneven_chain(20), 9 * UNIT, rules=rules, starts=[], seed=5, stop=stop, rounds=2)
        )
        assert not stop.cut_by_clock
    assert results[0] is not None
    assert results[0] == results[1]


def test_a_search_without_time_says_so() -> None:
    compile_search()
    stop = Stop.after(0.0)
    rules = Rules(False, True, ())
    search(uneven_chain(20), 9 * UNIT, rules=rules, starts=[], seed=5, stop=stop, rounds=2)
    assert stop.cut_by_clock


def test_evictions_end_by_themselves() -> None:
    graph = uneven_chain(20)
    results = []
    for _ in range(2):
        stop = Stop.after(PLENTY)
        evictions = Evictions(graph, 9 * UNIT)
        fit = evictions.fit((), stop)
        assert fit is not None
        results.append(evictions.improve(fit, stop, patience=30, seed=1))
        results.append(evicted_least(graph, stop))
        assert not stop.cut_by_clock
    assert results[:2] == results[2:]
    late = Stop.after(0.0)
    assert Evictions(graph, 9 * UNIT).fit((), late) is None
    assert late.cut_by_clock


def test_few_moves_over_many_flags_are_not_made() -> None:
    graph = unit_chain(200)
    few = flag_annealing.LEAST_WORK * flag_annealing.FEWEST_BY_FLAGS * 100
    spent = []
    for work in (few, 4 * few):
        stop = Stop.after(PLENTY, work=work)
        assert anneal(graph, frozenset(), None, stop=stop) is not None
        spent.append(work - stop.work_left)
    assert spent[0] == 0.0 < spent[1]


def test_annealing_over_flags_is_bounded_by_moves() -> None:
    graph = dataclasses.replace(uneven_chain(20), match_range=2)
    budget = allocate(Schedule.unplanned(graph)).nbytes * 2 // 3
    results = []
    for _ in range(2):
        stop = Stop.after(PLENTY)
        results.append(anneal(graph, frozenset(), budget, stop=stop, moves=300, seed=1))
        assert not stop.cut_by_clock
    assert results[0] is not None
    assert results[0] == results[1]


@pytest.mark.parametrize("moves", [None, 10**9])
def test_annealing_that_the_clock_hurries_says_so(moves: int | None) -> None:
    stop = Stop.after(0.05)
    anneal(uneven_chain(20), frozenset(), 9 * UNIT, stop=stop, moves=moves)
    assert stop.cut_by_clock
