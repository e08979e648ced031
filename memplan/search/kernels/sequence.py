"""A sequence of executions that changes one run at a time, with the bytes alive at every step.

Every step reads the latest execution, so a sequence is all there is to decide: a run more splits
the life of what it writes and may lengthen that of what it reads. Both are ranges of steps that
end where the run is, which makes a change cheap. An output that takes over a dying input is
counted once at its step, the discount of the step.

Loops over many steps run over a part of a row, from 0 on: numba looks at every index that may be
negative, and a loop in which it does is not turned into vector instructions.
"""

from __future__ import annotations

from memplan.search.kernels.aliases import alias_seconds, alias_seconds_around
from memplan.search.kernels.linking import link, shift, unlink
from memplan.search.kernels.model import (
    HANDED,
    NBYTES,
    READ,
    READERS,
    READERS_END,
    WRITER,
    WRITTEN,
)
from memplan.search.kernels.state import (
    BUDGET,
    CHANGES,
    DISCOUNT,
    EARLIER,
    EXCESS,
    FIRST,
    INSERTED,
    LAST,
    LATER,
    LENGTH,
    OP,
    REMOVED,
    WIDTH,
    latest,
)
from memplan.util.compiled import compiled


@compiled
def last_read(model, state, tensor, after, end):  # type: ignore[no-untyped-def]
    """The last step between ``after`` and ``end``, both excluded, that reads; else ``after``."""
    last = after
    for k in range(model.tensors[READERS, tensor], model.tensors[READERS_END, tensor]):
        last = max(last, latest(state, model.readers[k], end))
    return last


@compiled
def _life(model, state, tensor, gap):  # type: ignore[no-untyped-def]
    """The run that writes what a step at ``gap`` would read of ``tensor``, and the next run."""
    op = model.tensors[WRITER, tensor]
    step = state.runs[LAST, op]
    end = state.totals[LENGTH]
    while step >= gap:
        end = step
        step = state.steps[EARLIER, step]
    return step, end


@compiled
def _add_bytes(state, begin, end, nbytes):  # type: ignore[no-untyped-def]
    """Add ``nbytes`` to the bytes alive at steps ``begin`` to ``end - 1``."""
    budget = state.totals[BUDGET]
    live = state.live[begin:end]
    more = 0
    for i in range(len(live)):
        was = live[i]
        now = was + nbytes
        live[i] = now
        more += max(now - budget, 0) - max(was - budget, 0)
    state.totals[EXCESS] += more


@compiled
def handed_over(model, state, step):  # type: ignore[no-untyped-def]
    """List pairs in the scratch: the second takes over the buffer of the first at ``step``.

    How many tensors these are.
    """
    op = state.steps[OP, step]
    begin, end = model.start[HANDED, op], model.start[HANDED, op + 1]
    tensors = state.scratch[0]
    ntensors = 0
    for i in range(begin, end, 2):
        source, output = model.flat[i], model.flat[i + 1]
        free = True
        for j in range(ntensors):
            free &= tensors[j] != source and tensors[j] != output
        if not free:
            continue
        rewrite = _life(model, state, source, step)[1]
        if last_read(model, state, source, step, rewrite) != step:
            continue
        if last_read(model, state, output, step, state.steps[LATER, step]) == step:
            continue
        tensors[ntensors] = source
        tensors[ntensors + 1] = output
        ntensors += 2
    return ntensors


@compiled
def _discount(model, state, step):  # type: ignore[no-untyped-def]
    """Bytes of outputs at ``step`` that take over the buffers of inputs."""
    total = 0
    for j in range(1, handed_over(model, state, step), 2):
        total += model.tensors[NBYTES, state.scratch[0, j]]
    return total


@compiled
def _renew_discount(model, state, step):  # type: ignore[no-untyped-def]
    op = state.steps[OP, step]
    if model.start[HANDED, op] < model.start[HANDED, op + 1]:
        discount = _discount(model, state, step)
        if discount != state.steps[DISCOUNT, step]:
            _add_bytes(state, step, step + 1, state.steps[DISCOUNT, step] - discount)
            state.steps[DISCOUNT, step] = discount


@compiled
def _count_inputs(model, state, op, gap, ndirty):  # type: ignore[no-untyped-def]
    """Keep what ``op`` reads alive up to ``gap``; bytes more there, steps to look at again."""
    dirty, live = state.scratch[1], 0
    for i in range(model.start[READ, op], model.start[READ, op + 1]):
        tensor = model.flat[i]
        write, rewrite = _life(model, state, tensor, gap)
        end = last_read(model, state, tensor, write, rewrite)
        if end < gap:
            _add_bytes(state, end + 1, gap, model.tensors[NBYTES, tensor])
            live += model.tensors[NBYTES, tensor]
            dirty[ndirty] = end
            ndirty += 1
    return live, ndirty


