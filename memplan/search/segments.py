"""Cutting the forward pass into segments whose first values are kept and the rest recomputed."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable


def articulation_points(graph: TrainingGraph) -> tuple[int, ...]:
    """The forward ops without which the forward pass would fall apart, in base order.

    Articulation points of its undirected graph: natural places to cut (Chen et al. 2016 need
    chains; Jain et al. 2020, appendix B, extend them to these).
    """
    import networkx  # 9 MB, which are for searches alone

    forward = graph.to_networkx().subgraph(range(graph.nforward)).to_undirected()
    return tuple(sorted(networkx.articulation_points(forward)))


def output_nbytes(graph: TrainingGraph, op: int) -> int:
    """Bytes of all outputs of ``op``."""
    return sum(graph.tensors[tensor].nbytes for tensor in graph.ops[op].outputs)


def flags_keeping(graph: TrainingGraph, checkpoints: Collection[int]) -> frozenset[int]:
    """Flags that recompute every op that may be recomputed, except those in ``checkpoints``."""
    return frozenset(flaggable(graph)) - frozenset(checkpoints)


def cut_and_next(
    graph: TrainingGraph, points: Sequence[int], threshold_nbytes: int
) -> tuple[tuple[int, ...], int | None]:
    """The points to keep so that a segment ends once it holds more than ``threshold_nbytes``.

    The sweep of Chen et al. 2016, algorithm 3. Points that carry the same ``mirror_stage`` other
    than "True" are one cut line and are kept or dropped together. Beside them the least threshold
    above with another cut, None if there is none: the least that a segment holds which ends, for a
    smaller one decides all as this one.
    """
    candidates = frozenset(points)
    cut = []
    nbytes = 0
    line: str | None = None
    keep_line = False
    least: int | None = None
    for op in range(graph.nforward):
        nbytes += output_nbytes(graph, op)
        if op not in candidates:
            continue
        stage = graph.ops[op].mirror_stage
        if stage is None or stage == "True" or stage != line:
            keep_line = nbytes > threshold_nbytes
            line = stage
            if keep_line:
                least = nbytes if least is None else min(least, nbytes)
                nbytes = 0
        if keep_line:
            cut.append(op)
    return tuple(cut), least


def stages(graph: TrainingGraph) -> Sequence[int]:
    """The ops that carry ``mirror_stage``; in a network without such hints, its articulation
    points.
    """
    hints = [op for op in range(graph.nforward) if graph.ops[op].mirror_stage is not None]
    return hints or articulation_points(graph)


def threshold_cuts(
    graph: TrainingGraph, points: Sequence[int], *, at_most: int, least_nbytes: int = 1
) -> Iterator[tuple[int, ...]]:
    """The different cuts by ``at_most`` thresholds, from keeping every point to keeping none.

    Thresholds lie between ``least_nbytes`` and everything, evenly spaced in logarithm: a sweep with
    threshold b makes about total / b segments. Those that make the same cut as the one before are
    never looked at, as there may be any number of them.
    """
    total = sum(output_nbytes(graph, op) for op in range(graph.nforward))
    least = max(1, min(least_nbytes, total))

    def threshold(step: int) -> int:
        share = step / max(1, at_most - 1)
        return int(least ** (1.0 - share) * total**share) if step else 0

    at_most = min(at_most, sys.maxsize)  # no range can be longer
    step = 0
    while step < at_most:
        cut, next_nbytes = cut_and_next(graph, points, threshold(step))
        yield cut
        if next_nbytes is None:
            return
        step += 1
        step += bisect_left(range(step, at_most), next_nbytes, key=threshold)


def coarse_cuts(
    graph: TrainingGraph, points: Sequence[int], *, at_most: int
) -> Iterator[tuple[int, ...]]:
    """Those whose segments hold no less than the largest op writes, for graphs of many ops."""
    least_nbytes = max(output_nbytes(graph, op) for op in range(graph.nforward))
    return threshold_cuts(graph, points, at_most=at_most, least_nbytes=least_nbytes)
