"""Moves runs of a sequence until quick placements of its tensors take no more than a capacity.

How well a sequence can be packed is a matter of luck, and changes where a run is moved by a step.
:mod:`memplan.memory.packing` looks for offsets of one sequence; here the sequence gives way. On a
high-resolution network at 30% of its step that fits in a tenth of a second what is over by 5%.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.model import NBYTES, WRITTEN, SequenceModel
from memplan.search.kernels.moves import propose, reorder, unit
from memplan.search.kernels.sequence import handed_over, last_read, undo
from memplan.search.kernels.state import (
    CHANGES,
    DISCOUNT,
    EXCESS,
    LATER,
    LENGTH,
    OP,
    room_for_width,
)
from memplan.util.compiled import compiled

# Rows of PackingRoom.buffers: sizes, the first and the last section of a life (sections as in
# memplan.memory.offsets.buffers), the most bytes alive in it; then, by place, an order of the
# buffers, how low they can lie or which one lies there, and their first and last sections.
SIZE, BEGIN, END, TOTAL, ORDER, KEY, FROM, UNTIL = range(8)
# The key of what is placed: larger than all others.
PLACED = 1 << 62
# What is placed is left out when so much of a list is not.
KEPT = 0.75
# The exponents of a form, as in memplan.memory.offsets.passes, which says what they are.
OF_TOTAL, OF_LENGTH, OF_SIZE = range(3)
# What is left out and lives longer than this part of the step comes on top, as there.
LONG = 0.1
# An attempt makes 1 to 4 changes, mostly few; of these so many recompute other things.
MOST_TIMES, RECOMPUTING = 4, 0.3
# So many attempts are made at most for every placement: most do not keep the budget.
TRIES = 10


class PackingRoom(NamedTuple):
    """Room for the buffers of a sequence.

    ``sizes`` are those of tensors, rounded up; ``buffer_of`` each tensor is the latest one;
    ``sections`` are those of steps, and ``live`` their bytes. An order is by descending ``keys``,
    of one of the ``forms``.
    """

    sizes: Array
    buffer_of: Array
    sections: Array
    live: Array
    buffers: Array
    keys: Array
    forms: Array


class Repacking(NamedTuple):
    """Up to how many bytes; how many placements and squares at most, and seconds of the sequence.

    The squares are those of the number of buffers, summed over placements. Buffers of less than
    ``least_nbytes`` are left out: they fit between others.
    """

    capacity_nbytes: int
    least_nbytes: int
    nplacements: int
    nsquares: int
    seconds: float


def packing_room(
    model: SequenceModel, capacity: int, alignment: int, forms: Sequence[Sequence[int]]
) -> PackingRoom:
    """Room for sequences of up to ``capacity`` steps; sizes are multiples of ``alignment``."""
    sizes = -(-model.tensors[NBYTES] // alignment) * alignment
    most = room_for_width(model, capacity)
    return PackingRoom(
        sizes,
        np.zeros(len(sizes), dtype=np.int64),
        np.zeros(capacity, dtype=np.int64),
        np.zeros(capacity, dtype=np.int64),
        np.zeros((UNTIL + 1, most), dtype=np.int64),
        np.zeros(most),
        np.array(forms, dtype=np.int64),
    )


@compiled
def list_buffers(model, state, room, least):  # type: ignore[no-untyped-def]
    """Enter the buffers of the sequence of at least so many bytes; how many there are.

    And the most bytes of those left out that live long: they come on top of all others.
    """
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
    nsections = _number_sections(room, count, state.totals[LENGTH])
    count, on_top = _leave_out_small(room, count, nsections, least)
    _add_up(room, count, nsections)
    return count, on_top


@compiled
def _leave_out_small(room, count, nsections, least):  # type: ignore[no-untyped-def]
    """Move the buffers of at least so many bytes to the front; see list_buffers."""
    buffers, live, kept, on_top = room.buffers, room.live, 0, 0
    for section in range(nsections):
        live[section] = 0
    for k in range(count):
        size, begin, end = buffers[SIZE, k], buffers[BEGIN, k], buffers[END, k]
        if size >= least:
            buffers[SIZE, kept], buffers[BEGIN, kept], buffers[END, kept] = size, begin, end
            kept += 1
        elif end - begin + 1 > LONG * nsections:
            for section in range(begin, end + 1):
                live[section] += size
                on_top = max(on_top, live[section])
    return kept, on_top


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
def _power(value, quarters):  # type: ignore[no-untyped-def]
    """``value`` to the power of so many quarters, as memplan.memory.offsets.passes computes it."""
    result, factor = 1.0, np.sqrt(np.sqrt(value))
    while quarters > 0:
        if quarters % 2:
            result *= factor
        factor *= factor
        quarters //= 2
    return result


@compiled
def _set_keys(room, count, number):  # type: ignore[no-untyped-def]
    """Enter the keys of the form with this number."""
    buffers, form, most = room.buffers, room.forms[number], np.int64(1)
    for k in range(count):
        most = max(most, buffers[TOTAL, k])
    for k in range(count):
        length = np.float64(buffers[END, k] - buffers[BEGIN, k] + 1)
        key = _power(buffers[TOTAL, k] / most, form[OF_TOTAL]) * _power(length, form[OF_LENGTH])
        room.keys[k] = key * _power(np.float64(buffers[SIZE, k]), form[OF_SIZE])


@compiled
def _is_before(keys, one, other):  # type: ignore[no-untyped-def]
    """Is one before the other, by descending keys, of equal ones by number?"""
    if keys[one] != keys[other]:
        return keys[one] > keys[other]
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
def placed(room, count, number, capacity, limit):  # type: ignore[no-untyped-def]
    """Place buffers by ascending offset, on top of others, in the order of the form.

    The bytes, and what lies above the capacity, in bytes times sections: this ends above the limit.
    """
    _set_keys(room, count, number)
    _sort(room.buffers[ORDER], room.keys, count)
    buffers, highest, over, listed, lowest = room.buffers, 0, 0.0, count, 0
    begins, ends, keys = buffers[FROM], buffers[UNTIL], buffers[KEY]
    shift = 1
    while count >> shift > 0:
        shift += 1
    for k in range(count):
        begins[k], ends[k] = buffers[BEGIN, buffers[ORDER, k]], buffers[END, buffers[ORDER, k]]
        keys[k] = k
    for nleft in range(count - 1, -1, -1):
        floor, place = lowest >> shift, lowest & ((1 << shift) - 1)
        size, begin, end = buffers[SIZE, buffers[ORDER, place]], begins[place], ends[place]
        top = floor + size
        highest = max(highest, top)
        if top > capacity:
            over += np.float64(min(top - capacity, size)) * (end - begin + 1)
            if over > limit:
                break
        keys[place], begins[place], ends[place] = PLACED, PLACED, -1
        lowest = _raise_keys(keys, begins, ends, listed, begin, end, top << shift)
        if 0 < nleft < KEPT * listed:
            listed = _leave_out_placed(buffers, listed, shift)
            lowest = _lowest(keys, listed)
    return highest, over


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
def quick_nbytes(room, count, capacity):  # type: ignore[no-untyped-def]
    """The fewest bytes of all forms; what is least over the capacity, and the form of that."""
    fewest, least, best = np.int64(1 << 62), np.inf, 0
    for number in range(len(room.forms)):
        nbytes, over = placed(room, count, number, capacity, np.inf)
        fewest = min(fewest, nbytes)
        if over < least:
            least, best = over, number
    return fewest, least, best


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

    A change is taken back unless the bytes alive are within the budget, and what a placement has
    above the capacity is no more than before: one of the form that had the least, else of a form
    at random.
    """
    nforms = len(room.forms)
    count, on_top = list_buffers(model, state, room, task.least_nbytes)
    capacity = task.capacity_nbytes - on_top
    fewest, least, form = quick_nbytes(room, count, capacity)
    made, squares, tries = nforms, nforms * count * count, 0
    while fewest > capacity and made < task.nplacements and squares < task.nsquares:
        tries += 1
        if tries > TRIES * task.nplacements:
            break
        _change(model, state)
        if state.totals[CHANGES] == 0:
            continue
        if state.totals[EXCESS] > 0 or state.seconds[0] > task.seconds:
            undo(model, state)
            continue
        other = form
        count, on_top = list_buffers(model, state, room, task.least_nbytes)
        allowed = task.capacity_nbytes - on_top
        nbytes, over = placed(room, count, other, allowed, least)
        if over > least:
            other = int(nforms * unit(state))
            nbytes, over = placed(room, count, other, allowed, least)
            made, squares = made + 1, squares + count * count
        made, squares = made + 1, squares + count * count
        if over > least:
            undo(model, state)
        else:
            least, form, fewest, capacity = over, other, nbytes, allowed
    return fewest, squares
