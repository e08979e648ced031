"""Moves runs of a sequence until quick placements of its tensors take no more than a capacity.

How well a sequence can be packed is a matter of luck, and changes where a run is moved by a step.
:mod:`memplan.memory.packing` looks for offsets of one sequence; here the sequence gives way. On a
high-resolution network at 30% of its step that fits in a tenth of a second what is over by 5%.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.model import NBYTES, WRITTEN, SequenceModel
from memplan.search.kernels.moves import propose, reorder, unit
from memplan.search.kernels.sequence import handed_over, last_read, undo
from memplan.search.kernels.state import CHANGES, DISCOUNT, EXCESS, LATER, LENGTH, OP
from memplan.util.compiled import compiled

# Rows of PackingRoom.buffers: sizes, the first and the last section of a life (sections as in
# memplan.memory.offsets.buffers), the most bytes alive in it, offsets; then, by place, an order of
# the buffers, how low they can lie or which one lies there, and their first and last sections.
SIZE, BEGIN, END, TOTAL, OFFSET, ORDER, KEY, FROM, UNTIL = range(9)
# The key of what is placed: larger than all others.
PLACED = 1 << 62
# What is placed is left out when so much of a list is not.
KEPT = 0.75
# Orders of placements, those of memplan.memory.offsets.placement: by bytes; by the most bytes alive
# and then the bytes times the root of the length, times the length, or the length; by the length.
BY_SIZE, BY_ROOT, BY_AREA, BY_LENGTH, LONGEST = range(5)
NKINDS = LONGEST + 1
# An attempt makes 1 to 4 changes, mostly few; of these so many recompute other things.
MOST_TIMES, RECOMPUTING = 4, 0.3
# So many attempts are made at most for every placement: most do not keep the budget.
TRIES = 10


class PackingRoom(NamedTuple):
    """Room for the buffers of a sequence.

    ``sizes`` are those of tensors, rounded up; ``buffer_of`` each tensor is the latest one;
    ``sections`` are those of steps, and ``live`` their bytes. An order is by ``keys``, and by the
    others where these are equal.
    """

    sizes: Array
    buffer_of: Array
    sections: Array
    live: Array
    buffers: Array
    keys: Array


class Repacking(NamedTuple):
    """Up to how many bytes; how many placements and squares at most, and seconds of the sequence.

    The squares are those of the number of buffers, summed over placements.
    """

    capacity_nbytes: int
    nplacements: int
    nsquares: int
    seconds: float


def packing_room(model: SequenceModel, capacity: int, alignment: int) -> PackingRoom:
    """Room for sequences of up to ``capacity`` steps; sizes are multiples of ``alignment``."""
    sizes = -(-model.tensors[NBYTES] // alignment) * alignment
    most = capacity * int(np.max(np.diff(model.start[WRITTEN]), initial=1))
    return PackingRoom(
        sizes,
        np.zeros(len(sizes), dtype=np.int64),
        np.zeros(capacity, dtype=np.int64),
        np.zeros(capacity, dtype=np.int64),
        np.zeros((UNTIL + 1, most), dtype=np.int64),
        np.zeros((2, most)),
    )


@compiled
def list_buffers(model, state, room):  # type: ignore[no-untyped-def]
    """Enter the buffers of the sequence; how many there are."""
    buffers, count = room.buffers, 0
    for step in range(state.totals[LENGTH]):
        op, later = state.steps[OP, step], state.steps[LATER, step]
        nhanded = 0
        if state.steps[DISCOUNT, step] > 0:
            nhanded = handed_over(model, state, step)
        for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
            tensor, buffer = model.flat[i], count
            for k in range(0, nhanded, 2):
                if state.scratch[0, k + 1] == tensor:
                    buffer = room.buffer_of[state.scratch[0, k]]
            if buffer == count:
                buffers[SIZE, buffer] = room.sizes[tensor]
                buffers[BEGIN, buffer] = step
                count += 1
            room.buffer_of[tensor] = buffer
            buffers[END, buffer] = last_read(model, state, tensor, step, later)
    _add_up(room, count, _number_sections(room, count, state.totals[LENGTH]))
    return count


@compiled
def _number_sections(room, count, length):  # type: ignore[no-untyped-def]
    """Sections for steps: one begins where a buffer is born after another one died."""
    buffers, sections = room.buffers, room.sections
    for step in range(length):
        sections[step] = 0
    for k in range(count):
        sections[buffers[BEGIN, k]] |= 1
        if buffers[END, k] + 1 < length:
            sections[buffers[END, k] + 1] |= 2
    section, is_over = 0, False
    for step in range(length):
        is_over = is_over or sections[step] >= 2
        if is_over and sections[step] % 2:
            section, is_over = section + 1, False
        sections[step] = section
    for k in range(count):
        buffers[BEGIN, k] = sections[buffers[BEGIN, k]]
        buffers[END, k] = sections[buffers[END, k]]
    return section + 1


@compiled
def _add_up(room, count, nsections):  # type: ignore[no-untyped-def]
    """Enter the most bytes alive in the life of every buffer."""
    buffers, live = room.buffers, room.live
    for section in range(nsections):
        live[section] = 0
    for k in range(count):
        for section in range(buffers[BEGIN, k], buffers[END, k] + 1):
            live[section] += buffers[SIZE, k]
    for k in range(count):
        most = 0
        for section in range(buffers[BEGIN, k], buffers[END, k] + 1):
            most = max(most, live[section])
        buffers[TOTAL, k] = most


@compiled
def _set_keys(room, count, kind):  # type: ignore[no-untyped-def]
    buffers, keys = room.buffers, room.keys
    for k in range(count):
        width, size, total = buffers[END, k] - buffers[BEGIN, k] + 1, buffers[SIZE, k], 0
        if kind >= BY_ROOT and kind <= BY_LENGTH:
            total = buffers[TOTAL, k]
        if kind == BY_SIZE:
            keys[0, k], keys[1, k] = size, 0
        elif kind == BY_ROOT:
            keys[0, k], keys[1, k] = total, np.sqrt(width) * size
        elif kind == BY_AREA:
            keys[0, k], keys[1, k] = total, width * size
        elif kind == BY_LENGTH:
            keys[0, k], keys[1, k] = total, width
        else:
            keys[0, k], keys[1, k] = width, width * size


@compiled
def _is_before(keys, one, other):  # type: ignore[no-untyped-def]
    """Is one before the other, by descending keys, of equal ones by number?"""
    for row in range(2):
        if keys[row, one] != keys[row, other]:
            return keys[row, one] > keys[row, other]
    return one < other


@compiled
def _sort(order, keys, count):  # type: ignore[no-untyped-def]
    """Put the buffers in order, by Shell's sort: it needs no more memory."""
    for k in range(count):
        order[k] = k
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            value, j = order[i], i
            while j >= gap and _is_before(keys, value, order[j - gap]):
                order[j] = order[j - gap]
                j -= gap
            order[j] = value
        gap //= 3


