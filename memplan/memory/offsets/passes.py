"""Passes over buffers, one order after another: where a pass ends depends on its order alone.

An order is by descending keys, each a product of powers of what a buffer is: the most bytes alive
in its life, how many sections that spans, and its own bytes. No powers suit all networks. So a
search begins with random ones, and goes on from the best of them: it changes the keys of some
buffers, and takes back what makes it worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.memory.offsets.buffers import Array, Buffers
from memplan.memory.offsets.quick import first_fit, lowest_first

Keys = NDArray[np.float64]


class Form(NamedTuple):
    """The exponents of a key, in quarters: of the most bytes alive, of the length, of the bytes."""

    total: int
    length: int
    size: int


# One pass each comes first. Set on 14 sequences near the least memory of networks of 39 to 2,283
# ops, where the best of these ends 1.35% above the peak on average, and that of 112 forms 1.1%.
FORMS = (
    Form(512, 4, 2),
    Form(4, 4, 4),
    Form(512, 4, 4),
    Form(16, 3, 4),
    Form(32, 1, 2),
    Form(512, 2, 4),
)
# The search draws exponents from these, and disturbs every key by up to one of these shares.
TOTALS, LENGTHS, SIZES = (0, 4, 8, 16, 32, 128, 512), (1, 2, 3, 4, 6, 8), (2, 4)
NOISES = (0.0, 0.2, 0.6)
# It begins with so many, and makes so many changes of the best; then it begins anew.
NDRAWN, NCHANGED = 20, 80
# A change multiplies or divides up to this share of the keys, mostly few, by 1 to 1 + STRETCH. What
# is worse is kept as in annealing, at first up to this share of what was over, at last never.
MOST_CHANGED, STRETCH, HOT = 0.05, 2.0, 0.1

# Buffers of less than this share of the peak are left out, and fill what lies between the others:
# two in five of an SE-ResNet, whose passes take a third of the time without. Nothing lies free
# between others for long: those that live longer than this part of the step, statistics of
# BatchNorms mostly, come on top.
SMALL, LONG = 1e-5, 0.1


@dataclass(frozen=True, eq=False)
class Placement:
    """``offsets[i]`` of buffer i, within ``nbytes``; none takes less than ``bound_nbytes``."""

    offsets: Array
    nbytes: int
    bound_nbytes: int


def placement_of(buffers: Buffers, offsets: Array) -> Placement:
    """That of these offsets, of which only the peak is known to be needed."""
    nbytes = int((offsets + buffers.sizes).max(initial=0))
    return Placement(offsets, nbytes, buffers.peak_nbytes)


class Passes:
    """Passes over ``buffers``, and the ``best`` placement of them.

    ``target_nbytes`` are enough. No buffer lies across a multiple of ``segment_nbytes``.
    """

    def __init__(self, buffers: Buffers, target_nbytes: int, segment_nbytes: int) -> None:
        self.buffers, self.target_nbytes = buffers, target_nbytes
        self.segment_nbytes = segment_nbytes
        is_small = buffers.sizes < SMALL * buffers.peak_nbytes
        if is_small.all():
            is_small[:] = False
        is_long = is_small & (_lengths(buffers) > LONG * len(buffers.live_nbytes))
        self.large = np.flatnonzero(~is_small)
        fields = (buffers.sizes, buffers.first, buffers.last)
        self.kept = Buffers(*(values[self.large] for values in fields))
        self.small = np.lexsort((-buffers.sizes, ~is_long, ~is_small))[: int(is_small.sum())]
        on_top = self._filled(np.zeros(len(buffers), dtype=np.int64), np.flatnonzero(is_long), 0)
        tops = (on_top.offsets + buffers.sizes)[is_long]
        self.capacity_nbytes = target_nbytes - int(tops.max(initial=0))  # for the others
        self.lowest, self.unfilled = np.inf, np.empty(0, dtype=np.int64)
        self.best = self._filled(np.zeros(len(buffers), dtype=np.int64), _by_size(buffers), 0)

    def __len__(self) -> int:
        """How many buffers a pass places."""
        return len(self.large)

    @property
    def is_enough(self) -> bool:
        return self.best.nbytes <= self.target_nbytes

    def run_forms(self) -> None:
        """One pass for each of FORMS, until one is enough."""
        for form in FORMS:
            if self.is_enough:
                return
            self._run(self._keys(form))
        self._fill()

    def search(self, npasses: int) -> None:
        """So many passes, until one is enough; always the same ones."""
        for _ in islice(self._passes(np.random.default_rng(0)), npasses):
            if self.is_enough:
                return
        self._fill()

    def _passes(self, random: np.random.Generator) -> Iterator[float]:
        """Passes without end; what each is over."""
        while True:
            least, keys = np.inf, np.empty(0)
            for _ in range(NDRAWN):
                exponents = (random.choice(values) for values in (TOTALS, LENGTHS, SIZES))
                drawn = self._keys(Form(*exponents))
                drawn *= 1.0 + random.choice(NOISES) * random.random(len(self))
                over = self._run(drawn)
                if over < least:
                    least, keys = over, drawn
                yield over
            hot, over = HOT * least, least
            for number in range(NCHANGED):
                changed = self._changed(keys, random)
                is_over = self._run(changed)
                heat = hot * (1.0 - number / NCHANGED)
                if is_over <= over + heat * random.random():
                    over, keys = is_over, changed
                yield is_over

    def _changed(self, keys: Keys, random: np.random.Generator) -> Keys:
        """The keys, some of them changed."""
        share = MOST_CHANGED * random.random() * random.random()
        count = 1 + int(share * len(self))
        chosen = random.integers(0, len(self), count)
        factors = 1.0 + STRETCH * random.random(count)
        changed = keys.copy()
        changed[chosen] *= np.where(random.random(count) < 0.5, factors, 1.0 / factors)
        return changed

    def _keys(self, form: Form) -> Keys:
        kept = self.kept
        totals = kept.totals / max(1, int(kept.totals.max(initial=0)))
        lengths = _lengths(kept).astype(np.float64)
        sizes = kept.sizes.astype(np.float64)
        with np.errstate(under="ignore"):  # keys of what is alive with little may all be 0
            keys = _power(totals, form.total) * _power(lengths, form.length)
            return keys * _power(sizes, form.size)

    def _run(self, keys: Keys) -> float:
        """A pass, by descending keys; what lies above the capacity, in bytes times sections."""
        kept = self.kept
        order = np.argsort(-keys, kind="stable")
        offsets = lowest_first(kept.sizes, kept.first, kept.last, order, self.segment_nbytes)
        tops = offsets + kept.sizes
        if tops.max(initial=0) < self.lowest:
            self.lowest, self.unfilled = tops.max(initial=0), offsets
            if self.lowest <= self.capacity_nbytes:
                self._fill()
        over = np.clip(tops - self.capacity_nbytes, 0, kept.sizes).astype(np.float64)
        # Added up one by one, and so equal on all machines.
        return float(np.cumsum(over * _lengths(kept))[-1])

    def _fill(self) -> None:
        """Fill the lowest pass, which takes longer than a pass where much is small."""
        offsets, self.unfilled = self.unfilled, self.unfilled[:0]
        if len(offsets):
            placed = np.zeros(len(self.buffers), dtype=np.int64)
            placed[self.large] = offsets
            by_offset = self.large[np.argsort(offsets, kind="stable")]
            filled = self._filled(placed, np.concatenate([by_offset, self.small]), len(by_offset))
            self.best = min(self.best, filled, key=lambda option: option.nbytes)

    def _filled(self, offsets: Array, order: Array, nplaced: int) -> Placement:
        """A placement by first fit of what is not placed yet."""
        buffers = self.buffers
        fields = (buffers.sizes, buffers.first, buffers.last, order, self.segment_nbytes)
        first_fit(*fields, offsets, nplaced)
        return placement_of(buffers, offsets)


def _lengths(buffers: Buffers) -> Array:
    return buffers.last - buffers.first + 1


def _by_size(buffers: Buffers) -> Array:
    order: Array = np.lexsort((buffers.first, -buffers.sizes))
    return order


def _power(values: Keys, quarters: int) -> Keys:
    """The values to the power of so many quarters, equal on all machines: by roots and products."""
    result, factor = np.ones(len(values)), np.sqrt(np.sqrt(values))
    while quarters:
        if quarters % 2:
            result = result * factor
        factor = factor * factor
        quarters //= 2
    return result
