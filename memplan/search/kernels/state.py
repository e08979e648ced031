"""The state of a search: a sequence, the bytes alive at its steps, and what was changed last."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.errors import GraphError
from memplan.search.kernels.arrays import Array, most_written
from memplan.search.kernels.model import HANDED, NBYTES, SequenceModel
from memplan.util.compiled import compiled

# Rows of SequenceState.steps: the op, its run before and after this one, and the discount.
OP, EARLIER, LATER, DISCOUNT = range(4)
# Rows of SequenceState.runs.
FIRST, LAST = range(2)
# Places in SequenceState.totals: steps, the excess (bytes over the budget, summed over steps), the
# budget, the changes since the state was last accepted, the widths of all runs and the most of them
# with which it may become longer.
LENGTH, EXCESS, BUDGET, CHANGES, WIDTH, MOST_WIDTH = range(6)
# Kinds of changes.
INSERTED, REMOVED, MOVED = range(3)

# The excess must stay below 2^63, while it is changed, too.
MOST_EXCESS = 1 << 62

# A random move makes fewer changes than this.
MOST_CHANGES = 64


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


def sequence_state(model: SequenceModel, capacity: int, seed: int) -> SequenceState:
    """A state with room for ``capacity`` steps, empty.

    GraphError if bytes, summed over this many steps, are more than compiled code can count.
    """
    nops = len(model.seconds)
    nbytes = int(model.tensors[NBYTES].sum())
    if nbytes * capacity > MOST_EXCESS:
        raise GraphError(
            f"the tensors have {nbytes} bytes in all; a search over {capacity} steps can add up "
            f"{MOST_EXCESS // capacity} at most"
        )
    mixed = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64 or 1
    widest = int(np.max(np.diff(model.start[: HANDED + 1])))
    totals = np.zeros(6, dtype=np.int64)
    totals[MOST_WIDTH] = most_written(model.widths, capacity)
    return SequenceState(
        np.zeros((4, capacity), dtype=np.int64),
        np.zeros(capacity, dtype=np.int64),
        np.zeros((2, nops), dtype=np.int64),
        totals,
        np.zeros(1),
        np.zeros((MOST_CHANGES, 3), dtype=np.int64),
        np.zeros((2, 2 * widest + 2), dtype=np.int64),
        np.array([mixed], dtype=np.uint64),
    )


def room_for_width(model: SequenceModel, capacity: int) -> int:
    """The ops, or the tensors that they write, that a state with this room has at most."""
    return most_written(model.widths, capacity) + MOST_CHANGES * int(model.widths.max())


@compiled
def _copy(row, other, length):  # type: ignore[no-untyped-def]
    for i in range(length):
        other[i] = row[i]


@compiled
def copy_state(state, other):  # type: ignore[no-untyped-def]
    """Make the other one equal, but for changes and random numbers."""
    length = state.totals[LENGTH]
    for row in range(len(state.steps)):
        _copy(state.steps[row], other.steps[row], length)
    for row in range(len(state.runs)):
        _copy(state.runs[row], other.runs[row], state.runs.shape[1])
    _copy(state.live, other.live, length)
    _copy(state.totals, other.totals, len(state.totals))
    other.seconds[0] = state.seconds[0]


@compiled
def latest(state, op, gap):  # type: ignore[no-untyped-def]
    """The last run of ``op`` before ``gap``, or -1."""
    step = state.runs[LAST, op]
    while step >= gap:
        step = state.steps[EARLIER, step]
    return step
