"""Keep nothing but what the op before has written.

A baseline of Jain et al. 2020 (arXiv:1910.02653), table 1, as a schedule of any training graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.search.rematerialize import rematerialize
from memplan.step.schedule import Schedule
from memplan.strategies.base import OneOf, Problem


@dataclass(frozen=True)
class CheckpointLast(OneOf):
    """Carries of the forward values only those of the op before; recomputes the others, each time.

    Values that later forward ops read are no exception: they are recomputed, too.
    """

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """That one schedule."""
        producer = problem.graph.producer
        yield rematerialize(problem.graph, lambda t, a: producer[a] == t - 1)
