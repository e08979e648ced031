"""Ruin and recreate: take some recomputations back, then recompute what is idle at the peaks.

Schrimpf et al. 2000, "Record breaking optimization results using the ruin and recreate principle".
What is recomputed is chosen where most bytes are alive, by seconds per byte, as Kirisame et al.
2021 (Dynamic Tensor Rematerialization, arXiv:2006.09616) do online. It begins with any sequence, in
any order, and some attempts change the order: on the zoo's ResNet-50 and Inception that finds in
seconds what moves of single ops do not find in minutes. Parts of branches change places by moves of
several runs: on a high-resolution network at 30% of its step plans cost two points less by them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.annealing import BEST_LENGTH, BEST_NBYTES, BEST_SECONDS
from memplan.search.kernels.arrays import Array
from memplan.search.kernels.fitting import OVER, fit
from memplan.search.kernels.model import (
    NBYTES,
    READ,
    READERS,
    READERS_END,
    WRITER,
    WRITTEN,
    SequenceModel,
)
from memplan.search.kernels.moves import draw, is_read, unit
from memplan.search.kernels.ruining import reorder_some, ruin
from memplan.search.kernels.sequence import insert, last_read, remove
from memplan.search.kernels.state import (
    BUDGET,
    EARLIER,
    EXCESS,
    FIRST,
    LAST,
    LATER,
    LENGTH,
    MOST_WIDTH,
    OP,
    WIDTH,
    SequenceState,
    copy_state,
    latest,
    sequence_state,
)
from memplan.util.compiled import compiled

# An input whose life ended before the peak is kept, and not recomputed, if it has at most this
# share of the bytes of what is dropped.
SMALL = 0.02
# In half of the attempts the seconds per byte are up to so much higher, at random.
NOISE = 0.5
# What an attempt costs in work for each op, a change of a run by itself and for each op, and a look
# at an input, all over the root of the number of ops: measured on 21 networks and random graphs.
ATTEMPT_WORK, CHANGE_WORK, CHANGE_OP_WORK, LOOK_WORK = 0.07, 4.0, 0.033, 0.078


class Ruins(NamedTuple):
    """How attempts go on: temperatures fall from ``hot`` to ``cold`` seconds over so much work.

    They end with what takes ``enough_seconds``.
    """

    hot: float
    cold: float
    work: float
    enough_seconds: float


class Room(NamedTuple):
    """Room for attempts: the state of now; ops that run again, and marks of what was seen; tensors
    that are idle at a peak, and their scores; how many inputs were looked at; how many times its
    seconds each op counts in this attempt.
    """

    now: SequenceState
    found: Array
    marks: Array
    tensors: Array
    scores: Array
    looks: Array
    weights: Array


def recreating_room(model: SequenceModel, capacity: int) -> Room:
    """Room for sequences of up to ``capacity`` steps."""
    nops, ntensors = len(model.seconds), model.tensors.shape[1]
    found, marks = np.zeros(nops + 1, dtype=np.int64), np.zeros(nops + 1, dtype=np.int64)
    tensors, now = np.zeros(ntensors, dtype=np.int64), sequence_state(model, capacity, 0)
    looks, weights = np.zeros(1, dtype=np.int64), np.ones(nops)
    return Room(now, found, marks, tensors, np.zeros(ntensors), looks, weights)


@compiled
def _next_read(model, state, tensor, step):  # type: ignore[no-untyped-def]
    """The first step after ``step`` that reads ``tensor``; -1 if there is none."""
    first = np.int64(-1)
    for k in range(model.tensors[READERS, tensor], model.tensors[READERS_END, tensor]):
        run = state.runs[LAST, model.readers[k]]
        if run <= step:
            continue
        while state.steps[EARLIER, run] > step:
            run = state.steps[EARLIER, run]
        if first < 0 or run < first:
            first = run
    return first


@compiled
def _closure(model, state, op, gap, peak, nbytes, room):  # type: ignore[no-untyped-def]
    """Find what must run for ``op`` at ``gap``: with what it reads, if that is not there at the
    peak, nor written after it.

    How many ops that are, their seconds, and how many of ``nbytes`` it frees at the peak.
    """
    found, marks = room.found, room.marks
    marks[-1] += 1
    mark = marks[-1]
    marks[op] = mark
    found[0] = op
    count, done, seconds, gain = 1, 0, model.seconds[op], nbytes
    while done < count:
        now = found[done]
        done += 1
        room.looks[0] += model.start[READ, now + 1] - model.start[READ, now]
        for i in range(model.start[READ, now], model.start[READ, now + 1]):
            tensor = model.flat[i]
            source = model.tensors[WRITER, tensor]
            if marks[source] == mark:
                continue
            write = latest(state, source, gap)
            later = state.steps[LATER, write]
            if write >= peak or last_read(model, state, tensor, write, later) >= peak:
                continue
            size = model.tensors[NBYTES, tensor]
            if not model.repeatable[source] or size <= SMALL * nbytes:
                gain -= size
                continue
            marks[source] = mark
            found[count] = source
            count += 1
            seconds += model.seconds[source]
    return count, seconds, gain


@compiled
def _sort(values, count):  # type: ignore[no-untyped-def]
    for i in range(1, count):
        value, j = values[i], i
        while j > 0 and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value


@compiled
def _is_idle(model, state, tensor, peak):  # type: ignore[no-untyped-def]
    """Is ``tensor`` held at ``peak`` for a later step, and may it run again for that?"""
    writer = model.tensors[WRITER, tensor]
    if not model.repeatable[writer] or state.runs[FIRST, writer] >= peak:
        return False
    later = state.steps[LATER, latest(state, writer, peak)]
    if later == peak:
        return False
    is_held = False
    for k in range(model.tensors[READERS, tensor], model.tensors[READERS_END, tensor]):
        if model.readers[k] == state.steps[OP, peak]:
            return False
        is_held = is_held or latest(state, model.readers[k], later) > peak
    return is_held


@compiled
def _cheapest(scores, count):  # type: ignore[no-untyped-def]
    best = -1
    for i in range(count):
        if scores[i] < np.inf and (best < 0 or scores[i] < scores[best]):
            best = i
    return best


@compiled
def rank(model, state, peak, noise, room):  # type: ignore[no-untyped-def]
    """List what is idle at ``peak``, with seconds per byte; how many tensors that are.

    These stay what they are until the peak is within the budget: what gets cheaper by what else
    runs again is no better for it, and on the zoo's Inception plans cost two points more.
    """
    count = 0
    for tensor in range(model.tensors.shape[1]):
        if _is_idle(model, state, tensor, peak):
            gap = _next_read(model, state, tensor, peak)
            op, nbytes = model.tensors[WRITER, tensor], model.tensors[NBYTES, tensor]
            _, seconds, gain = _closure(model, state, op, gap, peak, nbytes, room)
            if gain > 0:
                room.tensors[count] = tensor
                seconds *= room.weights[op] * (1.0 + noise * unit(state))
                room.scores[count] = seconds / gain
                count += 1
    return count


@compiled
def _relieve(model, state, peak, noise, most_seconds, room):  # type: ignore[no-untyped-def]
    """Recompute what is idle at ``peak``, cheapest per byte first, until it is within the budget.

    False if there is too little, or no room for more steps, or it takes more than ``most_seconds``.
    """
    count = rank(model, state, peak, noise, room)
    while state.live[peak] > state.totals[BUDGET]:
        best = _cheapest(room.scores, count)
        if best < 0:
            return False
        room.scores[best] = np.inf
        tensor = room.tensors[best]
        op, nbytes = model.tensors[WRITER, tensor], model.tensors[NBYTES, tensor]
        gap = _next_read(model, state, tensor, peak)
        if latest(state, op, gap) >= peak:
            continue  # it runs again with another one
        nruns, _, gain = _closure(model, state, op, gap, peak, nbytes, room)
        if gain <= 0:
            continue
        if state.totals[LENGTH] + nruns >= len(state.live) // 2:
            return False
        if state.totals[WIDTH] > state.totals[MOST_WIDTH] // 2:
            return False
        _sort(room.found, nruns)
        for k in range(nruns):
            insert(model, state, room.found[k], gap + k, -1)
        if state.seconds[0] > most_seconds:
            return False
    return True


@compiled
def _highest(state):  # type: ignore[no-untyped-def]
    most = 0
    for step in range(state.totals[LENGTH]):
        if state.live[step] > state.live[most]:
            most = step
    return most


@compiled
def _recreate(model, state, most_seconds, room):  # type: ignore[no-untyped-def]
    """Recompute at peaks until all are within the budget, if they can be in ``most_seconds``."""
    noise = NOISE if unit(state) < 0.5 else 0.0
    for _ in range(4 * len(model.seconds)):
        peak = _highest(state)
        if state.live[peak] <= state.totals[BUDGET]:
            return
        if not _relieve(model, state, peak, noise, most_seconds, room):
            return


@compiled
def _take_back(model, state):  # type: ignore[no-untyped-def]
    """Take back what is recomputed and not read."""
    for step in range(state.totals[LENGTH] - 2, -1, -1):
        if state.steps[EARLIER, step] >= 0 and not is_read(model, state, step):
            remove(model, state, step)


@compiled
def _is_needed(model, state, step):  # type: ignore[no-untyped-def]
    """Is the budget surely exceeded without the run at ``step``?

    What it writes would be held from the run before. That is looked at up to where the first of
    what it reads would be needed no longer: until then nothing else changes.
    """
    op, earlier, later = state.steps[OP, step], state.steps[EARLIER, step], state.steps[LATER, step]
    until = step
    for i in range(model.start[READ, op], model.start[READ, op + 1]):
        tensor = model.flat[i]
        write = latest(state, model.tensors[WRITER, tensor], step)
        rewrite = state.steps[LATER, write]
        if last_read(model, state, tensor, write, rewrite) == step:
            until = min(until, last_read(model, state, tensor, write, step))
    most = np.int64(0)
    for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
        tensor = model.flat[i]
        if last_read(model, state, tensor, step, later) > step:
            held = state.live[last_read(model, state, tensor, earlier, step) + 1 : until]
            highest = np.int64(0)
            for k in range(len(held)):
                highest = max(highest, held[k])
            most = max(most, highest + model.tensors[NBYTES, tensor] * (len(held) > 0))
    return most > state.totals[BUDGET]


@compiled
def _trim(model, state):  # type: ignore[no-untyped-def]
    """Take back what the budget does not need to be recomputed, from the last on; the changes."""
    changes = 0
    for step in range(state.totals[LENGTH] - 2, -1, -1):
        op = state.steps[OP, step]
        if state.steps[EARLIER, step] >= 0 and not _is_needed(model, state, step):
            remove(model, state, step)
            changes += 1
            if state.totals[EXCESS] > 0:
                insert(model, state, op, step, -1)
                changes += 1
    return changes


@compiled
def _keep(state, best):  # type: ignore[no-untyped-def]
    length = state.totals[LENGTH]
    for step in range(length):
        best.sequence[step] = state.steps[OP, step]
    best.figures[BEST_LENGTH] = length
    best.figures[BEST_SECONDS] = state.seconds[0]
    best.figures[BEST_NBYTES] = state.live[_highest(state)]


@compiled
def _work(model, changes, looks):  # type: ignore[no-untyped-def]
    """What an attempt with so many changes and looks costs, in moves of annealing."""
    nops = len(model.seconds)
    work = ATTEMPT_WORK * nops + (CHANGE_WORK + CHANGE_OP_WORK * nops) * changes + LOOK_WORK * looks
    return np.int64(work / np.sqrt(nops))


@compiled
def recreate(model, state, room, ruins, fitting, best, spent, work):  # type: ignore[no-untyped-def]
    """Make attempts from the state of now for so much more ``work`` than was ``spent``.

    The best within the budget that fits goes into ``best``; how much is spent then.
    """
    now, end = room.now, spent + work
    while spent < end and best.figures[BEST_SECONDS] > ruins.enough_seconds:
        copy_state(now, state)
        ruin(model, state, room.weights)
        nmoved = reorder_some(model, state)
        heat = ruins.hot * (ruins.cold / ruins.hot) ** min(1.0, spent / ruins.work)
        threshold = -heat * np.log((draw(state) + 1.0) / 9007199254740993.0)
        # Most attempts end up too expensive: they are given up as soon as that is known. What
        # nothing reads any more must not count for that.
        now_seconds = now.seconds[0] + fitting.now[OVER]
        most_seconds = np.inf if now.totals[EXCESS] > 0 else now_seconds + threshold
        _take_back(model, state)
        length, room.looks[0] = state.totals[LENGTH], 0
        _recreate(model, state, most_seconds, room)
        # At least 1: attempts without peaks on a graph of one op would go on for ever.
        changes = now.totals[LENGTH] - length + state.totals[LENGTH] - length + nmoved
        spent += max(1, _work(model, changes, room.looks[0]))
        if state.totals[EXCESS] > 0:
            if state.totals[EXCESS] <= now.totals[EXCESS]:
                copy_state(state, now)
            continue
        _take_back(model, state)
        if now.totals[EXCESS] > 0 or state.seconds[0] < now_seconds:
            spent += _work(model, _trim(model, state), 0)
        if state.seconds[0] > most_seconds:
            continue
        over, placing = fit(model, state, fitting, most_seconds - state.seconds[0])
        spent += placing
        if over > most_seconds - state.seconds[0]:
            continue
        copy_state(state, now)
        if over == 0.0 and state.seconds[0] < best.figures[BEST_SECONDS]:
            _keep(state, best)
    return spent
