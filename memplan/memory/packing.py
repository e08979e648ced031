"""A schedule in one piece of memory: every tensor at an offset of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memplan.errors import ScheduleError
from memplan.memory.offsets.buffers import Buffers
from memplan.memory.offsets.placement import MOST_SQUARES, place
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay
from memplan.util.remember import remembered

ALIGNMENT = 256
"""Every offset is a multiple of it, as the addresses are that CUDA gives out."""

SEGMENT_NBYTES = 8 * ((1 << 31) - ALIGNMENT)
"""No tensor lies across a multiple of it: an array of MXNet's has fewer than 2^31 elements."""


class _Work(NamedTuple):
    """What a placement may take: squares of the number of buffers, less than a nanosecond each, for
    passes in disturbed orders; then buffers that a complete search places, times the sections that
    their lives span in all. Where these are less than a placement for every buffer, as on graphs of
    many thousand ops, there is none.
    """

    nsquares: int
    nplaced: int


# LONG takes three seconds at most, and follows QUICK, which takes half a second. ROUGH, a tenth of
# a second, is for where most that is looked at does not fit, or little depends on it.
LONG = _Work(MOST_SQUARES, 400_000_000)
QUICK, ROUGH, AT_ONCE = _Work(400_000_000, 100_000_000), _Work(100_000_000, 0), _Work(0, 0)


@dataclass(frozen=True)
class Packing:
    """Where tensors lie in ``nbytes`` of memory.

    ``offsets[step, tensor]`` is the offset of the tensor with this index in the graph, as the op
    at ``step`` writes it; one that takes over the buffer of an input lies where that does. No
    packing takes less than ``bound_nbytes``.
    """

    nbytes: int
    offsets: Mapping[tuple[int, int], int]
    bound_nbytes: int

    @property
    def proved(self) -> bool:
        """Whether no packing takes less."""
        return self.nbytes == self.bound_nbytes


def check_packing(schedule: Schedule, packing: Packing) -> None:
    """ScheduleError unless ``packing`` is one of ``schedule``: no two tensors lie on each other."""
    lifetimes = _Placed(schedule.graph, len(schedule.ops), packing.offsets)
    replay(schedule, lifetimes)
    if lifetimes.ntensors != len(packing.offsets):
        raise ScheduleError("the packing is that of another schedule")
    places, sizes = lifetimes.places, lifetimes.sizes
    for begin, nbytes in zip(places, sizes, strict=True):
        end = begin + nbytes
        if begin < 0 or begin % ALIGNMENT or end > packing.nbytes or _is_cut(begin, end):
            raise ScheduleError(f"the packing has a tensor of {nbytes} bytes at {begin}")
    # In arrays of numbers: it is done before a step, in a process whose bytes count.
    buffers = np.flatnonzero(sizes)
    deaths, births = np.array(lifetimes.last)[buffers] + 1, np.array(lifetimes.first)[buffers]
    steps = np.concatenate((deaths, births))
    alive: list[tuple[int, int]] = []
    for event in np.argsort(steps, kind="stable"):  # what dies at a step comes first
        is_birth, number = divmod(int(event), len(buffers))
        begin = places[buffers[number]]
        end = begin + sizes[buffers[number]]
        place = bisect_left(alive, (begin, end))
        if not is_birth:
            del alive[place]
            continue
        beside = alive[max(0, place - 1) : place + 1]
        if any(one < end and begin < other for one, other in beside):
            raise ScheduleError(f"the packing has two tensors at {begin} in step {steps[event]}")
        alive.insert(place, (begin, end))


def _is_cut(begin: int, end: int) -> bool:
    """Does a tensor lie across a multiple of SEGMENT_NBYTES?"""
    return end > begin and begin // SEGMENT_NBYTES != (end - 1) // SEGMENT_NBYTES


