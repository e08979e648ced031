"""The second opinion: hand-made schedules, forged ones, and agreement with the simulator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.graphs import UNIT, schedules, tensors, training_graphs, unit_chain
from memplan.step.graph import Handover, Op, TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate


def test_unit_chain() -> None:
    graph = unit_chain(3)
    # f0 f1 f2 loss b2 b1 b0: at b2 the outputs of f0, f1, f2, the loss and b2's own are alive.
    verdict = validate(Schedule.unplanned(graph))
    assert verdict.valid
    assert verdict.peak_nbytes == 5 * UNIT
    assert verdict.reason is None


def test_recomputation_shortens_lives() -> None:
    # f1 runs again after b2, so that its first output dies at f2.
    graph = unit_chain(3)
    schedule = Schedule.sequence(graph, [0, 1, 2, 3, 4, 1, 5, 6])
    # At b2: f0, f2, the loss, b2. At f1 again: f0, b2, f1. At b1: f0, b2, f1, b1.
    assert validate(schedule).peak_nbytes == 4 * UNIT


def test_an_unread_output_lives_in_its_own_step_only() -> None:
    ops = (Op("two", "two", (), (0, 1)), Op("one", "one", (0,), (2,)))
    graph = TrainingGraph(ops, tensors(a=1, unread=7, b=2), heads=(2,), nforward=2)
    assert validate(Schedule.unplanned(graph)).peak_nbytes == 8 * UNIT


def chain_with_handover(alias: bool, reader_later: bool) -> Schedule:
    """a -> h (may be written over a) -> z; z may read a too."""
    ops = (
        Op("a", "a", (), (0,)),
        Op("h", "h", (0,), (1,), handovers=(Handover(0, 0, alias),)),
        Op("z", "z", (1, 0) if reader_later else (1,), (2,)),
    )
    return Schedule.unplanned(TrainingGraph(ops, tensors(a=5, h=5, z=1), (2,), 3))


@pytest.mark.parametrize(
    ("alias", "reader_later", "elements"),
    [
        (False, False, 6),  # a dies at h: one buffer, then z
        (False, True, 11),  # a lives on: two buffers
        (True, False, 6),
        (True, True, 6),  # an alias shares even so
    ],
)
def test_handover(alias: bool, reader_later: bool, elements: int) -> None:
    schedule = chain_with_handover(alias, reader_later)
    assert validate(schedule).peak_nbytes == elements * UNIT


def test_each_input_and_output_is_handed_over_once() -> None:
    every = tuple(Handover(i, o, False) for i in (0, 1) for o in (0, 1))
    ops = (
        Op("a", "a", (), (0, 1)),
        Op("h", "h", (0, 1), (2, 3), handovers=(every[0], *every)),
    )
    graph = TrainingGraph(ops, tensors(a=1, b=1, c=1, d=1), heads=(2, 3), nforward=2)
    assert validate(Schedule.unplanned(graph)).peak_nbytes == 2 * UNIT


def test_no_handover_where_the_op_reads_the_input_twice() -> None:
    ops = (
        Op("a", "a", (), (0,)),
        Op("h", "h", (0, 0), (1,), handovers=(Handover(0, 0, False),)),
    )
    graph = TrainingGraph(ops, tensors(a=1, b=1), heads=(1,), nforward=2)
    assert validate(Schedule.unplanned(graph)).peak_nbytes == 2 * UNIT


def test_no_handover_to_an_output_that_nobody_reads() -> None:
    ops = (
        Op("a", "a", (), (0,)),
        Op("h", "h", (0,), (1, 2), handovers=(Handover(0, 0, False), Handover(0, 1, False))),
    )
    # The unread first output takes nothing over, so that the second one can.
    graph = TrainingGraph(ops, tensors(a=3, unread=3, b=3), heads=(2,), nforward=2)
    assert validate(Schedule.unplanned(graph)).peak_nbytes == 6 * UNIT


def test_a_tensor_without_bytes_takes_part_in_no_handover() -> None:
    over = (Handover(0, 0, False),)
    ops = (
        Op("a", "a", (), (0,)),
        Op("b", "b", (0,), (1,), handovers=over),
        Op("c", "c", (1,), (2,), handovers=over),
    )
    graph = TrainingGraph(ops, tensors(a=0, b=3, c=0), heads=(2,), nforward=3)
    assert validate(Schedule.unplanned(graph)).peak_nbytes == 3 * UNIT


def test_over_budget_names_the_step_and_the_largest_tensors() -> None:
    ops = (Op("one", "one", (), (0, 1)), Op("two", "two", (0, 1), (2,)))
    graph = TrainingGraph(ops, tensors(small=1, large=10, out=3), heads=(2,), nforward=2)
    schedule = Schedule.unplanned(graph)
    assert validate(schedule, 14 * UNIT).valid
    verdict = validate(schedule, 14 * UNIT - 1)
    assert not verdict.valid
    assert verdict.peak_nbytes == 14 * UNIT
    assert verdict.reason == (
        "step 1, op 'two': 56 bytes are alive, 1 more than the budget of 55; "
        "the largest are large (40 bytes), out (12 bytes), small (4 bytes)"
    )


def small_graph() -> TrainingGraph:
    """a -> b -> c; c is a head and waits for w; only b and w may run twice."""
    ops = (
        Op("w", "w", (), (0,)),
        Op("a", "a", (), (1,), recomputable=False),
        Op("b", "b", (1,), (2,)),
        Op("c", "c", (2,), (3,), recomputable=False, after=(0,)),
    )
    return TrainingGraph(ops, tensors(w=1, a=1, b=1, c=1), heads=(3,), nforward=4)


RIGHT = ((0, 1, 2, 3), ((), (), (1,), (2,)), (3,))


@pytest.mark.parametrize(
    ("ops", "reads", "heads", "reason"),
    [
        ((0, 1, 9, 3), RIGHT[1], (3,), "step 2: there is no op 9"),
        ((0, 1, 2, -1), RIGHT[1], (3,), "step 3: there is no op -1"),
        ((0, 1, 2, 3), ((), (), (1,)), (3,), "4 steps, but reads for 3"),
        ((0, 1, 2, 3), ((), (), (), (2,)), (3,), "step 2: op 'b' has 1 inputs, not 0"),
        (
            (0, 1, 2, 3),
            ((), (), (0,), (2,)),
            (3,),
            "step 2: op 'b' reads 'a' of step 0, which is no earlier step that writes it",
        ),
        (
            (0, 2, 1, 3),
            ((), (2,), (), (1,)),
            (3,),
            "step 1: op 'b' reads 'a' of step 2, which is no earlier step that writes it",
        ),
        (
            (0, 1, 2, 3),
            ((), (), (-3,), (2,)),
            (3,),
            "step 2: op 'b' reads 'a' of step -3, which is no earlier step that writes it",
        ),
        (
            (0, 1, 2, 1, 3),
            ((), (), (1,), (), (2,)),
            (4,),
            "step 3: op 'a' runs again, which it must not",
        ),
        ((1, 2, 3, 0), ((), (0,), (1,), ()), (2,), "step 2: op 'c' runs before 'w'"),
        ((0, 1, 2), ((), (), (1,)), (), "op 'c' never runs"),
        ((0, 1, 2, 3), RIGHT[1], (), "1 heads, but sources for 0"),
        (
            (0, 1, 2, 3),
            RIGHT[1],
            (2,),
            "head 'c' is taken from step 2, which does not write it",
        ),
        (
            (0, 1, 2, 3),
            RIGHT[1],
            (-1,),
            "head 'c' is taken from step -1, which does not write it",
        ),
    ],
)
def test_why_not(
    ops: tuple[int, ...], reads: tuple[tuple[int, ...], ...], heads: tuple[int, ...], reason: str
) -> None:
    verdict = validate(Schedule.trusted(small_graph(), ops, reads, heads))
    assert (verdict.valid, verdict.peak_nbytes, verdict.reason) == (False, 0, reason)


def test_what_the_forger_started_from_is_valid() -> None:
    assert validate(Schedule.trusted(small_graph(), *RIGHT)).valid


@given(st.data())
def test_agrees_with_the_simulator_on_any_schedule(data: st.DataObject) -> None:
    schedule = data.draw(schedules(data.draw(training_graphs())))
    verdict = validate(schedule)
    assert verdict.valid, verdict.reason
    assert verdict.peak_nbytes == simulate(schedule).peak_nbytes


@given(st.data())
def test_agrees_with_the_simulator_on_sequences(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    ops = data.draw(schedules(graph)).ops
    schedule = Schedule.sequence(graph, ops)
    verdict = validate(schedule)
    assert verdict.valid, verdict.reason
    assert verdict.peak_nbytes == simulate(schedule).peak_nbytes


@given(st.data())
def test_agrees_with_the_simulator_on_mirrored_schedules(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    may = flaggable(graph)
    flags = data.draw(st.sets(st.sampled_from(may))) if may else set()
    schedule = mirror(graph, flags)
    verdict = validate(schedule)
    assert verdict.valid, verdict.reason
    assert verdict.peak_nbytes == simulate(schedule).peak_nbytes
