"""memonger's search: mark stages to keep by a memory threshold, and search the threshold.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174),
algorithm 3 and section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.search.segments import stages, threshold_cuts
from memplan.step.schedule import Schedule
from memplan.strategies.base import OneOf, Problem, check_options


@dataclass(frozen=True)
class Memonger(OneOf):
    """Everything is recomputed but the stages at which a segment exceeds a threshold.

    Stages are the ops that carry the attribute ``mirror_stage``; in a network without such hints,
    its articulation points. ``ntrial`` is the number of thresholds to try.
    """

    ntrial: int = 96

    def __post_init__(self) -> None:
        check_options(self)

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """The schedule of every threshold."""
        graph = problem.graph
        for cut in threshold_cuts(graph, stages(graph), at_most=self.ntrial):
            yield problem.space.keeping(graph, cut)
