"""What the complete search works on, as arrays for compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.memory.offsets.buffers import Array, Buffers
from memplan.memory.offsets.inferences import Inferences
from memplan.util.compiled import compiled

FAR = 1 << 62
"""Above every offset."""

NONE = -1
ZERO = 0

# Places on the trail of ranks, by the number of buffers: where it is full, ranks stay.
RANKS_PER_BUFFER = 64


def _record(fields: str) -> np.dtype[Any]:
    """Integers with these names."""
    return np.dtype([(name, np.int64) for name in fields.split()])


# Fixed: size, sections, twin, a rank for the whole search, and where its neighbours are listed.
# `floor` is the highest top of what is placed and alive with it, its offset in the end; `raiser`
# is the frame that raised the floor last, -1 for none. `rank` breaks ties in its part. `key` is
# what buffers are sorted by.
BUFFER = _record("size first last twin order begin end floor raiser is_placed rank key")

# A frame is a choice: which buffer of members[begin:end], a part or the rest of one, is placed
# next. The part lives from section `first` to `last`. The latest candidate has `offset` and `rank`
# (at first, what was placed before has them), and is `buffer` while it lies there. `highest` is the
# highest offset for a candidate. `owner` is the frame of the placement before, -1 for none;
# `is_part`: a part begins here, which is not all of what the owner left. `entry` of the agenda
# comes after the part. What was placed is undone by going back to these lengths: `ntrail`,
# `nranked`, `nagenda`.
FRAME = _record(
    "begin end first last offset rank buffer highest owner is_part entry ntrail nranked nagenda"
)

# A part still to be solved, members[begin:end], alive from section `first` to `last`; `after` it
# comes another entry, -1 for none.
ENTRY = _record("begin end first last highest owner after")

# What was before a placement.
FLOOR = _record("buffer floor raiser")
RANK = _record("buffer rank")

# Lengths of the trails and the agenda, and the buffers placed in all.
COUNTS = _record("ntrail nranked nagenda nnodes")

Records = NDArray[Any]


class State(NamedTuple):
    """A search within ``capacity``. ``by_total``: the bytes left in the fullest section of a
    buffer's life rank it, before its ``order``."""

    buffers: Records
    others: Array  # the neighbours of i: others[buffers[i].begin : buffers[i].end]
    members: Array  # all buffers, by part
    left_nbytes: Array  # of what is left, in every section
    above_nbytes: Array  # of those among `picked` that were looked at, in every section
    picked: Array  # members whose bounds are looked at
    bounds: Array  # and these bounds
    places: Array  # and their places in `members`, ascending
    spans: Array  # the buffers left that live in a section and in the next one
    frames: Records
    agenda: Records
    trail: Records
    ranked: Records
    counts: Records  # one
    flags: Inferences
    by_total: bool
    capacity: int
    segment_nbytes: int


def new_state(
    buffers: Buffers,
    ranks: Array,
    *,
    by_total: bool,
    capacity_nbytes: int,
    segment_nbytes: int,
    inferences: Inferences,
) -> State:
    """Nothing is placed."""
    n, nsections = len(buffers), len(buffers.live_nbytes)
    starts, others = buffers.neighbours
    records = np.zeros(n, dtype=BUFFER)
    records["size"], records["twin"] = buffers.sizes, buffers.twins
    records["first"], records["last"] = buffers.first, buffers.last
    records["begin"], records["end"] = starts[:-1], starts[1:]
    records["order"], records["rank"], records["raiser"] = ranks, ranks, -1
    spans = np.zeros(nsections + 1, dtype=np.int64)
    np.add.at(spans, buffers.first, 1)
    np.add.at(spans, buffers.last, -1)
    return State(
        buffers=records,
        others=others,
        members=np.arange(n, dtype=np.int64),
        left_nbytes=buffers.live_nbytes.copy(),
        above_nbytes=np.zeros(nsections, dtype=np.int64),
        picked=np.zeros(n, dtype=np.int64),
        bounds=np.zeros(n, dtype=np.int64),
        places=np.zeros(n, dtype=np.int64),
        spans=spans.cumsum(),
        frames=np.zeros(n + 2, dtype=FRAME),
        agenda=np.zeros(2 * n + 2, dtype=ENTRY),
        trail=np.zeros(buffers.npairs // 2 + 1, dtype=FLOOR),
        ranked=np.zeros(RANKS_PER_BUFFER * n, dtype=RANK),
        counts=np.zeros(1, dtype=COUNTS),
        flags=inferences,
        by_total=by_total,
        capacity=capacity_nbytes,
        segment_nbytes=segment_nbytes,
    )


@compiled
def sort(state: State, begin: int, end: int) -> None:
    """Sort ``members[begin:end]`` by their keys; fast where they nearly are sorted."""
    members, buffers = state.members, state.buffers
    for k in range(begin + 1, end):
        buffer = members[k]
        place, key = k, buffers[buffer].key
        while place > begin and buffers[members[place - 1]].key > key:
            members[place] = members[place - 1]
            place -= 1
        members[place] = buffer


@compiled
def within_segment(offset: int, nbytes: int, segment_nbytes: int) -> int:
    """The lowest offset from ``offset`` on at which no multiple of a segment is crossed."""
    if offset // segment_nbytes == (offset + nbytes - 1) // segment_nbytes:
        return offset
    return (offset // segment_nbytes + 1) * segment_nbytes
