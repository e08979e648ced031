"""Simulated annealing over sequences of executions (Kirkpatrick et al. 1983).

Imanishi et al. 2023 (FastSA, NeurIPS 36) choose what to recompute by simulated annealing, too, and
plan graphs of thousands of ops in seconds. The moves here are of our own
(:mod:`memplan.search.kernels.moves`): they may also change the order of ops, and the bytes alive
follow at the cost of the steps concerned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.aliases import alias_seconds, is_alias_run
from memplan.search.kernels.arrays import Array
from memplan.search.kernels.model import MEMBERS
from memplan.search.kernels.moves import draw, propose
from memplan.search.kernels.replay import UNLIMITED, replay
from memplan.search.kernels.sequence import rebudget, undo
from memplan.search.kernels.state import BUDGET, CHANGES, EXCESS, LENGTH, OP
from memplan.util.compiled import compiled

# The weight of the excess rises if a smaller share of the states than the first was within the
# budget, and falls if a larger one than the second.
FEASIBLE_SHARES = (0.2, 0.5)

# Places in Best.figures.
BEST_LENGTH, BEST_SECONDS, BEST_NBYTES = range(3)
# Places in control: weight of the excess, moves made, feasible ones since the last review, bytes
# that small tensors add, excess and cost of the state (infinite where they are not known).
WEIGHT, MADE, FEASIBLE, SMALL, OVER, NOW = range(6)
LIVE = -1


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


@compiled
def expand(model, state, ops):  # type: ignore[no-untyped-def]
    """Write the ops of all groups into ``ops``; how many there are."""
    count = 0
    for step in range(state.totals[LENGTH]):
        group = state.steps[OP, step]
        begin = model.start[MEMBERS, group]
        for i in range(begin, model.start[MEMBERS, group + 1]):
            if i == begin or is_alias_run(model, state, model.flat[i], step):
                ops[count] = model.flat[i]
                count += 1
    return count


@compiled
def _live_peak(state):  # type: ignore[no-untyped-def]
    peak = 0
    for step in range(state.totals[LENGTH]):
        peak = max(peak, state.live[step])
    return peak


@compiled
def _total_seconds(model, state):  # type: ignore[no-untyped-def]
    total = 0.0
    for step in range(state.totals[LENGTH]):
        total += model.seconds[state.steps[OP, step]] + alias_seconds(model, state, step)
    return total


@compiled
def measure(model, state, large, memory, ops, match_range, enough):  # type: ignore[no-untyped-def]
    """Bytes of the blocks, or the peak of live bytes."""
    count = expand(model, state, ops)
    allocated, peak = replay(large, memory, ops, count, max(0, match_range), enough)
    return peak if match_range == LIVE else allocated


@compiled
def _review(control, review):  # type: ignore[no-untyped-def]
    """Adapt the weight of the excess to how often the budget was kept."""
    if control[FEASIBLE] < FEASIBLE_SHARES[0] * review:
        control[WEIGHT] *= 1.1
    elif control[FEASIBLE] > FEASIBLE_SHARES[1] * review:
        control[WEIGHT] /= 1.1
    control[FEASIBLE] = 0


@compiled
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


@compiled
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
    # By steps: slices, whose lengths might differ, bring in numba's error texts: 2 s to compile.
    for step in range(totals[LENGTH]):
        best.sequence[step] = state.steps[OP, step]
    best.figures[BEST_LENGTH] = totals[LENGTH]
    best.figures[BEST_SECONDS] = state.seconds[0]
    best.figures[BEST_NBYTES] = nbytes
    if task.shrink > 0.0:
        rebudget(state, np.int64(nbytes - max(1, int(nbytes * task.shrink))))


@compiled
def anneal(  # type: ignore[no-untyped-def]
    model, state, large, exact, memory, ops, task, best, control, nmoves
):
    """Make ``nmoves`` moves of ``task``; the best within the budget goes into ``best``.

    Blocks are those of the tensors in ``large``; what the others add is taken from the last time
    that ``exact`` was asked.
    """
    over, now = control[OVER], control[NOW]
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
            limit = now - heat * np.log((draw(state) + 1.0) / 9007199254740993.0)
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
    control[OVER], control[NOW] = over, now
