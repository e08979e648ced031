"""What a sequence has above the bytes that it is to be packed in, as quick placements tell.

A search in live bytes ends with what seldom can be packed in as many. One that counts this beside
the seconds, attempt by attempt, ends with what can, for hardly more: on SENet-154 at 40% of its
step in two seconds for less than a tenth of a point.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.moves import unit
from memplan.search.kernels.packing import PackingRoom, list_buffers, placed, quick_nbytes
from memplan.util.compiled import compiled

# What a placement costs in work: for each buffer, and for each square of their number. Measured on
# HRNet and SENet-154.
BUFFER_WORK, SQUARE_WORK = 0.1, 1e-4
# Places in Fitting.now.
OVER, FORM = range(2)


class Fitting(NamedTuple):
    """In how many bytes placements are to be, and the ``seconds`` that as many more are worth.

    With a capacity of 0 nothing is placed, and all fits. Buffers of less than ``least_nbytes`` are
    left out. ``now`` has what the sequence of now is over, in seconds, and the form that says so.
    """

    room: PackingRoom
    capacity_nbytes: int
    least_nbytes: int
    seconds: float
    now: Array


@compiled
def _over(fitting, nbytes, on_top):  # type: ignore[no-untyped-def]
    """By how much so many bytes, and those on top of them, are over the capacity, in seconds."""
    return fitting.seconds * max(0.0, (nbytes + on_top) / fitting.capacity_nbytes - 1.0)


@compiled
def begin_fitting(model, state, fitting):  # type: ignore[no-untyped-def]
    """Enter what the state is over as that of now, by the form by which it is least."""
    fitting.now[OVER], fitting.now[FORM] = 0.0, 0.0
    if fitting.capacity_nbytes > 0:
        count, on_top = list_buffers(model, state, fitting.room, fitting.least_nbytes)
        capacity = fitting.capacity_nbytes - on_top
        nbytes, _, form = quick_nbytes(fitting.room, count, capacity)
        fitting.now[OVER], fitting.now[FORM] = _over(fitting, nbytes, on_top), form


@compiled
def fit(model, state, fitting, most):  # type: ignore[no-untyped-def]
    """What the state is over, in seconds, and the work of placing it; up to ``most`` that is now's.

    By the form of now and, where that is more than ``most``, by one at random.
    """
    if fitting.capacity_nbytes == 0:
        return 0.0, 0
    count, on_top = list_buffers(model, state, fitting.room, fitting.least_nbytes)
    capacity, form = fitting.capacity_nbytes - on_top, np.int64(fitting.now[FORM])
    nbytes, _ = placed(fitting.room, count, form, capacity, np.inf)
    over, work = _over(fitting, nbytes, on_top), BUFFER_WORK * count + SQUARE_WORK * count * count
    if over > most:
        form = np.int64(len(fitting.room.forms) * unit(state))
        nbytes, _ = placed(fitting.room, count, form, capacity, np.inf)
        over, work = _over(fitting, nbytes, on_top), work + SQUARE_WORK * count * count
    if over <= most:
        fitting.now[OVER], fitting.now[FORM] = over, form
    return over, np.int64(work)
