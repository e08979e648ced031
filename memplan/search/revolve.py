"""Which points of a chain are stored when, so that visiting them backwards takes the fewest steps.

Griewank, Walther: Algorithm 799: revolve, ACM TOMS 26 (2000).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import comb


def forward_steps(npoints: int, slots: int) -> int:
    """The least executions that visit ``npoints`` points of a chain from the last to the first.

    The value at each point is computed from the one before it, that at the first from what is
    always there; ``slots`` values can be held. With l = npoints + 1 and the smallest r for which
    C(slots + r, slots) >= l it is r l - C(slots + r, r - 1) (Griewank & Walther 2000).
    """
    if npoints == 0:
        return 0
    length, r = npoints + 1, 1
    while comb(slots + r, slots) < length:
        r += 1
    return r * length - comb(slots + r, r - 1)


@functools.cache
def _split(npoints: int, slots: int) -> int:
    """How many steps to advance before storing, so that all takes the fewest steps."""
    if slots == 1:
        return npoints
    return min(
        range(1, npoints + 1),
        key=lambda m: m + forward_steps(npoints - m, slots - 1) + forward_steps(m - 1, slots),
    )


def stored_at(
    low: int, high: int, slots: int, checkpoints: frozenset[int]
) -> Iterator[tuple[int, frozenset[int]]]:
    """For each point from ``low`` to ``high`` - 1, what is there when it is to be visited."""
    while high > low:
        split = low + _split(high - low, slots) - 1
        has_rest = split + 1 < high
        yield split, checkpoints | {split} if has_rest else checkpoints
        if has_rest:
            yield from stored_at(split + 1, high, slots - 1, checkpoints | {split})
        high = split


def first_sweep(npoints: int, slots: int) -> Iterator[int]:
    """The points that are stored as the forward pass arrives at the end."""
    low = 0
    while low < npoints and slots > 0:
        low += _split(npoints - low, slots)
        slots -= 1
        yield low - 1
