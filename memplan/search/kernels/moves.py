"""Random changes of a sequence, and simulated annealing over them.

Annealing that may change the order of ops, too, is that of Bartan et al. 2023 (Moccasin, ICML) and
Ohno et al. 2023 (FastSA, NeurIPS); here the sequence itself is changed, and the bytes alive follow
at the cost of the steps concerned.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from memplan.search.kernels.replay import Array, replay
from memplan.search.kernels.sequence import (
    AFTER,
    BEFORE,
    BUDGET,
    CHANGES,
    EARLIER,
    EXCESS,
    FIRST,
    INSERTED,
    LAST,
    LATER,
    LENGTH,
    MEMBERS,
    MOVED,
    OP,
    READ,
    REMOVED,
    WRITER,
    insert,
    last_read,
    latest,
    log_change,
    move,
    rebudget,
    remove,
    undo,
)

# Shares of the kinds of moves: recompute, do not, exchange the two; the rest moves a run.
RECOMPUTE, DROP, EXCHANGE = 0.3, 0.25, 0.05
# A recomputed tensor whose own inputs would be carried over so many steps may recompute these.
FAR = 3
MOST_CHAINED = 12
# The weight of the excess rises if a smaller share of the states than the first was within the
# budget, and falls if a larger one than the second.
FEASIBLE_SHARES = (0.2, 0.5)

# Places in Best.figures.
BEST_LENGTH, BEST_SECONDS, BEST_NBYTES = range(3)
# Places in control: weight of the excess, moves made, feasible ones since the last review, bytes
# that small tensors add.
WEIGHT, MADE, FEASIBLE, SMALL = range(4)
LIVE = -1
UNLIMITED = 1 << 62


class Task(NamedTuple):
    """What annealing minimises: seconds, in units of ``seconds``, and the excess.

    ``match_range`` is that of the blocks, or LIVE. With ``shrink`` > 0 the budget is lowered by
    that share (and at least a byte) below whatever fits it; with ``least`` the fewest bytes count,
    however many more than the budget they are. Temperatures fall from ``hot`` to
    ``cold`` over ``moves``; the weight of the excess is looked at every ``review`` moves.
    """

    seconds: float
    match_range: int
    shrink: float
    least: bool
    hot: float
    cold: float
    moves: int
    review: int


class Best(NamedTuple):
    """The best sequence within the budget: its steps; length, seconds and bytes."""

    sequence: Array
    figures: Array


@numba.njit(cache=True)
def _draw(state):  # type: ignore[no-untyped-def]
    """A random integer of 53 bits (xorshift64)."""
    x = state.random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state.random[0] = x
    return x >> np.uint64(11)


@numba.njit(cache=True)
def _below(state, limit):  # type: ignore[no-untyped-def]
    return np.int64(_draw(state) % np.uint64(limit))


@numba.njit(cache=True)
def _chance(state, probability):  # type: ignore[no-untyped-def]
    return _draw(state) < probability * 9007199254740992.0


@numba.njit(cache=True)
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
    before = latest(state, op, gap)
    if before < 0 or gap - before < 2 or state.totals[LENGTH] + MOST_CHAINED >= len(state.live):
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
        written = latest(state, source, step)
        if step - last_read(model, state, tensor, written, step) <= FAR:
            break
        insert(model, state, source, step, -1)
        log_change(state, INSERTED, step, 0)
        if not _chance(state, 0.7):
            step += 1
    return True


@numba.njit(cache=True)
def _random_recomputation(state):  # type: ignore[no-untyped-def]
    """A step that runs an op again, or -1 after some attempts."""
    for _ in range(8):
        step = _below(state, state.totals[LENGTH] - 1)
        if state.steps[EARLIER, step] >= 0:
            return step
    return np.int64(-1)


@numba.njit(cache=True)
def _drop(model, state):  # type: ignore[no-untyped-def]
    step = _random_recomputation(state)
    if step < 0:
        return False
    op = state.steps[OP, step]
    remove(model, state, step)
    log_change(state, REMOVED, op, step)
    return True


@numba.njit(cache=True)
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


@numba.njit(cache=True)
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
    later = _chance(state, 0.5)
    if _chance(state, 0.15):
        gap = high if later else low
    else:
        gap = step + 1 + distance if later else step - distance
    gap = max(low, min(high, gap))
    if gap == step or gap == step + 1:
        return False
    log_change(state, MOVED, step, move(model, state, step, gap))
    return True


@numba.njit(cache=True)
def propose(model, state):  # type: ignore[no-untyped-def]
    """Make a random move; False if none was made."""
    kind = _draw(state) / 9007199254740992.0
    if kind < RECOMPUTE:
        return _recompute(model, state, False)
    if kind < RECOMPUTE + DROP:
        return _drop(model, state)
    if kind < RECOMPUTE + DROP + EXCHANGE:
        return _recompute(model, state, _drop(model, state))
    return _move(model, state)


@numba.njit(cache=True)
def expand(model, state, ops):  # type: ignore[no-untyped-def]
    """Write the ops of all groups into ``ops``; how many there are."""
    count = 0
    for step in range(state.totals[LENGTH]):
        group = state.steps[OP, step]
        for i in range(model.start[MEMBERS, group], model.start[MEMBERS, group + 1]):
            ops[count] = model.flat[i]
            count += 1
    return count


@numba.njit(cache=True)
def _live_peak(state):  # type: ignore[no-untyped-def]
    peak = 0
    for step in range(state.totals[LENGTH]):
        peak = max(peak, state.live[step])
    return peak


@numba.njit(cache=True)
def _total_seconds(model, state):  # type: ignore[no-untyped-def]
    total = 0.0
    for step in range(state.totals[LENGTH]):
        total += model.seconds[state.steps[OP, step]]
    return total


@numba.njit(cache=True)
def measure(model, state, large, memory, ops, match_range, enough):  # type: ignore[no-untyped-def]
    """Bytes of the blocks, or the peak of live bytes."""
    count = expand(model, state, ops)
    allocated, peak = replay(large, memory, ops, count, max(0, match_range), enough)
    return peak if match_range == LIVE else allocated


@numba.njit(cache=True)
def _review(control, review):  # type: ignore[no-untyped-def]
    """Adapt the weight of the excess to how often the budget was kept."""
    if control[FEASIBLE] < FEASIBLE_SHARES[0] * review:
        control[WEIGHT] *= 1.1
    elif control[FEASIBLE] > FEASIBLE_SHARES[1] * review:
        control[WEIGHT] /= 1.1
    control[FEASIBLE] = 0


@numba.njit(cache=True)
def _excess(model, state, large, memory, ops, task, control, most):  # type: ignore[no-untyped-def]
    """Bytes over the budget, in budgets: summed over steps, or of blocks (inf if over ``most``)."""
    budget = max(1.0, float(state.totals[BUDGET]))
    if task.match_range == LIVE:
        return state.totals[EXCESS] / budget
    enough = min(float(UNLIMITED), budget * (1.0 + most))
    if _live_peak(state) > enough:
        return np.inf
    enough -= control[SMALL]
    nbytes = measure(model, state, large, memory, ops, task.match_range, np.int64(enough))
    return np.inf if nbytes > enough else max(0.0, (nbytes + control[SMALL]) / budget - 1.0)


@numba.njit(cache=True)
def _record(  # type: ignore[no-untyped-def]
    model, state, large, exact, memory, ops, task, best, control
):
    """Enter the state as the best, if it is within the budget by all its tensors, too."""
    totals = state.totals
    nbytes = measure(model, state, exact, memory, ops, task.match_range, UNLIMITED)
    if task.match_range != LIVE:
        known = measure(model, state, large, memory, ops, task.match_range, UNLIMITED)
        control[SMALL] = nbytes - known
    if nbytes >= best.figures[BEST_NBYTES] if task.least else nbytes > totals[BUDGET]:
        return
    best.sequence[: totals[LENGTH]] = state.steps[OP, : totals[LENGTH]]
    best.figures[BEST_LENGTH] = totals[LENGTH]
    best.figures[BEST_SECONDS] = state.seconds[0]
    best.figures[BEST_NBYTES] = nbytes
    if task.shrink > 0.0:
        rebudget(state, np.int64(nbytes - max(1, int(nbytes * task.shrink))))


@numba.njit(cache=True)
def anneal(  # type: ignore[no-untyped-def]
    model, state, large, exact, memory, ops, task, best, control, nmoves
):
    """Make ``nmoves`` moves of ``task``; the best within the budget goes into ``best``.

    Blocks are those of the tensors in ``large``; what the others add is taken from the last time
    that ``exact`` was asked.
    """
    over, now = np.inf, np.inf  # not known
    for _ in range(nmoves):
        made = int(control[MADE])
        if made and made % task.review == 0 and not task.least:
            _review(control, task.review)
            now = np.inf
        weight = control[WEIGHT]
        if now == np.inf:
            state.seconds[0] = _total_seconds(model, state)  # free of the errors of adding up
            over = _excess(model, state, large, memory, ops, task, control, np.inf)
            now = state.seconds[0] / task.seconds + weight * over
        control[MADE] += 1
        state.totals[CHANGES] = 0
        if propose(model, state):
            heat = task.hot * (task.cold / task.hot) ** (made / task.moves)
            limit = now - heat * np.log((_draw(state) + 1.0) / 9007199254740993.0)
            left = limit - state.seconds[0] / task.seconds
            other = np.inf
            if left >= 0.0:
                other = _excess(model, state, large, memory, ops, task, control, left / weight)
            if weight * other > left:
                undo(model, state)
            else:
                over = other
                now = state.seconds[0] / task.seconds + weight * over
                cheaper = best.figures[BEST_SECONDS] - state.seconds[0] > 1e-9 * task.seconds
                better = over == 0.0 and (cheaper or task.shrink > 0.0)
                if task.least:
                    better = (over + 1.0) * state.totals[BUDGET] < best.figures[BEST_NBYTES]
                if better:
                    _record(model, state, large, exact, memory, ops, task, best, control)
                    now = np.inf
        control[FEASIBLE] += over == 0.0
