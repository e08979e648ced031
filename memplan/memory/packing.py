"""A schedule in one piece of memory: every tensor at an offset of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from memplan.errors import GraphError, ScheduleError
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

# At most this may be the bytes of all buffers times their number: compiled code counts up to four
# times as far (memplan.memory.offsets.quick).
MOST_KEY = 1 << 60


class _Work(NamedTuple):
    """What a placement may take: squares of the number of buffers, about a nanosecond each, for
    passes; then buffers that a complete search places, times the sections that their lives span in
    all. Where these are less than one placement for every buffer there is no search.
    """

    nsquares: int
    nplaced: int


# For the fewest bytes LONG takes three seconds at most, and follows QUICK, which takes half of one.
LONG, QUICK = _Work(MOST_SQUARES, 400_000_000), _Work(400_000_000, 100_000_000)
# Within a budget THOROUGH takes a second, where passes find most of what is found; ROUGH, a
# tenth of one, is for where most that is looked at does not fit, or little depends on it.
THOROUGH = _Work(MOST_SQUARES, 400_000_000)
ROUGH, AT_ONCE = _Work(100_000_000, 100_000_000), _Work(0, 0)


@dataclass(frozen=True)
class Packing:
    """Where tensors lie in ``nbytes`` of memory.

    ``offsets[step, tensor]`` is the offset of the tensor with this index in the graph, as the op
    at ``step`` writes it; one that takes over the buffer of an input lies where that does. No
    packing takes less than ``bound_nbytes``.
    """

    nbytes: int
    # Left out of the hash, as a mapping has none: equal packings still have equal ones.
    offsets: Mapping[tuple[int, int], int] = field(hash=False)
    bound_nbytes: int

    @property
    def proved(self) -> bool:
        """Whether no packing takes less."""
        return self.nbytes == self.bound_nbytes

    @classmethod
    def from_rows(cls, nbytes: int, rows: list[list[int]], *, bound_nbytes: int) -> Packing:
        """The packing that had these :attr:`rows`."""
        offsets = {(step, tensor): offset for step, tensor, offset in rows}
        return cls(nbytes, offsets, bound_nbytes)

    @property
    def rows(self) -> list[list[int]]:
        """A step, a tensor and its offset each: what a file has of it."""
        return [[*key, offset] for key, offset in self.offsets.items()]


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
        rank = bisect_left(alive, (begin, end))
        if not is_birth:
            del alive[rank]
            continue
        beside = alive[max(0, rank - 1) : rank + 1]
        if any(one < end and begin < other for one, other in beside):
            raise ScheduleError(f"the packing has two tensors at {begin} in step {steps[event]}")
        alive.insert(rank, (begin, end))


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
        offset = self.offsets.get((step, tensor), -1)
        if buffer == len(self.places):
            self.places.append(offset)
        if offset < 0 or offset != self.places[buffer]:
            raise ScheduleError("the packing is that of another schedule")
        self.ntensors += 1


def pack(schedule: Schedule, *, segment_nbytes: int = SEGMENT_NBYTES) -> Packing:
    """Offsets for ``schedule`` in the fewest bytes that a bounded search finds, and a bound.

    Quick placements come first; where they take more than the peak of the live bytes, a complete
    search follows, three seconds long at most (:mod:`memplan.memory.offsets.placement`). The
    same schedule is always packed the same way, unless :func:`nbytes_within` has found fewer bytes
    for it. Tensors must not be larger than ``segment_nbytes``, a multiple of :data:`ALIGNMENT`.
    GraphError if all together have more bytes than compiled code can count (petabytes).
    """
    found = _found(schedule, segment_nbytes)
    for work in (QUICK, LONG):
        # More work looks at other sizes, and may end in more bytes: so what is found once holds.
        if work not in found and not (found and _fewest(found).proved):
            found[work] = _searched(schedule, segment_nbytes, work)
    return _fewest(found)


def nbytes_within(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
    """The bytes of offsets within the budget, or of the fewest found if there are none.

    They are looked for in just this many bytes, which is far easier than in the fewest. What is
    found is remembered: :func:`pack` gives no more.
    """
    found = _found(schedule, SEGMENT_NBYTES)
    for work in (AT_ONCE, ROUGH if roughly else THOROUGH):
        is_within = bool(found) and _fewest(found).nbytes <= budget_nbytes
        if not is_within and (work, budget_nbytes) not in found:
            packing = _searched(schedule, SEGMENT_NBYTES, work, budget_nbytes)
            found[work, budget_nbytes] = packing
    return _fewest(found).nbytes


def _found(schedule: Schedule, segment_nbytes: int) -> dict[Hashable, Packing]:
    """What was found, by how it was looked for."""
    return remembered(schedule, (_found, segment_nbytes), dict)


def _fewest(found: Mapping[Hashable, Packing]) -> Packing:
    fewest = min(found.values(), key=lambda packing: packing.nbytes)
    bound_nbytes = max(packing.bound_nbytes for packing in found.values())
    if fewest.bound_nbytes == bound_nbytes:
        return fewest
    return replace(fewest, bound_nbytes=bound_nbytes)


def _searched(
    schedule: Schedule, segment_nbytes: int, work: _Work, capacity_nbytes: int | None = None
) -> Packing:
    """Offsets within the capacity, or in the fewest bytes, as far as a search of so much work.

    GraphError if the buffers have more bytes in all than compiled code can count.
    """
    lifetimes = _Lifetimes(schedule.graph, len(schedule.ops))
    replay(schedule, lifetimes)
    nbytes, nbuffers = sum(lifetimes.sizes), len(lifetimes.sizes)
    if not nbuffers:
        return Packing(0, {}, 0)
    if nbytes * nbuffers > MOST_KEY:
        raise GraphError(
            f"the tensors have {nbytes} bytes in all; offsets can be found for {nbuffers} of them "
            f"with {MOST_KEY // nbuffers} at most. Lower the batch size"
        )
    sizes, first, last = (
        np.array(values, dtype=np.int64)
        for values in (lifetimes.sizes, lifetimes.first, lifetimes.last)
    )
    buffers = Buffers.from_lifetimes(sizes, first, last + 1)
    nnodes = work.nplaced // int((buffers.last - buffers.first + 1).sum())
    placement = place(
        buffers,
        capacity_nbytes=capacity_nbytes,
        segment_nbytes=segment_nbytes,
        nsquares=work.nsquares,
        nnodes=nnodes if nnodes >= len(buffers) else 0,
    )
    offsets = placement.offsets.tolist()
    offset_of = {key: offsets[buffer] for key, buffer in lifetimes.buffer_of.items()}
    return Packing(placement.nbytes, offset_of, placement.bound_nbytes)