class _Lifetimes(Arena):
    """Notes when buffers are needed."""

    def __init__(self, graph: TrainingGraph, nsteps: int) -> None:
        self.tensors, self.nsteps = graph.tensors, nsteps
        self.sizes: list[int] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.buffer_of: dict[tuple[int, int], int] = {}

    def request(self, step: int, tensor: int) -> int:
        self.sizes.append(-(-self.tensors[tensor].nbytes // ALIGNMENT) * ALIGNMENT)
        self.first.append(step)
        self.last.append(self.nsteps)
        self.share(len(self.sizes) - 1, step, tensor)
        return len(self.sizes) - 1

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.buffer_of[step, tensor] = buffer

    def release(self, buffer: int, step: int) -> None:
        self.last[buffer] = step


class _Placed(_Lifetimes):
    """Lifetimes of buffers at ``places``, which are those that ``offsets`` say."""

    def __init__(
        self, graph: TrainingGraph, nsteps: int, offsets: Mapping[tuple[int, int], int]
    ) -> None:
        super().__init__(graph, nsteps)
        self.offsets, self.places = offsets, list[int]()
        self.ntensors = 0

    def share(self, buffer: int, step: int, tensor: int) -> None:
        place = self.offsets.get((step, tensor), -1)
        if buffer == len(self.places):
            self.places.append(place)
        if place < 0 or place != self.places[buffer]:
            raise ScheduleError("the packing is that of another schedule")
        self.ntensors += 1


def pack(schedule: Schedule, *, segment_nbytes: int = SEGMENT_NBYTES) -> Packing:
    """Offsets for ``schedule`` in the fewest bytes that a bounded search finds, and a bound.

    Quick placements come first; where they take more than the peak of the live bytes, a complete
    search follows, three seconds long at most (:mod:`memplan.memory.offsets.placement`). The
    same schedule is always packed the same way. Tensors must not be larger than
    ``segment_nbytes``, a multiple of :data:`ALIGNMENT`.
    """
    return remembered(schedule, (pack, segment_nbytes), lambda: _packed(schedule, segment_nbytes))


def _packed(schedule: Schedule, segment_nbytes: int) -> Packing:
    # More work looks at other sizes, and may end in more bytes: so what a short search says holds.
    quick = _placed(schedule, segment_nbytes, QUICK)
    if quick.proved:
        return quick
    return min(quick, _placed(schedule, segment_nbytes, LONG), key=lambda packing: packing.nbytes)


def nbytes_within(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
    """The bytes of a search that ends with what is within the budget, no fewer than :func:`pack`'s.

    It goes on for as long as that one, unless it is ``roughly``.
    """
    least = _placed(schedule, SEGMENT_NBYTES, AT_ONCE).nbytes
    for work in (ROUGH,) if roughly else (QUICK, LONG):
        if least > budget_nbytes:
            least = min(least, _placed(schedule, SEGMENT_NBYTES, work).nbytes)
    return least


def _placed(schedule: Schedule, segment_nbytes: int, work: _Work) -> Packing:
    """What a search of so much work finds, which is made once."""
    key = (_placed, segment_nbytes, work)
    return remembered(schedule, key, lambda: _searched(schedule, segment_nbytes, work))


def _searched(schedule: Schedule, segment_nbytes: int, work: _Work) -> Packing:
    lifetimes = _Lifetimes(schedule.graph, len(schedule.ops))
    replay(schedule, lifetimes)
    if not lifetimes.sizes:
        return Packing(0, {}, 0)
    sizes, first, last = (
        np.array(values, dtype=np.int64)
        for values in (lifetimes.sizes, lifetimes.first, lifetimes.last)
    )
    buffers = Buffers.from_lifetimes(sizes, first, last + 1)
    nnodes = work.nplaced // int((buffers.last - buffers.first + 1).sum())
    placement = place(
        buffers,
        segment_nbytes=segment_nbytes,
        nsquares=work.nsquares,
        nnodes=nnodes if nnodes >= len(buffers) else 0,
    )
    offsets = placement.offsets.tolist()
    offset_of = {key: offsets[buffer] for key, buffer in lifetimes.buffer_of.items()}
    return Packing(placement.nbytes, offset_of, placement.bound_nbytes)
