"""A sequence of executions that changes one run at a time, with the bytes alive at every step.

Every step reads the latest execution, so a sequence is all there is to decide: a run more splits
the life of what it writes and may lengthen that of what it reads. Both are ranges of steps that
end where the run is, which makes a change cheap. An output that takes over a dying input is
counted once at its step, the discount of the step.

An op whose one output is an alias of its one input (reshape) runs with the op that writes it:
what compiled code calls an op is such a group, and there is one more, which ends the sequence and
reads the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numba
import numpy as np

from memplan.search.kernels.replay import Array, ragged, ragged_lists
from memplan.step.graph import Op, TrainingGraph

# Lists of an op, as rows of SequenceModel.start.
READ, WRITTEN, HANDED, BEFORE, AFTER, MEMBERS = range(6)
# Rows of SequenceModel.tensors.
WRITER, NBYTES, READERS, READERS_END = range(4)
# Rows of SequenceState.steps: the op, its run before and after this one, and the discount.
OP, EARLIER, LATER, DISCOUNT = range(4)
# Rows of SequenceState.runs.
FIRST, LAST = range(2)
# Places in SequenceState.totals: steps, bytes over the budget summed over steps, the budget, the
# changes since the state was last accepted.
LENGTH, EXCESS, BUDGET, CHANGES = range(4)
# Kinds of changes.
INSERTED, REMOVED, MOVED = range(3)

# A random move makes fewer changes, and an op has fewer hand-overs or tensors, than this.
MOST_CHANGES = 64


class SequenceModel(NamedTuple):
    """Groups of ops as flat arrays: ``flat[start[k, v]:start[k, v + 1]]`` is list k of group v.

    ``readers`` are those of each tensor; ``edges`` all (tensor, reader) whose tensor may be
    recomputed. ``written_nbytes`` and ``repeatable`` are by group, ``seconds`` too.
    """

    start: Array
    flat: Array
    tensors: Array
    readers: Array
    written_nbytes: Array
    seconds: Array
    repeatable: Array
    edges: Array


class SequenceState(NamedTuple):
    """A sequence, with room for more: see the names of rows and places above."""

    steps: Array
    live: Array
    runs: Array
    totals: Array
    seconds: Array
    changes: Array
    scratch: Array
    random: Array


def groups(graph: TrainingGraph, again: tuple[bool, ...], *, adjacent: bool) -> list[list[int]]:
    """Ops with the aliases of what they write, in base order.

    With ``adjacent`` only those that directly follow.
    """
    leader = list(range(len(graph.ops)))
    result: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        source = _aliased(graph, index)
        if source is not None:
            first = leader[source]
            follows = result[first][-1] == index - 1 or not adjacent
            waits = set(op.after) <= {*result[first], *graph.dependencies[first]}
            if follows and waits and again[index] >= again[first]:
                leader[index] = first
                result[first].append(index)
                continue
        result[index] = [index]
    return list(result.values())


def _aliased(graph: TrainingGraph, index: int) -> int | None:
    """The op whose output op ``index`` does nothing but alias."""
    op = graph.ops[index]
    alias = len(op.handovers) == 1 and op.handovers[0].alias
    if not alias or len(op.inputs) != 1 or len(op.outputs) != 1:
        return None
    if not graph.tensors[op.inputs[0]].nbytes or not graph.tensors[op.outputs[0]].nbytes:
        return None
    return graph.producer[op.inputs[0]]


def sequence_model(
    graph: TrainingGraph, again: tuple[bool, ...], *, reorder: bool
) -> SequenceModel:
    """``graph`` as the search sees it; ``again`` says which ops may run again.

    Without ``reorder`` the ops keep their base order; with it, those forward ops that must not
    run again do, among themselves.
    """
    members = groups(graph, again, adjacent=not reorder)
    calls = [graph.ops[ops[0]] for ops in members]
    written_by = [(v, a) for v, call in enumerate(calls) for a in call.outputs]
    sized = [(v, a) for v, a in written_by if graph.tensors[a].nbytes]
    number = {a: i for i, (_, a) in enumerate(sized)}
    for ops in members:
        for op in ops[1:]:
            number[graph.ops[op].outputs[0]] = number[graph.ops[op].inputs[0]]
    read = [
        _distinct(number[a] for a in row if a in number)
        for row in (*(call.inputs for call in calls), graph.heads)
    ]
    written = [[number[a] for a in call.outputs if a in number] for call in calls]
    handed = [_handed(call, number) for call in calls]
    before = _predecessors(graph, members, again, reorder)
    readers = _reversed(read, len(sized))
    nbytes = [graph.tensors[a].nbytes for _, a in sized]
    repeatable = [*(again[ops[0]] for ops in members), False]
    reader_start, reader_flat = ragged(readers)
    after = _reversed(before, len(before))
    start, flat = ragged_lists([read, [*written, []], [*handed, []], before, after, [*members, []]])
    edges = [(a, v) for a, row in enumerate(readers) if repeatable[sized[a][0]] for v in row]
    return SequenceModel(
        start,
        flat,
        np.array(
            [[v for v, _ in sized], nbytes, reader_start[:-1], reader_start[1:]], dtype=np.int64
        ),
        reader_flat,
        np.array([*(sum(nbytes[a] for a in row) for row in written), 0], dtype=np.int64),
        np.array([sum(graph.ops[op].seconds for op in ops) for ops in [*members, []]], dtype=float),
        np.array(repeatable),
        np.array(edges, dtype=np.int64).reshape(-1, 2),
    )


def _reversed(rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """For each of ``count`` values, the rows in which it is."""
    result: list[list[int]] = [[] for _ in range(count)]
    for index, row in enumerate(rows):
        for value in row:
            result[value].append(index)
    return result


def _handed(call: Op, number: Mapping[int, int]) -> list[int]:
    """Pairs of tensors: the second may take over the buffer of the first, which is read once."""
    inputs = [number.get(a) for a in call.inputs]
    pairs = [(inputs[h.input], number.get(call.outputs[h.output])) for h in call.handovers]
    return [
        t
        for source, output in pairs
        if source is not None and output is not None and inputs.count(source) == 1
        for t in (source, output)
    ]


def _distinct(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))


def _predecessors(
    graph: TrainingGraph,
    members: list[list[int]],
    again: tuple[bool, ...],
    reorder: bool,
) -> list[list[int]]:
    """For each group, and for the end, the groups that must have run before it first runs."""
    group_of = {op: v for v, ops in enumerate(members) for op in ops}
    result = []
    once: int | None = None
    for v, ops in enumerate(members):
        found = {group_of[u] for op in ops for u in graph.dependencies[op]} - {v}
        if not reorder and v:
            found.add(v - 1)
        elif ops[0] < graph.nforward and not again[ops[0]]:
            found |= set() if once is None else {once}
            once = v
        result.append(sorted(found))
    return [*result, list(range(len(members)))]


def sequence_state(model: SequenceModel, capacity: int, seed: int) -> SequenceState:
    """A state with room for ``capacity`` steps, empty."""
    nops = len(model.seconds)
    mixed = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64 or 1
    widest = int(np.max(np.diff(model.start[: HANDED + 1])))
    return SequenceState(
        np.zeros((4, capacity), dtype=np.int64),
        np.zeros(capacity, dtype=np.int64),
        np.zeros((2, nops), dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        np.zeros(1),
        np.zeros((MOST_CHANGES, 3), dtype=np.int64),
        np.zeros((2, 2 * widest + 2), dtype=np.int64),
        np.array([mixed], dtype=np.uint64),
    )


@numba.njit(cache=True)
def latest(state, op, gap):  # type: ignore[no-untyped-def]
    """The last run of ``op`` before ``gap``, or -1."""
    step = state.runs[LAST, op]
    while step >= gap:
        step = state.steps[EARLIER, step]
    return step


@numba.njit(cache=True)
def last_read(model, state, tensor, after, end):  # type: ignore[no-untyped-def]
    """The last step between ``after`` and ``end``, both excluded, that reads; else ``after``."""
    found = after
    for k in range(model.tensors[READERS, tensor], model.tensors[READERS_END, tensor]):
        found = max(found, latest(state, model.readers[k], end))
    return found


@numba.njit(cache=True)
def _life(model, state, tensor, gap):  # type: ignore[no-untyped-def]
    """The run that writes what a step at ``gap`` would read of ``tensor``, and the next run."""
    op = model.tensors[WRITER, tensor]
    step = state.runs[LAST, op]
    end = state.totals[LENGTH]
    while step >= gap:
        end = step
        step = state.steps[EARLIER, step]
    return step, end


@numba.njit(cache=True)
def add_bytes(state, begin, end, nbytes):  # type: ignore[no-untyped-def]
    """Add ``nbytes`` to the bytes alive at steps ``begin`` to ``end - 1``."""
    budget = state.totals[BUDGET]
    live = state.live
    more = 0
    for step in range(begin, end):
        was = live[step]
        now = was + nbytes
        live[step] = now
        more += max(now - budget, 0) - max(was - budget, 0)
    state.totals[EXCESS] += more


@numba.njit(cache=True)
def _discount(model, state, step):  # type: ignore[no-untyped-def]
    """Bytes of outputs at ``step`` that take over the buffers of inputs."""
    op = state.steps[OP, step]
    begin, end = model.start[HANDED, op], model.start[HANDED, op + 1]
    taken = state.scratch[0]
    ntaken = 0
    total = 0
    for i in range(begin, end, 2):
        source, output = model.flat[i], model.flat[i + 1]
        free = True
        for j in range(ntaken):
            free &= taken[j] != source and taken[j] != output
        if not free:
            continue
        rewritten = _life(model, state, source, step)[1]
        if last_read(model, state, source, step, rewritten) != step:
            continue
        if last_read(model, state, output, step, state.steps[LATER, step]) == step:
            continue
        taken[ntaken] = source
        taken[ntaken + 1] = output
        ntaken += 2
        total += model.tensors[NBYTES, output]
    return total


@numba.njit(cache=True)
def _renew_discount(model, state, step):  # type: ignore[no-untyped-def]
    op = state.steps[OP, step]
    if model.start[HANDED, op] < model.start[HANDED, op + 1]:
        discount = _discount(model, state, step)
        if discount != state.steps[DISCOUNT, step]:
            add_bytes(state, step, step + 1, state.steps[DISCOUNT, step] - discount)
            state.steps[DISCOUNT, step] = discount


@numba.njit(cache=True)
def _open(row, place, length, first, by):  # type: ignore[no-untyped-def]
    """Move ``row[place:length]`` up by a place; what is ``first`` or more grows by ``by``."""
    for step in range(length, place, -1):
        value = row[step - 1]
        row[step] = value + by * (value >= first)


@numba.njit(cache=True)
def _close(row, place, length, first, by):  # type: ignore[no-untyped-def]
    """Move ``row[place + 1:length]`` down by a place; what is ``first`` or more grows by ``by``."""
    for step in range(place, length - 1):
        value = row[step + 1]
        row[step] = value + by * (value >= first)


@numba.njit(cache=True)
def _renumber(row, length, first, by):  # type: ignore[no-untyped-def]
    for i in range(length):
        value = row[i]
        row[i] = value + by * (value >= first)


@numba.njit(cache=True)
def _shift(state, place, by):  # type: ignore[no-untyped-def]
    """Open (by = 1) a step at ``place``, or close the one there (by = -1)."""
    steps, length = state.steps, state.totals[LENGTH]
    first = place + (by < 0)  # the first step whose number changes
    if by > 0:
        for row in (OP, DISCOUNT):
            _open(steps[row], place, length, first, 0)
        for row in (EARLIER, LATER):
            _open(steps[row], place, length, first, by)
        _open(state.live, place, length, first, 0)
    else:
        for row in (OP, DISCOUNT):
            _close(steps[row], place, length, first, 0)
        for row in (EARLIER, LATER):
            _close(steps[row], place, length, first, by)
        _close(state.live, place, length, first, 0)
    _renumber(steps[LATER], place, first, by)
    _renumber(state.runs[FIRST], state.runs.shape[1], first, by)
    _renumber(state.runs[LAST], state.runs.shape[1], first, by)
    state.totals[LENGTH] = length + by


@numba.njit(cache=True)
def insert(model, state, op, gap, orphaned):  # type: ignore[no-untyped-def]
    """Run ``op`` before the step ``gap``.

    If it has no run before, what it writes is counted already from step ``orphaned`` on.
    """
    tensors, flat, dirty = model.tensors, model.flat, state.scratch[1]
    length = state.totals[LENGTH]
    earlier = latest(state, op, gap)
    later = state.runs[FIRST, op] if earlier < 0 else state.steps[LATER, earlier]
    if later < 0:
        later = length
    live = state.live[gap] + state.steps[DISCOUNT, gap]
    live -= model.written_nbytes[state.steps[OP, gap]]
    ndirty = 0
    for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
        tensor = flat[i]
        nbytes = tensors[NBYTES, tensor]
        if last_read(model, state, tensor, gap - 1, later) < gap:
            continue
        if earlier >= 0:
            end = last_read(model, state, tensor, earlier, gap)
            add_bytes(state, end + 1, gap, -nbytes)
            live -= nbytes
            dirty[ndirty] = end
            ndirty += 1
        elif gap >= orphaned:
            add_bytes(state, orphaned, gap, -nbytes)
            live -= nbytes
        else:
            add_bytes(state, gap, orphaned, nbytes)
    for i in range(model.start[READ, op], model.start[READ, op + 1]):
        tensor = flat[i]
        written, rewritten = _life(model, state, tensor, gap)
        end = last_read(model, state, tensor, written, rewritten)
        if end < gap:
            add_bytes(state, end + 1, gap, tensors[NBYTES, tensor])
            live += tensors[NBYTES, tensor]
            dirty[ndirty] = end
            ndirty += 1
    live += model.written_nbytes[op]
    _shift(state, gap, 1)
    steps = state.steps
    later += 1
    steps[OP, gap] = op
    steps[EARLIER, gap] = earlier
    steps[LATER, gap] = later
    steps[DISCOUNT, gap] = 0
    if earlier >= 0:
        steps[LATER, earlier] = gap
    else:
        state.runs[FIRST, op] = gap
    if later < state.totals[LENGTH]:
        steps[EARLIER, later] = gap
    else:
        state.runs[LAST, op] = gap
    state.live[gap] = live
    state.totals[EXCESS] += max(live - state.totals[BUDGET], 0)
    state.seconds[0] += model.seconds[op]
    _renew_discount(model, state, gap)
    for i in range(ndirty):
        _renew_discount(model, state, dirty[i] + (dirty[i] >= gap))


@numba.njit(cache=True)
def remove(model, state, step):  # type: ignore[no-untyped-def]
    """Take out the run at ``step``.

    Of a first run that is read, what it writes stays counted: it must be inserted again.
    """
    tensors, flat, dirty, steps = model.tensors, model.flat, state.scratch[1], state.steps
    length = state.totals[LENGTH]
    op, earlier, later = steps[OP, step], steps[EARLIER, step], steps[LATER, step]
    ndirty = 0
    if earlier >= 0:
        for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
            tensor = flat[i]
            if last_read(model, state, tensor, step, later) > step:
                end = last_read(model, state, tensor, earlier, step)
                add_bytes(state, end + 1, step, tensors[NBYTES, tensor])
                dirty[ndirty] = end
                ndirty += 1
    for i in range(model.start[READ, op], model.start[READ, op + 1]):
        tensor = flat[i]
        written, rewritten = _life(model, state, tensor, step)
        if last_read(model, state, tensor, written, rewritten) == step:
            end = last_read(model, state, tensor, written, step)
            add_bytes(state, end + 1, step, -tensors[NBYTES, tensor])
            dirty[ndirty] = end
            ndirty += 1
    state.totals[EXCESS] -= max(state.live[step] - state.totals[BUDGET], 0)
    state.seconds[0] -= model.seconds[op]
    if earlier >= 0:
        steps[LATER, earlier] = later
    else:
        state.runs[FIRST, op] = later if later < length else -1
    if later < length:
        steps[EARLIER, later] = earlier
    else:
        state.runs[LAST, op] = earlier
    _shift(state, step, -1)
    for i in range(ndirty):
        _renew_discount(model, state, dirty[i] - (dirty[i] > step))


@numba.njit(cache=True)
def move(model, state, step, gap):  # type: ignore[no-untyped-def]
    """Put the run at ``step`` before the step ``gap``; where it is then."""
    op = state.steps[OP, step]
    orphaned = step
    remove(model, state, step)
    gap -= gap > step
    insert(model, state, op, gap, orphaned)
    return gap


@numba.njit(cache=True)
def load(model, state, sequence, length, budget_nbytes):  # type: ignore[no-untyped-def]
    """Make ``sequence[:length]`` the state's; the last step is the end."""
    steps, runs = state.steps, state.runs
    runs[:] = -1
    state.totals[LENGTH] = length
    state.totals[EXCESS] = 0
    state.totals[BUDGET] = budget_nbytes
    state.totals[CHANGES] = 0
    state.seconds[0] = 0.0
    state.live[:length] = 0
    for step in range(length):
        op = sequence[step]
        earlier = runs[LAST, op]
        steps[OP, step] = op
        steps[EARLIER, step] = earlier
        steps[LATER, step] = length
        steps[DISCOUNT, step] = 0
        if earlier >= 0:
            steps[LATER, earlier] = step
        else:
            runs[FIRST, op] = step
        runs[LAST, op] = step
        state.seconds[0] += model.seconds[op]
    for step in range(length):
        op = steps[OP, step]
        for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
            end = last_read(model, state, model.flat[i], step, steps[LATER, step])
            add_bytes(state, step, end + 1, model.tensors[NBYTES, model.flat[i]])
    for step in range(length):
        _renew_discount(model, state, step)


