"""Makes room for a step of a sequence or closes it, and links the runs of its op anew.

A step has links to the runs of its op before and after it, and an op to its first and last run.
Links are numbers of steps, so that those to what is behind change with every step that comes or
goes. Loops run over a part of a row, from 0 on: numba looks at every index that may be negative,
and a loop in which it does is not turned into vector instructions.
"""

from __future__ import annotations

from memplan.search.kernels.state import DISCOUNT, EARLIER, FIRST, LAST, LATER, LENGTH, OP
from memplan.util.compiled import compiled


@compiled
def _open(row, place, length, first, by):  # type: ignore[no-untyped-def]
    """Move ``row[place:length]`` up by a place; what is ``first`` or more grows by ``by``."""
    moved = row[place : length + 1]
    for i in range(len(moved) - 1, 0, -1):
        value = moved[i - 1]
        moved[i] = value + by * (value >= first)


@compiled
def _close(row, place, length, first, by):  # type: ignore[no-untyped-def]
    """Move ``row[place + 1:length]`` down by a place; what is ``first`` or more grows by ``by``."""
    moved = row[place:length]
    for i in range(len(moved) - 1):
        value = moved[i + 1]
        moved[i] = value + by * (value >= first)


@compiled
def _renumber(row, first, by):  # type: ignore[no-untyped-def]
    """What is ``first`` or more grows by ``by``."""
    for i in range(len(row)):
        value = row[i]
        row[i] = value + by * (value >= first)


@compiled
def shift(state, place, by):  # type: ignore[no-untyped-def]
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
    _renumber(steps[LATER, :place], first, by)
    _renumber(state.runs[FIRST], first, by)
    _renumber(state.runs[LAST], first, by)
    state.totals[LENGTH] = length + by


@compiled
def link(steps, runs, length, op, gap, earlier, later):  # type: ignore[no-untyped-def]
    """Enter the run of ``op`` at the step ``gap`` between its runs before and after."""
    steps[OP, gap] = op
    steps[EARLIER, gap] = earlier
    steps[LATER, gap] = later
    steps[DISCOUNT, gap] = 0
    if earlier >= 0:
        steps[LATER, earlier] = gap
    else:
        runs[FIRST, op] = gap
    if later < length:
        steps[EARLIER, later] = gap
    else:
        runs[LAST, op] = gap


@compiled
def unlink(steps, runs, length, op, earlier, later):  # type: ignore[no-untyped-def]
    """Forget the run of ``op`` between these."""
    if earlier >= 0:
        steps[LATER, earlier] = later
    else:
        runs[FIRST, op] = later if later < length else -1
    if later < length:
        steps[EARLIER, later] = earlier
    else:
        runs[LAST, op] = earlier
