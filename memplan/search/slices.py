"""Schedules that store all that crosses some cuts of the forward pass, and recompute slices.

Where a network has no points to cut at, as an unrolled recurrent one has none, what is read across
a cut of its order is a set of tensors. Between two cuts lies a slice. The backward pass visits
slices from the last to the first: what is stored when is decided as on a chain
(:mod:`memplan.search.revolve`), and a slice is recomputed from the nearest cut before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from memplan.search.eager import better_order
from memplan.search.kernels.arrays import Array, graph_arrays
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.search.rematerialize import carried_always, closure
from memplan.search.revolve import first_sweep, stored_at
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# So many cuts are tried, each with as many slots, then with so many fewer at a time, until a
# schedule fits. A cut may be this part of a slice away from where slices have equal bytes. Set on
# unrolled recurrent networks, and on U-Nets.
COUNTS = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90)
FEWER, LEVELS, LEEWAY = 1.5, 9, 0.4

# Longer sequences, in steps of the unplanned one, are given up.
MOST_STEPS = 4

# What a schedule costs in work, for every op: measured on unrolled networks of 1,300 and 4,800 ops.
WORK_BY_OPS = 2.0

# The cheapest is chosen for these parts of the budget; bytes over that, in budgets, cost so many
# steps.
SLACKS, EXCESS_SECONDS = (1.0, 0.95, 0.9), 5.0


def sliced_schedules(
    graph: TrainingGraph, budget_nbytes: int, stop: Stop, *, reorder: bool
) -> list[Schedule]:
    """The cheapest within about the budget, or those that are cheapest for how far they are over.

    Without backward ops there are none. With ``reorder`` backward ops may change their order.
    """
    if graph.nforward == len(graph.ops):
        return []
    entries: list[tuple[int, float, list[int]]] = []
    arrays, seconds = graph_arrays(graph), np.array([op.seconds for op in graph.ops])
    memory = replay_memory(arrays, MOST_STEPS * len(graph.ops))
    order = better_order(graph) if reorder else range(len(graph.ops))
    for ops in _levels(graph, order, entries, budget_nbytes, stop):
        steps = np.array(ops, dtype=np.int64)
        peak = int(replay(arrays, memory, steps, len(steps), 0, UNLIMITED)[1])
        entries.append((peak, float(seconds[steps].sum()), ops))

    def cost(entry: tuple[int, float, list[int]], aim: float) -> float:
        excess = max(0.0, entry[0] / max(1.0, aim) - 1.0)
        return entry[1] + EXCESS_SECONDS * excess * graph.seconds

    best = [min(entries, key=lambda e: cost(e, s * budget_nbytes)) for s in SLACKS if entries]
    unique = {id(entry[2]): entry[2] for entry in best}
    return [Schedule.sequence(graph, ops) for ops in unique.values()]


def _levels(
    graph: TrainingGraph,
    order: Sequence[int],
    entries: Sequence[tuple[int, float, list[int]]],
    budget_nbytes: int,
    stop: Stop,
) -> Iterator[list[int]]:
    """Sequences with ever fewer slots, until one of those ``entries`` is well within the budget."""
    slices = {cuts: _Slices(graph, cuts, order) for cuts in _distinct_cuts(graph)}
    pairs = set()
    for level in range(LEVELS):
        for cuts in slices:
            slots = max(1, round(len(cuts) / FEWER**level))
            if (cuts, slots) in pairs:
                continue
            pairs.add((cuts, slots))
            if stop.is_over():
                return
            stop.spend(WORK_BY_OPS * len(graph.ops))
            ops = slices[cuts].sequence(slots)
            if ops is not None:
                yield ops
        if any(peak <= SLACKS[-1] * budget_nbytes for peak, _, _ in entries):
            return


def _distinct_cuts(graph: TrainingGraph) -> list[tuple[int, ...]]:
    """Cuts of the forward order: ops before which one lies, ascending."""
    ncuts = graph.nforward + 1
    crossing_nbytes, saved_nbytes = np.zeros(ncuts), np.zeros(graph.nforward)
    for a, readers in enumerate(graph.readers):
        p, nbytes = graph.producer[a], graph.tensors[a].nbytes
        forward = bisect_left(readers, graph.nforward)
        if forward:
            crossing_nbytes[p + 1] += nbytes
            crossing_nbytes[readers[forward - 1] + 1] -= nbytes
        if p < graph.nforward and forward < len(readers):
            saved_nbytes[p] += nbytes
    crossing_nbytes, saved_nbytes = np.cumsum(crossing_nbytes), np.cumsum(saved_nbytes)
    candidates = (tuple(_cuts(crossing_nbytes, saved_nbytes, count)) for count in COUNTS)
    return [cuts for cuts in dict.fromkeys(candidates) if cuts]


def _cuts(crossing_nbytes: Array, saved_nbytes: Array, count: int) -> Iterator[int]:
    """About ``count`` cuts between slices of about equal ``saved_nbytes`` where little crosses."""
    before, part = 0, (saved_nbytes[-1] if len(saved_nbytes) else 0.0) / (count + 1)
    for k in range(1, count + 1):
        low, high = np.searchsorted(saved_nbytes, [(k - LEEWAY) * part, (k + LEEWAY) * part])
        low, high = max(int(low), before) + 1, min(int(high) + 2, len(saved_nbytes))
        if low < high:
            before = low + int(np.argmin(crossing_nbytes[low:high]))
            yield before


class _Slices:
    """The forward pass in slices between ``cuts``, and the order in which ops run first.

    A backward op belongs to the slice of the forward op that it differentiates, if it reads what
    the forward pass wrote, or to that of the op before it if that is earlier.
    """

    def __init__(self, graph: TrainingGraph, cuts: Sequence[int], order: Sequence[int]) -> None:
        self.graph, self.order, self.ncuts = graph, order, len(cuts)
        self.always = carried_always(graph)
        self.slice_of = [bisect_right(cuts, op) for op in range(graph.nforward)]
        self.slice_of += [self.ncuts] * (len(graph.ops) - graph.nforward)
        arrival = self.ncuts
        for op in order[graph.nforward :]:
            twin = graph.ops[op].differentiates
            reads = any(graph.producer[a] < graph.nforward for a in graph.ops[op].inputs)
            if reads and twin is not None and twin < graph.nforward:
                arrival = min(arrival, self.slice_of[twin])
            self.slice_of[op] = arrival
        self.tensors_of: list[set[int]] = [set() for _ in range(self.ncuts + 1)]
        self.read_in: list[set[int]] = [set() for _ in range(self.ncuts + 1)]
        self.crossings: list[set[int]] = [set() for _ in range(self.ncuts + 1)]
        self.readers: dict[int, list[int]] = {}
        for a, p in enumerate(graph.producer):
            if p < graph.nforward and a not in self.always:
                self._enter(a, self.slice_of[p])

    def _enter(self, a: int, home: int) -> None:
        """Note in which slices after its own tensor a is read."""
        self.tensors_of[home].add(a)
        slices = sorted({self.slice_of[r] for r in self.graph.readers[a]} - set(range(home + 1)))
        self.readers[a] = slices
        for q in slices:
            self.read_in[q].add(a)
        for q in range(home + 1, slices[-1] + 1 if slices else 0):
            self.crossings[q].add(a)

    def sequence(self, slots: int) -> list[int] | None:
        """The ops that run with so many cuts stored at a time; None if these are too many."""
        graph, last = self.graph, self.ncuts
        checkpoints = dict(stored_at(0, last, slots, frozenset()))
        checkpoints[last] = frozenset(first_sweep(last, slots))
        sequence = list(self.order[: graph.nforward])
        current = last
        keepable = self._keepable(current, checkpoints[current])
        first_inputs = graph.ops[self.order[graph.nforward]].inputs
        present = {
            a
            for op in sequence
            for a in graph.ops[op].outputs
            if a in keepable or a in self.always or a in first_inputs
        }
        for op in self.order[graph.nforward :]:
            ops = {op}
            if self.slice_of[op] != current:
                current = self.slice_of[op]
                keepable = self._keepable(current, checkpoints[current])
                present = {a for a in present if a in keepable or a not in self.readers}
                missing_tensors = self._demand(current, checkpoints[current]) - present
                ops.update(graph.producer[a] for a in missing_tensors)
            run = closure(graph, ops, present)
            sequence += run
            if len(sequence) > MOST_STEPS * len(graph.ops):
                return None
            outputs = (a for other in run for a in graph.ops[other].outputs)
            present.update(a for a in outputs if a in keepable or a not in self.readers)
        return sequence

    def _keepable(self, current: int, checkpoints: frozenset[int]) -> set[int]:
        """What may stay while the backward pass is in slice ``current``."""
        crossings = (self.crossings[point + 1] for point in checkpoints)
        return self.tensors_of[current] | self.read_in[current].union(*crossings)

    def _demand(self, current: int, checkpoints: frozenset[int]) -> set[int]:
        """What slice ``current`` reads of others, and the slices before it of what is stored."""
        tensors = set(self.read_in[current])
        for point in checkpoints:
            for a in self.crossings[point + 1]:
                slices = self.readers[a]
                if slices[bisect_left(slices, point + 1)] <= current:
                    tensors.add(a)
        return tensors
