"""A second opinion on a schedule, by definition and slowly: may it run, and what is its peak?

Shares no code with :mod:`memplan.step.simulate`, so that each can convict the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.step.schedule import Schedule

# The output of a step: (step, tensor).
Instance = tuple[int, int]


@dataclass(frozen=True)
class Verdict:
    """Is a schedule valid? ``reason`` says why not; ``peak_nbytes`` is 0 if it cannot run."""

    valid: bool
    peak_nbytes: int
    reason: str | None


@dataclass(frozen=True)
class _Buffer:
    """Outputs that share memory, from the step ``first`` to the step ``last``."""

    name: str
    nbytes: int
    first: int
    last: int


def validate(schedule: Schedule, budget_nbytes: int | None = None) -> Verdict:
    """Can ``schedule`` run, and is its peak of live bytes within ``budget_nbytes``?

    An output lives from its step to its last reader: to the end of the step if it is a head, not
    beyond its own step if nobody reads it. The budget is for the graph's tensors alone, its
    ``fixed_nbytes`` aside; None means no limit. Raises nothing: the verdict has the reason.
    """
    reason = first_violation(schedule)
    if reason is not None:
        return Verdict(False, 0, reason)
    buffers = _buffers(schedule)
    live = np.zeros(len(schedule.ops), dtype=np.int64)
    for buffer in buffers:
        live[buffer.first : buffer.last + 1] += buffer.nbytes
    peak = int(live.max(initial=0))
    if budget_nbytes is not None and peak > budget_nbytes:
        reason = _why_too_much(schedule, buffers, int(live.argmax()), peak, budget_nbytes)
    return Verdict(reason is None, peak, reason)


def first_violation(schedule: Schedule) -> str | None:
    """The first rule that ``schedule`` breaks, or None."""
    graph = schedule.graph
    ops_so_far: set[int] = set()
    if len(schedule.reads) != len(schedule.ops):
        return f"{len(schedule.ops)} steps, but reads for {len(schedule.reads)}"
    for step, index in enumerate(schedule.ops):
        if index not in range(len(graph.ops)):
            return f"step {step}: there is no op {index}"
        op, sources = graph.ops[index], schedule.reads[step]
        if index in ops_so_far and not op.recomputable:
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
            if other not in ops_so_far:
                return f"step {step}: op {op.name!r} runs before {graph.ops[other].name!r}"
        ops_so_far.add(index)
    for index, op in enumerate(graph.ops):
        if index not in ops_so_far:
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


def _buffers(schedule: Schedule) -> list[_Buffer]:
    """The buffers that ``schedule`` needs, hand-overs taken."""
    tensors = schedule.graph.tensors
    uses = _uses(schedule)
    result = []
    for members in _shared(schedule, uses):
        ends = [use for member in members for use in (member[0], *uses[member])]
        nbytes = max(tensors[tensor].nbytes for _, tensor in members)
        names = " = ".join(tensors[tensor].name for _, tensor in members)
        result.append(_Buffer(names, nbytes, min(ends), max(ends)))
    return result


def _uses(schedule: Schedule) -> dict[Instance, list[int]]:
    """The steps that read each output; one past the last step for a head."""
    ops = schedule.graph.ops
    uses: dict[Instance, list[int]] = {
        (step, tensor): [] for step, op in enumerate(schedule.ops) for tensor in ops[op].outputs
    }
    for step, op in enumerate(schedule.ops):
        for source, tensor in zip(schedule.reads[step], ops[op].inputs, strict=True):
            uses[source, tensor].append(step)
    for source, tensor in zip(schedule.heads, schedule.graph.heads, strict=True):
        uses[source, tensor].append(len(schedule.ops))
    return uses


def _shared(schedule: Schedule, uses: dict[Instance, list[int]]) -> list[list[Instance]]:
    """The outputs that occupy memory, grouped by the memory they share.

    An output that somebody reads joins an input's group if what is left to do with that group is
    the present read alone, or if the hand-over is an alias. Of an op's hand-overs each input and
    each output takes part in one, the first possible.
    """
    tensors = schedule.graph.tensors
    groups: list[list[Instance]] = []
    # Of each group the members that are still to be read: those of a long sum are not looked at
    # again at each of its terms.
    unread: list[list[Instance]] = []
    group_of: dict[Instance, int] = {}
    for step, index in enumerate(schedule.ops):
        op = schedule.graph.ops[index]
        source_places: set[int] = set()
        for place, target, alias in op.handovers:
            source = (schedule.reads[step][place], op.inputs[place])
            output = (step, op.outputs[target])
            if tensors[source[1]].nbytes == 0 or tensors[output[1]].nbytes == 0:
                continue
            if place in source_places or output in group_of or not uses[output]:
                continue
            group = group_of[source]
            unread[group] = [member for member in unread[group] if uses[member][-1] >= step]
            to_come = [use for member in unread[group] for use in uses[member] if use >= step]
            if alias or to_come == [step]:
                source_places.add(place)
                groups[group].append(output)
                unread[group].append(output)
                group_of[output] = group
        for tensor in op.outputs:
            output = (step, tensor)
            if output not in group_of and tensors[tensor].nbytes > 0:
                group_of[output] = len(groups)
                groups.append([output])
                unread.append([output] if uses[output] else [])
    return groups


def _why_too_much(
    schedule: Schedule, buffers: list[_Buffer], step: int, peak: int, budget: int
) -> str:
    alive = [buffer for buffer in buffers if buffer.first <= step <= buffer.last]
    largest = sorted(alive, key=lambda buffer: buffer.nbytes, reverse=True)[:3]
    names = ", ".join(f"{buffer.name} ({buffer.nbytes} bytes)" for buffer in largest)
    op = schedule.graph.ops[schedule.ops[step]].name
    return (
        f"step {step}, op {op!r}: {peak} bytes are alive, {peak - budget} more than the budget "
        f"of {budget}; the largest are {names}"
    )
