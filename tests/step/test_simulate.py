"""The scorer, on schedules small enough to do by hand (test_validate.py has the rest)."""

from __future__ import annotations

import pytest

from helpers.graphs import UNIT, tensors, unit_chain
from memplan.step.graph import Handover, Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import replay, simulate


def elements(schedule: Schedule) -> list[int]:
    return [nbytes // UNIT for nbytes in simulate(schedule).live_nbytes]


def test_a_tensor_lives_until_its_last_reader() -> None:
    # Step by step: f0 | f0 f1 | f0 f1 f2 | + loss | + b2 | f0 f1 b2 b1 | f0 b1 b0.
    timeline = simulate(Schedule.unplanned(unit_chain(3)))
    assert timeline.live_nbytes == tuple(UNIT * n for n in (1, 2, 3, 4, 5, 4, 3))
    assert timeline.peak_nbytes == 5 * UNIT
    assert timeline.peak_step == 4
    assert timeline.seconds == 7.0


def test_recomputation() -> None:
    schedule = Schedule.sequence(unit_chain(3), [0, 1, 2, 3, 4, 1, 5, 6])
    assert elements(schedule) == [1, 2, 3, 3, 4, 3, 4, 3]
    assert simulate(schedule).peak_step == 4
    assert simulate(schedule).seconds == 8.0


def test_a_head_lives_to_the_end() -> None:
    ops = (Op("a", "a", (), (0,)), Op("b", "b", (0,), (1,)), Op("c", "c", (), (2,)))
    graph = TrainingGraph(ops, tensors(a=1, b=10, c=100), heads=(0, 2), nforward=3)
    assert elements(Schedule.unplanned(graph)) == [1, 11, 101]


def test_an_unread_output_dies_at_once() -> None:
    ops = (Op("a", "a", (), (0, 1)), Op("b", "b", (0,), (2,)))
    graph = TrainingGraph(ops, tensors(a=1, unread=10, b=100), heads=(2,), nforward=2)
    assert elements(Schedule.unplanned(graph)) == [11, 101]


@pytest.mark.parametrize(
    ("alias", "reads_again", "expected"),
    [
        (False, False, [5, 5, 6]),
        (False, True, [5, 10, 11]),
        (True, False, [5, 5, 6]),
        (True, True, [5, 5, 6]),
    ],
)
def test_handover(alias: bool, reads_again: bool, expected: list[int]) -> None:
    ops = (
        Op("a", "a", (), (0,)),
        Op("h", "h", (0,), (1,), handovers=(Handover(0, 0, alias),)),
        Op("z", "z", (1, 0) if reads_again else (1,), (2,)),
    )
    graph = TrainingGraph(ops, tensors(a=5, h=5, z=1), heads=(2,), nforward=3)
    assert elements(Schedule.unplanned(graph)) == expected


def test_handovers_are_tried_in_order() -> None:
    """The first output takes the first input's buffer, though the head keeps the second."""
    ops = (
        Op("a", "a", (), (0, 1)),
        Op("h", "h", (0, 1), (2,), handovers=(Handover(1, 0, False), Handover(0, 0, False))),
        Op("z", "z", (2,), (3,)),
    )
    graph = TrainingGraph(ops, tensors(a=5, b=5, h=5, z=1), heads=(3,), nforward=3)
    assert elements(Schedule.unplanned(graph)) == [10, 10, 6]
    kept = TrainingGraph(ops, graph.tensors, heads=(3, 1), nforward=3)
    assert elements(Schedule.unplanned(kept)) == [10, 10, 11]


def test_a_chain_of_handovers_is_one_buffer() -> None:
    over = (Handover(0, 0, False),)
    ops = (
        Op("a", "a", (), (0,)),
        *(Op(f"h{i}", "h", (i - 1,), (i,), handovers=over) for i in range(1, 5)),
    )
    graph = TrainingGraph(ops, tensors(a=3, b=3, c=3, d=3, e=3), heads=(4,), nforward=5)
    assert elements(Schedule.unplanned(graph)) == [3] * 5


def test_a_tensor_without_bytes_takes_part_in_no_handover() -> None:
    over = (Handover(0, 0, False),)
    ops = (Op("a", "a", (), (0,)), Op("b", "b", (0,), (1,), handovers=over))
    graph = TrainingGraph(ops, tensors(a=0, b=3), heads=(1,), nforward=2)
    assert elements(Schedule.unplanned(graph)) == [0, 3]


def test_nothing_to_do() -> None:
    timeline = simulate(Schedule.unplanned(TrainingGraph((), (), (), 0)))
    assert (timeline.live_nbytes, timeline.peak_nbytes, timeline.seconds) == ((), 0, 0)


class Diary:
    """An arena that writes down what it is asked."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.entries: list[str] = []
        self.names: list[str] = []

    def request(self, step: int, tensor: int) -> int:
        self.names.append(f"{self.graph.tensors[tensor].name}{step}")
        self.entries.append(f"+{self.names[-1]}")
        return len(self.names) - 1

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.entries.append(f"{self.names[buffer]}={self.graph.tensors[tensor].name}{step}")

    def release(self, buffer: int, step: int) -> None:
        self.entries.append(f"-{self.names[buffer]}@{step}")

    def end_of_requests(self, step: int) -> None:
        self.entries.append(f"|{step}")


def test_the_arena_is_asked_in_mxnets_order() -> None:
    """Hand-overs, requests from the largest (later outputs first among equals), releases."""
    ops = (
        Op("one", "one", (), (0, 1, 2, 3)),
        Op("two", "two", (3, 0), (4, 5, 6), handovers=(Handover(1, 1, False),)),
    )
    sizes = {"a": 2, "b": 3, "c": 2, "d": 9, "e": 1, "f": 2, "unread": 4}
    graph = TrainingGraph(ops, tensors(**sizes), heads=(1, 2, 4, 5), nforward=2)
    diary = Diary(graph)
    replay(Schedule.unplanned(graph), diary)
    assert " ".join(diary.entries) == ("+d0 +b0 +c0 +a0 |0 a0=f1 +unread1 +e1 |1 -d0@1 -unread1@1")
