"""From what is kept to what runs: schedules with as little recomputation as that allows.

All schedules here advance the frontier (Jain et al. 2020, Checkmate, arXiv:1910.02653, section
4.3): stage t ends with the first execution of op t; before it, ops that were executed in earlier
stages may run once more each, in base order. A stage recomputes what it reads and does not find,
and nothing else. What is freed when follows from liveness.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule

# keep(t, a): may tensor a, if it is there, be carried into stage t?
Keep = Callable[[int, int], bool]


def repeatable(graph: TrainingGraph, *, backward: bool = False) -> tuple[bool, ...]:
    """For each op, may it run again? Backward ops run once unless ``backward``."""
    return tuple(
        op.recomputable and (index < graph.nforward or backward)
        for index, op in enumerate(graph.ops)
    )


def inner_forward(graph: TrainingGraph) -> tuple[int, ...]:
    """The forward ops that some forward op reads: without the loss."""
    return tuple(
        op
        for op in range(graph.nforward)
        if any(r < graph.nforward for a in graph.ops[op].outputs for r in graph.readers[a])
    )


def rematerialize(graph: TrainingGraph, keep: Keep) -> Schedule:
    """The schedule that carries what ``keep`` lets it, and recomputes the rest when it is read.

    Heads, tensors without bytes, those that cannot be recomputed and those that the first backward
    op reads and finds are carried in any case.
    """
    always = carried_always(graph)
    present: set[int] = set()
    sequence: list[int] = []
    for stage in range(len(graph.ops)):
        first_inputs = graph.ops[stage].inputs if stage == graph.nforward else ()
        present = {a for a in present if a in always or a in first_inputs or keep(stage, a)}
        stage_ops = closure(graph, (stage,), present)
        sequence += stage_ops
        present.update(a for op in stage_ops for a in graph.ops[op].outputs)
    return Schedule.sequence(graph, sequence)


def carried_always(graph: TrainingGraph) -> set[int]:
    """The tensors that must be carried: heads, and what has no bytes or cannot be recomputed."""
    is_repeatable = repeatable(graph)
    heads = frozenset(graph.heads)
    return {
        a
        for a, tensor in enumerate(graph.tensors)
        if not is_repeatable[graph.producer[a]] or a in heads or not tensor.nbytes
    }


def retaining(graph: TrainingGraph, contents: Sequence[AbstractSet[int]]) -> Schedule:
    """The schedule with the least recomputation in which ``contents[t]`` are there before stage t.

    ``contents[len(ops)]`` are the tensors at the end, the heads. This is R as the second phase of
    Checkmate's rounding computes it from S (Jain et al. 2020, algorithm 1). Whatever cannot be
    recomputed must be retained as long as it is read.
    """
    sequence: list[int] = []
    for stage in range(len(graph.ops)):
        present = contents[stage]
        producers = {graph.producer[a] for a in contents[stage + 1] - present}
        sequence += closure(graph, {stage, *producers}, present)
    return Schedule.sequence(graph, sequence)


def closure(graph: TrainingGraph, ops: Iterable[int], present: Collection[int]) -> list[int]:
    """``ops`` and all that must run for them where ``present`` tensors are there."""
    members = set(ops)
    stack = list(members)
    while stack:
        for a in graph.ops[stack.pop()].inputs:
            source = graph.producer[a]
            if a not in present and source not in members:
                members.add(source)
                stack.append(source)
    return sorted(members)


def recomputing_segments(graph: TrainingGraph, checkpoints: Collection[int]) -> Schedule:
    """The schedule that keeps the ops ``checkpoints`` and recomputes others once, in segments.

    What is not kept is dropped after its last reader in the forward pass (Chen et al. 2016). When
    a backward op needs it, it is recomputed from what is there, and what is recomputed on the way
    stays until its own last reader: the segment between two kept ops is recomputed as a whole.
    """
    checkpoint_ops, always = frozenset(checkpoints), carried_always(graph)
    nforward = graph.nforward
    first_inputs = graph.ops[nforward].inputs if nforward < len(graph.ops) else ()
    present = {
        a
        for op in range(nforward)
        for a in graph.ops[op].outputs
        if op in checkpoint_ops or a in always or a in first_inputs
    }
    # The forward pass finds all that it reads, and the backward pass drops nothing.
    sequence = list(range(nforward))
    for stage in range(nforward, len(graph.ops)):
        stage_ops = closure(graph, (stage,), present)
        sequence += stage_ops
        present.update(a for op in stage_ops for a in graph.ops[op].outputs)
    return Schedule.sequence(graph, sequence)
