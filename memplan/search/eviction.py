"""Schedules within a budget by dropping tensors between two of their reads, improved by search.

A decision is a drop (a, r): tensor a is not carried to its read by the first execution of op r.
If it is recomputed on the way, it stays from then on; with the drop (a, -r) it does not, and is
recomputed for r. What to drop is chosen where the peak is, by seconds of recomputation per byte
(:mod:`memplan.search.kernels.greedy`); the search then takes some drops back and chooses again.
Nothing is proved.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import cycle, islice, pairwise
from typing import NamedTuple

import numpy as np

from memplan.search.buffers import carried_ranges
from memplan.search.kernels.arrays import Array, graph_arrays
from memplan.search.kernels.greedy import (
    FITS,
    FULL,
    ONCE,
    STUCK,
    TWICE,
    DropState,
    drop_arrays,
    drop_state,
    fit,
    run,
)
from memplan.search.kernels.replay import UNLIMITED, ReplayMemory, replay_memory
from memplan.search.online import online_schedules
from memplan.search.rematerialize import repeatable
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

Drop = tuple[int, int]

# What a step of the search takes back: a share of all drops, or of those around an op, within this
# part of all ops. Set on the networks that benchmarks/gaps.py calls tuned.
SHARES = (0.01, 0.03, 0.1, 0.3)
AROUND, SHARES_AROUND = (0.02, 0.05, 0.1, 0.2, 0.4), (0.2, 0.5, 1.0)

# Searches from several schedules: this many, of which each makes this many attempts; then the
# better half goes on, twice as long.
SEARCHES, ATTEMPTS = 8, 40

# At this many peaks tensors are dropped between two looks at the clock.
PEAKS_BETWEEN_LOOKS_AT_THE_CLOCK = 8

# There is room for sequences of this many times the ops at first, and of as many more as it takes.
ROOM = 4

# What dropping between two looks at the clock costs in work, times the root of the number of ops:
# measured on the zoo's ResNet-50 and DenseNet-121.
WORK_BY_ROOT = 9.0


@functools.cache
def compile_evictions() -> None:
    """Compile, or load what was compiled before: once in a process."""
    graph = TrainingGraph((Op("warm", "op", (), (0,), 1.0),), (Tensor("warm", 4, 1),), (0,), 1)
    Evictions(graph, 0).fit((), Stop(math.inf))


class Fit(NamedTuple):
    """A schedule within the budget, and the drops that make it."""

    schedule: Schedule
    drops: frozenset[Drop]


class _Plan(NamedTuple):
    """Drops that keep the budget, as bits of each read; the ops that run then; seconds."""

    drop_bits: Array
    ops: Array
    seconds: float


class Evictions:
    """Turns drops into schedules, and chooses drops, within ``budget_nbytes``."""

    def __init__(
        self, graph: TrainingGraph, budget_nbytes: int, *, recompute_backward: bool = False
    ) -> None:
        self.graph = graph
        self.budget_nbytes = _counted(budget_nbytes)
        self._recompute_backward = recompute_backward
        self._arrays = drop_arrays(graph, repeatable(graph, backward=recompute_backward))
        self._graph_arrays = graph_arrays(graph)
        ends = self._arrays.first_read.tolist()
        reads = self._arrays.reads.tolist()
        self.readers = [tuple(reads[i:j]) for i, j in pairwise(ends)]
        # The drop of each read and of what is recomputed before it, in ascending order.
        owners = np.repeat(np.arange(len(graph.tensors)), np.diff(self._arrays.first_read))
        self._drops: list[Drop] = sorted(
            (int(a), sign * r) for a, r in zip(owners, reads, strict=True) for sign in (1, -1)
        )
        place = {(int(a), r): k for k, (a, r) in enumerate(zip(owners, reads, strict=True))}
        self._places = np.array([place[a, abs(r)] for a, r in self._drops], dtype=np.int64)
        self._bits = np.array([ONCE if r >= 0 else TWICE for _, r in self._drops], dtype=np.int8)
        self._number = {drop: k for k, drop in enumerate(self._drops)}
        self._reading = np.array([abs(r) for _, r in self._drops], dtype=np.int64)
        self._writing = np.array([graph.producer[a] for a, _ in self._drops], dtype=np.int64)
        self._state, self._memory = self._room(ROOM * len(graph.ops) + 1)

    def _room(self, capacity: int) -> tuple[DropState, ReplayMemory]:
        state = drop_state(self._arrays, capacity)
        return state, replay_memory(self._graph_arrays, capacity, state.events.shape[1] // 2)

    def within(self, budget_nbytes: int) -> Evictions:
        """The same for another budget, with what takes time to make; one at a time may run."""
        result = copy.copy(self)
        result.budget_nbytes = _counted(budget_nbytes)
        return result

    def next_read(self, a: int, t: int) -> int | None:
        """The first read of ``a`` by a first execution after stage ``t``."""
        place = bisect_right(self.readers[a], t)
        return self.readers[a][place] if place < len(self.readers[a]) else None

    def drops_of(self, contents: Sequence[AbstractSet[int]]) -> set[Drop]:
        """The drops by which ``contents[t]`` are carried into stage t, as far as drops can say."""
        return {
            (a, r) for a, r, stages in self._waits() if any(a not in contents[t] for t in stages)
        }

    def drops_in(self, schedule: Schedule) -> set[Drop]:
        """The drops of what ``schedule`` carries: in little memory also where it has many steps."""
        ranges = carried_ranges(schedule)
        return {(a, r) for a, r, stages in self._waits() if not _has_all(ranges[a], stages)}

    def _waits(self) -> Iterator[tuple[int, int, range]]:
        """Tensor, reading op, and the stages into which it is carried unless that is a drop."""
        for a, readers in enumerate(self.readers):
            before = self.graph.producer[a]
            for r in readers:
                if not self._arrays.fixed[a] and r < len(self.graph.ops):
                    yield a, r, range(before + 1, r + 1)
                before = r

    def stages(self, drops: AbstractSet[Drop]) -> list[list[int]]:
        """For every stage, the ops that run with these drops."""
        self._state.dropped[:] = self._bits_of(drops)
        while run(self._arrays, self._state) < 0:
            self._grow()
        ends = [0, *self._state.ends.tolist()]
        ops = self._state.ops.tolist()
        return [ops[i:j] for i, j in pairwise(ends)]

    def _bits_of(self, drops: Iterable[Drop]) -> Array:
        """The bits of each read."""
        numbers = [self._number[drop] for drop in drops if drop in self._number]
        result = np.zeros(len(self._arrays.reads), dtype=np.int8)
        np.bitwise_or.at(result, self._places[numbers], self._bits[numbers])
        return result

    def _grow(self) -> None:
        """Make room for longer sequences, with the same drops."""
        state, self._memory = self._room(2 * len(self._state.ops))
        state.dropped[:] = self._state.dropped
        self._state = state

    def fit(self, drops: Collection[Drop], stop: Stop) -> Fit | None:
        """Drop more until the budget is met; None if that fails, or time is up."""
        plan = self._fit(self._bits_of(drops), stop)
        return None if plan is None else self._fit_of(plan)

    def first(self, online: Schedule | None, stop: Stop) -> Fit | None:
        """The cheaper one of what is chosen from nothing, and from what is dropped ``online``."""
        from_nothing = self.fit((), stop)
        if online is None or (from_nothing and from_nothing.schedule.seconds <= online.seconds):
            return from_nothing
        from_online = self.fit(self.drops_in(online), stop)
        fits = [plan for plan in (from_nothing, from_online) if plan is not None]
        return min(fits, key=lambda plan: plan.schedule.seconds, default=None)

    def cheapest_online(self, stop: Stop) -> Schedule | None:
        """The cheapest schedule of online eviction within the budget."""
        schedules = online_schedules(
            self.graph, self.budget_nbytes, stop, recompute_backward=self._recompute_backward
        )
        matches = [s for s in schedules if simulate(s).peak_nbytes <= self.budget_nbytes]
        return min(matches, key=lambda schedule: schedule.seconds, default=None)

    def _fit(self, drop_bits: Array, stop: Stop) -> _Plan | None:
        self._state.dropped[:] = drop_bits
        while not stop.is_over():
            end, length, seconds = fit(
                *(self._arrays, self._graph_arrays, self._state, self._memory),
                *(self.budget_nbytes, PEAKS_BETWEEN_LOOKS_AT_THE_CLOCK),
            )
            stop.spend(WORK_BY_ROOT * len(self.graph.ops) ** 0.5)
            if end == FITS:
                state = self._state
                return _Plan(state.dropped.copy(), state.ops[:length].copy(), seconds)
            if end == STUCK:
                return None
            if end == FULL:
                self._grow()
        return None

    def _fit_of(self, plan: _Plan) -> Fit:
        schedule = Schedule.sequence(self.graph, plan.ops.tolist())
        return Fit(schedule, frozenset(self._drops[k] for k in self._chosen(plan.drop_bits)))

    def _chosen(self, drop_bits: Array) -> Array:
        """The numbers of the drops with these bits."""
        return np.flatnonzero(drop_bits[self._places] & self._bits)

    def improve(self, fit: Fit, stop: Stop, *, patience: int, seed: int = 0) -> Fit:
        """Take some drops back, choose again, keep what is no more expensive.

        Ends after ``patience`` attempts in a row without a cheaper schedule, or with ``stop``.
        """
        return improve_best([Start(self, fit)], stop, patience=patience, seed=seed).fit

    def improve_or_end(self, fit: Fit, stop: Stop, *, patience: int, seed: int = 0) -> Fit:
        """As :meth:`improve`; an interrupt ends it, and ``stop``, with the best so far."""
        descent = _Descent(self, fit, seed)
        try:
            descent.go_on(None, patience, stop)
        except KeyboardInterrupt:
            stop.end()
        return descent.fit()


class Start(NamedTuple):
    """What a search begins with: a schedule, and what has made it."""

    evictions: Evictions
    fit: Fit


def improve_best(starts: Sequence[Start], stop: Stop, *, patience: int, seed: int) -> Start:
    """Searches from several ``starts`` in turn, and again until there are enough; the best.

    A single search depends on its luck: the better half of them goes on, until one is left.
    """
    attempts = ATTEMPTS
    ranked = sorted(starts, key=lambda start: start.fit.schedule.seconds)
    turns = islice(cycle(ranked), SEARCHES) if len(starts) > 1 else ranked
    descents = [_Descent(*start, seed + k) for k, start in enumerate(turns)]
    while len(descents) > 1:
        for descent in descents:
            descent.go_on(attempts, patience, stop)
        descents.sort(key=lambda descent: descent.best.seconds)
        del descents[(len(descents) + 1) // 2 :]
        attempts *= 2
    descents[0].go_on(None, patience, stop)
    return Start(descents[0].evictions, descents[0].fit())


class _Descent:
    """A search that takes some drops back, chooses again, and keeps what is no more expensive."""

    def __init__(self, evictions: Evictions, start: Fit, seed: int) -> None:
        self.evictions, self._start, self._draw = evictions, start, random.Random(seed)
        schedule = start.schedule
        drop_bits = evictions._bits_of(start.drops)
        self._first = self.best = _Plan(drop_bits, np.array(schedule.ops), schedule.seconds)
        self._stalled = 0

    def fit(self) -> Fit:
        """The best so far."""
        return self._start if self.best is self._first else self.evictions._fit_of(self.best)

    def go_on(self, attempts: int | None, patience: int, stop: Stop) -> None:
        """Make ``attempts``, at the most until ``patience`` of them in a row found nothing."""
        count = 0
        while count != attempts and self._stalled < patience and self.best.drop_bits.any():
            if stop.is_over():
                return
            other = self.evictions._fit(self._with_less(), stop)
            count, self._stalled = count + 1, self._stalled + 1
            if other is not None and other.seconds <= self.best.seconds:
                if other.seconds < self.best.seconds:
                    self._stalled = 0
                self.best = other

    def _with_less(self) -> Array:
        """The drops of the best, some of them taken back."""
        draw, evictions = self._draw, self.evictions
        drops = evictions._chosen(self.best.drop_bits)
        if draw.random() < 0.5:
            share, near = draw.choice(SHARES), np.ones(len(drops), dtype=np.bool_)
        else:
            share, near = draw.choice(SHARES_AROUND), self._around(drops)
        rest = drops[[not (is_near and draw.random() < share) for is_near in near]]
        drop_bits = np.zeros_like(self.best.drop_bits)
        np.bitwise_or.at(drop_bits, evictions._places[rest], evictions._bits[rest])
        return drop_bits

    def _around(self, drops: Array) -> Array:
        """Which of these drops are around an op: a chain or branch, forward or backward."""
        draw, evictions = self._draw, self.evictions
        nops = len(evictions.graph.ops)
        half = 0.5 * draw.choice(AROUND) * nops
        ops = draw.choice((evictions._reading, evictions._writing))[drops]
        near: Array = np.abs(ops - draw.random() * nops) < half
        return near


def _counted(budget_nbytes: int) -> int:
    """The same budget, as large as compiled code can count."""
    return max(-1, min(budget_nbytes, UNLIMITED))


def _has_all(ranges: Iterable[range], stages: range) -> bool:
    """Is each of ``stages`` in one of ``ranges``?"""
    end = stages.start
    for part in sorted(ranges, key=lambda part: part.start):
        if part.start <= end:
            end = max(end, part.stop)
    return end >= stages.stop
