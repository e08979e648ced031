"""Buffers to place: how many bytes each takes, and when it lives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memplan.util.compiled import compiled_with_arrays

Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Buffers:
    """``sizes[i]`` bytes live in every section of time from ``first[i]`` to ``last[i]``.

    Sections are numbered from 0. They are what is left of time where only the largest sets of
    buffers alive together count: no section's buffers are all alive in another one.
    """

    sizes: Array
    first: Array
    last: Array

    @staticmethod
    def from_lifetimes(sizes: Array, lower: Array, upper: Array) -> Buffers:
        """Buffers alive in [lower, upper) of any clock; ``lower < upper``."""
        # A section begins where a buffer is born after another one died.
        events = np.concatenate([upper, lower])
        is_birth = np.repeat([0, 1], len(sizes))
        order = np.lexsort((is_birth, events))
        section_of = np.zeros(len(order), dtype=np.int64)
        section_of[order[1:]] = (np.diff(is_birth[order]) > 0).cumsum()
        # Of a column of a table, compiled functions would have to be compiled anew.
        sizes = np.ascontiguousarray(sizes, dtype=np.int64)
        return Buffers(sizes, section_of[len(sizes) :], section_of[: len(sizes)])

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def live_nbytes(self) -> Array:
        """Bytes alive in every section."""
        changes = np.zeros(int(self.last.max(initial=-1)) + 2, dtype=np.int64)
        np.add.at(changes, self.first, self.sizes)
        np.add.at(changes, self.last + 1, -self.sizes)
        return changes.cumsum()[:-1]

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive in a section: no placement needs less."""
        return int(self.live_nbytes.max(initial=0))

    @cached_property
    def totals(self) -> Array:
        """For every buffer, the most bytes alive in a section of its life, its own included."""
        totals: Array = most_live(self.first, self.last, self.live_nbytes)
        return totals

    @cached_property
    def npairs(self) -> int:
        """The number of ordered pairs of buffers that are alive together."""
        begins, ends = np.sort(self.first), np.sort(self.last)
        before_its_end = np.searchsorted(begins, self.last, side="right")
        before_its_begin = np.searchsorted(ends, self.first, side="left")
        return int((before_its_end - before_its_begin).sum()) - len(self)

    @cached_property
    def neighbours(self) -> tuple[Array, Array]:
        """``starts, others``: alive together with i are ``others[starts[i] : starts[i + 1]]``."""
        neighbours: tuple[Array, Array] = list_neighbours(self.first, self.last, self.npairs)
        return neighbours

    @cached_property
    def twins(self) -> Array:
        """For every buffer, the one before it of the same size and lifetime; -1 without one."""
        latest: dict[tuple[int, int, int], int] = {}
        twins = np.full(len(self), -1, dtype=np.int64)
        keys = zip(self.sizes.tolist(), self.first.tolist(), self.last.tolist(), strict=True)
        for buffer, key in enumerate(keys):
            twins[buffer] = latest.get(key, -1)
            latest[key] = buffer
        return twins


@compiled_with_arrays
def most_live(first: Array, last: Array, live_nbytes: Array) -> Array:
    most = np.zeros(len(first), np.int64)
    for buffer in range(len(first)):
        for section in range(first[buffer], last[buffer] + 1):
            most[buffer] = max(most[buffer], live_nbytes[section])
    return most


@compiled_with_arrays
def list_neighbours(first: Array, last: Array, npairs: int) -> tuple[Array, Array]:
    starts = np.zeros(len(first) + 1, np.int64)
    others = np.zeros(npairs, np.int64)
    count = 0
    for one in range(len(first)):
        for other in range(len(first)):
            if one != other and first[one] <= last[other] and first[other] <= last[one]:
                others[count] = other
                count += 1
        starts[one + 1] = count
    return starts, others
