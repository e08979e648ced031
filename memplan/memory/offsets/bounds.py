"""Why what is left cannot fit: bounds for offsets, and for the bytes above them."""

from __future__ import annotations

from memplan.memory.offsets.state import FAR, NONE, ZERO, State
from memplan.util.compiled import compiled


@compiled
def most_left(state: State, number: int, begin: int, end: int, offset: int, rank: int) -> int:
    """The most bytes left in a section of ``members[begin:end]``; -1 if they cannot fit.

    These are what is left of the frame ``number``, which has placed a buffer at ``offset``; none of
    them will lie lower. Let r be the bounds of the offsets of a section's buffers. For each of
    them, r and the bytes of all that lie at r or higher are at most the capacity. (Without floors:
    r = ``offset``.) Before the first placement the number is -1.
    """
    buffers, members = state.buffers, state.members
    first, last = ZERO, len(state.left_nbytes) - 1
    if number >= 0:
        first, last = state.frames[number].first, state.frames[number].last
    fullest: int = ZERO
    left = state.left_nbytes[first : last + 1]
    for i in range(len(left)):
        fullest = max(fullest, left[i])
    if offset + fullest > state.capacity:
        return -1
    first, last = _bound(state, number, begin, end, offset, rank)
    if state.flags.floors:
        count = _sort_by_bound(state, begin, end, first, last)
        return fullest if _fits(state, count, first, last) else -1
    for k in range(begin, end):
        if buffers[members[k]].key + buffers[members[k]].size > state.capacity:
            return -1
    return fullest


@compiled
def _bound(
    state: State, number: int, begin: int, end: int, offset: int, rank: int
) -> tuple[int, int]:
    """The bounds of the offsets of ``members[begin:end]`` become their keys.

    Between the two sections lives all whose bound is higher than before the frame's placement. In
    the other sections nothing has changed since they were looked at, except that less is left.
    """
    buffers, members, picked = state.buffers, state.members, state.picked
    first, last = FAR, NONE
    if number < 0:
        first, last = ZERO, len(state.left_nbytes) - 1
    count: int = ZERO
    for k in range(begin, end):
        buffer = buffers[members[k]]
        buffer.key = max(buffer.floor, offset)
        passed_over = buffer.floor < offset or (buffer.floor == offset and buffer.rank < rank)
        if passed_over:
            picked[count] = members[k]
            count += 1
        if passed_over or buffer.raiser == number:
            first, last = min(first, buffer.first), max(last, buffer.last)
    if not state.flags.lifting:
        return first, last
    for k in range(count):
        # It was passed over, so it will lie on a neighbour.
        buffer = buffers[picked[k]]
        lowest_top = FAR
        for place in range(buffer.begin, buffer.end):
            other = buffers[state.others[place]]
            if not other.is_placed:
                lowest_top = min(lowest_top, other.key + other.size)
        buffer.key = max(buffer.key, lowest_top)
    return first, last


@compiled
def _sort_by_bound(state: State, begin: int, end: int, first: int, last: int) -> int:
    """Pick those of ``members[begin:end]`` that live in these sections, by bound; how many.

    In ``members`` they are in the same order from now on, and so nearly sorted the next time.
    """
    buffers, members, picked, bounds = state.buffers, state.members, state.picked, state.bounds
    count: int = ZERO
    for k in range(begin, end):
        buffer = buffers[members[k]]
        if buffer.first > last or buffer.last < first:
            continue
        place, bound = count, buffer.key
        while place > 0 and bounds[place - 1] > bound:
            bounds[place], picked[place] = bounds[place - 1], picked[place - 1]
            place -= 1
        bounds[place], picked[place] = bound, members[k]
        state.places[count] = k
        count += 1
    for k in range(count):
        members[state.places[k]] = picked[k]
    return count


@compiled
def _fits(state: State, count: int, first: int, last: int) -> bool:
    """Whether in all these sections the picked buffers fit above the bound of each."""
    above = state.above_nbytes[first : last + 1]
    for i in range(len(above)):
        above[i] = ZERO
    for k in range(count - 1, -1, -1):
        buffer = state.buffers[state.picked[k]]
        size: int = buffer.size
        most: int = ZERO
        above = state.above_nbytes[max(first, buffer.first) : min(last, buffer.last) + 1]
        for i in range(len(above)):
            above[i] += size
            most = max(most, above[i])
        if state.bounds[k] + most > state.capacity:
            return False
    return True
