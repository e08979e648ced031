"""Drops tensors where most bytes are alive until a budget is met, cheapest per byte first.

By seconds of recomputation per byte, as Kirisame et al. 2021 (Dynamic Tensor Rematerialization,
arXiv:2006.09616) do online. What a drop is says :mod:`memplan.search.eviction`: a tensor and an
op that reads it, here a place in ``DropArrays.reads``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import READ, WRITTEN, Array, ragged, ragged_lists
from memplan.search.kernels.replay import UNLIMITED, replay
from memplan.step.graph import TrainingGraph
from memplan.util.compiled import compiled, compiled_with_arrays

# Bits of DropState.dropped: not carried to that read; not even if it is recomputed on the way.
ONCE, TWICE = 1, 2
# What :func:`fit` ends with.
FITS, STUCK, UNDECIDED, FULL = range(4)
# Rows of DropState.events.
STAGE, THERE, BEFORE = range(3)


class DropArrays(NamedTuple):
    """A graph: the lists of its ops (what they read and write), and who reads each tensor.

    ``reads[first_read[a]:first_read[a + 1]]`` are the readers of tensor a, ascending, the end
    for heads. ``fixed`` are the tensors that are never dropped.
    """

    start: Array
    flat: Array
    producer: Array
    nbytes: Array
    fixed: Array
    first_read: Array
    reads: Array
    seconds: Array


class DropState(NamedTuple):
    """Drops, the sequence that they make, and where in it tensors are there.

    Stage t runs ``ops[ends[t - 1]:ends[t]]``. ``events`` are, in the order of stages, when tensors
    come and go: stage, whether it is there after it, and the event before of the same tensor, of
    which ``latest`` has the last. ``closure`` is room for what a stage runs, ``marks`` say what
    was seen, by a number that the last of them has.
    """

    dropped: Array
    recomputed: Array
    ops: Array
    ends: Array
    events: Array
    latest: Array
    closure: Array
    marks: Array


def drop_arrays(graph: TrainingGraph, again: tuple[bool, ...]) -> DropArrays:
    """``graph`` for drops; ``again`` says which ops may run again."""
    start, flat = ragged_lists([[op.inputs for op in graph.ops], [op.outputs for op in graph.ops]])
    heads = frozenset(graph.heads)
    end = (len(graph.ops),)
    readers = [(*row, *(end if a in heads else ())) for a, row in enumerate(graph.readers)]
    fixed = [
        not again[graph.producer[a]] or not tensor.nbytes for a, tensor in enumerate(graph.tensors)
    ]
    return DropArrays(
        start,
        flat,
        np.array(graph.producer, dtype=np.int64),
        np.array([tensor.nbytes for tensor in graph.tensors], dtype=np.int64),
        np.array(fixed, dtype=np.bool_),
        *ragged(readers),
        np.array([op.seconds for op in graph.ops], dtype=float),
    )


def drop_state(arrays: DropArrays, capacity: int) -> DropState:
    """Room for sequences of up to ``capacity`` steps; nothing is dropped."""
    nops, ntensors = len(arrays.seconds), len(arrays.nbytes)
    most_written = int(np.max(np.diff(arrays.start[WRITTEN]), initial=0))
    nevents = 2 * (capacity * ntensors // max(1, nops) + most_written)
    return DropState(
        np.zeros(len(arrays.reads), dtype=np.int8),
        np.zeros(len(arrays.reads), dtype=np.bool_),
        np.zeros(capacity, dtype=np.int64),
        np.zeros(nops, dtype=np.int64),
        np.zeros((3, nevents), dtype=np.int64),
        np.zeros(ntensors, dtype=np.int64),
        np.zeros(nops + 1, dtype=np.int64),
        np.zeros(max(nops, ntensors) + 1, dtype=np.int64),
    )


# What is called for every op or tensor takes the arrays that it needs: numba hands on a tuple of
# them at several times the seconds of what is done with it.


@compiled
def next_read(first_read, reads, tensor, stage):  # type: ignore[no-untyped-def]
    """The place of the first read of ``tensor`` by an op after ``stage``; -1 if there is none."""
    low, end = first_read[tensor], first_read[tensor + 1]
    high = end
    while low < high:
        middle = (low + high) // 2
        if reads[middle] > stage:
            high = middle
        else:
            low = middle + 1
    return low if low < end else np.int64(-1)


# Sorting and searching are written out: to compile numba's own takes some seconds.


@compiled
def _sort(ops, count):  # type: ignore[no-untyped-def]
    """Sort the first ``count`` of ``ops``, as Shell does."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap:
        for k in range(gap, count):
            op, place = ops[k], k
            while place >= gap and ops[place - gap] > op:
                ops[place] = ops[place - gap]
                place -= gap
            ops[place] = op
        gap //= 3


