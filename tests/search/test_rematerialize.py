"""Schedules from what is kept: do they recompute what they must, and only that?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import UNIT, training_graphs, unit_chain
from helpers.small_graphs import small_graphs
from memplan.memory.memory import Live, cheapest
from memplan.search.buffers import carried_tensors
from memplan.search.rematerialize import (
    closure,
    recomputing_segments,
    rematerialize,
    retaining,
)
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate


def test_keeping_everything_recomputes_nothing() -> None:
    graph = unit_chain(5)
    assert rematerialize(graph, lambda t, a: True) == Schedule.unplanned(graph)
    assert recomputing_segments(graph, range(graph.nforward)) == Schedule.unplanned(graph)


def test_a_segment_is_recomputed_once_and_right_before_it_is_needed() -> None:
    graph = unit_chain(4)  # f0 f1 f2 f3 loss b3 b2 b1 b0
    schedule = recomputing_segments(graph, {2})
    # f3 is there when the backward pass begins; f0 and f1 are computed again for b1.
    assert schedule.ops == (0, 1, 2, 3, 4, 5, 6, 0, 1, 7, 8)


def test_keeping_nothing_recomputes_from_the_start_each_time() -> None:
    graph = unit_chain(4)
    schedule = rematerialize(graph, lambda t, a: False)
    backward = (5, 0, 1, 2, 6, 0, 1, 7, 0, 8)
    # In the forward pass, too, nothing is kept.
    forward = (0, 0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4)
    assert schedule.ops == forward + backward


def test_what_is_retained_is_recomputed_for_it() -> None:
    graph = unit_chain(3)  # f0 f1 f2 loss b2 b1 b0
    kept = carried_tensors(Schedule.unplanned(graph))
    dropped = [set(tensors) for tensors in kept]
    for t in (3, 4):
        dropped[t].discard(0)
    # f0 must be there after stage 4, so that it runs in that stage.
    assert retaining(graph, dropped).ops == (0, 1, 2, 3, 0, 4, 5, 6)


def test_closure_stops_at_what_is_there() -> None:
    graph = unit_chain(4)
    assert closure(graph, [3], {1}) == [2, 3]
    assert closure(graph, [3], ()) == [0, 1, 2, 3]


def test_cheapest_within_a_budget_and_lowest_without() -> None:
    graph = unit_chain(8)
    plans = [
        Schedule.unplanned(graph),
        recomputing_segments(graph, {2, 5}),
        rematerialize(graph, lambda t, a: False),
    ]
    assert cheapest(plans, 100 * UNIT, Live()) == Schedule.unplanned(graph)
    lowest = cheapest(plans, None, Live())
    assert lowest is not None
    assert simulate(lowest).peak_nbytes == min(simulate(plan).peak_nbytes for plan in plans)
    assert cheapest(plans, 0, Live()) is None


@examples(60)
@given(st.data())
def test_any_choice_gives_a_valid_schedule(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(training_graphs(), small_graphs(6)))
    drop = data.draw(st.randoms(use_true_random=False))
    schedule = rematerialize(graph, lambda t, a: drop.random() < 0.5)
    assert validate(schedule).valid
    assert all(i < graph.nforward for i in schedule.recomputed)


@examples(60)
@given(st.data())
def test_what_a_schedule_carries_gives_it_back(data: st.DataObject) -> None:
    """R is determined by S: of a schedule with least recomputation nothing is lost."""
    graph = data.draw(st.one_of(training_graphs(), small_graphs(6)))
    drop = data.draw(st.randoms(use_true_random=False))
    schedule = rematerialize(graph, lambda t, a: drop.random() < 0.5)
    again = retaining(graph, carried_tensors(schedule))
    assert validate(again).valid
    assert again.seconds <= schedule.seconds
    assert simulate(again).peak_nbytes <= simulate(schedule).peak_nbytes