@compiled
def _first_fit(room, count, most):  # type: ignore[no-untyped-def]
    """Place each buffer at the lowest offset that is free for it; the bytes, if below ``most``."""
    buffers, by_offset, highest = room.buffers, room.buffers[KEY], 0
    for placed in range(count):
        buffer = buffers[ORDER, placed]
        size, offset = buffers[SIZE, buffer], 0
        begin, end = buffers[BEGIN, buffer], buffers[END, buffer]
        for k in range(placed):
            other = by_offset[k]
            if buffers[BEGIN, other] <= end and begin <= buffers[END, other]:
                if buffers[OFFSET, other] - offset >= size:
                    break
                offset = max(offset, buffers[OFFSET, other] + buffers[SIZE, other])
        highest = max(highest, offset + size)
        if highest >= most:
            break
        buffers[OFFSET, buffer] = offset
        place = placed
        while place > 0 and buffers[OFFSET, by_offset[place - 1]] > offset:
            by_offset[place] = by_offset[place - 1]
            place -= 1
        by_offset[place] = buffer
    return highest


@compiled
def _lowest_first(room, count, most):  # type: ignore[no-untyped-def]
    """Place buffers by ascending offset, on top of others; the bytes, if below ``most``."""
    buffers, highest, listed, lowest = room.buffers, 0, count, 0
    begins, ends, keys = buffers[FROM], buffers[UNTIL], buffers[KEY]
    shift = 1
    while count >> shift > 0:
        shift += 1
    for k in range(count):
        begins[k], ends[k] = buffers[BEGIN, buffers[ORDER, k]], buffers[END, buffers[ORDER, k]]
        keys[k] = k
    for nleft in range(count - 1, -1, -1):
        floor, place = lowest >> shift, lowest & ((1 << shift) - 1)
        top = floor + buffers[SIZE, buffers[ORDER, place]]
        highest = max(highest, top)
        if highest >= most:
            break
        begin, end = begins[place], ends[place]
        keys[place], begins[place], ends[place] = PLACED, PLACED, -1
        lowest = _raise_keys(keys, begins, ends, listed, begin, end, top << shift)
        if 0 < nleft < KEPT * listed:
            listed = _leave_out_placed(buffers, listed, shift)
            lowest = _lowest(keys, listed)
    return highest


