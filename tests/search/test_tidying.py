"""Other orders of the same runs: what they read, how much is alive, and what is packed by them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.graphs import UNIT, tensors, training_graphs, unit_chain, unrolled
from memplan.search import beginnings, settling, tidying
from memplan.search.kernels.arrays import Array
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequences import Rules
from memplan.search.settling import settle
from memplan.search.tidying import tidied
from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.validate import validate
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


def searching(graph: TrainingGraph, **options: Any) -> Rounds:
    rules = options.pop("rules", RULES)
    return Rounds(graph, rules, seed=0, stop=Stop.after(1e6, work=1e9), **options)


def reads_of(schedule: Schedule) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Which run of each op reads which runs of others, but for what has no bytes."""
    ops, all_tensors = schedule.graph.ops, schedule.graph.tensors
    runs = [(op, schedule.ops[:step].count(op)) for step, op in enumerate(schedule.ops)]
    return {
        run: [
            runs[step]
            for a, step in zip(ops[run[0]].inputs, steps, strict=True)
            if all_tensors[a].nbytes
        ]
        for run, steps in zip(runs, schedule.reads, strict=True)
    }


# A chain of 16 whose first ops run again long before they are read, and just before that.
EARLY = np.array([*range(17), *range(4), *range(17, 34)])
LATE = np.array([*range(29), *range(4), *range(29, 34)])


def test_what_is_recomputed_early_is_recomputed_just_before_it_is_read() -> None:
    # b3 is the first that reads what the copies write.
    assert tidied(searching(unit_chain(16)).model, EARLY).tolist() == LATE.tolist()


def test_what_takes_memory_runs_just_before_it_is_read() -> None:
    """And what it is read with frees none, so that it does not come early, either."""
    graph = one_op_each((), (), (1,), (2,), (0, 3), large=4, a=3, b=2, c=1, end=1)
    assert tidied(searching(graph).model, np.arange(6)).tolist() == [1, 2, 3, 0, 4, 5]


