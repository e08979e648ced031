"""Placements in one pass over the buffers: seldom the least bytes, often near."""

from __future__ import annotations

import numpy as np

from memplan.memory.offsets.buffers import Array
from memplan.memory.offsets.state import within_segment
from memplan.util.compiled import compiled_with_arrays


@compiled_with_arrays
def first_fit(sizes: Array, first: Array, last: Array, order: Array, segment_nbytes: int) -> Array:
    """Offsets of buffers placed one by one, each at the lowest offset that is free for it.

    ``order`` lists the buffers. By descending size this is the greedy algorithm of Pisarchyk and
    Lee 2020 (Efficient Memory Management for Deep Neural Net Inference, arXiv:2001.03288).
    """
    offsets = np.zeros(len(order), np.int64)
    by_offset = np.zeros(len(order), np.int64)
    for count, buffer in enumerate(order):
        size, end = sizes[buffer], 0
        for other in by_offset[:count]:
            if first[other] <= last[buffer] and first[buffer] <= last[other]:
                if offsets[other] - end >= size:
                    break
                end = max(end, offsets[other] + sizes[other])
                end = within_segment(end, size, segment_nbytes)
        offsets[buffer] = end
        place = count
        while place > 0 and offsets[by_offset[place - 1]] > end:
            by_offset[place] = by_offset[place - 1]
            place -= 1
        by_offset[place] = buffer
    return offsets


@compiled_with_arrays
def lowest_first(
    sizes: Array, first: Array, last: Array, order: Array, segment_nbytes: int
) -> Array:
    """Offsets of buffers placed by ascending offset, on top of what is placed.

    Of those that can lie lowest, the earliest of ``order`` is placed. This is the first way down
    of :mod:`memplan.memory.offsets.complete`, without its bounds.
    """
    offsets = np.zeros(len(order), np.int64)
    rest, begins, ends = order.copy(), first[order], last[order]
    floors, most = np.zeros(len(order), np.int64), sizes.max()
    for nleft in range(len(order), 0, -1):
        place = np.argmin(floors[:nleft])
        buffer = rest[place]
        offsets[buffer] = floors[place]
        top, begin, end = floors[place] + sizes[buffer], begins[place], ends[place]
        for k in range(place, nleft - 1):
            rest[k], floors[k] = rest[k + 1], floors[k + 1]
            begins[k], ends[k] = begins[k + 1], ends[k + 1]
        for k in range(nleft - 1):
            if begins[k] <= end and begin <= ends[k] and floors[k] < top:
                floors[k] = top
        if top // segment_nbytes != (top + most) // segment_nbytes:
            for k in range(nleft - 1):
                if floors[k] == top:
                    floors[k] = within_segment(top, sizes[rest[k]], segment_nbytes)
    return offsets
