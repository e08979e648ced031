"""Chen et al.'s rules for where to keep: every √n-th point, or wherever a segment is full.

Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174),
sections 4.1 and 4.4; at articulation points and linearised as in Jain et al. 2020, appendix B.
A segment is recomputed as a whole when the backward pass arrives at it; mirroring recomputes an op
of it when the first backward op needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.search.segments import threshold_cuts
from memplan.step.schedule import Schedule
from memplan.strategies.base import OneOf, Problem, check_options


@dataclass(frozen=True)
class ChenSqrt(OneOf):
    """Keeps √n of n points, evenly spaced, and recomputes everything between them.

    Points are the articulation points; with ``linear`` all forward ops that a forward op reads.
    On a chain of n equal ops and a loss, in which every k-th op is kept, k = ⌊√n⌋ > 1 and
    m = ⌊n / k⌋, the peak of an explicit schedule is m + k tensors, and m (k − 1) ops run again.
    """

    linear: bool = False

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """That one schedule."""
        points = problem.points(linear=self.linear)
        segment = max(1, math.isqrt(len(points)))
        yield problem.space.keeping(problem.graph, points[segment - 1 :: segment])


@dataclass(frozen=True)
class ChenGreedy(OneOf):
    """Keeps a point whenever the segment before it exceeds a threshold; searches the threshold.

    Points are the articulation points; with ``linear`` all forward ops that a forward op reads.
    ``ntrial`` is the number of thresholds to try.
    """

    linear: bool = False
    ntrial: int = 48

    def __post_init__(self) -> None:
        check_options(self)

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """The schedule of every threshold."""
        points = problem.points(linear=self.linear)
        for cut in threshold_cuts(problem.graph, points, at_most=self.ntrial):
            yield problem.space.keeping(problem.graph, cut)
