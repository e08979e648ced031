"""What holds for every set of flags in the program of mirroring: requests, aliases, gradients.

Flags leave the order of the backward ops as it is, and with it when each of them asks for what it
needs, and what the gradients occupy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from memplan.errors import ScheduleError
from memplan.step.graph import Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay


def consumers_of(graph: TrainingGraph) -> dict[int, list[int]]:
    """For each forward op, the forward ops that depend on it."""
    return {u: [x for x in graph.followers[u] if x < graph.nforward] for u in range(graph.nforward)}


def reasons_of(
    graph: TrainingGraph, consumers: Mapping[int, list[int]]
) -> dict[int, dict[int, int]]:
    """For each forward op u, when backward ops ask for its copy, if it is flagged.

    ``{v: k}``: from stage k on if v, which they differentiate, is flagged. Left out where
    another reason comes no later.
    """
    stages_of: dict[int, dict[int, int]] = {u: {} for u in range(graph.nforward)}
    for (op, dependency), stage in _stages(graph).items():
        v = graph.ops[op].differentiates
        if v is not None and dependency < graph.nforward:
            stages_of[dependency][v] = min(stage, stages_of[dependency].get(v, stage))
    result = {}
    for u, stage_of in stages_of.items():
        own = stage_of.get(u, math.inf)
        result[u] = {
            v: stage
            for v, stage in stage_of.items()
            if v == u
            or (stage < own and not (v in consumers[u] and stages_of[v].get(v, math.inf) <= stage))
        }
    return result


def _stages(graph: TrainingGraph) -> dict[tuple[int, int], int]:
    """For each backward op and each op that it depends on: the stage in which it asks for it.

    MXNet runs the graph depth first: an op asks for what it needs one after the other.
    """
    result: dict[tuple[int, int], int] = {}
    entered_ops: set[int] = set()
    next_stage = 0
    for root in (graph.producer[head] for head in graph.heads):
        stack = [] if root in entered_ops else [(root, iter(graph.dependencies[root]))]
        entered_ops.add(root)
        while stack:
            op, dependencies = stack[-1]
            for dependency in dependencies:
                if op >= graph.nforward:
                    result.setdefault((op, dependency), next_stage)
                if dependency not in entered_ops:
                    entered_ops.add(dependency)
                    stack.append((dependency, iter(graph.dependencies[dependency])))
                    break
            else:
                if op != next_stage:
                    raise ScheduleError(
                        f"op {graph.ops[op].name!r} comes {op}th in the graph, but MXNet would "
                        f"run it {next_stage}th: mirroring needs the graph in MXNet's own order"
                    )
                next_stage += 1
                stack.pop()
    return result


@dataclass(frozen=True)
class Aliases:
    """Which tensors share the buffer of a forward tensor, whether that dies or not.

    ``source[a]`` is the tensor whose buffer the forward tensor ``a`` shares. ``uncounted`` are
    the tensors of which that cannot be told for certain; leaving them out is safe, as it only
    makes the program more of a relaxation.
    """

    source: Mapping[int, int]
    uncounted: frozenset[int]

    @classmethod
    def of(cls, graph: TrainingGraph) -> Aliases:
        source: dict[int, int] = {}
        uncounted: set[int] = set()
        for index, op in enumerate(graph.ops):
            sources_of: dict[int, set[int]] = defaultdict(set)
            for handover in op.handovers:
                a = op.inputs[handover.input]
                shared = index < graph.nforward or graph.producer[a] < graph.nforward
                if handover.alias and (shared or a in uncounted) and graph.tensors[a].nbytes:
                    sources_of[op.outputs[handover.output]].add(a)
            for target, sources in sources_of.items():
                if index < graph.nforward and len(sources) == 1:
                    source[target] = sources.pop()
                else:
                    uncounted.add(target)
        return cls(source, frozenset(uncounted))

    def root(self, a: int) -> int:
        """The tensor that first had the buffer of ``a``."""
        while a in self.source:
            a = self.source[a]
        return a


class Gradients(NamedTuple):
    """Bytes of backward tensors alive right before and while an op of the unplanned step runs.

    Flags change neither. ``handed_over`` are the op's outputs that take over a gradient's buffer.
    """

    before_nbytes: int
    during_nbytes: int
    handed_over: frozenset[int]


class _GradientArena(Arena):
    """Counts what :class:`Gradients` tells, while a step is replayed."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.sizes: list[int] = []
        self.live = 0
        self.requested_nbytes = 0
        self.shared: set[int] = set()
        self.gradients: list[Gradients] = []

    def request(self, step: int, tensor: int) -> int:
        self.sizes.append(self.tensors[tensor].nbytes)
        self.requested_nbytes += self.sizes[-1]
        return len(self.sizes) - 1

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.shared.add(tensor)

    def release(self, buffer: int, step: int) -> None:
        self.live -= self.sizes[buffer]

    def end_of_requests(self, step: int) -> None:
        during = self.live + self.requested_nbytes
        self.gradients.append(Gradients(self.live, during, frozenset(self.shared)))
        self.live, self.requested_nbytes, self.shared = during, 0, set()


def gradients_of(graph: TrainingGraph, aliases: Aliases) -> list[Gradients]:
    """What the gradients occupy at every op, forward tensors (and what is theirs) left out."""
    tensors = tuple(
        Tensor(tensor.name, 0, 0)
        if graph.producer[t] < graph.nforward or t in aliases.uncounted
        else tensor
        for t, tensor in enumerate(graph.tensors)
    )
    arena = _GradientArena(tensors)
    replay(Schedule.unplanned(dataclasses.replace(graph, tensors=tensors)), arena)
    return arena.gradients
