"""Offsets of buffers: the search agrees with brute force, whatever it may conclude."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.branches import taking
from memplan.memory.offsets import passes, placement
from memplan.memory.offsets.bounds import most_left
from memplan.memory.offsets.buffers import Buffers
from memplan.memory.offsets.complete import INFEASIBLE, SOLVED, search
from memplan.memory.offsets.inferences import Inferences
from memplan.memory.offsets.passes import Passes
from memplan.memory.offsets.placement import NO_SEGMENTS, place, solve
from memplan.memory.offsets.state import new_state
from oracles.offsets import Buffer, flaw, least_nbytes, least_sum, peak

NAMES = list(Inferences._fields)


def arrays(buffers: list[Buffer]) -> Buffers:
    sizes, lower, upper = np.array(buffers, dtype=np.int64).reshape(-1, 3).T
    return Buffers.from_lifetimes(sizes, lower, upper)


def crowd(seed: int, count: int) -> list[Buffer]:
    """Few sizes and short lives, so that there are twins, parts and ties."""
    rng = random.Random(seed)
    lower = [rng.randrange(6) for _ in range(count)]
    return [Buffer(rng.randint(1, 7), at, at + rng.randint(1, 4)) for at in lower]


def cut(seed: int, count: int, time: int, height: int) -> list[Buffer]:
    """A rectangle of time and memory cut into buffers, which take all of it."""
    rng = random.Random(seed)
    rectangles = [(0, time, 0, height)]
    while len(rectangles) < count:
        rectangle = max(rectangles, key=lambda r: (r[1] - r[0]) * (r[3] - r[2]) * rng.random())
        rectangles.remove(rectangle)
        left, right, bottom, top = rectangle
        if right - left > 1 and (top - bottom < 2 or rng.random() < 0.5):
            middle = rng.randrange(left + 1, right)
            rectangles += [(left, middle, bottom, top), (middle, right, bottom, top)]
        elif top - bottom > 1:
            middle = rng.randrange(bottom + 1, top)
            rectangles += [(left, right, bottom, middle), (left, right, middle, top)]
        else:
            rectangles.append(rectangle)
    rng.shuffle(rectangles)
    return [Buffer(top - bottom, left, right) for left, right, bottom, top in rectangles]


lifetimes = st.builds(
    lambda size, lower, duration: Buffer(size, lower, lower + duration),
    *(st.integers(1, 9), st.integers(0, 7), st.integers(1, 5)),
)


@given(st.lists(lifetimes, min_size=1, max_size=9))
def test_sections_keep_who_meets_whom(buffers: list[Buffer]) -> None:
    sections = arrays(buffers)
    starts, others = sections.neighbours
    for one, buffer in enumerate(buffers):
        expected = [k for k, other in enumerate(buffers) if k != one and buffer.meets(other)]
        assert others[starts[one] : starts[one + 1]].tolist() == expected
    assert sections.peak_nbytes == peak(buffers)
    spans = list(zip(sections.first.tolist(), sections.last.tolist(), strict=True))
    alive = [
        {k for k, (first, last) in enumerate(spans) if first <= section <= last}
        for section in range(len(sections.live_nbytes))
    ]
    assert not any(one <= other for one, other in permutations(alive, 2))


# The peak is 7 bytes, and 8 are needed.
WITH_GAP = [
    *(Buffer(4, 0, 3), Buffer(1, 3, 7), Buffer(1, 2, 6), Buffer(4, 5, 8)),
    *(Buffer(2, 2, 5), Buffer(3, 7, 9), Buffer(3, 0, 1)),
]
MIRRORED = [Buffer(size, -upper, -lower) for size, lower, upper in WITH_GAP]
BELOW_ANOTHER = [*WITH_GAP, Buffer(3, -1, 10)]
WITH_TWINS = [*WITH_GAP, Buffer(1, 8, 12), Buffer(1, 8, 12)]
GAPS = [WITH_GAP, MIRRORED, BELOW_ANOTHER, WITH_TWINS]


@pytest.mark.parametrize("buffers", GAPS, ids=["plain", "mirrored", "below another", "twins"])
def test_the_least_is_found_and_proved(buffers: list[Buffer]) -> None:
    placement = place(arrays(buffers))
    assert placement.nbytes == placement.bound_nbytes == least_nbytes(buffers) == peak(buffers) + 1
    assert flaw(buffers, placement.offsets.tolist(), placement.nbytes) is None


def choices(**fixed: bool) -> list[Inferences]:
    """All choices of inferences with some of them fixed."""
    free = [name for name in NAMES if name not in fixed]
    return [
        Inferences(**fixed, **dict(zip(free, values, strict=True)))
        for values in product([True, False], repeat=len(free))
    ]


@pytest.mark.parametrize("canonical", [True, False])
def test_every_choice_of_inferences_agrees(canonical: bool) -> None:
    """On what is feasible, to the last byte, and on what is not."""
    for buffers in [*GAPS, crowd(1, 7), crowd(2, 7), cut(1, 8, 6, 9), cut(2, 8, 5, 7)]:
        least = least_nbytes(buffers)
        for inferences in choices(canonical=canonical):
            status, offsets = solve(arrays(buffers), least, inferences=inferences)
            assert status == SOLVED, inferences
            assert flaw(buffers, offsets.tolist(), least) is None, inferences
            status, _ = solve(arrays(buffers), least - 1, inferences=inferences)
            assert status == INFEASIBLE, inferences


@taking(solved=10)
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 24), st.sampled_from(choices()))
def test_what_fits_is_never_proved_infeasible(
    taken: Counter[str], seed: int, count: int, inferences: Inferences
) -> None:
    buffers = cut(seed, count, 12, 20)
    status, offsets = solve(arrays(buffers), 20, nnodes=3000, inferences=inferences)
    assert status != INFEASIBLE
    if status == SOLVED:
        taken["solved"] += 1
        assert flaw(buffers, offsets.tolist(), 20) is None


@pytest.mark.parametrize("seed", range(12))
def test_the_least_sum_survives_the_bounds(seed: int) -> None:
    """After each of its placements, by ascending offset, no bound is above what follows."""
    buffers = crowd(seed, 6) if seed % 2 else cut(seed, 6, 6, 9)
    capacity = least_nbytes(buffers)
    offsets = least_sum(buffers, capacity)
    order = sorted(range(6), key=lambda k: (offsets[k], k))
    for count in range(1, 6):
        state = new_state(
            arrays(buffers),
            np.arange(6),
            by_total=False,
            capacity_nbytes=capacity,
            segment_nbytes=NO_SEGMENTS,
            inferences=Inferences(),
        )
        state.members[:] = order
        state.buffers["is_placed"][order[:count]] = 1
        for k in order[count:]:
            under = [o for o in order[:count] if buffers[o].meets(buffers[k])]
            tops = [offsets[o] + buffers[o].size for o in under]
            state.buffers["floor"][k] = max(tops, default=0)
        state.left_nbytes[:] = 0
        for k in order[count:]:
            buffer = state.buffers[k]
            state.left_nbytes[buffer["first"] : buffer["last"] + 1] += buffer["size"]
        latest = order[count - 1]
        assert most_left(state, -1, count, 6, offsets[latest], latest) > 0
        left = order[count:]
        assert (state.buffers["key"][left] <= np.array(offsets)[left]).all()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_fits_also_where_no_bound_has_risen(seed: int) -> None:
    """A placement is followed by a look at few sections; a look at all of them agrees."""
    buffers = arrays(cut(seed, 40, 60, 100))
    for nnodes in range(1, 200):
        state = new_state(
            buffers,
            np.arange(40),
            by_total=False,
            capacity_nbytes=100,
            segment_nbytes=NO_SEGMENTS,
            inferences=Inferences(lifting=False),
        )
        if search(state, nnodes) == SOLVED:
            break
        left = state.buffers[state.buffers["is_placed"] == 0]
        expected = np.zeros_like(state.left_nbytes)
        for buffer in left:
            expected[buffer["first"] : buffer["last"] + 1] += buffer["size"]
        assert (state.left_nbytes == expected).all()
        number = int(np.flatnonzero(state.frames["buffer"] < 0)[0])
        frame, before = state.frames[number], state.frames[number - 1]
        if number and not frame["is_part"]:
            # The other parts are left to place, too, and may go below.
            state.left_nbytes[: frame["first"]] = state.left_nbytes[frame["last"] + 1 :] = 0
            rest = (int(frame["begin"]), int(frame["end"]))
            assert most_left(state, -1, *rest, int(before["offset"]), int(before["rank"])) > 0


@pytest.mark.parametrize("seed", range(4))
def test_rectangles_cut_into_many_buffers_are_put_together_again(seed: int) -> None:
    buffers = cut(seed, 50, 60, 100)
    assert place(arrays(buffers), nsquares=0, nnodes=0).nbytes > 100, "too easy to tell"
    placement = place(arrays(buffers))
    assert placement.nbytes == placement.bound_nbytes == 100
    assert flaw(buffers, placement.offsets.tolist(), 100) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(lifetimes, min_size=1, max_size=6), st.integers(9, 12))
def test_no_buffer_lies_across_segments(buffers: list[Buffer], segment: int) -> None:
    placement = place(arrays(buffers), segment_nbytes=segment)
    assert placement.nbytes == least_nbytes(buffers, segment)
    assert flaw(buffers, placement.offsets.tolist(), placement.nbytes, segment) is None


def test_a_capacity_is_enough() -> None:
    buffers = cut(3, 50, 60, 100)
    placement = place(arrays(buffers), capacity_nbytes=103)
    assert 100 <= placement.nbytes <= 103
    assert placement.bound_nbytes == 100


def test_a_capacity_that_is_too_small_is_proved_so() -> None:
    placement = place(arrays(WITH_GAP), capacity_nbytes=7)
    assert placement.nbytes == placement.bound_nbytes == 8
    assert place(arrays(WITH_GAP), capacity_nbytes=3).bound_nbytes == 8


def test_without_placements_to_spend_nothing_is_proved() -> None:
    placement = place(arrays(WITH_GAP), nsquares=0, nnodes=0)
    assert (placement.nbytes, placement.bound_nbytes) == (8, 7)


def test_nothing_to_place() -> None:
    placement = place(arrays([]))
    assert (len(placement.offsets), placement.nbytes, placement.bound_nbytes) == (0, 0, 0)


def test_passes_find_what_few_placements_of_the_complete_search_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = cut(1, 150, 60, 1000)
    found = place(arrays(buffers), nnodes=3200)
    assert flaw(buffers, found.offsets.tolist(), found.nbytes) is None
    monkeypatch.setattr(placement, "MOST_PASSES", 0)
    assert found.nbytes < place(arrays(buffers), nnodes=3200).nbytes


@pytest.mark.parametrize("seed", range(3))
def test_what_is_small_fills_and_comes_on_top_where_it_lives_long(seed: int) -> None:
    rng = random.Random(seed)
    large = [buffer._replace(size=buffer.size << 22) for buffer in cut(seed, 40, 60, 1000)]
    starts = [rng.randrange(57) for _ in range(200)]
    small = [Buffer(rng.randint(1, 9), at, at + rng.choice((1, 3, 60 - at))) for at in starts]
    buffers = arrays(large + small)
    alone = Passes(arrays(large), 0, NO_SEGMENTS)
    alone.search(100)
    target_nbytes = alone.best.nbytes + sum(buffer.size for buffer in small)
    filled = Passes(buffers, target_nbytes, NO_SEGMENTS)
    filled.search(300)
    assert len(filled) == len(large)
    assert filled.capacity_nbytes < target_nbytes  # that of what lives long is left for it
    assert filled.is_enough
    assert flaw(large + small, filled.best.offsets.tolist(), filled.best.nbytes) is None


def test_where_all_is_small_all_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "SMALL", 1.0)
    buffers = crowd(0, 30)
    found = place(arrays(buffers))
    assert flaw(buffers, found.offsets.tolist(), found.nbytes) is None
    assert found.nbytes == peak(buffers)


def test_a_script_that_makes_numpy_raise_is_no_matter() -> None:
    """Where hardly anything is alive, powers of it are too small for a number."""
    buffers = [*cut(1, 150, 60, 1000), Buffer(20, 60, 61)]
    with np.errstate(all="raise"):
        found = place(arrays(buffers), nnodes=0)
    assert flaw(buffers, found.offsets.tolist(), found.nbytes) is None
