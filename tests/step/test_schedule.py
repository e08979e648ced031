"""Which sequences of executions are schedules, and the views of one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.graphs import schedules, tensors, training_graphs, unit_chain
from memplan.errors import ScheduleError
from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule, without_unread
from memplan.step.simulate import simulate
from memplan.step.validate import first_violation

# w; a -> b -> c, a head, which also waits for w
GRAPH = TrainingGraph(
    (
        Op("w", "w", (), (0,), 1.0),
        Op("a", "a", (), (1,), 2.0, recomputable=False),
        Op("b", "b", (1,), (2,), 4.0),
        Op("c", "c", (2,), (3,), 8.0, recomputable=False, after=(0,)),
    ),
    tensors(w=1, a=1, b=1, c=1),
    heads=(3,),
    nforward=4,
)
OPS = (0, 1, 2, 3)
READS = ((), (), (1,), (2,))


def test_unplanned() -> None:
    assert Schedule.unplanned(GRAPH) == Schedule(GRAPH, OPS, READS, (3,))


def test_integers_of_numpy_become_pythons() -> None:
    """A strategy of the user's may make a schedule from arrays; JSON takes no number of NumPy's."""
    reads = tuple(map(np.array, ([], [], [1], [2])))
    unplanned = Schedule.unplanned(GRAPH)
    for schedule in (
        Schedule.sequence(GRAPH, np.arange(4)),
        Schedule(GRAPH, np.arange(4), reads, np.array([3])),  # type: ignore[arg-type]
    ):
        assert schedule == unplanned
        assert schedule.to_json() == unplanned.to_json()


@pytest.mark.parametrize("op", ["a", 0.0, True, None])
def test_ops_and_steps_are_named_by_integers(op: Any) -> None:
    message = f"^not a memplan schedule: ops and steps are named by integers, not by {op!r}$"
    with pytest.raises(ScheduleError, match=message):
        Schedule.sequence(GRAPH, [op, 1, 2, 3])
    with pytest.raises(ScheduleError, match=message):
        Schedule(GRAPH, OPS, ((), (), (1,), (op,)), (3,))
    with pytest.raises(ScheduleError, match=message):
        Schedule(GRAPH, OPS, READS, (op,))


@pytest.mark.parametrize("field", ["ops", "reads", "heads"])
def test_what_is_no_list_is_no_schedule(field: str) -> None:
    schedule = Schedule.unplanned(GRAPH)
    with pytest.raises(ScheduleError, match=r"ops, reads and heads are lists, not None"):
        dataclasses.replace(schedule, **{field: None})


def test_a_sequence_reads_the_latest_execution() -> None:
    schedule = Schedule.sequence(GRAPH, [1, 2, 0, 2, 3])
    assert schedule.reads == ((), (0,), (), (0,), (3,))
    assert schedule.heads == (4,)


def test_an_op_too_large_to_be_written_out_is_none() -> None:
    with pytest.raises(ScheduleError, match="step 1: there is no op an integer of 16610 bits"):
        Schedule.sequence(GRAPH, [0, 10**5000])


def test_recomputation_costs_its_seconds() -> None:
    schedule = Schedule.sequence(GRAPH, [0, 1, 2, 0, 2, 3])
    assert schedule.recomputed == (0, 2)
    assert schedule.seconds == 20.0
    assert schedule.overhead == pytest.approx(5 / 15)
    assert Schedule.unplanned(GRAPH).overhead == 0.0


@pytest.mark.parametrize("sequence", [(1, 2, 0, 3), (1, 0, 2, 3)])
def test_another_order_takes_the_same_seconds(sequence: tuple[int, ...]) -> None:
    """To the last digit: else a plan without recomputation has an overhead below zero."""
    graph = GRAPH.with_seconds([0.1, 0.2, 0.3, 0.0])
    assert 0.1 + 0.2 + 0.3 != 0.2 + 0.3 + 0.1
    assert Schedule.sequence(graph, sequence).overhead == 0.0


def test_seconds_that_are_too_many_to_count_are_infinite() -> None:
    graph = GRAPH.with_seconds([1e308, 0.0, 0.0, 0.0])
    assert Schedule.sequence(graph, [0, 1, 2, 0, 3]).seconds == math.inf


def test_no_overhead_where_nothing_takes_time() -> None:
    graph = GRAPH.with_seconds([0.0] * 4)
    assert Schedule.sequence(graph, [0, 1, 2, 2, 3]).overhead == 0.0


@pytest.mark.parametrize(
    ("ops", "reads", "heads", "message"),
    [
        ((0, 1, 9, 3), READS, (3,), "step 2: there is no op 9"),
        ((0, 1, -2, 3), READS, (3,), "step 2: there is no op -2"),
        (OPS, READS[:3], (3,), "4 steps, but reads for 3"),
        (OPS, ((), (), (), (2,)), (3,), "step 2: op 'b' has 1 inputs, not 0"),
        (OPS, ((), (), (0,), (2,)), (3,), "step 2: op 'b' reads 'a', which step 0 does not"),
        (OPS, ((), (), (-3,), (2,)), (3,), "step 2: op 'b' reads 'a', which step -3 does not"),
        ((0, 2, 1, 3), ((), (2,), (), (1,)), (3,), "step 1: op 'b' reads 'a', which step 2 does"),
        ((0, 1, 2, 1, 3), ((), (), (1,), (), (2,)), (4,), "step 3: op 'a' must not run twice"),
        ((1, 2, 3, 0), ((), (0,), (1,), ()), (2,), "step 2: op 'c' must run after 'w'"),
        ((0, 1, 2), READS[:3], (2,), "head 'c' is said to come from step 2; it does not"),
        (OPS, READS, (-1,), "head 'c' is said to come from step -1; it does not"),
        (OPS, READS, (4,), "head 'c' is said to come from step 4; it does not"),
        (OPS, READS, (), "1 heads, but sources for 0"),
    ],
)
def test_refused(
    ops: tuple[int, ...], reads: tuple[tuple[int, ...], ...], heads: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}"):
        Schedule(GRAPH, ops, reads, heads)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([0, 1, 2, 9], "step 3: there is no op 9"),
        ([0, 2, 1, 3], "step 1: op 'b' reads 'a', which step -1 does not supply"),
        ([1, 2, 3, 0], "step 2: op 'c' must run after 'w'"),
    ],
)
def test_refused_sequences(ops: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}"):
        Schedule.sequence(GRAPH, ops)


def test_every_op_must_run() -> None:
    graph = TrainingGraph(GRAPH.ops, GRAPH.tensors, heads=(2,), nforward=4)
    with pytest.raises(ScheduleError, match=r"^2 ops never run, among them \['w', 'c'\]$"):
        Schedule.sequence(graph, [1, 2])


def test_matrices() -> None:
    # f0 f1 loss b1 | f0 again, b0: f0's first output is read by f1 alone.
    schedule = Schedule.sequence(unit_chain(2), [0, 1, 2, 3, 0, 4])
    ran, kept = schedule.matrices()
    assert ran.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1],
    ]
    assert kept.astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
    ]


def test_matrices_keep_heads_to_the_end() -> None:
    graph = TrainingGraph(GRAPH.ops, GRAPH.tensors, heads=(0, 3), nforward=4)
    _, kept = Schedule.unplanned(graph).matrices()
    assert kept[:, 0].tolist() == [False, True, True, True]


def test_what_runs_after_every_op_has_run_belongs_to_the_last_stage() -> None:
    graph = TrainingGraph(GRAPH.ops, GRAPH.tensors, heads=(0, 3), nforward=4)
    ran, kept = Schedule.sequence(graph, [0, 1, 2, 3, 0]).matrices()
    assert ran[3].tolist() == [True, False, False, True]
    assert not kept[:, 0].any()


@given(st.data())
def test_matrices_obey_checkmate(data: st.DataObject) -> None:
    """Inequalities (1b) and (1c) of Jain et al. 2020, on any schedule."""
    schedule = data.draw(schedules(data.draw(training_graphs())))
    graph = schedule.graph
    ran, kept = schedule.matrices()
    assert (kept[1:] <= (ran | kept)[:-1]).all()
    assert not kept[0].any()
    for op, call in enumerate(graph.ops):
        for tensor in call.inputs:
            assert (ran[:, op] <= (ran | kept)[:, graph.producer[tensor]]).all()
    firsts = list(dict.fromkeys(schedule.ops))
    assert ran[np.arange(len(firsts)), firsts].all()


def test_printed() -> None:
    lines = str(Schedule.sequence(GRAPH, [0, 1, 2, 2, 3])).splitlines()
    assert lines == [
        "     0  w  (w)",
        "     1  a  (a)",
        "     2  b  (b)",
        "     3  again b  (b)",
        "     4  c  (c)",
    ]


@given(st.data())
def test_json_round_trip(data: st.DataObject) -> None:
    schedule = data.draw(schedules(data.draw(training_graphs())))
    assert Schedule.from_json(schedule.graph, schedule.to_json()) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        "{}",
        '{"format": "memplan.step.graph/1"}',
        '{"format": "memplan.step.schedule/1"}',
        '{"format": "memplan.step.schedule/1", "ops": ["x"], "reads": [[]], "heads": []}',
        '{"format": "memplan.step.schedule/1", "ops": [0], "reads": [0], "heads": []}',
    ],
)
def test_other_text_is_no_schedule(text: str) -> None:
    with pytest.raises(ScheduleError, match="not a memplan schedule"):
        Schedule.from_json(GRAPH, text)


def test_json_of_another_graph_is_refused() -> None:
    text = Schedule.unplanned(GRAPH).to_json()
    with pytest.raises(ScheduleError, match="step 1: op 'f1' has 1 inputs, not 0"):
        Schedule.from_json(unit_chain(4), text)


@pytest.mark.parametrize(
    ("sequence", "kept"),
    [
        ((0, 1, 2, 2, 3), (0, 1, 2, 3)),
        ((0, 1, 2, 3, 2), (0, 1, 2, 3)),
        # c waits for w, whose first run is early enough and need not be the last one before it.
        ((0, 1, 0, 2, 3, 0), (0, 1, 2, 3)),
        ((0, 1, 2, 3), (0, 1, 2, 3)),
    ],
)
def test_runs_that_nobody_reads_are_left_out(
    sequence: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    assert without_unread(Schedule.sequence(GRAPH, sequence)) == Schedule.sequence(GRAPH, kept)


@given(st.data())
def test_without_runs_that_nobody_reads_a_step_holds_and_takes_no_more(data: st.DataObject) -> None:
    schedule = data.draw(schedules(data.draw(training_graphs())))
    lean = without_unread(schedule)
    assert first_violation(lean) is None
    assert without_unread(lean) is lean
    if schedule == Schedule.sequence(schedule.graph, schedule.ops):
        assert lean == Schedule.sequence(lean.graph, lean.ops)
    assert lean.seconds <= schedule.seconds
    assert simulate(lean).peak_nbytes <= simulate(schedule).peak_nbytes