@compiled
def insert(model, state, op, gap, orphaned):  # type: ignore[no-untyped-def]
    """Run ``op`` before the step ``gap``.

    If it has no run before, what it writes is counted already from step ``orphaned`` on.
    """
    flat, dirty, totals = model.flat, state.scratch[1], state.totals
    earlier = latest(state, op, gap)
    later = state.runs[FIRST, op] if earlier < 0 else state.steps[LATER, earlier]
    if later < 0:
        later = totals[LENGTH]
    of_aliases, has_aliases = 0.0, len(model.alias_readers) > 0
    if has_aliases:
        of_aliases -= alias_seconds_around(model, state, op, gap, earlier, later)
    live = state.live[gap] + state.steps[DISCOUNT, gap]
    live -= model.written_nbytes[state.steps[OP, gap]]
    ndirty = 0
    for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
        tensor = flat[i]
        nbytes = model.tensors[NBYTES, tensor]
        if last_read(model, state, tensor, gap - 1, later) < gap:
            continue
        if earlier >= 0:
            end = last_read(model, state, tensor, earlier, gap)
            _add_bytes(state, end + 1, gap, -nbytes)
            live -= nbytes
            dirty[ndirty] = end
            ndirty += 1
        elif gap >= orphaned:
            _add_bytes(state, orphaned, gap, -nbytes)
            live -= nbytes
        else:
            _add_bytes(state, gap, orphaned, nbytes)
    more, ndirty = _count_inputs(model, state, op, gap, ndirty)
    live += more + model.written_nbytes[op]
    shift(state, gap, 1)
    link(state.steps, state.runs, totals[LENGTH], op, gap, earlier, later + 1)
    state.live[gap] = live
    totals[EXCESS] += max(live - totals[BUDGET], 0)
    totals[WIDTH] += model.widths[op]
    if has_aliases:
        of_aliases += alias_seconds_around(model, state, op, gap, earlier, later + 1)
        of_aliases += alias_seconds(model, state, gap)
    state.seconds[0] += model.seconds[op] + of_aliases
    _renew_discount(model, state, gap)
    for i in range(ndirty):
        _renew_discount(model, state, dirty[i] + (dirty[i] >= gap))


@compiled
def remove(model, state, step):  # type: ignore[no-untyped-def]
    """Take out the run at ``step``.

    Of a first run that is read, what it writes stays counted: it must be inserted again.
    """
    tensors, flat, dirty, steps = model.tensors, model.flat, state.scratch[1], state.steps
    op, earlier, later = steps[OP, step], steps[EARLIER, step], steps[LATER, step]
    of_aliases, has_aliases = 0.0, len(model.alias_readers) > 0
    if has_aliases:
        of_aliases += alias_seconds_around(model, state, op, step, earlier, later)
        of_aliases += alias_seconds(model, state, step)
    ndirty = 0
    if earlier >= 0:
        for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
            tensor = flat[i]
            if last_read(model, state, tensor, step, later) > step:
                end = last_read(model, state, tensor, earlier, step)
                _add_bytes(state, end + 1, step, tensors[NBYTES, tensor])
                dirty[ndirty] = end
                ndirty += 1
    for i in range(model.start[READ, op], model.start[READ, op + 1]):
        tensor = flat[i]
        write, rewrite = _life(model, state, tensor, step)
        if last_read(model, state, tensor, write, rewrite) == step:
            end = last_read(model, state, tensor, write, step)
            _add_bytes(state, end + 1, step, -tensors[NBYTES, tensor])
            dirty[ndirty] = end
            ndirty += 1
    totals = state.totals
    totals[EXCESS] -= max(state.live[step] - totals[BUDGET], 0)
    totals[WIDTH] -= model.widths[op]
    unlink(steps, state.runs, totals[LENGTH], op, earlier, later)
    shift(state, step, -1)
    if has_aliases:
        of_aliases -= alias_seconds_around(model, state, op, step, earlier, later - 1)
    state.seconds[0] -= model.seconds[op] + of_aliases
    for i in range(ndirty):
        _renew_discount(model, state, dirty[i] - (dirty[i] > step))


@compiled
def move(model, state, step, gap):  # type: ignore[no-untyped-def]
    """Put the run at ``step`` before the step ``gap``; where it is then."""
    op = state.steps[OP, step]
    orphaned = step
    remove(model, state, step)
    gap -= gap > step
    insert(model, state, op, gap, orphaned)
    return gap


@compiled
def load(model, state, sequence, length, budget_nbytes):  # type: ignore[no-untyped-def]
    """Make ``sequence[:length]`` the state's; the last step is the end."""
    steps, runs = state.steps, state.runs
    runs[:] = -1
    state.totals[LENGTH] = length
    state.totals[BUDGET] = budget_nbytes
    state.totals[CHANGES] = 0
    state.totals[WIDTH] = 0
    state.seconds[0] = 0.0
    live, excess, total = state.live, 0, 0
    live[:length] = 0
    for step in range(length):
        op = sequence[step]
        link(steps, runs, length, op, step, runs[LAST, op], length)
        state.totals[WIDTH] += model.widths[op]
        state.seconds[0] += model.seconds[op]
    for step in range(length):
        op = steps[OP, step]
        state.seconds[0] += alias_seconds(model, state, step)
        for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
            tensor = model.flat[i]
            end = last_read(model, state, tensor, step, steps[LATER, step])
            live[step] += model.tensors[NBYTES, tensor]
            if end + 1 < length:
                live[end + 1] -= model.tensors[NBYTES, tensor]
    for step in range(length):
        total += live[step]
        live[step] = total
        excess += max(total - budget_nbytes, 0)
    state.totals[EXCESS] = excess
    for step in range(length):
        _renew_discount(model, state, step)


@compiled
def rebudget(state, budget_nbytes):  # type: ignore[no-untyped-def]
    """Count the excess over another budget."""
    state.totals[BUDGET] = budget_nbytes
    excess = 0
    for step in range(state.totals[LENGTH]):
        excess += max(state.live[step] - budget_nbytes, 0)
    state.totals[EXCESS] = excess


@compiled
def log_change(state, kind, what, where):  # type: ignore[no-untyped-def]
    """Remember a change: (INSERTED, step), (REMOVED, op, step) or (MOVED, from, to)."""
    count = state.totals[CHANGES]
    state.changes[count, 0] = kind
    state.changes[count, 1] = what
    state.changes[count, 2] = where
    state.totals[CHANGES] = count + 1


@compiled
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