@compiled
def _sort_by(scores, order, count):  # type: ignore[no-untyped-def]
    """Write the first ``count`` numbers into ``order``, by their scores, then ascending."""
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    for k in range(count):
        order[k] = k
    while gap:
        for k in range(gap, count):
            item, place = order[k], k
            while place >= gap:
                other = order[place - gap]
                lower = scores[other] < scores[item]
                if lower or (scores[other] == scores[item] and other < item):
                    break
                order[place] = other
                place -= gap
            order[place] = item
        gap //= 3


@compiled
def _peak(live, ends, length):  # type: ignore[no-untyped-def]
    """The first step with the most bytes alive, and its stage."""
    step = 0
    for k in range(length):
        if live[k] > live[step]:
            step = k
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        if ends[middle] > step:
            high = middle
        else:
            low = middle + 1
    return step, low


@compiled
def _close(start, flat, producer, events, latest, found, marks, op, stage):  # type: ignore[no-untyped-def]
    """Write into ``found``, ascending, what must run for ``op`` with what is there before
    ``stage``; their number.

    The last of ``marks`` is the one that was used last.
    """
    marks[-1] += 1
    mark = marks[-1]
    marks[op] = mark
    found[0] = op
    count, done = 1, 0
    while done < count:
        now = found[done]
        done += 1
        for i in range(start[READ, now], start[READ, now + 1]):
            source = producer[flat[i]]
            if marks[source] == mark:
                continue
            event = latest[flat[i]]
            while event >= 0 and events[STAGE, event] >= stage:
                event = events[BEFORE, event]
            if event < 0 or events[THERE, event] == 0:
                marks[source] = mark
                found[count] = source
                count += 1
    _sort(found, count)
    return count


@compiled
def _come(events, latest, nevents, tensors, stage):  # type: ignore[no-untyped-def]
    """Note that ``tensors`` are there after ``stage``; how many events there are then."""
    for tensor in tensors:
        event = latest[tensor]
        if event < 0 or events[THERE, event] == 0:
            events[STAGE, nevents], events[THERE, nevents] = stage, 1
            events[BEFORE, nevents] = event
            latest[tensor] = nevents
            nevents += 1
    return nevents


@compiled
def _go(reading, dropping, events, latest, nevents, tensors, stage):  # type: ignore[no-untyped-def]
    """Note which ``tensors`` are freed after ``stage``: if they are dropped, or not read any more.

    How many events there are then.
    """
    (fixed, first_read, reads), (dropped, recomputed) = reading, dropping
    for tensor in tensors:
        event = latest[tensor]
        if fixed[tensor] or event < 0 or events[THERE, event] == 0:
            continue
        place = next_read(first_read, reads, tensor, stage)
        if place >= 0:
            bits = ONCE | TWICE if recomputed[place] else ONCE
            if dropped[place] & bits != bits:
                continue
        events[STAGE, nevents], events[THERE, nevents] = stage, 0
        events[BEFORE, nevents] = event
        latest[tensor] = nevents
        nevents += 1
    return nevents


@compiled
def run(arrays, state):  # type: ignore[no-untyped-def]
    """Make the sequence of the drops; its length, or -1 if there is no room for it."""
    start, flat, first_read, reads = arrays.start, arrays.flat, arrays.first_read, arrays.reads
    events, latest, found, recomputed = state.events, state.latest, state.closure, state.recomputed
    reading, dropping = (arrays.fixed, first_read, reads), (state.dropped, recomputed)
    recomputed[:] = False
    latest[:] = -1
    length, nevents, nwritten = 0, 0, 0
    for stage in range(len(state.ends)):
        count = _close(
            start, flat, arrays.producer, events, latest, found, state.marks, stage, stage
        )
        # What is written comes at most once for that, and goes at most once: perhaps in a later
        # stage, which must have room for what was written before it, too.
        for op in found[:count]:
            nwritten += start[WRITTEN, op + 1] - start[WRITTEN, op]
        if length + count > len(state.ops) or 2 * nwritten > events.shape[1]:
            return -1
        for op in found[:count]:
            state.ops[length] = op
            length += 1
            tensors = flat[start[WRITTEN, op] : start[WRITTEN, op + 1]]
            nevents = _come(events, latest, nevents, tensors, stage)
            if op < stage:
                for tensor in tensors:
                    place = next_read(first_read, reads, tensor, stage)
                    if place >= 0:
                        recomputed[place] = True
        for op in found[:count]:
            for kind in (READ, WRITTEN):
                tensors = flat[start[kind, op] : start[kind, op + 1]]
                nevents = _go(reading, dropping, events, latest, nevents, tensors, stage)
        state.ends[stage] = length
    return length


