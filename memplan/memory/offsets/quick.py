"""Placements in one pass over the buffers: seldom the least bytes, often near."""

from __future__ import annotations

import numpy as np

from memplan.memory.offsets.buffers import Array
from memplan.memory.offsets.state import within_segment
from memplan.util.compiled import compiled_with_arrays

# The key of what is placed: larger than all others.
PLACED = 1 << 62
# What is placed is left out when so much of a list is not.
KEPT = 0.75


@compiled_with_arrays
def first_fit(
    sizes: Array,
    first: Array,
    last: Array,
    order: Array,
    segment_nbytes: int,
    offsets: Array,
    nplaced: int,
) -> None:
    """Enter offsets of buffers placed one by one, each at the lowest that is free for it.

    ``order`` lists the buffers; the first ``nplaced`` of them have their offsets already, and
    ascend by these. By descending size this is the greedy algorithm of Pisarchyk and Lee 2020
    (Efficient Memory Management for Deep Neural Net Inference, arXiv:2001.03288).
    """
    by_offset = order.copy()
    for count in range(nplaced, len(order)):
        buffer = order[count]
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


@compiled_with_arrays
def lowest_first(
    sizes: Array, first: Array, last: Array, order: Array, segment_nbytes: int
) -> Array:
    """Offsets of buffers placed by ascending offset, on top of what is placed.

    Of those that can lie lowest, the earliest of ``order`` is placed. This is the first way down
    of :mod:`memplan.memory.offsets.complete`, without its bounds. All sizes together are less than
    2^61 over the number of buffers: 70 TB of 30,000.
    """
    count, most = len(order), sizes.max()
    offsets = np.zeros(count, np.int64)
    rest, begins, ends = order.copy(), first[order], last[order]
    # A key is how low a buffer can lie, and behind that its place in ``rest``: the least key of all
    # is that of the next buffer. One loop raises keys and finds it, without a branch.
    shift = 1
    while count >> shift > 0:
        shift += 1
    keys, lowest = np.arange(count), np.int64(0)
    for nleft in range(len(order) - 1, -1, -1):
        floor, place = lowest >> shift, lowest & ((1 << shift) - 1)
        buffer, begin, end = rest[place], begins[place], ends[place]
        offsets[buffer], top = floor, floor + sizes[buffer]
        keys[place], begins[place], ends[place] = PLACED, PLACED, -1
        lowest = _raise_keys(keys[:count], begins, ends, begin, end, top << shift)
        if top // segment_nbytes != (top + most) // segment_nbytes:
            for k in range(count):
                if keys[k] >> shift == top:
                    keys[k] = (within_segment(top, sizes[rest[k]], segment_nbytes) << shift) | k
            lowest = keys[:count].min()
        if 0 < nleft < KEPT * count:
            count = _leave_out_placed(keys[:count], begins, ends, rest, shift)
            lowest = keys[:count].min()
    return offsets


@compiled_with_arrays
def _raise_keys(keys: Array, begins: Array, ends: Array, begin: int, end: int, least: int) -> int:
    """Raise the keys of what is alive from ``begin`` to ``end``; the lowest of all keys."""
    lowest = PLACED
    for k in range(len(keys)):
        is_beside = (begins[k] <= end) & (begin <= ends[k])
        key = max(keys[k], least | k) if is_beside else keys[k]
        keys[k] = key
        lowest = min(lowest, key)
    return lowest


@compiled_with_arrays
def _leave_out_placed(keys: Array, begins: Array, ends: Array, rest: Array, shift: int) -> int:
    """Move what is not placed yet to the front, in the same order; how many these are."""
    count = 0
    for k in range(len(keys)):
        if keys[k] != PLACED:
            begins[count], ends[count], rest[count] = begins[k], ends[k], rest[k]
            keys[count] = (keys[k] >> shift << shift) | count
            count += 1
    return count
