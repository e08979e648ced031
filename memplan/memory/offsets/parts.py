"""What is left to place, in parts that share no section, each ranked anew."""

from __future__ import annotations

from memplan.memory.offsets.state import FAR, NONE, ZERO, State, sort
from memplan.util.compiled import compiled


@compiled
def falls_apart(state: State, begin: int, end: int, index: int) -> bool:
    """Whether ``members[begin:end]``, one part with the buffer ``index``, are more without."""
    buffers, members = state.buffers, state.members
    left, gaps = state.spans[buffers[index].first : buffers[index].last], ZERO
    for i in range(len(left)):
        gaps += left[i] == 0
    if gaps == 0:  # as mostly
        return False
    first, last = FAR, NONE
    for k in range(begin, end):
        first = min(first, buffers[members[k]].first)
        last = max(last, buffers[members[k]].last)
    for section in range(max(first, buffers[index].first), min(last, buffers[index].last)):
        if state.spans[section] == 0:
            return True
    return False


@compiled
def divide(state: State, begin: int, end: int, owner: int, after: int) -> int:
    """Enter the parts of ``members[begin:end]`` in the agenda before ``after``; the first entry.

    A buffer without neighbours left is no part: it lies at its floor.
    """
    buffers, members = state.buffers, state.members
    for k in range(begin, end):
        buffers[members[k]].key = buffers[members[k]].first
    sort(state, begin, end)
    entry: int = after
    while begin < end:
        part_end = begin + 1
        first, last = buffers[members[begin]].first, buffers[members[begin]].last
        while part_end < end and (
            not state.flags.parts or buffers[members[part_end]].first <= last
        ):
            last = max(last, buffers[members[part_end]].last)
            part_end += 1
        if part_end - begin > 1:
            entry = _enter(state, begin, part_end, owner, entry)
            state.agenda[entry].first, state.agenda[entry].last = first, last
        begin = part_end
    return entry


@compiled
def _enter(state: State, begin: int, end: int, owner: int, after: int) -> int:
    """Enter ``members[begin:end]`` in the agenda, ranked by the bytes left."""
    buffers, members = state.buffers, state.members
    most: int = ZERO
    for k in range(begin, end):
        buffer = buffers[members[k]]
        total: int = ZERO
        left = state.left_nbytes[buffer.first : buffer.last + 1]
        for i in range(len(left)):
            total = max(total, left[i])
        most = max(most, total)
        by_total = total * len(buffers) if state.by_total else ZERO
        buffers[members[k]].key = buffer.order - by_total
    if state.flags.sorting and state.counts[0].nranked + end - begin <= len(state.ranked):
        sort(state, begin, end)
        _rank(state, begin, end)
    number: int = state.counts[0].nagenda
    state.counts[0].nagenda = number + 1
    entry = state.agenda[number]
    entry.begin, entry.end, entry.owner, entry.after = begin, end, owner, after
    entry.highest = state.capacity - most
    return number


@compiled
def _rank(state: State, begin: int, end: int) -> None:
    """Rank ``members[begin:end]`` as they stand; their ranks of before go on the trail."""
    length = state.counts[0].nranked
    for k in range(begin, end):
        buffer = state.members[k]
        state.ranked[length].buffer = buffer
        state.ranked[length].rank = state.buffers[buffer].rank
        state.buffers[buffer].rank = k
        length += 1
    state.counts[0].nranked = length
