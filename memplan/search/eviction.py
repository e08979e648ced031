"""Schedules within a budget by dropping tensors between two of their reads, improved by search.

A decision is a drop (a, r): tensor a is not carried to its read by the first execution of op r.
If it is recomputed on the way, it stays from then on; with the drop (a, -r) it does not, and is
recomputed for r. What to drop is chosen where the peak is, by seconds of recomputation per byte,
as Kirisame et al. 2021 (Dynamic Tensor Rematerialization, arXiv:2006.09616) do online; the search
then takes some drops back and chooses again. Nothing is proved.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain
from typing import NamedTuple

from memplan.search.rematerialize import closure, repeatable
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

Drop = tuple[int, int]

# The share of drops that a step of the search takes back.
SHARES = (0.01, 0.03, 0.1, 0.3)


class Found(NamedTuple):
    """A schedule within the budget, and the drops that make it."""

    schedule: Schedule
    drops: frozenset[Drop]


class Evictions:
    """Turns drops into schedules, and chooses drops, within ``budget_nbytes``."""

    def __init__(
        self, graph: TrainingGraph, budget_nbytes: int, *, recompute_backward: bool = False
    ) -> None:
        self.graph = graph
        self.budget_nbytes = budget_nbytes
        again = repeatable(graph, backward=recompute_backward)
        heads = frozenset(graph.heads)
        end = len(graph.ops)
        self.readers = [
            (*readers, end) if a in heads else readers for a, readers in enumerate(graph.readers)
        ]
        self.fixed = [
            not again[graph.producer[a]] or not tensor.nbytes
            for a, tensor in enumerate(graph.tensors)
        ]

    def next_read(self, a: int, t: int) -> int | None:
        """The first read of ``a`` by a first execution after stage ``t``."""
        place = bisect_right(self.readers[a], t)
        return self.readers[a][place] if place < len(self.readers[a]) else None

    def _last_read(self, a: int, r: int) -> int:
        """The stage that reads ``a`` before stage ``r`` does, or that writes it."""
        place = bisect_left(self.readers[a], r)
        return self.readers[a][place - 1] if place else self.graph.producer[a]

    def drops_of(self, retained: Sequence[AbstractSet[int]]) -> set[Drop]:
        """The drops by which ``retained[t]`` are carried into stage t, as far as drops can say."""
        return {
            (a, r)
            for a, readers in enumerate(self.readers)
            for r in readers
            if not self.fixed[a]
            and r < len(self.graph.ops)
            and any(a not in retained[t] for t in range(self._last_read(a, r) + 1, r + 1))
        }

    def run(self, drops: AbstractSet[Drop]) -> tuple[list[list[int]], list[set[int]]]:
        """For every stage, the ops that run with these drops, and the tensors there before it."""
        graph = self.graph
        present: set[int] = set()
        before: list[set[int]] = []
        stages: list[list[int]] = []
        again: set[tuple[int, int | None]] = set()
        for t in range(len(graph.ops)):
            before.append(set(present))
            stages.append(closure(graph, (t,), present))
            for i in stages[-1]:
                present.update(graph.ops[i].outputs)
            touched = {a for i in stages[-1] for a in graph.ops[i].inputs}
            touched.update(a for i in stages[-1] for a in graph.ops[i].outputs)
            for i in stages[-1][:-1]:
                again.update((a, self.next_read(a, t)) for a in graph.ops[i].outputs)
            for a in touched:
                r = self.next_read(a, t)
                if not self.fixed[a] and (
                    r is None or ((a, r) in drops and ((a, r) not in again or (a, -r) in drops))
                ):
                    present.discard(a)
        return stages, before

    def fit(self, drops: Collection[Drop], deadline: float) -> Found | None:
        """Drop more until the budget is met; None if that fails, or time is up."""
        chosen = set(drops)
        while time.monotonic() < deadline:
            stages, before = self.run(chosen)
            schedule = Schedule.sequence(self.graph, chain.from_iterable(stages))
            live = simulate(schedule).live_nbytes
            peak = max(live, default=0)
            if peak <= self.budget_nbytes:
                return Found(schedule, frozenset(chosen))
            ends = list(accumulate(map(len, stages)))
            t = bisect_right(ends, live.index(peak))
            idle = self._idle(stages[t], live.index(peak) - ends[t], before[t])
            more = self._cheapest_drops(t, idle, before, peak - self.budget_nbytes, chosen)
            if not more:
                return None
            chosen |= more
        return None

    def _idle(self, stage_ops: Sequence[int], step: int, before: AbstractSet[int]) -> set[int]:
        """What is there at ``step`` (from the end) of a stage, but not read in the rest of it."""
        ops = self.graph.ops
        written = {a for i in stage_ops[:step] for a in ops[i].outputs}
        return (written | before).difference(*(ops[i].inputs for i in stage_ops[step:]))

    def _cheapest_drops(
        self,
        t: int,
        idle: Collection[int],
        before: Sequence[AbstractSet[int]],
        excess: int,
        chosen: AbstractSet[Drop],
    ) -> set[Drop]:
        """Drops of what is ``idle`` in stage ``t``, until ``excess`` bytes are free there."""
        graph = self.graph
        ranked = []
        for a in idle:
            r = self.next_read(a, t)
            if self.fixed[a] or r is None or r >= len(graph.ops) or (a, -r) in chosen:
                continue
            if (a, r) in chosen:
                r = -r
            again = closure(graph, (graph.producer[a],), before[abs(r)])
            seconds = sum(graph.ops[i].seconds for i in again)
            ranked.append((seconds / graph.tensors[a].nbytes, (a, r)))
        result: set[Drop] = set()
        for _, (a, r) in sorted(ranked):
            result.add((a, r))
            excess -= graph.tensors[a].nbytes
            if excess <= 0:
                break
        return result

    def improve(self, found: Found, deadline: float, *, patience: int, seed: int = 0) -> Found:
        """Take some drops back, choose again, keep what is no dearer.

        Ends at ``deadline``, or after ``patience`` attempts in a row without a cheaper schedule.
        """
        draw = random.Random(seed)
        stalled = 0
        while found.drops and stalled < patience and time.monotonic() < deadline:
            share = draw.choice(SHARES)
            left = {drop for drop in sorted(found.drops) if draw.random() > share}
            other = self.fit(left, deadline)
            stalled += 1
            if other is not None and other.schedule.seconds <= found.schedule.seconds:
                if other.schedule.seconds < found.schedule.seconds:
                    stalled = 0
                found = other
        return found


def lowest(graph: TrainingGraph, deadline: float) -> Schedule:
    """The least memory found at no more than the seconds of one extra forward pass."""
    most_seconds = graph.seconds + graph.forward_seconds
    best = Schedule.unplanned(graph)
    low, high = 0, simulate(best).peak_nbytes
    while high - low > max(1.0, 0.005 * high) and time.monotonic() < deadline:
        middle = (low + high) // 2
        search = Evictions(graph, middle)
        found = search.fit((), deadline)
        if found is not None and found.schedule.seconds > most_seconds:
            found = search.improve(found, deadline, patience=20)
        if found is None or found.schedule.seconds > most_seconds:
            low = middle
        else:
            best = found.schedule
            high = simulate(best).peak_nbytes
    return best
