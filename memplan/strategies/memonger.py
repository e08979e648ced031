"""memonger's search: mark stages to keep by a memory threshold, and search the threshold.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174),
algorithm 3 and section 4.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.errors import ArgumentError
from memplan.search.segments import articulation_points, flags_keeping, threshold_cuts
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import mirror
from memplan.strategies.base import Outcome, best_of


@dataclass(frozen=True)
class Memonger:
    """Everything is recomputed but the stages at which a segment exceeds a threshold.

    Stages are the ops that carry the attribute ``mirror_stage``; in a network without such hints,
    its articulation points. ``ntrial`` is the number of thresholds to try.
    """

    ntrial: int = 96

    def __post_init__(self) -> None:
        if not isinstance(self.ntrial, int) or self.ntrial < 1:
            raise ArgumentError(f"ntrial must be an integer >= 1, got {self.ntrial!r}")

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest plan of the search within the budget; without one, the least memory."""
        hinted = [op for op in range(graph.nforward) if graph.ops[op].mirror_stage is not None]
        points = hinted or articulation_points(graph)
        cuts = threshold_cuts(graph, points, at_most=self.ntrial)
        plans = (mirror(graph, flags_keeping(graph, cut)) for cut in cuts)
        return best_of(plans, budget_nbytes)
