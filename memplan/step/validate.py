"""A second opinion on a schedule, by definition and slowly: may it run?

Shares no code with :mod:`memplan.step.schedule`, so that each can convict the other.
"""

from __future__ import annotations

from memplan.step.schedule import Schedule


def first_violation(schedule: Schedule) -> str | None:
    """The first rule that ``schedule`` breaks, or None: then it may run."""
    graph = schedule.graph
    ran: set[int] = set()
    if len(schedule.reads) != len(schedule.ops):
        return f"{len(schedule.ops)} steps, but reads for {len(schedule.reads)}"
    for step, index in enumerate(schedule.ops):
        if index not in range(len(graph.ops)):
            return f"step {step}: there is no op {index}"
        op, sources = graph.ops[index], schedule.reads[step]
        if index in ran and not op.recomputable:
            return f"step {step}: op {op.name!r} runs again, which it must not"
        if len(sources) != len(op.inputs):
            return f"step {step}: op {op.name!r} has {len(op.inputs)} inputs, not {len(sources)}"
        for source, tensor in zip(sources, op.inputs, strict=True):
            if source not in range(step) or not _writes(schedule, source, tensor):
                return (
                    f"step {step}: op {op.name!r} reads {graph.tensors[tensor].name!r} "
                    f"of step {source}, which is no earlier step that writes it"
                )
        for other in op.after:
            if other not in ran:
                return f"step {step}: op {op.name!r} runs before {graph.ops[other].name!r}"
        ran.add(index)
    for index, op in enumerate(graph.ops):
        if index not in ran:
            return f"op {op.name!r} never runs"
    if len(schedule.heads) != len(graph.heads):
        return f"{len(graph.heads)} heads, but sources for {len(schedule.heads)}"
    for source, tensor in zip(schedule.heads, graph.heads, strict=True):
        if source not in range(len(schedule.ops)) or not _writes(schedule, source, tensor):
            name = graph.tensors[tensor].name
            return f"head {name!r} is taken from step {source}, which does not write it"
    return None


def _writes(schedule: Schedule, step: int, tensor: int) -> bool:
    return tensor in schedule.graph.ops[schedule.ops[step]].outputs
