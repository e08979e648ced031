"""A step in two halves: between them somebody else reads the outputs and makes their gradients."""

from __future__ import annotations

import dataclasses

from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule


def in_halves(graph: TrainingGraph) -> TrainingGraph:
    """``graph`` with more dependencies: every schedule computes all outputs before a backward op.

    Whoever computes the loss gets copies of the outputs, whose bytes are fixed. An output is never
    recomputed, for what its first run writes must last to the end of the step.
    """
    outputs = _outputs(graph)
    producers = tuple(sorted({graph.producer[tensor] for tensor in outputs}))

    def changed(index: int, op: Op) -> Op:
        if index in producers:
            return dataclasses.replace(op, recomputable=False)
        before = graph.dependencies[index]
        if index < graph.nforward or any(other >= graph.nforward for other in before):
            return op
        return dataclasses.replace(op, after=tuple(dict.fromkeys((*op.after, *producers))))

    return dataclasses.replace(
        graph,
        ops=tuple(changed(index, op) for index, op in enumerate(graph.ops)),
        fixed_nbytes=graph.fixed_nbytes + sum(graph.tensors[t].nbytes for t in outputs),
    )


def second_half(schedule: Schedule) -> int:
    """The step at which the second half of a step in halves begins: all outputs are there."""
    graph = schedule.graph
    runs = [schedule.first_run[graph.producer[tensor]] for tensor in _outputs(graph)]
    return 1 + max(runs, default=-1)


def _outputs(graph: TrainingGraph) -> list[int]:
    """The heads that forward ops compute."""
    return [tensor for tensor in graph.heads if graph.producer[tensor] < graph.nforward]
