"""Schedules that store all that crosses some cuts of the forward pass, and recompute slices.

Where a network has no points to cut at, as an unrolled recurrent one has none, what is read across
a cut of its order is a set of tensors. Between two cuts lies a slice. The backward pass visits
slices from the last to the first; what is stored when is decided as on a chain
(:mod:`memplan.search.chain`), by about the bytes that are alive then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memplan.search.chain import ChainPlans
from memplan.search.eager import reordered
from memplan.search.kernels.arrays import Array, graph_arrays
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.search.sliced_graph import SlicedGraph
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# So many cuts are tried. A cut may be this part of a slice away from where slices have equal bytes.
# Set on unrolled recurrent networks, and on U-Nets.
COUNTS = (4, 11, 23, 45, 90, 160)
LEEWAY = 0.4

# So many groups of slices are tried, for each of which is made again what many slices read; with
# none it is stored. Set on an unrolled LSTM.
NGROUPS = (7, 4, 0)

# Plans of a chain are made for budgets up to this many of the budget.
MOST_BUDGETS = 1.3

# Longer sequences, in steps of the unplanned one, are given up.
MOST_STEPS = 4

# What a schedule costs in work, for every op, and a chain for the cube of its slices: measured on
# unrolled networks of 1,300 and 4,800 ops.
WORK_BY_OPS, WORK_BY_CUBE = 2.0, 0.01

# The cheapest is chosen for these parts of the budget; bytes over that, in budgets, cost so many
# steps where nothing fits. Each is looked for in the chains that are cheapest, so often.
SLACKS, EXCESS_SECONDS = (1.0, 0.98, 0.95), 5.0
CHEAPEST_CHAINS, CORRECTIONS = 4, 4


class _Entry(NamedTuple):
    """The peak of live bytes, the seconds and the ops of a sequence."""

    peak_nbytes: int
    seconds: float
    ops: list[int]


def sliced_schedules(
    graph: TrainingGraph, budget_nbytes: int, stop: Stop, *, reorder: bool
) -> list[Schedule]:
    """The cheapest within about the budget, or that which is cheapest for how far it is over.

    Without backward ops there are none. With ``reorder`` backward ops may change their order.
    """
    if graph.nforward == len(graph.ops) or budget_nbytes <= 0:
        return []
    other = reordered(graph, reorder=reorder)
    entries = [entry for n in NGROUPS for entry in _entries(other.graph, n, budget_nbytes, stop)]

    def cost(entry: _Entry, aim: float) -> float:
        excess = max(0.0, entry.peak_nbytes / aim - 1.0)
        return entry.seconds + EXCESS_SECONDS * excess * graph.seconds

    best = []
    for aim in (slack * budget_nbytes for slack in SLACKS):
        fitting = [entry for entry in entries if entry.peak_nbytes <= aim]
        best += [min(fitting or entries, key=lambda e: cost(e, aim))] if entries else []
    unique = {id(entry.ops): entry.ops for entry in best}
    return [other.back(Schedule.sequence(other.graph, ops)) for ops in unique.values()]


def _entries(
    graph: TrainingGraph, ngroups: int, budget_nbytes: int, stop: Stop
) -> Iterator[_Entry]:
    """Sequences in this order of about as many bytes as each part of the budget.

    They are of the cuts whose chains are cheapest there.
    """
    chains = list(_chains(graph, ngroups, budget_nbytes, stop))
    arrays, seconds = graph_arrays(graph), np.array([op.seconds for op in graph.ops])
    memory = replay_memory(arrays, MOST_STEPS * len(graph.ops))

    def entry_of(slices: SlicedGraph, plans: ChainPlans, held: int) -> _Entry | None:
        stop.spend(WORK_BY_OPS * len(graph.ops))
        ops = slices.sequence(plans.plan(held), MOST_STEPS * len(graph.ops))
        if ops is None:
            return None
        steps = np.array(ops, dtype=np.int64)
        peak = int(replay(arrays, memory, steps, len(steps), 0, UNLIMITED)[1])
        return _Entry(peak, float(seconds[steps].sum()), ops)

    for slack in SLACKS:
        aim = slack * budget_nbytes

        def estimate(chain: tuple[SlicedGraph, ChainPlans], aim: float = aim) -> float:
            return chain[1].least_seconds(aim)

        for slices, plans in sorted(chains, key=estimate)[:CHEAPEST_CHAINS]:
            held = plans.held_for(aim)
            for _ in range(CORRECTIONS):
                if stop.is_over():
                    return
                entry = entry_of(slices, plans, held)
                if entry is None:
                    break
                yield entry
                # The bytes of a chain are about those of its sequence: what that has too many, or
                # too few, is held beside the next plan.
                more = math.ceil((entry.peak_nbytes - aim) / plans.unit)
                next_held = plans.nearest(held + more)
                if next_held == held:
                    break
                held = next_held


def _chains(
    graph: TrainingGraph, ngroups: int, budget_nbytes: int, stop: Stop
) -> Iterator[tuple[SlicedGraph, ChainPlans]]:
    """The forward pass in slices between cuts, where a plan of the chain fits.

    With ``ngroups`` only those in which something is made again for each.
    """
    for cuts in _distinct_cuts(graph):
        if stop.is_over():
            return
        slices = SlicedGraph(graph, cuts, ngroups=ngroups)
        if ngroups and not slices.remade:
            continue
        plans = ChainPlans(slices.chain(), int(MOST_BUDGETS * budget_nbytes))
        stop.spend(WORK_BY_CUBE * len(cuts) ** 3)
        if plans.nearest(0) == 0:
            yield slices, plans


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
