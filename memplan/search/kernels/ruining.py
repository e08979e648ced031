"""What an attempt of ruin and recreate begins with: what is taken back, and put elsewhere."""

from __future__ import annotations

from memplan.search.kernels.moves import move_several, reorder, unit
from memplan.search.kernels.sequence import remove
from memplan.search.kernels.state import CHANGES, EARLIER, LENGTH, OP
from memplan.util.compiled import compiled

# Kinds of attempts: what is taken back is anywhere, else at some steps, else of some ops.
ANYWHERE, AT_STEPS = 0.4, 0.3
# About how many recomputations are taken back: in most attempts FEW at most, of long schedules too,
# as what takes back a tenth of six hundred is hardly ever mended; in the others up to a share of
# all. In what share of the steps or ops there, at most in this part of all. Set on SENet-154 and a
# residual attention network at 40% of their steps, and on five of 205 to 2,283 ops.
FEWEST, FEW, MANY, OFTEN_FEW = 1.0, 10.0, 0.2, 0.85
SHARES_NEAR, MOST_SHARE, MOST_PART = (0.2, 0.5, 1.0), 0.3, 0.2
# The share of the attempts that also move runs elsewhere, and of those that do so once more; in
# what share of these moves several runs in a row go. Set on five networks of 136 to 625 ops.
REORDERING, ONE_MORE, SEVERAL = 0.6, 0.6, 0.6
# In this share of the attempts what is taken back counts so many times its seconds per byte: else
# most of it is chosen again. Set on four networks of 205 to 625 ops.
AVOIDING, AVOIDED = 0.3, 3.0


@compiled
def ruin(model, state, weights):  # type: ignore[no-untyped-def]
    """Take back some recomputations: anywhere, around a step, or of ops around an op.

    Their ``weights`` are more than 1 in some attempts, in which others are to be chosen instead, as
    what is tabu in Glover 1989, "Tabu search, part I".
    """
    kind, size, centre = unit(state), unit(state), unit(state)
    length, nops = state.totals[LENGTH], len(model.seconds)
    most = FEW if unit(state) < OFTEN_FEW else FEW + MANY * (length - nops)
    number = FEWEST * (most / FEWEST) ** unit(state)  # as evenly in logarithm
    part = number / max(1, length - nops)
    share, half = min(part, MOST_SHARE), 1.0
    if kind >= ANYWHERE:
        share = SHARES_NEAR[int(3 * size)]
        half = min(0.5 * part / share, MOST_PART)
    weight = AVOIDED if unit(state) < AVOIDING else 1.0
    for op in range(nops):
        weights[op] = 1.0
    for step in range(length - 2, -1, -1):
        if state.steps[EARLIER, step] < 0:
            continue
        away = 0.0
        if kind >= ANYWHERE + AT_STEPS:
            away = abs(state.steps[OP, step] / nops - centre)
        elif kind >= ANYWHERE:
            away = abs(step / length - centre)
        if away < half and unit(state) < share:
            weights[state.steps[OP, step]] = weight
            remove(model, state, step)


@compiled
def reorder_some(model, state):  # type: ignore[no-untyped-def]
    """In some attempts, put runs elsewhere, one by one or several in a row: how many were so."""
    reordering, nmoved = REORDERING, 0
    while unit(state) < reordering:
        state.totals[CHANGES] = 0  # nothing is undone
        if unit(state) < SEVERAL:
            nmoved += move_several(model, state)
        else:
            reorder(model, state)
        reordering = ONE_MORE
    return nmoved
