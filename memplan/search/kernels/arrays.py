"""A graph as flat arrays, as compiled code reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memplan.memory.blocks import PLANNER_ELEMENT_NBYTES
from memplan.step.graph import Op, TrainingGraph
from memplan.util.remember import remembered

Array = np.ndarray[Any, Any]

# There is room for sequences of any ops of up to so many tensors.
USUAL_WIDTH = 8

# Lists of an op, as rows of GraphArrays.start.
READ, WRITTEN, PLACED, HANDED = range(4)
# Rows of GraphArrays.tensors.
CLASS, NBYTES = range(2)


class GraphArrays(NamedTuple):
    """``flat[start[k, op]:start[k, op + 1]]`` is list k of an op.

    The lists of an op: tensors read, tensors written, those among them to be placed (largest
    first), hand-overs (tensor read, tensor written, alias, number of the place that reads).
    ``tensors`` are, of every tensor, the class of its size as MXNet's planner counts it and its
    true bytes; ``classes`` the bytes of those classes, ascending; ``heads`` tensors.
    """

    start: Array
    flat: Array
    tensors: Array
    classes: Array
    heads: Array


def ragged(rows: Sequence[Sequence[int]], offset: int = 0) -> tuple[Array, Array]:
    """Rows of integers as one array, and where each row starts in it, counted from ``offset``."""
    start = np.full(len(rows) + 1, offset, dtype=np.int64)
    start[1:] += np.cumsum([len(row) for row in rows], dtype=np.int64)
    return start, np.array([value for row in rows for value in row], dtype=np.int64)


def ragged_lists(lists: Sequence[Sequence[Sequence[int]]]) -> tuple[Array, Array]:
    """Several lists of every op as one array; ``start[k, op]`` is where list k of an op begins."""
    starts, flats, offset = [], [], 0
    for rows in lists:
        start, flat = ragged(rows, offset)
        starts.append(start)
        flats.append(flat)
        offset += len(flat)
    return np.array(starts), np.concatenate(flats)


def most_written(widths: Array, nsteps: int) -> int:
    """How many tensors a sequence of up to ``nsteps`` steps may write; ``widths`` are those of ops.

    All that it can, unless ops write more than is usual: a sequence would have to run these over
    and over to write more than this, and room for that may be more than there is memory.
    """
    widest = int(np.max(widths, initial=0))
    return int(nsteps * max(min(widest, USUAL_WIDTH), widths.sum() / max(1, len(widths))))


def graph_arrays(graph: TrainingGraph, least_nbytes: int = 1) -> GraphArrays:
    """``graph`` as compiled code reads it, without the tensors of less than ``least_nbytes``."""
    if least_nbytes > 1:  # by what a budget says, which is another one each time
        return _graph_arrays(graph, least_nbytes)
    return remembered(graph, graph_arrays, lambda: _graph_arrays(graph, 1))


def _graph_arrays(graph: TrainingGraph, least_nbytes: int) -> GraphArrays:
    large = [tensor.nbytes >= least_nbytes for tensor in graph.tensors]
    lists: list[list[list[int]]] = [
        [[a for a in op.inputs if large[a]] for op in graph.ops],
        [[a for a in op.outputs if large[a]] for op in graph.ops],
        [
            [op.outputs[p] for p in graph.placements[i] if large[op.outputs[p]]]
            for i, op in enumerate(graph.ops)
        ],
        [_handed(op, large) for op in graph.ops],
    ]
    start, flat = ragged_lists(lists)
    planner = [t.nelements * PLANNER_ELEMENT_NBYTES for t in graph.tensors]
    classes = sorted(set(planner))
    of_size = {size: c for c, size in enumerate(classes)}
    tensors = [[of_size[n] for n in planner], [t.nbytes for t in graph.tensors]]
    return GraphArrays(
        start,
        flat.astype(np.uint32),
        np.array(tensors, dtype=np.int64),
        np.array(classes, dtype=np.int64),
        np.array([a for a in graph.heads if large[a]], dtype=np.int64),
    )


def _handed(op: Op, large: Sequence[bool]) -> list[int]:
    places = list(dict.fromkeys(h.input for h in op.handovers))
    return [
        value
        for h in op.handovers
        if large[op.inputs[h.input]] and large[op.outputs[h.output]]
        for value in (op.inputs[h.input], op.outputs[h.output], int(h.alias), places.index(h.input))
    ]
