"""Placements in one pass over the buffers, against what they say that they do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from memplan.memory.offsets.placement import NO_SEGMENTS
from memplan.memory.offsets.quick import lowest_first
from memplan.memory.offsets.state import within_segment

UNIT = 256
# Sizes, first sections and lengths of lives.
BUFFERS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=30
)


def one_by_one(
    sizes: list[int], lives: list[tuple[int, int]], order: list[int], segment_nbytes: int
) -> list[int]:
    """Offsets, as lowest_first is described: the lowest that can be, and then the earliest."""
    floors, offsets, rest = [0] * len(sizes), [0] * len(sizes), list(order)
    while rest:
        buffer = min(rest, key=lambda b: floors[b])
        rest.remove(buffer)
        offsets[buffer], top = floors[buffer], floors[buffer] + sizes[buffer]
        for other in rest:
            (begin, end), (first, last) = lives[buffer], lives[other]
            if first <= end and begin <= last and floors[other] < top:
                floors[other] = within_segment.py_func(top, sizes[other], segment_nbytes)
    return offsets


@pytest.mark.parametrize("segment_nbytes", [NO_SEGMENTS, 8 * UNIT])
@examples(100)
@given(buffers=BUFFERS, data=st.data())
def test_the_lowest_is_placed_first_and_of_these_the_earliest(
    segment_nbytes: int, buffers: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    sizes = [size * UNIT for size, _, _ in buffers]
    lives = [(first, first + length) for _, first, length in buffers]
    order = data.draw(st.permutations(range(len(buffers))))
    first, last = np.array(lives, dtype=np.int64).T.copy()
    found = lowest_first(np.array(sizes), first, last, np.array(order), segment_nbytes)
    assert found.tolist() == one_by_one(sizes, lives, list(order), segment_nbytes)
