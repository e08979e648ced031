"""Runs a step in its base order and drops tensors wherever memory runs out.

The greedy eviction of Kirisame et al. 2021 (Dynamic Tensor Rematerialization, arXiv:2006.09616):
the tensor with the fewest seconds of recomputation per byte and age is dropped first. The seconds
are those of its op, and of the dropped tensors next to it with all that were dropped around these,
which a union-find adds up (their section 4.1). Here the rest of the step is known, so that age may
also be how long a tensor waits for its next read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import READ, WRITTEN, Array
from memplan.search.kernels.greedy import DropArrays, next_read
from memplan.util.compiled import compiled

# What the age of a tensor is: the stages until it is needed next, or the seconds since it was used.
DISTANCE, STALENESS = range(2)

# Places in OnlineState.counts: bytes alive, tensors alive, steps, unions, the last mark, and how
# many tensors were looked at.
LIVE_NBYTES, RESIDENTS, LENGTH, UNIONS, MARK, LOOKS = range(6)

# The stage that needs what no op needs any more.
NEVER = 1 << 60

# At every step the clock of staleness moves by this share of its time at least.
TICK = 1e-9


class OnlineState(NamedTuple):
    """What is alive, what has run, and what was dropped next to each other.

    ``residents`` are the tensors alive, ``place`` says where among them each one is (-1: it is not
    alive). ``needed`` is the stage that recomputes something for which a tensor is read, ``used``
    the time when it was written or read last. ``stack`` has the ops that wait for their inputs,
    ``pins`` how many of them hold each tensor; ``waiting`` is room for ops. ``union`` is the place
    of a dropped tensor in the union-find (-1: it is not dropped), of which ``parent``, ``seconds``
    and ``marks`` are.
    """

    residents: Array
    place: Array
    needed: Array
    used: Array
    stack: Array
    pins: Array
    waiting: Array
    union: Array
    parent: Array
    seconds: Array
    marks: Array
    ops: Array
    counts: Array
    clock: Array


def online_state(arrays: DropArrays, capacity: int) -> OnlineState:
    """Room for sequences of up to ``capacity`` steps."""
    ntensors, nops = len(arrays.nbytes), len(arrays.seconds)
    # Each drop of a tensor makes one. Ops with many outputs may run, and drop, more often than
    # others: then the sequence ends where there is no room.
    nunions = capacity * ntensors // max(1, nops) + ntensors
    by_tensor = [np.zeros(ntensors, dtype=np.int64) for _ in range(5)]
    residents, place, needed, pins, union = by_tensor
    return OnlineState(
        *(residents, place, needed, np.zeros(ntensors), np.zeros(nops + 1, dtype=np.int64), pins),
        *(np.zeros(nops + 1, dtype=np.int64), union, np.zeros(nunions, dtype=np.int64)),
        *(np.zeros(nunions), np.zeros(nunions, dtype=np.int64)),
        *(np.zeros(capacity, dtype=np.int64), np.zeros(6, dtype=np.int64), np.zeros(1)),
    )


@compiled
def _root(parent, union):  # type: ignore[no-untyped-def]
    while parent[union] != union:
        parent[union] = parent[parent[union]]
        union = parent[union]
    return union


# What is called for every tensor that is looked at takes the arrays that it needs, as in
# :mod:`memplan.search.kernels.greedy`.


@compiled
def _need(first_read, reads, needed, tensor, stage):  # type: ignore[no-untyped-def]
    """The stage, from ``stage`` on, that reads ``tensor`` next, itself or to recompute others."""
    place = next_read(first_read, reads, tensor, stage - 1)
    need = reads[place] if place >= 0 else np.int64(NEVER)
    return min(need, needed[tensor]) if needed[tensor] >= stage else need


@compiled
def _with_around(total, union, parent, seconds, marks, mark, tensors):  # type: ignore[no-untyped-def]
    """``total`` and the seconds of what was dropped with those of ``tensors`` that are dropped,
    which count once.
    """
    for tensor in tensors:
        if union[tensor] >= 0:
            root = _root(parent, union[tensor])
            if marks[root] != mark:
                marks[root] = mark
                total += seconds[root]
    return total


@compiled
def _seconds(lists, readers, op_seconds, unions, mark, op):  # type: ignore[no-untyped-def]
    """Seconds to run ``op`` again for a tensor with these ``readers``, with what was dropped around
    it.
    """
    (start, flat), (union, parent, seconds, marks) = lists, unions
    tensors = flat[start[READ, op] : start[READ, op + 1]]
    total = _with_around(op_seconds[op], union, parent, seconds, marks, mark, tensors)
    for reader in readers:
        if reader < len(op_seconds):
            tensors = flat[start[WRITTEN, reader] : start[WRITTEN, reader + 1]]
            total = _with_around(total, union, parent, seconds, marks, mark, tensors)
    return total


@compiled
def _is_below_anything(arrays, state, tensor):  # type: ignore[no-untyped-def]
    """May something that was computed of ``tensor`` have to be computed again?"""
    for i in range(arrays.first_read[tensor], arrays.first_read[tensor + 1]):
        reader = arrays.reads[i]
        if reader < len(arrays.seconds):
            for j in range(arrays.start[WRITTEN, reader], arrays.start[WRITTEN, reader + 1]):
                written = arrays.flat[j]
                there = state.place[written] >= 0 or state.union[written] >= 0
                if there and not arrays.fixed[written]:
                    return True
    return False


@compiled
def _victim(arrays, state, stage, age):  # type: ignore[no-untyped-def]
    """The tensor to drop next, or -1 if there is none."""
    first_read, reads, op_seconds = arrays.first_read, arrays.reads, arrays.seconds
    lists, counts = (arrays.start, arrays.flat), state.counts
    unions = state.union, state.parent, state.seconds, state.marks
    least, victim = np.inf, np.int64(-1)
    counts[LOOKS] += counts[RESIDENTS]
    for tensor in state.residents[: counts[RESIDENTS]]:
        if state.pins[tensor]:
            continue
        need = _need(first_read, reads, state.needed, tensor, stage)
        fixed = arrays.fixed[tensor]
        if need == NEVER and not (fixed and _is_below_anything(arrays, state, tensor)):
            return tensor
        if fixed or need == len(op_seconds):  # the latter is a head that no op reads any more
            continue
        waits = need - stage + 1.0 if age == DISTANCE else state.clock[0] - state.used[tensor]
        counts[MARK] += 1
        op, readers = arrays.producer[tensor], reads[first_read[tensor] : first_read[tensor + 1]]
        seconds = _seconds(lists, readers, op_seconds, unions, counts[MARK], op)
        score = seconds / (arrays.nbytes[tensor] * waits)
        if score < least:
            least, victim = score, tensor
    return victim


@compiled
def _pass_on(arrays, state, op, need, stage):  # type: ignore[no-untyped-def]
    """At ``need`` it is needed what ``op`` reads, and what is read to compute that again."""
    state.waiting[0] = op
    count = 1
    while count:
        count -= 1
        op = state.waiting[count]
        for i in range(arrays.start[READ, op], arrays.start[READ, op + 1]):
            tensor = arrays.flat[i]
            if stage <= state.needed[tensor] <= need:
                continue
            state.needed[tensor] = need
            if state.place[tensor] < 0 and count < len(state.waiting):
                state.waiting[count] = arrays.producer[tensor]
                count += 1


@compiled
def _unite(state, tensor, root):  # type: ignore[no-untyped-def]
    if state.union[tensor] >= 0:
        other = _root(state.parent, state.union[tensor])
        if other != root:
            state.parent[other] = root
            state.seconds[root] += state.seconds[other]


@compiled
def _leave(arrays, state, tensor):  # type: ignore[no-untyped-def]
    """Take ``tensor`` out of its union. That cannot be split: only the seconds leave it."""
    root = _root(state.parent, state.union[tensor])
    left = state.seconds[root] - arrays.seconds[arrays.producer[tensor]]
    state.seconds[root] = max(0.0, left)
    state.union[tensor] = -1


@compiled
def _retire(arrays, state, tensor, stage):  # type: ignore[no-untyped-def]
    """Nothing needs the dropped ``tensor`` ever again, nor perhaps what it was computed of."""
    first_read, reads = arrays.first_read, arrays.reads
    state.waiting[0] = arrays.producer[tensor]
    count = 1
    while count:
        count -= 1
        op = state.waiting[count]
        for i in range(arrays.start[READ, op], arrays.start[READ, op + 1]):
            source = arrays.flat[i]
            if (
                state.union[source] < 0
                or _need(first_read, reads, state.needed, source, stage) < NEVER
            ):
                continue
            if not _is_below_anything(arrays, state, source):
                _leave(arrays, state, source)
                if count < len(state.waiting):
                    state.waiting[count] = arrays.producer[source]
                    count += 1


@compiled
def _drop(arrays, state, tensor, stage):  # type: ignore[no-untyped-def]
    place, last = state.place[tensor], state.counts[RESIDENTS] - 1
    state.residents[place] = state.residents[last]
    state.place[state.residents[place]] = place
    state.place[tensor] = -1
    state.counts[RESIDENTS] = last
    state.counts[LIVE_NBYTES] -= arrays.nbytes[tensor]
    need = _need(arrays.first_read, arrays.reads, state.needed, tensor, stage)
    if need == NEVER and not _is_below_anything(arrays, state, tensor):
        _retire(arrays, state, tensor, stage)
        return
    op, root = arrays.producer[tensor], state.counts[UNIONS]
    state.counts[UNIONS] += 1
    state.union[tensor] = state.parent[root] = root
    state.seconds[root] = arrays.seconds[op]
    for i in range(arrays.start[READ, op], arrays.start[READ, op + 1]):
        _unite(state, arrays.flat[i], root)
    for i in range(arrays.first_read[tensor], arrays.first_read[tensor + 1]):
        reader = arrays.reads[i]
        if reader < len(arrays.seconds):
            for j in range(arrays.start[WRITTEN, reader], arrays.start[WRITTEN, reader + 1]):
                _unite(state, arrays.flat[j], root)
    if need < NEVER:
        _pass_on(arrays, state, op, need, stage)


@compiled
def _keep(arrays, state, tensor):  # type: ignore[no-untyped-def]
    """``tensor``, which was not alive, is."""
    state.place[tensor] = state.counts[RESIDENTS]
    state.residents[state.counts[RESIDENTS]] = tensor
    state.counts[RESIDENTS] += 1
    state.counts[LIVE_NBYTES] += arrays.nbytes[tensor]
    if state.union[tensor] >= 0:
        _leave(arrays, state, tensor)


@compiled
def _run(arrays, state, op, stage, budget_nbytes, age):  # type: ignore[no-untyped-def]
    """Run ``op``, whose inputs are alive; first drop until its outputs have room, if that helps."""
    start, flat = arrays.start, arrays.flat
    more = 0
    for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
        if state.place[flat[i]] < 0:
            more += arrays.nbytes[flat[i]]
    while state.counts[LIVE_NBYTES] + more > budget_nbytes:
        victim = _victim(arrays, state, stage, age)
        if victim < 0:
            break
        _drop(arrays, state, victim, stage)
    state.ops[state.counts[LENGTH]] = op
    state.counts[LENGTH] += 1
    for kind in (READ, WRITTEN):
        for i in range(start[kind, op], start[kind, op + 1]):
            state.used[flat[i]] = state.clock[0] + arrays.seconds[op]
            if kind == WRITTEN and state.place[flat[i]] < 0:
                _keep(arrays, state, flat[i])
    state.clock[0] += arrays.seconds[op]


@compiled
def _pin(arrays, state, op, by):  # type: ignore[no-untyped-def]
    for i in range(arrays.start[READ, op], arrays.start[READ, op + 1]):
        state.pins[arrays.flat[i]] += by


@compiled
def _first_missing(arrays, state, op):  # type: ignore[no-untyped-def]
    """The op that writes the first input of ``op`` that is not alive, or -1."""
    for i in range(arrays.start[READ, op], arrays.start[READ, op + 1]):
        if state.place[arrays.flat[i]] < 0:
            return arrays.producer[arrays.flat[i]]
    return np.int64(-1)


@compiled
def run_online(arrays, state, budget_nbytes, age, most_seconds):  # type: ignore[no-untyped-def]
    """The length of the sequence, whose bytes alive may be over the budget where nothing could be
    dropped; -1 if it takes more than ``most_seconds``, or more steps than there is room for.
    """
    for row in (state.place, state.needed, state.union):
        row[:] = -1
    state.pins[:] = 0
    state.counts[:] = 0
    state.marks[:] = 0
    state.clock[0] = 0.0
    tick = TICK * most_seconds if most_seconds > 0.0 else 1.0
    seconds = 0.0
    for stage in range(len(arrays.seconds)):
        state.stack[0] = stage
        depth = 1
        _pin(arrays, state, stage, 1)
        while depth:
            op = state.stack[depth - 1]
            missing = _first_missing(arrays, state, op)
            if missing >= 0:
                state.stack[depth] = missing
                depth += 1
                _pin(arrays, state, missing, 1)
                continue
            seconds += arrays.seconds[op]
            # All that is alive may be dropped before the op runs.
            unions = state.counts[UNIONS] + state.counts[RESIDENTS]
            is_full = state.counts[LENGTH] == len(state.ops) or unions > len(state.parent)
            if is_full or seconds > most_seconds:
                return np.int64(-1)
            _run(arrays, state, op, stage, budget_nbytes, age)
            state.clock[0] += tick
            _pin(arrays, state, op, -1)
            depth -= 1
    return state.counts[LENGTH]
