"""A schedule in one piece of memory: every tensor at an offset of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import replay

ALIGNMENT = 256
"""Every offset is a multiple of it, as the addresses are that CUDA gives out."""

SEGMENT_NBYTES = 8 * ((1 << 31) - ALIGNMENT)
"""No tensor lies across a multiple of it: an array of MXNet's has fewer than 2^31 elements."""


# A packing within this share of the peak is good enough.
NEAR = 0.002

# The number of orders tried, times the square of the number of buffers: less than a tenth of a
# second.
TRIALS = 100_000_000

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Where tensors lie in ``nbytes`` of memory.

    ``offsets[step, tensor]`` is the offset of the tensor with this index in the graph, as the op
    at ``step`` writes it; one that takes over the buffer of an input lies where that does.
    """

    nbytes: int
    offsets: Mapping[tuple[int, int], int]


class _Lifetimes:
    """An arena (see :mod:`memplan.step.simulate`) that notes when buffers are needed."""

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

    def end_of_requests(self, step: int) -> None:
        pass


def pack(schedule: Schedule, *, segment_nbytes: int = SEGMENT_NBYTES) -> Packing:
    """Offsets for ``schedule`` in little more memory than the peak of its live bytes.

    Buffers are placed one by one, the largest first, each at the lowest offset that is free as
    long as it lives (Pisarchyk and Lee 2020, arXiv:2001.03288, greedy by size). Where that needs
    more than the peak, buffers that lie too high are placed earlier, as often as that does not
    make it worse, until it is near or a number of trials is spent. The same schedule is always
    packed the same way. Tensors must not be larger than ``segment_nbytes``, a multiple of
    :data:`ALIGNMENT`.
    """
    lifetimes = _Lifetimes(schedule.graph, len(schedule.ops))
    replay(schedule, lifetimes)
    if not lifetimes.sizes:
        return Packing(0, {})
    sizes, first, last = (
        np.array(values, dtype=np.int64)
        for values in (lifetimes.sizes, lifetimes.first, lifetimes.last)
    )
    order = np.lexsort((first, -sizes))
    enough = int((1.0 + NEAR) * _peak(sizes, first, last, len(schedule.ops)))
    ntrials = max(1, TRIALS // len(sizes) ** 2)
    offsets = _placed(sizes, first, last, order, segment_nbytes, enough, ntrials)
    found = offsets.tolist()
    offset_of = {key: found[buffer] for key, buffer in lifetimes.buffer_of.items()}
    return Packing(int((offsets + sizes).max()), offset_of)


def _peak(sizes: Array, first: Array, last: Array, nsteps: int) -> int:
    """The most bytes alive at any step."""
    changes = np.zeros(nsteps + 2, dtype=np.int64)
    np.add.at(changes, first, sizes)
    np.add.at(changes, last + 1, -sizes)
    return int(changes.cumsum().max())


@numba.njit(cache=True)
def _placed(
    sizes: Array,
    first: Array,
    last: Array,
    order: Array,
    segment_nbytes: int,
    enough: int,
    ntrials: int,
) -> Array:
    """Offsets within ``enough`` bytes, or the least of ``ntrials`` orders of placing."""
    np.random.seed(0)
    n = len(sizes)
    offsets, found, high = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    total = _first_fit(sizes, first, last, order, segment_nbytes, offsets)
    tried = order.copy()
    for _ in range(ntrials - 1):
        nhigh = 0
        for k in range(1, n):
            if offsets[order[k]] + sizes[order[k]] > enough:
                high[nhigh] = k
                nhigh += 1
        if total <= enough or nhigh == 0:
            break
        here = high[np.random.randint(nhigh)]
        there = np.random.randint(here)
        tried[:] = order
        tried[there + 1 : here + 1] = order[there:here]
        tried[there] = order[here]
        reached = _first_fit(sizes, first, last, tried, segment_nbytes, found)
        if reached <= total:
            total = reached
            order = tried.copy()
            offsets[:] = found
    return offsets


@numba.njit(cache=True)
def _first_fit(
    sizes: Array, first: Array, last: Array, order: Array, segment_nbytes: int, offsets: Array
) -> int:
    """Fill in ``offsets``; the bytes they need."""
    placed = np.zeros(len(order), np.int64)  # by their offsets
    total = 0
    for count, buffer in enumerate(order):
        size, end = sizes[buffer], 0
        for other in placed[:count]:
            if first[other] <= last[buffer] and first[buffer] <= last[other]:
                if offsets[other] - end >= size:
                    break
                end = max(end, offsets[other] + sizes[other])
                if end // segment_nbytes != (end + size - 1) // segment_nbytes:
                    end = (end // segment_nbytes + 1) * segment_nbytes
        offsets[buffer] = end
        total = max(total, end + size)
        place = count
        while place > 0 and offsets[placed[place - 1]] > end:
            placed[place] = placed[place - 1]
            place -= 1
        placed[place] = buffer
    return total
