"""Random changes of a sequence: another run of an op, one less, one elsewhere."""

from __future__ import annotations

import numpy as np

from memplan.search.kernels.model import AFTER, BEFORE, READ, WRITER, WRITTEN
from memplan.search.kernels.sequence import insert, last_read, log_change, move, remove
from memplan.search.kernels.state import (
    EARLIER,
    FIRST,
    INSERTED,
    LAST,
    LATER,
    LENGTH,
    MOST_WIDTH,
    MOVED,
    OP,
    REMOVED,
    WIDTH,
    latest,
)
from memplan.util.compiled import compiled

# Shares of the kinds of moves: recompute, do not, exchange the two; the rest moves a run.
RECOMPUTE, DROP, EXCHANGE = 0.3, 0.25, 0.05
# A recomputed tensor whose own inputs would be carried over this many steps may recompute these.
FAR = 3
MOST_CHAINED = 12
# Several runs are two, and one more so often; they go by a step, and by one more so often. Set on
# four networks of 136 to 625 ops: with 8 runs by 20 steps on average two of them end lower than
# with 6 by 10.
MORE_RUNS, FARTHER = 0.85, 0.95


@compiled
def draw(state):  # type: ignore[no-untyped-def]
    """A random integer of 53 bits (xorshift64)."""
    x = state.random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state.random[0] = x
    return x >> np.uint64(11)


@compiled
def unit(state):  # type: ignore[no-untyped-def]
    """A random number from 0 to 1."""
    return draw(state) / 9007199254740992.0


@compiled
def _below(state, limit):  # type: ignore[no-untyped-def]
    return np.int64(draw(state) % np.uint64(limit))


@compiled
def _chance(state, probability):  # type: ignore[no-untyped-def]
    return draw(state) < probability * 9007199254740992.0


@compiled
def _recompute(model, state, exchange):  # type: ignore[no-untyped-def]
    """Recompute what a random reader reads, shortly before it; and perhaps what that takes."""
    if len(model.edges) == 0:
        return exchange
    edge = _below(state, len(model.edges))
    op = model.tensors[WRITER, model.edges[edge, 0]]
    gap = state.runs[LAST, model.edges[edge, 1]]
    while gap >= 0 and state.steps[EARLIER, gap] >= 0 and _chance(state, 0.3):
        gap = state.steps[EARLIER, gap]
    if _chance(state, 0.3):
        while gap > 1 and _chance(state, 0.7):
            gap -= 1
    before, totals = latest(state, op, gap), state.totals
    is_full = totals[LENGTH] + MOST_CHAINED >= len(state.live) or totals[WIDTH] > totals[MOST_WIDTH]
    if before < 0 or gap - before < 2 or is_full:
        return exchange
    most = 1
    while most < MOST_CHAINED and _chance(state, 0.5):
        most += 1
    insert(model, state, op, gap, -1)
    log_change(state, INSERTED, gap, 0)
    step = gap
    while most > 1:
        most -= 1
        # The run at ``step``: recompute one of its inputs before it, if that is far away.
        op = state.steps[OP, step]
        begin, end = model.start[READ, op], model.start[READ, op + 1]
        if begin == end:
            break
        tensor = model.flat[begin + _below(state, end - begin)]
        source = model.tensors[WRITER, tensor]
        if not model.repeatable[source]:
            break
        write = latest(state, source, step)
        if step - last_read(model, state, tensor, write, step) <= FAR:
            break
        insert(model, state, source, step, -1)
        log_change(state, INSERTED, step, 0)
        if not _chance(state, 0.7):
            step += 1
    return True


@compiled
def _random_recomputation(state):  # type: ignore[no-untyped-def]
    """A step that runs an op again, or -1 after some attempts."""
    for _ in range(8):
        step = _below(state, state.totals[LENGTH] - 1)
        if state.steps[EARLIER, step] >= 0:
            return step
    return np.int64(-1)


@compiled
def _drop(model, state):  # type: ignore[no-untyped-def]
    step = _random_recomputation(state)
    if step < 0:
        return False
    op = state.steps[OP, step]
    remove(model, state, step)
    log_change(state, REMOVED, op, step)
    return True


