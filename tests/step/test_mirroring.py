"""MXNet's mirroring, done by hand (tests/realise/test_mirror.py asks MXNet itself)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.graphs import tensors, training_graphs, unit_chain
from memplan.errors import ScheduleError
from memplan.step.graph import Op, TrainingGraph
from memplan.step.mirroring import flaggable, flags_of, mirror
from memplan.step.schedule import Schedule

F0, F1, F2, LOSS, B2, B1, B0 = range(7)


def reading_inputs() -> TrainingGraph:
    """f0 -> f1 -> f2 -> loss; the backward op of f_i reads f_i's input, as convolutions do."""
    ops = (
        Op("f0", "f", (), (F0,), 1.0),
        Op("f1", "f", (F0,), (F1,), 1.0),
        Op("f2", "f", (F1,), (F2,), 1.0),
        Op("loss", "loss", (F2,), (LOSS,), 1.0, recomputable=False),
        Op("b2", "b", (LOSS, F1), (B2,), 1.0, False, F2, (F2,)),
        Op("b1", "b", (B2, F0), (B1,), 1.0, False, F1, (F1,)),
        Op("b0", "b", (B1,), (B0,), 1.0, False, F0, (F0,)),
    )
    sizes = dict.fromkeys(("f0", "f1", "f2", "loss", "b2", "b1", "b0"), 1)
    return TrainingGraph(ops, tensors(**sizes), heads=(LOSS, B0), nforward=4)


def test_without_flags_the_base_order() -> None:
    for graph in (unit_chain(4), reading_inputs()):
        assert mirror(graph, frozenset()) == Schedule.unplanned(graph)


def test_flagged_ops_run_again_before_the_first_backward_op_that_needs_them() -> None:
    schedule = mirror(reading_inputs(), {F1, F2})
    assert schedule.ops == (F0, F1, F2, LOSS, F1, F2, B2, B1, B0)
    # The copy of f1 reads the original f0, the copy of f2 the copy of f1, as b2 does.
    assert schedule.reads == ((), (0,), (1,), (2,), (0,), (4,), (3, 4), (6, 0), (7,))
    assert schedule.heads == (3, 8)


def test_a_flagged_segment_starts_from_the_first_flagged_op() -> None:
    schedule = mirror(reading_inputs(), {F0, F1, F2})
    assert schedule.ops == (F0, F1, F2, LOSS, F0, F1, F2, B2, B1, B0)
    assert schedule.reads == ((), (0,), (1,), (2,), (), (4,), (5,), (3, 5), (7, 4), (8,))


def test_an_unflagged_consumer_keeps_the_original() -> None:
    schedule = mirror(reading_inputs(), {F1})
    # f2 is not flagged: b2 reads the original f1, and the copy runs for nothing but b1's wait.
    assert schedule.ops == (F0, F1, F2, LOSS, B2, F1, B1, B0)
    assert schedule.reads == ((), (0,), (1,), (2,), (3, 1), (0,), (4, 0), (6,))


def test_an_unflagged_op_keeps_its_own_output() -> None:
    # In unit_chain b_i reads the output of f_i: the copy of a flagged one, else the original.
    schedule = mirror(unit_chain(3), {F2})
    assert schedule.ops == (F0, F1, F2, LOSS, F2, B2, B1, B0)
    assert schedule.reads == ((), (0,), (1,), (2,), (1,), (3, 4), (5, 1), (6, 0))


def test_a_copy_runs_where_it_is_first_needed_once() -> None:
    schedule = mirror(unit_chain(3), {F0, F1, F2})
    assert schedule.ops == (F0, F1, F2, LOSS, F0, F1, F2, B2, B1, B0)
    assert schedule.reads[7:] == ((3, 6), (7, 5), (8, 4))


def test_heads_are_the_originals() -> None:
    graph = TrainingGraph(reading_inputs().ops, reading_inputs().tensors, (F1, B0), 4)
    schedule = mirror(graph, {F1, F2})
    assert schedule.ops == (F0, F1, F2, LOSS, F1, F2, B2, B1, B0)
    assert schedule.heads == (1, 8)


def test_what_may_be_flagged() -> None:
    assert flaggable(reading_inputs()) == (F0, F1, F2)


@pytest.mark.parametrize(("flag", "name"), [(LOSS, "'loss'"), (B1, "'b1'"), (7, "7"), (-7, "-7")])
def test_refused(flag: int, name: str) -> None:
    with pytest.raises(ScheduleError, match=f"op {name} cannot be flagged"):
        mirror(reading_inputs(), {F0, flag})


def test_flags_of() -> None:
    assert flags_of(mirror(reading_inputs(), {F1, F2})) == {F1, F2}
    assert flags_of(Schedule.unplanned(reading_inputs())) == frozenset()


@pytest.mark.parametrize(
    "ops",
    [
        (F0, F1, F2, LOSS, F1, B2, B1, B0),  # b2 reads a copy, though f2 has none
        (F0, F1, F1, F2, F2, LOSS, B2, B1, B0),
        (F0, F1, F2, LOSS, F1, F2, F1, B2, B1, B0),
    ],
)
def test_other_schedules_have_no_flags(ops: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="no set of force_mirroring flags"):
        flags_of(Schedule.sequence(reading_inputs(), ops))


@given(st.data())
def test_flags_of_any_mirrored_schedule(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    may = flaggable(graph)
    flags = data.draw(st.sets(st.sampled_from(may))) if may else set()
    schedule = mirror(graph, flags)
    # Every forward op has a backward op here, which makes its copy run.
    assert flags_of(schedule) == flags
    assert len(schedule.ops) == len(graph.ops) + len(flags)


@given(training_graphs())
def test_originals_run_in_the_order_of_no_flags(graph: TrainingGraph) -> None:
    """Copies are inserted; nothing else moves."""
    plain = mirror(graph, frozenset())
    schedule = mirror(graph, set(flaggable(graph)))
    assert tuple(dict.fromkeys(schedule.ops)) == plain.ops
