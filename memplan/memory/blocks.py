"""MXNet's block allocator, replayed on a schedule: the bytes that a bound executor will hold."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay
from memplan.util.remember import remembered

PLANNER_ELEMENT_NBYTES = 4
"""MXNet's planner counts every element as 4 bytes, whatever its dtype."""

MATCH_RANGES = (1, 2, 4, 8, 16)
"""Values of NNVM_EXEC_MATCH_RANGE to choose from where memplan binds a network itself."""


@dataclass(frozen=True)
class Allocation:
    """Memory in blocks. ``nbytes`` is their true size, ``reported_nbytes`` what MXNet prints.

    They differ where elements are not 4 bytes wide. ``match_range`` is the NNVM_EXEC_MATCH_RANGE
    with which MXNet places them so, ``blocks`` has the true size of each.
    """

    nbytes: int
    reported_nbytes: int
    match_range: int
    blocks: tuple[int, ...] = field(default=(), compare=False, repr=False)


class _Blocks(Arena):
    """The allocator of src/nnvm/plan_memory.cc: whole blocks, which grow but never split.

    A request takes, of the free blocks within ``match_range`` times its size, the smallest that
    is large enough, else the largest smaller one, which then grows.
    """

    def __init__(self, graph: TrainingGraph, match_range: int) -> None:
        self.tensors, self.match_range = graph.tensors, match_range
        self.reported: list[int] = []
        self.true: list[int] = []
        # (size, order of release, block): a multimap keeps equal sizes in order of insertion
        self.free: list[tuple[int, int, int]] = []
        self.releases = 0

    def request(self, step: int, tensor: int) -> int:
        size = self.tensors[tensor].nelements * PLANNER_ELEMENT_NBYTES
        block = self._find(size)
        if block is None:
            self.reported.append(size)
            self.true.append(self.tensors[tensor].nbytes)
            return len(self.reported) - 1
        self.reported[block] = max(self.reported[block], size)
        self.share(block, step, tensor)
        return block

    def _find(self, size: int) -> int | None:
        if self.match_range == 0:
            return None
        place = bisect_left(self.free, (size, -1, -1))
        if place < len(self.free) and self.free[place][0] <= size * self.match_range:
            return self.free.pop(place)[2]
        if place > 0 and self.free[place - 1][0] >= size // self.match_range:
            return self.free.pop(place - 1)[2]
        return None

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.true[buffer] = max(self.true[buffer], self.tensors[tensor].nbytes)

    def release(self, buffer: int, step: int) -> None:
        self.releases += 1
        insort(self.free, (self.reported[buffer], self.releases, buffer))


def allocate(schedule: Schedule, *, match_range: int | None = None) -> Allocation:
    """The blocks in which MXNet places ``schedule``.

    ``match_range`` is NNVM_EXEC_MATCH_RANGE; None means that of the graph.
    """
    by = schedule.graph.match_range if match_range is None else match_range
    return remembered(schedule, (allocate, by), lambda: _allocated(schedule, by))


def _allocated(schedule: Schedule, match_range: int) -> Allocation:
    blocks = _Blocks(schedule.graph, match_range)
    replay(schedule, blocks)
    return Allocation(sum(blocks.true), sum(blocks.reported), match_range, tuple(blocks.true))


def best_allocation(schedule: Schedule) -> Allocation:
    """The blocks of ``schedule`` at the match range of :data:`MATCH_RANGES` that suits it best."""
    return min(
        (allocate(schedule, match_range=match_range) for match_range in MATCH_RANGES),
        key=lambda allocation: allocation.nbytes,
    )