@compiled
def is_read(model, state, step):  # type: ignore[no-untyped-def]
    """Is anything read of what the run at ``step`` writes?"""
    op, later = state.steps[OP, step], state.steps[LATER, step]
    for i in range(model.start[WRITTEN, op], model.start[WRITTEN, op + 1]):
        if last_read(model, state, model.flat[i], step, later) > step:
            return True
    return False


@compiled
def _attach(model, state):  # type: ignore[no-untyped-def]
    """Put a random run right behind another run of what writes an input of it."""
    step = _below(state, state.totals[LENGTH] - 1)
    op = state.steps[OP, step]
    begin, end = model.start[READ, op], model.start[READ, op + 1]
    if begin == end:
        return False
    source = model.tensors[WRITER, model.flat[begin + _below(state, end - begin)]]
    low, high = _limits(model, state, step)
    gap = state.runs[LAST, source] + 1
    while gap > high or (gap > low and _chance(state, 0.5)):
        earlier = state.steps[EARLIER, gap - 1]
        if earlier < 0:
            break
        gap = earlier + 1
    gap = max(low, min(high, gap))
    while gap < high and _chance(state, 0.5):
        gap += 1
    if gap == step or gap == step + 1:
        return False
    log_change(state, MOVED, step, move(model, state, step, gap))
    return True


@compiled
def _limits(model, state, step):  # type: ignore[no-untyped-def]
    """The gaps between which the run at ``step`` may be put."""
    op, earlier, high = state.steps[OP, step], state.steps[EARLIER, step], state.steps[LATER, step]
    high = min(high, state.totals[LENGTH] - 1)
    if earlier >= 0:
        return earlier + 1, high
    low = 0
    for i in range(model.start[BEFORE, op], model.start[BEFORE, op + 1]):
        low = max(low, state.runs[FIRST, model.flat[i]] + 1)
    for i in range(model.start[AFTER, op], model.start[AFTER, op + 1]):
        high = min(high, state.runs[FIRST, model.flat[i]])
    return low, high


@compiled
def _move(model, state):  # type: ignore[no-untyped-def]
    """Put a random run elsewhere, mostly near."""
    step = np.int64(-1)
    if _chance(state, 0.5):
        step = _random_recomputation(state)
    if step < 0:
        step = _below(state, state.totals[LENGTH] - 1)
    low, high = _limits(model, state, step)
    distance = 1
    while _chance(state, 0.75):
        distance += 1
    is_later = _chance(state, 0.5)
    if _chance(state, 0.15):
        gap = high if is_later else low
    else:
        gap = step + 1 + distance if is_later else step - distance
    gap = max(low, min(high, gap))
    if gap == step or gap == step + 1:
        return False
    log_change(state, MOVED, step, move(model, state, step, gap))
    return True


@compiled
def reorder(model, state):  # type: ignore[no-untyped-def]
    """Put a random run elsewhere, if that is possible: mostly near, or to what it reads."""
    if _chance(state, 0.3):
        _attach(model, state)
    else:
        _move(model, state)


@compiled
def move_several(model, state):  # type: ignore[no-untyped-def]
    """Put some random runs in a row elsewhere, each as far as it may; how many were moved.

    A part of a branch, with what is recomputed for it, may so come before a part of another one:
    run by run each step on the way would have to hold little, too. One that may go farther passes
    those that have to wait.
    """
    length = state.totals[LENGTH] - 1
    first, is_later = _below(state, length), _chance(state, 0.5)
    size, distance = 2, 1
    while _chance(state, MORE_RUNS):
        size += 1
    while _chance(state, FARTHER):
        distance += 1
    size, nmoved = min(size, length - first), 0
    for k in range(size):
        # What goes first makes room for the next one, which may have to stay on that side of it.
        step = first + (size - 1 - k if is_later else k)
        low, high = _limits(model, state, step)
        gap = min(high, step + 1 + distance) if is_later else max(low, step - distance)
        if gap < step or gap > step + 1:
            move(model, state, step, gap)
            nmoved += 1
    return nmoved


@compiled
def propose(model, state):  # type: ignore[no-untyped-def]
    """Make a random move; False if none was made."""
    kind = unit(state)
    if kind < RECOMPUTE:
        return _recompute(model, state, False)
    if kind < RECOMPUTE + DROP:
        return _drop(model, state)
    if kind < RECOMPUTE + DROP + EXCHANGE:
        return _recompute(model, state, _drop(model, state))
    return _move(model, state)
