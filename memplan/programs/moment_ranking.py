"""Which moments of a step are likely to prove most: what must be dropped there, at what it costs.

The bound of a moment is a program; here all moments are looked at in one pass over the buffers.
Sets of ops, and of their moments, are integers with a bit for every op.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from memplan.search.buffers import Buffers
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

Array = np.ndarray[Any, Any]

# Buffers between two looks at whether all moments are within the budget.
BUFFERS_BETWEEN_LOOKS = 64


def relatives(graph: TrainingGraph) -> tuple[list[int], list[int]]:
    """For every op, a bit for each of its ancestors, and for each of its descendants."""
    nops = len(graph.ops)
    ancestors, descendants = [0] * nops, [0] * nops
    for t in range(nops):
        for other in graph.dependencies[t]:
            ancestors[t] |= ancestors[other] | 1 << other
    for t in range(nops - 1, -1, -1):
        for other in graph.followers[t]:
            descendants[t] |= descendants[other] | 1 << other
    return ancestors, descendants


def needed(graph: TrainingGraph, buffers: Buffers, tensors: Iterable[int]) -> dict[int, int]:
    """For the buffers of these ``tensors``, a bit for every op during which they are needed.

    A tensor is at the descendants of the op that writes it that are ancestors of a reader.
    """
    ancestors, descendants = relatives(graph)
    heads = frozenset(graph.heads)
    masks: dict[int, int] = defaultdict(int)
    for a in tensors:
        before_reader = -1 if a in heads else 0
        for r in graph.readers[a]:
            before_reader |= ancestors[r]
        masks[buffers.class_of[a]] |= descendants[graph.producer[a]] & before_reader
    return masks


def bits(mask: int, count: int) -> Array:
    """The lowest ``count`` bits of ``mask`` as an array, the lowest first."""
    packed = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), dtype=np.uint8)
    # NumPy would multiply bytes by a Python int above 2^32 as unsigned numbers.
    return np.unpackbits(packed, bitorder="little")[:count].astype(np.int64)


def ranked(
    graph: TrainingGraph,
    buffers: Buffers,
    is_repeatable: Sequence[bool],
    working_nbytes: Sequence[int],
    budget_nbytes: int,
) -> list[int]:
    """The ops at whose first run something must be dropped, those that cost most first.

    Beside what the op itself reads and writes, its moment holds what descendants of the op read of
    its ancestors. As much of that as is over the budget is dropped, the cheapest per byte first, as
    if each could be computed again by its own op alone: that costs too little, but tells moments
    apart.
    """
    excess = np.array(working_nbytes, dtype=np.int64) - budget_nbytes
    masks = _waiting(graph, buffers)
    for c, mask in masks.items():
        begin, present = _window(mask)
        excess[begin : begin + len(present)] += buffers.classes[c][0] * present
    moments = np.flatnonzero(excess > 0).tolist()
    seconds = {c: _seconds_per_byte(graph, buffers, is_repeatable, c) for c in masks}
    cost = np.zeros(len(graph.ops))
    for place, c in enumerate(sorted(masks, key=lambda c: seconds[c])):
        if place % BUFFERS_BETWEEN_LOOKS == 0 and excess.max(initial=0) <= 0:
            break
        begin, present = _window(masks[c])
        part = slice(begin, begin + len(present))
        drop_nbytes = np.minimum(np.maximum(excess[part], 0), buffers.classes[c][0] * present)
        excess[part] -= drop_nbytes
        if math.isinf(seconds[c]):
            cost[part][drop_nbytes > 0] = math.inf
        else:
            cost[part] += seconds[c] * drop_nbytes
    return sorted(moments, key=lambda t: -cost[t])


def _waiting(graph: TrainingGraph, buffers: Buffers) -> dict[int, int]:
    """For buffers, the ops during which they are there and neither read nor written."""
    sized = [a for a, c in enumerate(buffers.class_of) if c >= 0]
    touching: dict[int, int] = defaultdict(int)
    for a in sized:
        for op in (graph.producer[a], *graph.readers[a]):
            touching[buffers.class_of[a]] |= 1 << op
    waiting = {c: mask & ~touching[c] for c, mask in needed(graph, buffers, sized).items()}
    return {c: mask for c, mask in waiting.items() if mask}


def _window(mask: int) -> tuple[int, Array]:
    """Where the first bit of ``mask`` is, and its bits from there to the last."""
    begin = (mask & -mask).bit_length() - 1
    return begin, bits(mask >> begin, mask.bit_length() - begin)


def _seconds_per_byte(
    graph: TrainingGraph, buffers: Buffers, is_repeatable: Sequence[bool], c: int
) -> float:
    """Seconds of the cheapest op that writes into buffer ``c``, by the bytes that it writes."""
    return min(
        graph.ops[p].seconds / max(1, sum(graph.tensors[a].nbytes for a in graph.ops[p].outputs))
        if is_repeatable[p]
        else math.inf
        for p in (graph.producer[a] for a in buffers.classes[c][1])
    )


def fullest_between(schedule: Schedule, least_seconds: float) -> tuple[int, ...]:
    """The ops whose first runs are the fullest between two recomputations of ``schedule``.

    Recomputations in a row are one, and count if they take more than ``least_seconds``. What a
    good schedule recomputes it had no room for at one of these moments, so that together they prove
    more than moments that prove much alone.
    """
    live, graph = simulate(schedule).live_nbytes, schedule.graph
    parts: list[list[int]] = [[]]
    seconds = 0.0
    for step, op in enumerate(schedule.ops):
        if schedule.first_run[op] != step:
            seconds += graph.ops[op].seconds
            continue
        if seconds > least_seconds:
            parts.append([])
            seconds = 0.0
        parts[-1].append(step)
    fullest = (max(part, key=lambda step: live[step]) for part in parts if part)
    return tuple(schedule.ops[step] for step in fullest)
