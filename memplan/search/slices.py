"""Schedules that store all that crosses some cuts of the forward pass, and recompute slices.

Where a network has no points to cut at, as an unrolled recurrent one has none, what is read across
a cut of its order is a set of tensors. Between two cuts lies a slice. The backward pass visits
slices from the last to the first; what is stored when is decided as on a chain
(:mod:`memplan.search.chain`), by about the bytes that are alive then.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from memplan.search.chain import Chain, ChainPlans, Stored, corrected
from memplan.search.kernels.arrays import WRITTEN, Array, graph_arrays, most_written
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.search.postponing import postponed
from memplan.search.reordered import Reordered, reordered
from memplan.search.sliced_graph import SlicedGraph
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered
from memplan.util.stop import Stop

# This many cuts are tried. A cut may be this part of a slice away from where slices have equal
# bytes. Set on unrolled recurrent networks, and on U-Nets.
COUNTS = (4, 11, 23, 45, 90, 160)
LEEWAY = 0.4

# This many groups of slices are tried, for each of which is made again what many slices read; with
# none it is stored. Set on an unrolled LSTM.
NGROUPS = (7, 4, 0)

# Plans of a chain are made for budgets up to this many of the budget.
MOST_BUDGETS = 1.3

# Longer sequences, in steps of the unplanned one, are given up.
MOST_STEPS = 4

# What a schedule costs in work, for every op, and a chain for the cube of its slices: measured on
# unrolled networks of 1,300 and 4,800 ops.
WORK_BY_OPS, WORK_BY_CUBE = 2.0, 0.01

# More work than all of that, by which it is counted where the clock alone ends it.
MOST_WORK = 1e12

# The cheapest is chosen for these parts of the budget; bytes over that, in budgets, cost this many
# steps where nothing fits, and in what is only to begin with. Each is looked for in the chains that
# are cheapest, so often.
SLACKS, EXCESS_SECONDS = (1.0, 0.98, 0.95), 5.0
CHEAPEST_CHAINS, CORRECTIONS = 4, 4

# This many chains are solved again, so often, with what sequences of their plans have turned out to
# hold. Set on an LSTM at 30% of its step, in the usual order: 86% more time in 1.01 of the budget,
# where without it the least that fits costs 131%, and the cheapest for what it is over 77% in 1.04.
CORRECTED_CHAINS, SOLUTIONS = 2, 4


class _Entry(NamedTuple):
    """The peak of live bytes, the seconds and the ops of a sequence that recomputes ``slices``."""

    peak_nbytes: int
    seconds: float
    ops: list[int]
    slices: SlicedGraph
    sequences: _Sequences


# The sequences of plans of a chain, by the parts of the budget that are held beside the plan.
_Made = dict[int, _Entry | None]


def sliced_schedules(
    graph: TrainingGraph, budget_nbytes: int, stop: Stop, *, reorder: bool
) -> list[Schedule]:
    """The cheapest within about the budget, and that which is cheapest for how far it is over.

    Without backward ops there are none. With ``reorder`` backward ops may change their order. They
    are remembered where ``stop`` did not cut them.
    """
    if graph.nforward == len(graph.ops) or budget_nbytes <= 0:
        return []
    made: dict[tuple[int, bool], tuple[float, list[Schedule]]]
    made = remembered(graph, sliced_schedules, dict)
    work, schedules = made.get((budget_nbytes, reorder), (math.inf, []))
    if work < stop.work_left:
        stop.spend(work)  # so that a search goes on in the same way
        return schedules
    if stop.is_over():
        return []
    most = min(stop.work_left, MOST_WORK)
    until = Stop(stop.deadline, work=most, part_of=stop)
    schedules = list(_best_sliced(graph, budget_nbytes, until, reorder=reorder))
    if until.work_left > 0.0 and not until.cut_by_clock:
        made[budget_nbytes, reorder] = most - until.work_left, schedules
    return schedules


def _best_sliced(
    graph: TrainingGraph, budget_nbytes: int, stop: Stop, *, reorder: bool
) -> Iterator[Schedule]:
    """The same, made anew: with sums begun later, which holds less, and in the usual order."""
    orders = (postponed(graph, reorder=reorder), reordered(graph, reorder=reorder))
    entries, corrected_entries = list[_Entry](), list[_Entry]()
    for other in {tuple(each.order): each for each in orders}.values():
        sequences = _Sequences(other, stop)
        of_order = _entries(sequences, budget_nbytes)
        entries += of_order
        corrected_entries += _corrected_entries(sequences, of_order, budget_nbytes)
    best = [_ranked([*entries, *corrected_entries], budget_nbytes)[:1]]
    # Those of both: which one can be packed, nobody knows here.
    for some in (corrected_entries, entries):
        for aim in (slack * budget_nbytes for slack in SLACKS):
            fitting = [entry for entry in some if entry.peak_nbytes <= aim]
            best.append(_ranked(fitting or some, aim)[:1])
    unique = {id(entry.ops): entry for ranked in best for entry in ranked}
    for entry in unique.values():
        yield entry.sequences.schedule(entry.ops)


def _ranked(entries: Sequence[_Entry], aim: float) -> list[_Entry]:
    """The entries, cheapest first, where bytes over ``aim`` cost seconds, too."""

    def cost(entry: _Entry) -> float:
        unit = entry.slices.graph.seconds
        return entry.seconds + EXCESS_SECONDS * max(0.0, entry.peak_nbytes / aim - 1.0) * unit

    return sorted(entries, key=cost)


def _entries(sequences: _Sequences, budget_nbytes: int) -> list[_Entry]:
    """Sequences in this order of about as many bytes as each part of the budget.

    They are of the cuts whose chains are cheapest there.
    """
    entries: list[_Entry] = []
    for ngroups in NGROUPS:
        chains = list(_chains(sequences.graph, ngroups, budget_nbytes, sequences.stop))
        made: dict[ChainPlans, _Made] = {plans: {} for _, plans in chains}
        for aim in (slack * budget_nbytes for slack in SLACKS):
            for slices, plans in _cheapest_chains(chains, aim):
                entries += sequences.near(slices, plans, aim, made[plans])
    return entries


def _corrected_entries(
    sequences: _Sequences, entries: Sequence[_Entry], budget_nbytes: int
) -> list[_Entry]:
    """Where the cheapest entry is over the budget, others of chains that say more truly of what.

    What the best chains say of bytes is corrected, and they are solved again.
    """
    ranked = _ranked(entries, budget_nbytes)
    if not ranked or ranked[0].peak_nbytes <= budget_nbytes:
        return []
    best: dict[int, _Entry] = {}
    for entry in ranked:
        best.setdefault(id(entry.slices), entry)
    return [
        other
        for entry in islice(best.values(), CORRECTED_CHAINS)
        for other in sequences.of_corrected(entry.slices, budget_nbytes)
    ]


def _cheapest_chains(
    chains: Sequence[tuple[SlicedGraph, ChainPlans]], aim: float
) -> list[tuple[SlicedGraph, ChainPlans]]:
    return sorted(chains, key=lambda chain: chain[1].least_seconds(aim))[:CHEAPEST_CHAINS]


class _Sequences:
    """Makes the sequences of plans in an order, and measures them."""

    def __init__(self, other: Reordered, stop: Stop) -> None:
        self.other, self.graph, self.stop = other, other.graph, stop
        self.arrays, graph = graph_arrays(other.graph), other.graph
        self.most_steps = MOST_STEPS * len(graph.ops)
        self.work = WORK_BY_OPS * len(graph.ops)
        self.seconds = np.array([op.seconds for op in graph.ops])
        self.widths = np.diff(self.arrays.start[WRITTEN])
        self.most_written = most_written(self.widths, self.most_steps)
        self.memory = replay_memory(self.arrays, self.most_steps, self.most_written)

    def entry(self, slices: SlicedGraph, plan: Sequence[Stored]) -> _Entry | None:
        """The sequence of a plan; None if it is too long."""
        self.stop.spend(self.work)
        ops = slices.sequence(plan, self.most_steps)
        if ops is None:
            return None
        steps = np.array(ops, dtype=np.int64)
        if self.widths[steps].sum() > self.most_written:
            return None
        peak = int(replay(self.arrays, self.memory, steps, len(steps), 0, UNLIMITED)[1])
        return _Entry(peak, float(self.seconds[steps].sum()), ops, slices, self)

    def schedule(self, ops: Sequence[int]) -> Schedule:
        """A sequence as a schedule of the graph whose ops have another order here."""
        return self.other.back(Schedule.sequence(self.graph, ops))

    def near(
        self, slices: SlicedGraph, plans: ChainPlans, aim: float, made: _Made | None = None
    ) -> Iterator[_Entry]:
        """Of plans of a chain, sequences of about this many bytes; those ``made`` serve again."""
        made = {} if made is None else made
        held = plans.held_for(aim)
        for _ in range(CORRECTIONS):
            if held not in made and not self.stop.is_over():
                made[held] = self.entry(slices, plans.plan(held))
            entry = made.get(held)
            if entry is None:
                return
            yield entry
            # The bytes of a chain are about those of its sequence: what that has too many, or
            # too few, is held beside the next plan.
            more = math.ceil((entry.peak_nbytes - aim) / plans.unit)
            next_held = plans.nearest(held + more)
            if next_held == held:
                return
            held = next_held

    def of_corrected(self, slices: SlicedGraph, budget_nbytes: int) -> Iterator[_Entry]:
        """Of plans of a chain with what sequences of those before have turned out to hold."""
        plans = _plans(slices.chain(), budget_nbytes, self.stop)
        for _ in range(SOLUTIONS):
            plan = plans.plan(plans.held_for(budget_nbytes))
            entry = None if self.stop.is_over() else self.entry(slices, plan)
            if entry is None:
                return
            yield entry
            held = slices.most_held(entry.ops, self.memory.live[: len(entry.ops)])
            plans = _plans(corrected(plans.chain, plan, *held), budget_nbytes, self.stop)
            if plans.nearest(0) != 0:
                return
            yield from self.near(slices, plans, budget_nbytes)


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
        plans = _plans(slices.chain(), budget_nbytes, stop)
        if plans.nearest(0) == 0:
            yield slices, plans


def _plans(chain: Chain, budget_nbytes: int, stop: Stop) -> ChainPlans:
    stop.spend(WORK_BY_CUBE * (len(chain.seconds) - 1) ** 3)
    return ChainPlans(chain, int(MOST_BUDGETS * budget_nbytes))


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