def test_what_many_read_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of all that reads one tensor: each reader is looked at some times at most."""
    nreaders, looks = 300, list[int]()
    sums = [(k, nreaders + k - 1) if k > 1 else (1,) for k in range(1, nreaders + 1)]
    sources = [(), *[(0,)] * nreaders, *sums]
    graph = one_op_each(*sources, **{f"t{k}": 1 for k in range(len(sources))})
    gain = tidying._InTurn._gain
    monkeypatch.setattr(
        tidying._InTurn, "_gain", lambda turn, step: looks.append(step) or gain(turn, step)
    )
    search = searching(graph)
    assert search.is_legal(tidied(search.model, search.unplanned))
    assert len(looks) < 10 * len(graph.ops)


def one_op_each(*sources: tuple[int, ...], **nbytes: int) -> TrainingGraph:
    """The last of the ops ends the step; each writes one tensor."""
    ops = tuple(Op(f"op{n}", "op", inputs, (n,), 1.0) for n, inputs in enumerate(sources))
    return TrainingGraph(ops, tensors(**nbytes), (len(ops) - 1,), len(ops))


def test_what_frees_memory_runs_as_soon_as_it_can() -> None:
    """Here it reads the large tensor last, which cannot be written later."""
    graph = one_op_each((), (0,), (1,), (2,), (0,), (3, 4), large=4, a=1, b=1, c=1, small=1, end=1)
    assert tidied(searching(graph).model, np.arange(7)).tolist() == [0, 1, 4, 2, 3, 5, 6]


@given(st.data())
def test_every_run_reads_what_it_has_read(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    search = searching(graph)
    sequence = data.draw(sequences(search))
    before = search.schedule(sequence)
    order = tidied(search.model, sequence)
    assert search.is_legal(order)
    after = search.schedule(order)
    assert validate(after).valid
    assert reads_of(after) == reads_of(before)


@st.composite
def sequences(draw: st.DrawFn, search: Rounds) -> Array:
    """The unplanned step with runs again at places where they may be."""
    steps = search.unplanned.tolist()
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(1, len(steps) - 1))
        again = [v for v in dict.fromkeys(steps[:place]) if search.model.repeatable[v]]
        steps[place:place] = again[:1] if not again else [draw(st.sampled_from(again))]
    return np.array(steps, dtype=np.int64)


@pytest.mark.parametrize("reorder", [True, False])
def test_what_is_too_large_fits_in_another_order(reorder: bool) -> None:
    """Where ops may change their order; it is looked at roughly, too."""
    graph = unit_chain(16)

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        return 0 if list(schedule.ops) == LATE[:-1].tolist() else UNIT

    for roughly in (True, False):
        search = searching(graph, rules=RULES._replace(reorder=reorder), excess=excess)
        search.offer(EARLY, 100 * UNIT)
        over = settle(search, 100 * UNIT, roughly=roughly)
        assert over == (0 if reorder else UNIT)
        assert (search.fitting is not None) == reorder


def test_an_order_with_a_higher_peak_than_the_budget_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searching(unit_chain(16), excess=lambda *_, **__: UNIT)
    monkeypatch.setattr(settling, "tidied", lambda *_: EARLY)
    search.offer(LATE, 100 * UNIT)
    assert search.live_peak(EARLY) > search.live_peak(LATE)
    settle(search, search.live_peak(LATE), roughly=True)
    assert search.first.tolist() == LATE.tolist()


def test_races_from_slices_aim_lower_until_what_they_find_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, budget = unrolled(40), 88 * UNIT
    search, aims = searching(graph, excess=lambda *_, **__: 0), list[int]()
    search.offer(search.unplanned, None)
    search.found.figures[1] *= 2.0
    excesses = [4 * UNIT, UNIT, 0]

    def raced(_: Rounds, starts: list[Array], aim: int, stop: Stop) -> None:
        assert starts
        assert not stop.is_over()
        aims.append(aim)
        search.found.figures[1] -= 1.0  # something cheaper

    def over(*_: Any, **options: Any) -> int:
        return excesses.pop(0) if options.get("briefly") else 0

    monkeypatch.setattr(beginnings, "race", raced)
    monkeypatch.setattr(beginnings, "settle", over)
    beginnings._sliced_start(search, budget, roughly=False)
    assert aims == [budget, budget - 2 * UNIT, budget - 2 * UNIT - UNIT // 2]
    assert not excesses
    assert math.isfinite(search.stop.work_left)
    assert len(best_sequence(search.found))


def test_what_a_race_has_found_is_mended_where_the_next_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, budget = unrolled(40), 88 * UNIT
    search, aims = searching(graph, excess=lambda *_, **__: UNIT), list[int]()
    search.offer(search.unplanned, None)
    search.found.figures[1] *= 2.0
    settled = search.settled.figures.copy()

    def raced(_: Rounds, starts: list[Array], aim: int, __: Stop) -> None:
        aims.append(aim)
        if len(aims) == 1:
            search.offer(min(starts, key=search.live_peak), 2 * budget)

    monkeypatch.setattr(beginnings, "race", raced)
    beginnings._sliced_start(search, 2 * budget, roughly=False)
    assert len(aims) == 2
    assert best_sequence(search.found).tolist() == search.first.tolist()
    assert search.found.figures[1] < settled[1]


@pytest.mark.parametrize("is_cheaper", [True, False])
def test_what_was_too_large_is_mended_where_a_race_has_found_what_fits_but_costs_more(
    is_cheaper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, budget = unrolled(40), 88 * UNIT
    search = searching(graph, excess=lambda *_, **__: 0)
    costly = search.sliced(budget, search.stop)[0]
    assert search.seconds(costly) > search.seconds(search.unplanned)
    fits, large = search.unplanned, costly
    if is_cheaper:
        fits, large = large, fits

    def raced(search: Rounds, *_: object) -> None:
        search.found.figures[1] = math.inf
        search.offer(fits, 10 * budget)

    def over(search: Rounds, *_: object, **options: object) -> int:
        if not options.get("briefly"):
            search.first = large
        return 0 if options.get("briefly") else UNIT

    monkeypatch.setattr(beginnings, "race", raced)
    monkeypatch.setattr(beginnings, "settle", over)
    search.offer(large, 10 * budget)
    search.found.figures[1] += graph.seconds
    beginnings._sliced_start(search, 10 * budget, roughly=False)
    best = large if is_cheaper else fits
    assert best_sequence(search.found).tolist() == best.tolist()
