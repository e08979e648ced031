"""The schedules that MXNet's mirroring can execute: one for every set of flagged forward ops.

The rules are those of MXNet 1.9.1's gradient pass (src/nnvm/gradient.cc) and of the depth-first
order in which the executor then runs the graph:

- every flagged op has one copy, whose inputs are the copies of flagged inputs and the originals
  of the others;
- the backward op of a flagged op reads that copy and the copy's inputs, and waits for the copy;
  the backward op of another op reads originals only;
- a copy runs when the first op that needs it or waits for it is reached.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from memplan.errors import ScheduleError
from memplan.graph import TrainingGraph
from memplan.schedule import Schedule


def flaggable(graph: TrainingGraph) -> tuple[int, ...]:
    """The forward ops that may be flagged: those that may run twice, in base order."""
    return tuple(op for op in range(graph.nforward) if graph.ops[op].recomputable)


def mirror(graph: TrainingGraph, flags: AbstractSet[int]) -> Schedule:
    """The schedule that MXNet executes when exactly the forward ops ``flags`` are flagged."""
    for op in flags:
        if not (0 <= op < graph.nforward and graph.ops[op].recomputable):
            name = graph.ops[op].name if 0 <= op < len(graph.ops) else op
            raise ScheduleError(f"op {name!r} cannot be flagged: it must not be recomputed")
    producer = graph.producer
    # A node is an op, or an op's copy: op + ncopies.
    shift = len(graph.ops)
    step_of: dict[int, int] = {}
    ops: list[int] = []
    reads: list[tuple[int, ...]] = []

    def version(reader: int, op: int) -> int:
        """The node that ``reader`` gets when it refers to ``op``."""
        if reader >= shift or graph.ops[reader].differentiates in flags:
            return op + shift if op in flags else op
        return op

    for root in (producer[head] for head in graph.heads):
        if root in step_of:
            continue
        stack = [(root, False)]
        while stack:
            node, expanded = stack.pop()
            if node in step_of:
                continue
            call = graph.ops[node % shift]
            if expanded:
                step_of[node] = len(ops)
                ops.append(node % shift)
                reads.append(tuple(step_of[version(node, producer[t])] for t in call.inputs))
                continue
            stack.append((node, True))
            for op in reversed((*(producer[t] for t in call.inputs), *call.after)):
                needed = version(node, op)
                if needed not in step_of:
                    stack.append((needed, False))
    heads = tuple(step_of[producer[head]] for head in graph.heads)
    return Schedule(graph, tuple(ops), tuple(reads), heads)


def flags_of(schedule: Schedule) -> frozenset[int]:
    """The flags that make MXNet execute ``schedule``; ScheduleError if none do."""
    flags = frozenset(schedule.recomputed)
    if mirror(schedule.graph, flags) != schedule:
        raise ScheduleError("no set of force_mirroring flags makes MXNet execute this schedule")
    return flags