@compiled
def _raise_keys(keys, begins, ends, listed, begin, end, least):  # type: ignore[no-untyped-def]
    """Raise the keys of what is alive from ``begin`` to ``end``; the lowest of all keys.

    A key is how low a buffer can lie, and behind that its place in the order: the least key of all
    is that of the next one. Without a branch this takes half of the time.
    """
    lowest = PLACED
    for k in range(listed):
        is_beside = (begins[k] <= end) & (begin <= ends[k])
        key = max(keys[k], least | k) if is_beside else keys[k]
        keys[k] = key
        lowest = min(lowest, key)
    return lowest


@compiled
def _lowest(keys, listed):  # type: ignore[no-untyped-def]
    lowest = PLACED
    for k in range(listed):
        lowest = min(lowest, keys[k])
    return lowest


@compiled
def _leave_out_placed(buffers, listed, shift):  # type: ignore[no-untyped-def]
    """Move what is not placed yet to the front, in the same order; how many these are."""
    count = 0
    for k in range(listed):
        if buffers[KEY, k] != PLACED:
            for row in range(ORDER, UNTIL + 1):
                buffers[row, count] = buffers[row, k]
            buffers[KEY, count] = (buffers[KEY, k] >> shift << shift) | count
            count += 1
    return count


@compiled
def _placed(room, count, kind, most):  # type: ignore[no-untyped-def]
    """The bytes of a placement of this kind; ``most`` or more if it takes more."""
    _set_keys(room, count, kind)
    _sort(room.buffers[ORDER], room.keys, count)
    if kind == BY_SIZE:
        return _first_fit(room, count, most)
    return _lowest_first(room, count, most)


@compiled
def quick_nbytes(room, count):  # type: ignore[no-untyped-def]
    """The fewest bytes of all kinds of placements of the buffers, and the kind."""
    best, best_kind = np.int64(1 << 62), 0
    for kind in range(NKINDS):
        nbytes = _placed(room, count, kind, best)
        if nbytes < best:
            best, best_kind = nbytes, kind
    return best, best_kind


@compiled
def _change(model, state):  # type: ignore[no-untyped-def]
    """Make some random moves, most of which cost nothing."""
    state.totals[CHANGES] = 0
    for _ in range(1 + int(MOST_TIMES * unit(state) ** 2)):
        if unit(state) < RECOMPUTING:
            propose(model, state)
        else:
            reorder(model, state)


@compiled
def repack(model, state, room, task):  # type: ignore[no-untyped-def]
    """Move runs until a quick placement fits ``task``; the bytes, and what was placed, in squares.

    A change is taken back unless the bytes alive are within the budget, and those of a placement
    no more than before: one of the kind that had the fewest, else of a kind at random.
    """
    count = list_buffers(model, state, room)
    best, kind = quick_nbytes(room, count)
    made, squares, tries = NKINDS, NKINDS * count * count, 0
    while best > task.capacity_nbytes and made < task.nplacements and squares < task.nsquares:
        tries += 1
        if tries > TRIES * task.nplacements:
            break
        _change(model, state)
        if state.totals[CHANGES] == 0:
            continue
        if state.totals[EXCESS] > 0 or state.seconds[0] > task.seconds:
            undo(model, state)
            continue
        count, other = list_buffers(model, state, room), kind
        nbytes = _placed(room, count, other, best + 1)
        if nbytes > best:
            other = int(NKINDS * unit(state))
            nbytes = _placed(room, count, other, best + 1)
            made, squares = made + 1, squares + count * count
        made, squares = made + 1, squares + count * count
        if nbytes > best:
            undo(model, state)
        else:
            best, kind = nbytes, other
    return best, squares
