"""A complete search: offsets within a capacity, or the proof that there are none.

The problem is static memory allocation; the search is of the kind of Moffitt 2023 (MiniMalloc:
A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning, ASPLOS). Among the
placements within the capacity take one with the least sum of offsets: there, every buffer lies
at 0 or on another one that is alive with it. So buffers are placed one by one, by ascending
offset, each at its floor, the highest top of what is placed and alive with it; where all choices
fail, the search goes back. What it concludes on the way is listed in
:mod:`memplan.memory.offsets.inferences`: the placement with the least sum survives all of it.
"""

from __future__ import annotations

from memplan.memory.offsets.bounds import most_left
from memplan.memory.offsets.parts import divide, falls_apart
from memplan.memory.offsets.state import FAR, NONE, ZERO, State, within_segment
from memplan.util.compiled import compiled

INFEASIBLE, SOLVED, UNKNOWN = range(3)


@compiled
def search(state: State, nnodes: int) -> int:
    """INFEASIBLE, SOLVED (the floors are offsets), or UNKNOWN after ``nnodes`` placements.

    ``state`` is new, and used up by the call.
    """
    n = len(state.buffers)
    if most_left(state, NONE, ZERO, n, ZERO, NONE) < 0:
        return INFEASIBLE
    entry = divide(state, ZERO, n, NONE, NONE)
    if entry < 0:
        return SOLVED
    frame = _begin_part(state, ZERO, entry)
    while state.counts[0].nnodes < nnodes:
        buffer = _candidate(state, frame)
        if buffer < 0:
            frame = _go_back(state, frame)
            if frame < 0:
                return INFEASIBLE
            continue
        state.counts[0].nnodes += 1
        _place(state, frame, buffer)
        frame = _go_on(state, frame, buffer)
        if frame < 0:
            return SOLVED
    return UNKNOWN


@compiled
def _candidate(state: State, number: int) -> int:
    """The next buffer to try in a frame, by floor and rank; -1 if none is left."""
    frame, buffers, flags = state.frames[number], state.buffers, state.flags
    offset, rank = frame.offset, frame.rank
    best: int = NONE
    best_offset, best_rank, lowest_top = FAR, FAR, FAR
    for k in range(frame.begin, frame.end):
        buffer = buffers[state.members[k]]
        lowest_top = min(lowest_top, buffer.floor + buffer.size)
        if buffer.floor < offset or buffer.floor > best_offset:
            continue
        if buffer.floor == offset and buffer.rank <= rank:
            continue
        if buffer.floor == best_offset and buffer.rank > best_rank:
            continue
        if flags.twins and buffer.twin >= 0 and not buffers[buffer.twin].is_placed:
            continue
        best, best_offset, best_rank = state.members[k], buffer.floor, buffer.rank
    if best_offset > frame.highest or (flags.dominance and best_offset >= lowest_top):
        return -1
    frame.offset, frame.rank = best_offset, best_rank
    return best


@compiled
def _place(state: State, number: int, index: int) -> None:
    """Place a buffer at its floor, and raise the floors of its neighbours."""
    frame, counts, buffer = state.frames[number], state.counts[0], state.buffers[index]
    frame.buffer, frame.ntrail = index, counts.ntrail
    frame.nranked, frame.nagenda = counts.nranked, counts.nagenda
    buffer.is_placed = 1
    top, length = buffer.floor + buffer.size, counts.ntrail
    for place in range(buffer.begin, buffer.end):
        other = state.buffers[state.others[place]]
        if not other.is_placed and other.floor < top:
            before = state.trail[length]
            before.buffer, before.floor = state.others[place], other.floor
            before.raiser = other.raiser
            length += 1
            other.floor = within_segment(top, other.size, state.segment_nbytes)
            other.raiser = number
    counts.ntrail = length
    spans = state.spans[buffer.first : buffer.last]
    for i in range(len(spans)):
        spans[i] -= 1
    left = state.left_nbytes[buffer.first : buffer.last + 1]
    for i in range(len(left)):
        left[i] -= buffer.size
    # What is left of the part follows it in `members`.
    place = frame.begin
    while state.members[place] != index:
        place += 1
    state.members[place] = state.members[frame.begin]
    state.members[frame.begin] = index


@compiled
def _take_back(state: State, number: int) -> None:
    """Undo the placement of a frame."""
    frame, counts = state.frames[number], state.counts[0]
    buffer = state.buffers[frame.buffer]
    frame.buffer, buffer.is_placed = NONE, ZERO
    for k in range(counts.ntrail - 1, frame.ntrail - 1, -1):
        before = state.trail[k]
        other = state.buffers[before.buffer]
        other.floor, other.raiser = before.floor, before.raiser
    for k in range(counts.nranked - 1, frame.nranked - 1, -1):
        state.buffers[state.ranked[k].buffer].rank = state.ranked[k].rank
    counts.ntrail, counts.nranked = frame.ntrail, frame.nranked
    counts.nagenda = frame.nagenda
    spans = state.spans[buffer.first : buffer.last]
    for i in range(len(spans)):
        spans[i] += 1
    left = state.left_nbytes[buffer.first : buffer.last + 1]
    for i in range(len(left)):
        left[i] += buffer.size


@compiled
def _go_back(state: State, number: int) -> int:
    """The frame to go on with where one has no candidate left; -1 if nothing is left.

    A part that has no solution has none until one of its floors is lower.
    """
    frame = state.frames[number]
    target: int = frame.owner
    if state.flags.jumping and frame.is_part:
        target = NONE
        for k in range(frame.begin, frame.end):
            target = max(target, state.buffers[state.members[k]].raiser)
    if target >= 0:
        for above in range(number, target - 1, -1):
            if state.frames[above].buffer >= 0:
                _take_back(state, above)
    return target


@compiled
def _go_on(state: State, number: int, index: int) -> int:
    """The frame that follows the placement of a frame; -1 if all is solved."""
    frame = state.frames[number]
    begin, end, offset, rank = frame.begin + 1, frame.end, frame.offset, frame.rank
    if not state.flags.canonical:
        offset, rank = ZERO, NONE
    most = most_left(state, number, begin, end, offset, rank)
    if most < 0:
        _take_back(state, number)
        return number
    if end - begin < 2 or (state.flags.parts and falls_apart(state, begin, end, index)):
        entry = divide(state, begin, end, number, frame.entry)
        next_frame: int = _begin_part(state, number + 1, entry) if entry >= 0 else entry
        return next_frame
    rest = state.frames[number + 1]
    rest.begin, rest.end, rest.offset, rest.rank = begin, end, offset, rank
    rest.first, rest.last = frame.first, frame.last
    rest.buffer, rest.highest, rest.owner = NONE, state.capacity - most, number
    rest.is_part, rest.entry = ZERO, frame.entry
    return number + 1


@compiled
def _begin_part(state: State, number: int, entry: int) -> int:
    """Let a frame choose from a part of the agenda; the frame."""
    frame, part = state.frames[number], state.agenda[entry]
    frame.begin, frame.end, frame.offset, frame.rank = part.begin, part.end, NONE, NONE
    frame.buffer, frame.highest, frame.owner = NONE, part.highest, part.owner
    frame.first, frame.last = part.first, part.last
    frame.is_part, frame.entry = 1, part.after
    return number