@numba.njit(cache=True)
def rebudget(state, budget_nbytes):  # type: ignore[no-untyped-def]
    """Count the excess over another budget."""
    state.totals[BUDGET] = budget_nbytes
    excess = 0
    for step in range(state.totals[LENGTH]):
        excess += max(state.live[step] - budget_nbytes, 0)
    state.totals[EXCESS] = excess


@numba.njit(cache=True)
def log_change(state, kind, what, where):  # type: ignore[no-untyped-def]
    """Remember a change: (INSERTED, step), (REMOVED, op, step) or (MOVED, from, to)."""
    count = state.totals[CHANGES]
    state.changes[count, 0] = kind
    state.changes[count, 1] = what
    state.changes[count, 2] = where
    state.totals[CHANGES] = count + 1


@numba.njit(cache=True)
def undo(model, state):  # type: ignore[no-untyped-def]
    """Take back all changes since the last accepted state."""
    while state.totals[CHANGES] > 0:
        state.totals[CHANGES] -= 1
        change = state.changes[state.totals[CHANGES]]
        kind, what, where = change[0], change[1], change[2]
        if kind == INSERTED:
            remove(model, state, what)
        elif kind == REMOVED:
            insert(model, state, what, where, -1)
        else:
            move(model, state, where, what + (what > where))
