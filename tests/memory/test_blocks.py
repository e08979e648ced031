"""MXNet's block allocator: cases done by hand (tests/trace/test_trace.py asks MXNet itself)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.graphs import UNIT, schedules, training_graphs
from memplan.memory.blocks import MATCH_RANGES, Allocation, allocate, best_allocation
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate


def steps(*calls: tuple[str, str]) -> Schedule:
    """A schedule of ops written ("outputs", "inputs").

    Outputs are written like ``a:100`` (elements of 4 bytes) or ``a:100h`` (of 2 bytes). Each
    tensor is read once at most, so that it is released where it is read.
    """
    tensors: list[Tensor] = []
    index: dict[str, int] = {}
    ops = []
    for written, read in calls:
        outputs = []
        for item in written.split():
            name, size = item.split(":")
            nelements = int(size.rstrip("h"))
            index[name] = len(tensors)
            outputs.append(index[name])
            tensors.append(Tensor(name, nelements * (2 if size[-1] == "h" else 4), nelements))
        inputs = tuple(index[name] for name in read.split())
        ops.append(Op(written, "op", inputs, tuple(outputs)))
    used = {tensor for op in ops for tensor in op.inputs}
    heads = tuple(tensor for tensor in range(len(tensors)) if tensor not in used)
    return Schedule.unplanned(TrainingGraph(tuple(ops), tuple(tensors), heads, len(ops)))


def reported(schedule: Schedule, match_range: int) -> int:
    """Elements in all blocks."""
    return allocate(schedule, match_range=match_range).reported_nbytes // UNIT


@pytest.mark.parametrize(
    ("size", "match_range", "total"),
    [
        (100, 0, 250),  # no block is ever taken again
        (100, 1, 150),  # exact fit
        (100, 16, 150),
        (60, 1, 210),  # 100 > 60
        (60, 2, 150),  # 100 <= 2 × 60, and the block keeps its size
        (50, 2, 150),
        (49, 2, 199),  # 100 > 2 × 49
        (49, 16, 150),
        (6, 16, 156),  # 100 > 16 × 6
        (7, 16, 150),
        (101, 1, 251),  # 100 < 101
        (101, 2, 151),  # 100 >= 101 / 2: the block grows
        (200, 2, 250),
        (201, 2, 351),
        (1600, 16, 1650),
        (1603, 16, 1653),  # MXNet divides bytes: 6412 // 16 = 400
        (1604, 16, 1754),
    ],
)
def test_a_free_block_within_range_is_taken(size: int, match_range: int, total: int) -> None:
    # When c is requested, a's block of 100 is free and b's of 50 is not.
    schedule = steps(("a:100", ""), ("b:50", "a"), (f"c:{size}", "b"))
    assert reported(schedule, match_range) == total


def test_the_range_is_that_of_the_graph_unless_said() -> None:
    schedule = steps(("a:100", ""), ("b:50", "a"), ("c:49", "b"))
    assert allocate(schedule).reported_nbytes == 150 * UNIT
    graph = schedule.graph
    narrow = TrainingGraph(graph.ops, graph.tensors, graph.heads, graph.nforward, match_range=2)
    assert allocate(Schedule.unplanned(narrow)).reported_nbytes == 199 * UNIT


def test_the_smallest_that_is_large_enough() -> None:
    # Free at c: 100 and 80. c takes 80, so that d fits into 100.
    schedule = steps(("a:100 b:80", ""), ("x:1", "a b"), ("c:70", "x"), ("d:90", "c"))
    assert reported(schedule, 16) == 181


def test_a_larger_block_before_a_nearer_smaller_one() -> None:
    # Free at c: 100 and 69. c takes 100 although 69 is nearer, so that d grows 69 to 71.
    schedule = steps(("a:100 b:69", ""), ("x:1", "a b"), ("c:70", "x"), ("d:71", "c"))
    assert reported(schedule, 16) == 100 + 71 + 1


def test_the_largest_smaller_block_grows() -> None:
    # Free at c: 50 and 80. c grows 80 to 90.
    schedule = steps(("a:50 b:80", ""), ("x:1", "a b"), ("c:90", "x"))
    assert reported(schedule, 16) == 50 + 90 + 1


def test_a_grown_block_is_free_with_its_new_size() -> None:
    # c grows 50 to 100; d fits into it without more.
    schedule = steps(("a:50", ""), ("x:1", "a"), ("c:100", "x"), ("y:1", "c"), ("d:100", "y"))
    assert reported(schedule, 2) == 100 + 1


def test_a_block_serves_one_tensor_at_a_time() -> None:
    schedule = steps(("a:100", ""), ("x:1", "a"), ("b:50 c:50", "x"))
    assert reported(schedule, 16) == 100 + 50 + 1


def test_the_largest_output_is_placed_first() -> None:
    # Free at b and c: 100. The larger c takes it, b a new block.
    schedule = steps(("a:100", ""), ("x:1", "a"), ("b:50 c:100", "x"))
    assert reported(schedule, 16) == 100 + 50 + 1


def test_an_unread_output_frees_its_block_at_once() -> None:
    op = Op("a", "a", (), (0, 1))
    read = Op("b", "b", (0,), (2,))
    tensors = (Tensor("a", 4, 1), Tensor("unread", 400, 100), Tensor("b", 400, 100))
    graph = TrainingGraph((op, read), tensors, (2,), 2)
    assert reported(Schedule.unplanned(graph), 16) == 101


def test_true_bytes_of_half_floats() -> None:
    schedule = steps(("a:100h", ""), ("b:50h", "a"), ("c:100h", "b"))
    assert allocate(schedule, match_range=1) == Allocation(300, 600, match_range=1)


def test_the_best_match_range_is_found_and_said() -> None:
    # At range 1 nothing fits what is free; at 2 the block of 4 serves the 3, and the 5 by growing.
    schedule = steps(("a:4", ""), ("b:1", "a"), ("c:3", "b"), ("d:1", "c"), ("e:5", "d"))
    totals = {n: allocate(schedule, match_range=n).nbytes for n in MATCH_RANGES}
    best = best_allocation(schedule)
    assert best.nbytes == min(totals.values()) < totals[1]
    assert totals[best.match_range] == best.nbytes
    assert sum(best.blocks) == best.nbytes


def test_a_block_is_as_large_as_its_largest_tensor() -> None:
    schedule = steps(("a:100h", ""), ("b:50h", "a"), ("c:100", "b"))
    assert allocate(schedule, match_range=1) == Allocation(500, 600, match_range=1)


@pytest.mark.parametrize(
    ("released", "nbytes"),
    [
        ("a b", 400 + 400 + 4),  # the half floats' block was free first: c makes it 400 bytes
        ("b a", 200 + 400 + 4),
    ],
)
def test_of_equal_blocks_the_first_released_is_taken(released: str, nbytes: int) -> None:
    schedule = steps(("a:100h b:100", ""), ("x:1", released), ("c:100", "x"))
    assert allocate(schedule, match_range=16) == Allocation(nbytes, 201 * UNIT, 16)


@pytest.mark.parametrize(
    ("released", "nbytes"),
    [
        ("a b", 200 + 480 + 4),
        ("b a", 480 + 400 + 4),  # the half floats' block was free last: c makes it 480 bytes
    ],
)
def test_of_equal_smaller_blocks_the_last_released_grows(released: str, nbytes: int) -> None:
    schedule = steps(("a:100h b:100", ""), ("x:1", released), ("c:120", "x"))
    assert allocate(schedule, match_range=16) == Allocation(nbytes, 221 * UNIT, 16)


@pytest.mark.parametrize(("alias", "total"), [(False, 200), (True, 100)])
def test_handed_over_blocks(alias: bool, total: int) -> None:
    # b may be written over a where a dies; here c reads a later, so that only an alias shares.
    ops = (
        Op("a", "a", (), (0,)),
        Op("b", "b", (0,), (1,), handovers=(Handover(0, 0, alias),)),
        Op("c", "c", (0, 1), (2,)),
    )
    tensors = (Tensor("a", 400, 100), Tensor("b", 400, 100), Tensor("c", 0, 0))
    graph = TrainingGraph(ops, tensors, (2,), 3)
    assert reported(Schedule.unplanned(graph), 16) == total


@given(st.data())
def test_blocks_hold_what_is_alive(data: st.DataObject) -> None:
    schedule = data.draw(schedules(data.draw(training_graphs())))
    peak = simulate(schedule).peak_nbytes
    for match_range in (0, 1, 2, 16):
        allocation = allocate(schedule, match_range=match_range)
        assert allocation.nbytes == allocation.reported_nbytes >= peak
