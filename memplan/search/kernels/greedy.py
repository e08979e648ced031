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
from memplan.util.compiled import compiled

# Bits of DropState.dropped: not carried to that read; not even if it is recomputed on the way.
ONCE, TWICE = 1, 2
# What :func:`fit` ends with.
FITS, STUCK, UNDECIDED, FULL = range(4)
# Places in DropState.counts: events, the mark of the last closure.
EVENTS, MARK = range(2)
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
    was seen.
    """

    dropped: Array
    recomputed: Array
    ops: Array
    ends: Array
    events: Array
    latest: Array
    closure: Array
    marks: Array
    counts: Array


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
        np.zeros(max(nops, ntensors), dtype=np.int64),
        np.zeros(2, dtype=np.int64),
    )


@compiled
def next_read(arrays, tensor, stage):  # type: ignore[no-untyped-def]
    """The place of the first read of ``tensor`` by an op after ``stage``; -1 if there is none."""
    low, end = arrays.first_read[tensor], arrays.first_read[tensor + 1]
    high = end
    while low < high:
        middle = (low + high) // 2
        if arrays.reads[middle] > stage:
            high = middle
        else:
            low = middle + 1
    return low if low < end else np.int64(-1)


@compiled
def _is_there(events, event, stage):  # type: ignore[no-untyped-def]
    """Is a tensor there before ``stage``, whose last event is ``event``?"""
    while event >= 0 and events[STAGE, event] >= stage:
        event = events[BEFORE, event]
    return event >= 0 and events[THERE, event] == 1


@compiled
def _log(state, tensor, stage, there):  # type: ignore[no-untyped-def]
    """After ``stage`` the tensor is there, or not; nothing if that is so already."""
    event = state.latest[tensor]
    if (event >= 0 and state.events[THERE, event] == 1) != there:
        count = state.counts[EVENTS]
        state.events[STAGE, count] = stage
        state.events[THERE, count] = there
        state.events[BEFORE, count] = event
        state.latest[tensor] = count
        state.counts[EVENTS] = count + 1


@compiled
def _close(arrays, state, op, stage):  # type: ignore[no-untyped-def]
    """Write into ``state.closure``, ascending, what must run for ``op`` with what is there before
    ``stage``; their number.
    """
    flat, producer, found, marks = arrays.flat, arrays.producer, state.closure, state.marks
    events, latest = state.events, state.latest
    state.counts[MARK] += 1
    mark = state.counts[MARK]
    marks[op] = mark
    found[0] = op
    count, done = 1, 0
    while done < count:
        now = found[done]
        done += 1
        for i in range(arrays.start[READ, now], arrays.start[READ, now + 1]):
            source = producer[flat[i]]
            if marks[source] != mark and not _is_there(events, latest[flat[i]], stage):
                marks[source] = mark
                found[count] = source
                count += 1
    found[:count].sort()
    return count


@compiled
def _free(arrays, state, tensor, stage):  # type: ignore[no-untyped-def]
    """Free a tensor after ``stage`` if it is dropped, or not read any more."""
    if not arrays.fixed[tensor]:
        place = next_read(arrays, tensor, stage)
        bits = ONCE if place >= 0 else 0
        if place >= 0 and state.recomputed[place]:
            bits |= TWICE
        if place < 0 or state.dropped[place] & bits == bits:
            _log(state, tensor, stage, False)


@compiled
def _run_stage(arrays, state, stage, count):  # type: ignore[no-untyped-def]
    """What comes and goes in ``stage``, which runs the ``count`` ops in ``state.closure``."""
    start, flat = arrays.start, arrays.flat
    for k in range(count):
        op = state.closure[k]
        for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
            _log(state, flat[i], stage, True)
            if op < stage:
                place = next_read(arrays, flat[i], stage)
                if place >= 0:
                    state.recomputed[place] = True
    for k in range(count):
        op = state.closure[k]
        for kind in (READ, WRITTEN):
            for i in range(start[kind, op], start[kind, op + 1]):
                _free(arrays, state, flat[i], stage)


@compiled
def run(arrays, state):  # type: ignore[no-untyped-def]
    """Make the sequence of the drops; its length, or -1 if there is no room for it."""
    state.recomputed[:] = False
    state.latest[:] = -1
    state.counts[EVENTS] = 0
    length = 0
    for stage in range(len(arrays.seconds)):
        count = _close(arrays, state, stage, stage)
        if length + count > len(state.ops):
            return -1
        written = 0
        for k in range(count):
            op = state.closure[k]
            state.ops[length + k] = op
            written += arrays.start[WRITTEN, op + 1] - arrays.start[WRITTEN, op]
        # Each output comes at most once, and goes at most once.
        if state.counts[EVENTS] + 2 * written > state.events.shape[1]:
            return -1
        length += count
        state.ends[stage] = length
        _run_stage(arrays, state, stage, count)
    return length


@compiled
def _idle(arrays, state, stage, step):  # type: ignore[no-untyped-def]
    """The tensors that are there at ``step`` of ``stage``, but are not read in the rest of it."""
    start, flat, marks = arrays.start, arrays.flat, state.marks
    begin = state.ends[stage - 1] if stage else 0
    written, read = state.counts[MARK] + 1, state.counts[MARK] + 2
    state.counts[MARK] += 2
    for k in range(begin, step):
        for i in range(start[WRITTEN, state.ops[k]], start[WRITTEN, state.ops[k] + 1]):
            marks[flat[i]] = written
    for k in range(step, state.ends[stage]):
        for i in range(start[READ, state.ops[k]], start[READ, state.ops[k] + 1]):
            marks[flat[i]] = read
    result = np.empty(len(arrays.nbytes), dtype=np.int64)
    count = 0
    for tensor in range(len(arrays.nbytes)):
        there = marks[tensor] == written
        there = there or _is_there(state.events, state.latest[tensor], stage)
        if there and marks[tensor] != read:
            result[count] = tensor
            count += 1
    return result[:count]


@compiled
def _drop(arrays, state, stage, idle, excess):  # type: ignore[no-untyped-def]
    """Drop what is ``idle`` in ``stage``, cheapest per byte first, until ``excess`` bytes are free.

    False if there is nothing to drop.
    """
    places = np.empty(len(idle), dtype=np.int64)
    tensors = np.empty(len(idle), dtype=np.int64)
    scores = np.empty(len(idle))
    count = 0
    for tensor in idle:
        place = next_read(arrays, tensor, stage)
        if arrays.fixed[tensor] or place < 0 or arrays.reads[place] >= len(arrays.seconds):
            continue
        if state.dropped[place] & TWICE:
            continue
        seconds = 0.0
        for k in range(_close(arrays, state, arrays.producer[tensor], arrays.reads[place])):
            seconds += arrays.seconds[state.closure[k]]
        tensors[count], places[count] = tensor, place
        scores[count] = seconds / arrays.nbytes[tensor]
        count += 1
    for k in np.argsort(scores[:count], kind="mergesort"):
        state.dropped[places[k]] |= TWICE if state.dropped[places[k]] & ONCE else ONCE
        excess -= arrays.nbytes[tensors[k]]
        if excess <= 0:
            break
    return count > 0


@compiled
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
        step = int(np.argmax(memory.live[:length]))
        stage = np.searchsorted(state.ends, step, side="right")
        idle = _idle(arrays, state, stage, step)
        if not _drop(arrays, state, stage, idle, peak - budget_nbytes):
            return STUCK, length, 0.0
    return UNDECIDED, 0, 0.0
