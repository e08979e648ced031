"""Chen et al.'s rules for where to keep, as schedules of any training graph.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174),
sections 4.1 and 4.4; at articulation points and linearised as in Jain et al. 2020, appendix B.
Segments are recomputed as a whole when the backward pass arrives at them
(:func:`memplan.search.rematerialize.recomputing_segments`); what comes after the last kept op
stays, as the backward pass begins there.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from memplan.search.rematerialize import cheapest, inner_forward, recomputing_segments
from memplan.search.segments import articulation_points, threshold_cuts
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Status


def _points(graph: TrainingGraph, linear: bool) -> tuple[int, ...]:
    return inner_forward(graph) if linear else articulation_points(graph)


def _keeping(graph: TrainingGraph, kept: Collection[int]) -> Schedule:
    last_segment = range(max(kept, default=graph.nforward), graph.nforward)
    return recomputing_segments(graph, frozenset(kept).union(last_segment))


def _outcome(schedule: Schedule | None) -> Outcome:
    if schedule is None:
        return Outcome(Status.NO_PLAN_FOUND)
    return Outcome(Status.FEASIBLE, schedule)


@dataclass(frozen=True)
class ExplicitChenSqrt:
    """Keeps √n of n points, evenly spaced, and recomputes everything between them.

    Points are the articulation points; with ``linear`` all forward ops that a forward op reads.
    On a chain of n equal ops and a loss, in which every k-th op is kept, k = ⌊√n⌋ > 1 and
    m = ⌊n / k⌋, the peak is m + k tensors, and m (k − 1) ops run again.
    """

    linear: bool = False

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """That one schedule, if its peak is within the budget."""
        points = _points(graph, self.linear)
        segment = max(1, math.isqrt(len(points)))
        return _outcome(cheapest([_keeping(graph, points[segment - 1 :: segment])], budget_nbytes))


@dataclass(frozen=True)
class ExplicitChenGreedy:
    """Keeps a point whenever the segment before it exceeds a threshold; searches the threshold.

    Points are the articulation points; with ``linear`` all forward ops that a forward op reads.
    ``ntrial`` is the number of thresholds to try.
    """

    linear: bool = False
    ntrial: int = 48

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest schedule of the search within the budget; without one, the lowest peak."""
        cuts = threshold_cuts(graph, _points(graph, self.linear), at_most=self.ntrial)
        return _outcome(cheapest((_keeping(graph, cut) for cut in cuts), budget_nbytes))
