"""Schedules that recompute what mirroring could: few decisions, a good start in MXNet's blocks."""

from __future__ import annotations

import dataclasses

from memplan.search.flag_annealing import anneal
from memplan.search.kernels.mirroring import Evaluator
from memplan.search.rematerialize import inner_forward
from memplan.search.segments import articulation_points, flags_keeping, threshold_cuts
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# How many segmentations are tried for each kind of points to cut at.
CUTS = 24


def mirrored_schedule(
    graph: TrainingGraph,
    budget_nbytes: int | None,
    *,
    match_range: int,
    seconds: float | Stop,
    moves: int | None = None,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest schedule within the budget found by annealing over flags, bounded as there.

    An op that is flagged runs again just before it is first needed, as in MXNet's mirroring
    (:mod:`memplan.step.mirroring`); every step then reads the latest execution. None if nothing
    fits. Without a budget: the one with the fewest bytes.
    """
    placed = dataclasses.replace(graph, match_range=match_range)
    evaluate = Evaluator(placed)

    def rank(flags: frozenset[int]) -> tuple[int, float]:
        cost = evaluate(evaluate.flags(flags))
        return max(0, cost.allocated_nbytes - (budget_nbytes or 0)), cost.seconds

    cuts = [
        flags_keeping(graph, cut)
        for points in (articulation_points(graph), inner_forward(graph))
        for cut in threshold_cuts(graph, points, at_most=CUTS)
    ]
    start = min([frozenset[int](), *cuts], key=rank)
    found = anneal(placed, start, budget_nbytes, seconds=seconds, moves=moves, seed=seed)
    return None if found is None else Schedule.sequence(graph, found.ops)