@compiled_with_arrays
def _idle(arrays, state, stage, step):  # type: ignore[no-untyped-def]
    """The tensors that are there at ``step`` of ``stage``, but are not read in the rest of it."""
    start, flat, marks = arrays.start, arrays.flat, state.marks
    events, latest, ops = state.events, state.latest, state.ops
    begin = state.ends[stage - 1] if stage else 0
    marks[-1] += 2
    written, read = marks[-1] - 1, marks[-1]
    for op in ops[begin:step]:
        for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
            marks[flat[i]] = written
    for op in ops[step : state.ends[stage]]:
        for i in range(start[READ, op], start[READ, op + 1]):
            marks[flat[i]] = read
    result = np.empty(len(arrays.nbytes), dtype=np.int64)
    count = 0
    for tensor in range(len(latest)):
        if marks[tensor] == read:
            continue
        event = latest[tensor]
        while event >= 0 and events[STAGE, event] >= stage:
            event = events[BEFORE, event]
        if marks[tensor] == written or (event >= 0 and events[THERE, event] == 1):
            result[count] = tensor
            count += 1
    return result[:count]


@compiled_with_arrays
def _drop(arrays, state, stage, idle, excess):  # type: ignore[no-untyped-def]
    """Drop what is ``idle`` in ``stage``, cheapest per byte first, until ``excess`` bytes are free.

    False if there is nothing to drop.
    """
    start, flat, producer, nbytes = arrays.start, arrays.flat, arrays.producer, arrays.nbytes
    first_read, reads, op_seconds = arrays.first_read, arrays.reads, arrays.seconds
    events, latest, found, dropped = state.events, state.latest, state.closure, state.dropped
    places, scores = np.empty(len(idle), dtype=np.int64), np.empty(len(idle))
    tensors = np.empty(len(idle), dtype=np.int64)
    count = 0
    for tensor in idle:
        place = next_read(first_read, reads, tensor, stage)
        if arrays.fixed[tensor] or place < 0 or reads[place] >= len(op_seconds):
            continue
        if dropped[place] & TWICE:
            continue
        op = producer[tensor]
        nruns = _close(start, flat, producer, events, latest, found, state.marks, op, reads[place])
        seconds = 0.0
        for k in range(nruns):
            seconds += op_seconds[found[k]]
        tensors[count], places[count] = tensor, place
        scores[count] = seconds / nbytes[tensor]
        count += 1
    order = np.empty(count, dtype=np.int64)
    _sort_by(scores, order, count)
    for k in order:
        dropped[places[k]] |= TWICE if dropped[places[k]] & ONCE else ONCE
        excess -= nbytes[tensors[k]]
        if excess <= 0:
            break
    return count > 0


@compiled_with_arrays
def fit(arrays, graph, state, memory, budget_nbytes, rounds):  # type: ignore[no-untyped-def]
    """Drop at up to ``rounds`` peaks: how that ends, and the sequence's length and seconds.

    ``graph`` and ``memory`` are those of the replay.
    """
    for _ in range(rounds):
        length = run(arrays, state)
        if length < 0:
            return FULL, length, 0.0
        peak = replay(graph, memory, state.ops, length, 0, UNLIMITED)[1]
        if peak <= budget_nbytes:
            seconds = 0.0
            for step in range(length):
                seconds += arrays.seconds[state.ops[step]]
            return FITS, length, seconds
        if not length:
            return STUCK, length, 0.0
        step, stage = _peak(memory.live, state.ends, length)
        idle = _idle(arrays, state, stage, step)
        if not _drop(arrays, state, stage, idle, peak - budget_nbytes):
            return STUCK, length, 0.0
    return UNDECIDED, 0, 0.0
