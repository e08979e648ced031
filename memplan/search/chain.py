"""Which points of a chain are stored when, by bytes: the least recomputation within a budget.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal checkpointing for heterogeneous chains,
INRIA RR-9302 (2019), over slices of a network: what crosses the cut before a slice may be stored,
and a slice may keep all that its backward pass reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.chain import PARTS, solve_chain


class Chain(NamedTuple):
    """Slices 0 to n - 1 of a forward pass: the seconds of each, and bytes.

    ``crossing_nbytes[s, k, t]`` cross cut k, which is before slice k, and not cut s, and are read
    in slices k to t. Besides what is stored, a slice takes ``running_nbytes`` when it runs and
    ``keeping_nbytes`` when it keeps what its backward pass reads; that is ``kept_nbytes[s, t]``
    with what slices up to t read of it. ``read_nbytes[s, t]`` cross cut s, and are read first in
    one of the slices up to t. The backward pass of a slice begins with ``waiting_nbytes``, and
    takes ``backward_nbytes`` with what the slice has kept.
    """

    seconds: Array
    crossing_nbytes: Array
    running_nbytes: Array
    keeping_nbytes: Array
    kept_nbytes: Array
    read_nbytes: Array
    waiting_nbytes: Array
    backward_nbytes: Array


class Stored(NamedTuple):
    """What is there as the backward pass comes to ``slice``: cuts, and slices that keep all.

    By the chain this many bytes are held at most while what the slice reads is made, 0 if nothing
    is, and while it runs backwards; without what is held beside the plan.
    """

    slice: int
    cuts: frozenset[int]
    slices: frozenset[int]
    making_nbytes: float
    backward_nbytes: float


class Kept(NamedTuple):
    """Cuts that are stored, and slices that keep all that their backward pass reads."""

    cuts: frozenset[int]
    slices: frozenset[int]

    def with_cut(self, cut: int) -> Kept:
        """And this cut."""
        return self._replace(cuts=self.cuts | {cut})

    def with_slice(self, s: int) -> Kept:
        """And slice s, and the cut behind it."""
        return Kept(self.cuts | {s + 1}, self.slices | {s})


class ChainPlans:
    """The plans of a chain that take the fewest seconds, for budgets up to ``budget_nbytes``.

    ``seconds[s, t, h]`` is what it takes to run slices s to t backwards where h parts of the budget
    are held of what was stored before; ``split[s, t, h]`` is the next cut that is stored, or s if
    slice s keeps all.
    """

    def __init__(self, chain: Chain, budget_nbytes: int) -> None:
        self.chain, self.nslices = chain, len(chain.seconds)
        self.unit = max(1, budget_nbytes) / PARTS
        self._parts = tuple(
            np.rint(nbytes / self.unit).astype(np.int64)
            for nbytes in (chain.crossing_nbytes, chain.kept_nbytes, chain.read_nbytes)
        )
        self.seconds = np.zeros((self.nslices, self.nslices, PARTS + 1))
        self.split = np.zeros(self.seconds.shape, dtype=np.int16)
        solve_chain(chain, self._parts, self.unit, self.seconds, self.split)

    def held_for(self, nbytes: float) -> int:
        """The parts of the budget that a plan of about this many bytes leaves."""
        return self.nearest(PARTS - round(nbytes / self.unit))

    def nearest(self, held: int) -> int:
        """This many parts, or the most below with which there is a plan; none if there is none."""
        some = np.flatnonzero(np.isfinite(self.seconds[0, -1]))
        return int(min(max(0, held), some.max(initial=-1)))

    def least_seconds(self, nbytes: float) -> float:
        """What the plan of about this many bytes takes."""
        return float(self.seconds[0, -1, self.held_for(nbytes)])

    def plan(self, held: int) -> list[Stored]:
        """The cheapest where this many parts of the budget are held by something else."""
        beside = held * self.unit
        parts = self._visit(0, self.nslices - 1, held, 0.0, Kept(frozenset({0}), frozenset()))
        return [
            part._replace(
                making_nbytes=max(0.0, part.making_nbytes - beside),
                backward_nbytes=part.backward_nbytes - beside,
            )
            for part in parts
        ]

    def _visit(self, s: int, t: int, held: int, making: float, stored: Kept) -> Iterator[Stored]:
        """The backward pass through slices t to s; ``making`` bytes were held before, for t."""
        chain, (crossing, kept, read) = self.chain, self._parts
        while t > s:
            k, here = int(self.split[s, t, held]), chain.waiting_nbytes[t] + self.unit * held
            if k == s:
                making = max(making, here + chain.keeping_nbytes[s])
                rest = held + int(kept[s, t])
                yield from self._visit(s + 1, t, rest, making, stored.with_slice(s))
                dead_nbytes = chain.read_nbytes[s, t] - chain.read_nbytes[s, s]
                own = self.unit * held + chain.backward_nbytes[s] - dead_nbytes
                yield Stored(s, *stored, 0.0, own)
                return
            running = chain.crossing_nbytes[s, s:k, t] + chain.running_nbytes[s:k]
            making = max(making, here + running.max())
            rest = held + int(crossing[s, k, t])
            yield from self._visit(k, t, rest, making, stored.with_cut(k))
            held = max(0, held - int(read[s, t] - read[s, k - 1]))
            t, making = k - 1, 0.0
        here = self.unit * held
        making = max(making, here + chain.waiting_nbytes[s] + chain.keeping_nbytes[s])
        yield Stored(s, *stored, making, here + chain.backward_nbytes[s])


def corrected(chain: Chain, plan: Sequence[Stored], making: Array, backward: Array) -> Chain:
    """The chain that says of ``plan`` what that has turned out to hold.

    While what each slice reads was made, and while it ran backwards: nan where nothing was.
    """
    of_making, of_backward = np.zeros_like(making), np.zeros_like(backward)
    for part in plan:
        of_backward[part.slice] = backward[part.slice] - part.backward_nbytes
        if part.making_nbytes:
            of_making[part.slice] = making[part.slice] - part.making_nbytes
    return chain._replace(
        waiting_nbytes=chain.waiting_nbytes + np.nan_to_num(of_making),
        backward_nbytes=chain.backward_nbytes + np.nan_to_num(of_backward),
    )


def compile_chain() -> None:
    """Compile, or load what was compiled before."""
    one = np.zeros(1)
    square = np.zeros((1, 1))
    ChainPlans(Chain(one, np.zeros((1, 1, 1)), one, one, square, square, one, one), 1)
