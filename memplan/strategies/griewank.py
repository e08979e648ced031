"""Griewank & Walther's checkpointing: logarithmic memory, optimal on chains of equal ops.

Griewank, Walther: Algorithm 799: revolve, ACM TOMS 26 (2000); at articulation points and
linearised as in Jain et al. 2020 (arXiv:1910.02653), appendix B.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memplan.search.rematerialize import rematerialize
from memplan.search.revolve import first_sweep, stored_at
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.base import OneOf, Problem, check_options


@dataclass(frozen=True)
class Griewank(OneOf):
    """Stores points of the forward pass in a number of slots, and reuses a slot as it gets free.

    Points are the articulation points; with ``linear`` all forward ops that a forward op reads.
    What lies between two points is recomputed as a whole when the backward pass arrives there.
    Numbers of slots up to ``max_slots`` are tried. On a chain of n equal ops and a loss, s slots
    give a peak of s + 2 tensors and :func:`~memplan.search.revolve.forward_steps` executions of the
    n ops, the least possible for that peak.
    """

    linear: bool = False
    max_slots: int = 24

    def __post_init__(self) -> None:
        check_options(self)

    def candidates(self, problem: Problem) -> Iterator[Schedule]:
        """The schedule of every number of slots, the cheapest first."""
        graph = problem.graph
        points = problem.points(linear=self.linear)
        for slots in range(min(self.max_slots, max(1, len(points))), 0, -1):
            yield _revolve(graph, points, slots)


def _revolve(graph: TrainingGraph, points: Sequence[int], slots: int) -> Schedule:
    """The schedule that stores at most ``slots`` of ``points`` at a time."""
    # Segment q are the forward ops after point q - 1, up to and with point q.
    segment_of = [bisect_left(points, op) for op in range(graph.nforward)]
    checkpoints: list[frozenset[int]] = [frozenset()] * len(points)
    for q, path in stored_at(0, len(points), slots, frozenset()):
        checkpoints[q] = frozenset(points[p] for p in path)
    checkpoints.append(frozenset(points[p] for p in first_sweep(len(points), slots)))
    arrivals = _arrivals(graph, segment_of, len(points))

    def keep(stage: int, a: int) -> bool:
        p = graph.producer[a]
        q = arrivals[stage]
        if stage < graph.nforward and any(stage <= r < graph.nforward for r in graph.readers[a]):
            return True
        # What was computed on the way to a later segment is not kept for this one.
        staying = stage >= graph.nforward and arrivals[stage - 1] == q
        return p in checkpoints[q] or (staying and segment_of[p] == q)

    return rematerialize(graph, keep)


def _arrivals(graph: TrainingGraph, segment_of: Sequence[int], last: int) -> list[int]:
    """For every stage, the segment at which the backward pass has arrived."""
    result = [last] * len(graph.ops)
    for stage in range(graph.nforward, len(graph.ops)):
        op = graph.ops[stage]
        producers = [graph.producer[a] for a in op.inputs if graph.producer[a] < graph.nforward]
        twin = op.differentiates
        arrival = last if stage == 0 else result[stage - 1]
        if twin is not None and twin < graph.nforward:
            arrival = min(arrival, segment_of[twin])
        elif producers:
            arrival = min(arrival, max(segment_of[p] for p in producers))
        result[stage] = arrival
    return result
