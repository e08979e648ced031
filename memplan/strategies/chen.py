"""Chen et al.'s rules for where to keep: every √n-th point, or wherever a segment is full.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174),
sections 4.1 and 4.4; at articulation points and linearised as in Jain et al. 2020, appendix B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memplan.search.segments import articulation_points, flags_keeping, threshold_cuts
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import mirror
from memplan.strategies.base import Outcome, best_of


def _points(graph: TrainingGraph, linear: bool) -> tuple[int, ...]:
    return tuple(range(graph.nforward)) if linear else articulation_points(graph)


@dataclass(frozen=True)
class ChenSqrt:
    """Keeps √n of n points, evenly spaced, and recomputes everything between them.

    Points are the articulation points; with ``linear`` all forward ops, in base order.
    """

    linear: bool = False

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """That one plan, if it fits the budget."""
        points = _points(graph, self.linear)
        segment = max(1, math.isqrt(len(points)))
        kept = points[segment - 1 :: segment]
        return best_of([mirror(graph, flags_keeping(graph, kept))], budget_nbytes)


@dataclass(frozen=True)
class ChenGreedy:
    """Keeps a point whenever the segment before it exceeds a threshold; searches the threshold.

    Points are the articulation points; with ``linear`` all forward ops, in base order.
    ``ntrial`` is the number of thresholds to try.
    """

    linear: bool = False
    ntrial: int = 96

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest plan of the search within the budget; without one, the least memory."""
        cuts = threshold_cuts(graph, _points(graph, self.linear), at_most=self.ntrial)
        plans = (mirror(graph, flags_keeping(graph, cut)) for cut in cuts)
        return best_of(plans, budget_nbytes)
