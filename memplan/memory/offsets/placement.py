"""Offsets of buffers in as few bytes as possible, and what is proved about them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from memplan.memory.offsets.buffers import Array, Buffers
from memplan.memory.offsets.complete import INFEASIBLE, SOLVED, UNKNOWN, search
from memplan.memory.offsets.inferences import Inferences
from memplan.memory.offsets.passes import Passes, Placement, placement_of
from memplan.memory.offsets.state import new_state

NO_SEGMENTS = 1 << 60
"""A segment that holds everything."""

ALL = Inferences()

# Orders of the complete search, descending: by the fullest section of a lifetime (T), its length
# (W), its length times the bytes (A). Moffitt 2023 has the same three.
SEARCHED = ("TWA", "TAW", "WAT")

# The complete search begins with FIRST_NNODES placements in every order, at least with two for
# every buffer, and doubles them. In between, as many placements in all go to orders disturbed by
# up to NOISE, RESTART_NNODES each. Set on MiniMalloc's A to J, and on rectangles cut into 100 to
# 200 buffers: where an order has no solution within a few thousand placements, it often has none
# within a million, but one in ten disturbed orders has one within RESTART_NNODES.
FIRST_NNODES = 500
RESTART_NNODES = 2000
NOISE = 0.3

# Before the complete search so many passes are made at most, and of many buffers fewer, as a pass
# takes time by the square of their number.
MOST_PASSES, MOST_SQUARES = 1000, 1_000_000_000

# Sizes that are tried after the first, and the part of its placements that each one gets.
MOST_SIZES = 6
SHARE = 0.25

# More pairs of buffers alive together take too much memory and time for the complete search.
MOST_PAIRS = 8_000_000


@functools.cache
def compile_placement() -> None:
    """Compile, or load what was compiled before: once in a process."""
    sizes, lower, upper = (np.array(values, dtype=np.int64) for values in ((1, 1), (0, 1), (2, 3)))
    buffers = Buffers.from_lifetimes(sizes, lower, upper)
    Passes(buffers, -1, NO_SEGMENTS).search(1)
    solve(buffers, 2)


def place(
    buffers: Buffers,
    *,
    capacity_nbytes: int | None = None,
    segment_nbytes: int = NO_SEGMENTS,
    nsquares: int = MOST_SQUARES,
    nnodes: int = 1_000_000,
) -> Placement:
    """Offsets within ``capacity_nbytes``, by default in the fewest bytes; always the same ones.

    No buffer lies across a multiple of ``segment_nbytes``. Passes are made as long as the squares
    of the number of buffers add up to ``nsquares``. The complete search places ``nnodes`` buffers
    at most for the capacity or, without one, for the peak of the bytes alive; where it then still
    does not know, a part (SHARE) of that for each larger size that it tries. So the placement may
    need more than is asked for; ``bound_nbytes`` says whether that is proved.
    """
    bound = buffers.peak_nbytes
    target = bound if capacity_nbytes is None else max(bound, capacity_nbytes)
    if not len(buffers):
        return Placement(np.zeros(0, dtype=np.int64), 0, 0)
    passes = Passes(buffers, target, segment_nbytes)
    passes.run_forms()
    passes.search(min(MOST_PASSES, nsquares // max(1, len(passes) ** 2)))
    best = passes.best
    if best.nbytes <= target or nnodes < 1 or buffers.npairs > MOST_PAIRS:
        return best
    unit = math.gcd(segment_nbytes, int(np.gcd.reduce(buffers.sizes)))
    low = 0  # the largest size that is too small, or not solved
    for attempt in range(1 if capacity_nbytes is not None else 1 + MOST_SIZES):
        most = nnodes if attempt == 0 else int(SHARE * nnodes)
        status, offsets = solve(buffers, target, segment_nbytes=segment_nbytes, nnodes=most)
        if status == SOLVED:
            best = replace(placement_of(buffers, offsets), bound_nbytes=bound)
        else:
            low = target
        if status == INFEASIBLE:
            bound = (target // unit + 1) * unit
            best = replace(best, bound_nbytes=bound)
        target = (low + best.nbytes) // 2 // unit * unit
        if best.nbytes <= max(bound, capacity_nbytes or 0) or target <= low:
            break
    return best


def _ranks(buffers: Buffers, name: str, noise: np.random.Generator | None = None) -> Array:
    """The place of every buffer in an order; see SEARCHED."""
    width = buffers.last - buffers.first + 1
    keys = {
        "T": buffers.totals,
        "W": width,
        "A": width * buffers.sizes,
    }
    if noise is not None:
        for key in "WA":
            keys[key] = keys[key] * (1.0 + NOISE * noise.random(len(buffers)))
    order = np.lexsort([-keys[key] for key in reversed(name)])
    ranks = np.empty(len(buffers), dtype=np.int64)
    ranks[order] = np.arange(len(buffers))
    return ranks


def _trials(buffers: Buffers) -> Iterator[tuple[str, Array, int]]:
    """Orders without end, their ranks, and the placements to spend on each."""
    noise = np.random.default_rng(0)
    nnodes = max(FIRST_NNODES, 2 * len(buffers))
    restart_nnodes = max(RESTART_NNODES, 2 * len(buffers))
    while True:
        for name in SEARCHED:
            yield name, _ranks(buffers, name), nnodes
        nrestarts = len(SEARCHED) * nnodes // restart_nnodes
        for name in islice(cycle(SEARCHED), nrestarts):
            yield name, _ranks(buffers, name, noise), restart_nnodes
        nnodes *= 2


def solve(
    buffers: Buffers,
    capacity_nbytes: int,
    *,
    segment_nbytes: int = NO_SEGMENTS,
    nnodes: int = 1_000_000,
    inferences: Inferences = ALL,
) -> tuple[int, Array]:
    """A status and, if that is SOLVED, offsets: of a complete search in several orders in turn.

    INFEASIBLE is proved; UNKNOWN: ``nnodes`` placements of a buffer were not enough. An order may
    be lucky where another one is not, by a factor of thousands, so each gets few at first.
    """
    for name, ranks, most in _trials(buffers):
        state = new_state(
            buffers,
            ranks,
            by_total=name.startswith("T"),
            capacity_nbytes=capacity_nbytes,
            segment_nbytes=segment_nbytes,
            inferences=inferences,
        )
        status = search(state, min(most, nnodes))
        nnodes -= int(state.counts[0]["nnodes"])
        if status != UNKNOWN or nnodes <= 0:
            break
    return status, state.buffers["floor"].copy()
