"""Why what is left cannot fit: bounds for offsets, and for the bytes above them."""

from __future__ import annotations

from memplan.memory.offsets.state import FAR, ZERO, State, sort
from memplan.util.compiled import compiled


@compiled
def most_left(state: State, begin: int, end: int, offset: int, rank: int) -> int:
    """The most bytes left in a section of ``members[begin:end]``; -1 if they cannot fit.

    The last buffer was placed at ``offset``, and none of these will lie lower. Let r be the
    bounds of the offsets of a section's buffers. For each of them, r and the bytes of all that
    lie at r or higher are at most the capacity. (Without floors: r = ``offset``.) Leaves the bytes
    left of every section in ``state.left_nbytes``.
    """
    buffers, members, left_nbytes = state.buffers, state.members, state.left_nbytes
    _bound(state, begin, end, offset, rank)
    if state.flags.floors:
        sort(state, begin, end)
    for k in range(begin, end):
        buffer = buffers[members[k]]
        left = left_nbytes[buffer.first : buffer.last + 1]
        for i in range(len(left)):
            left[i] = ZERO
    fullest: int = ZERO
    for k in range(end - 1, begin - 1, -1):
        buffer = buffers[members[k]]
        size: int = buffer.size
        most: int = ZERO
        left = left_nbytes[buffer.first : buffer.last + 1]
        for i in range(len(left)):
            left[i] += size
            most = max(most, left[i])
        above = most if state.flags.floors else size
        if buffer.key + above > state.capacity or offset + most > state.capacity:
            return -1
        fullest = max(fullest, most)
    return fullest


@compiled
def _bound(state: State, begin: int, end: int, offset: int, rank: int) -> None:
    """The bounds of the offsets of ``members[begin:end]`` become their keys."""
    buffers, members = state.buffers, state.members
    for k in range(begin, end):
        buffers[members[k]].key = max(buffers[members[k]].floor, offset)
    if not state.flags.lifting:
        return
    for k in range(begin, end):
        buffer = buffers[members[k]]
        if buffer.floor < offset or (buffer.floor == offset and buffer.rank < rank):
            # It was passed over, so it will lie on a neighbour.
            lowest_top = FAR
            for place in range(buffer.begin, buffer.end):
                other = buffers[state.others[place]]
                if not other.is_placed:
                    lowest_top = min(lowest_top, other.key + other.size)
            buffers[members[k]].key = max(buffer.key, lowest_top)
