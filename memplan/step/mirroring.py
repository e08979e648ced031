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
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered


def flaggable(graph: TrainingGraph) -> tuple[int, ...]:
    """The forward ops that may be flagged, in base order: those that may run twice.

    An op is left out if none of its backward ops depends on it: a flag would change what those
    read although the copy never runs, so that no schedule would show the flag.
    """
    idle: set[int | None] = set()
    effective: set[int | None] = set()
    for op in range(graph.nforward, len(graph.ops)):
        twin = graph.ops[op].differentiates
        (effective if twin in graph.dependencies[op] else idle).add(twin)
    idle -= effective
    return tuple(
        op for op in range(graph.nforward) if graph.ops[op].recomputable and op not in idle
    )


def mirror(graph: TrainingGraph, flags: AbstractSet[int]) -> Schedule:
    """The schedule that MXNet executes when exactly the forward ops ``flags`` are flagged.

    ScheduleError for an op that cannot be.
    """
    for op in flags:
        if not (0 <= op < graph.nforward and graph.ops[op].recomputable):
            name = graph.ops[op].name if 0 <= op < len(graph.ops) else op
            raise ScheduleError(f"op {name!r} cannot be flagged: it must not be recomputed")
    producer, dependencies = graph.producer, graph.dependencies
    # A node is an op, or an op's copy: op + shift.
    shift = len(graph.ops)
    step_of: dict[int, int] = {}
    ops: list[int] = []
    reads: list[tuple[int, ...]] = []
    for root in (producer[head] for head in graph.heads):
        stack = [root]
        while stack:
            node = stack[-1]
            if node in step_of:
                stack.pop()
                continue
            op = node % shift
            call = graph.ops[op]
            # A copy, and the backward op of a flagged op, refer to copies where there are any.
            if node >= shift or call.differentiates in flags:
                dependency_nodes = [d + shift if d in flags else d for d in dependencies[op]]
            else:
                dependency_nodes = list(dependencies[op])
            missing_nodes = [d for d in dependency_nodes if d not in step_of]
            if missing_nodes:
                stack.extend(reversed(missing_nodes))
                continue
            stack.pop()
            step_of[node] = len(ops)
            ops.append(op)
            reads.append(tuple([step_of[d] for d in dependency_nodes[: len(call.inputs)]]))
    heads = tuple(step_of[producer[head]] for head in graph.heads)
    return Schedule.trusted(graph, tuple(ops), tuple(reads), heads)


def flags_of(schedule: Schedule) -> frozenset[int]:
    """The flags that make MXNet execute ``schedule``; ScheduleError if none do."""
    flags = frozenset(schedule.recomputed)
    if not remembered(schedule, flags_of, lambda: mirror(schedule.graph, flags) == schedule):
        raise ScheduleError("no set of force_mirroring flags makes MXNet execute this schedule")
    return flags
