"""What a sequence of executions costs, compiled: the bytes alive and those of MXNet's blocks.

The rules are those of :func:`memplan.step.simulate.replay` and
:func:`memplan.memory.blocks.allocate` for a schedule in which every step reads the latest
execution; the tests hold them equal. A search may use this to choose; what it returns is scored by
those two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np

from memplan.memory.blocks import PLANNER_ELEMENT_NBYTES
from memplan.step.graph import Op, TrainingGraph

Array = np.ndarray[Any, Any]


class GraphArrays(NamedTuple):
    """A graph as flat arrays. ``start[k, op]`` is where in ``flat`` list k of an op begins.

    The lists of an op: tensors read, tensors written, those among them to be placed (largest
    first), hand-overs (tensor read, tensor written, alias, number of the place that reads, at most
    63). ``tensors`` are, of every tensor, the class of its size as
    MXNet's planner counts it and its true bytes; ``classes`` the bytes of those classes, ascending.
    """

    start: Array
    flat: Array
    tensors: Array
    classes: Array
    heads: Array


class Cost(NamedTuple):
    """Bytes of MXNet's blocks and peak of live bytes."""

    allocated_nbytes: int
    peak_nbytes: int


READ, WRITTEN, PLACED, HANDED = range(4)
CLASS, NBYTES = range(2)


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


def graph_arrays(graph: TrainingGraph, least_nbytes: int = 1) -> GraphArrays:
    """``graph`` as compiled code reads it, without the tensors of less than ``least_nbytes``."""
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
    return GraphArrays(
        start,
        flat.astype(np.uint32),
        np.array([[of_size[n] for n in planner], [t.nbytes for t in graph.tensors]]).reshape(2, -1),
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


@dataclass(frozen=True)
class Replayer:
    """Costs of sequences of one graph."""

    arrays: GraphArrays

    @classmethod
    def of(cls, graph: TrainingGraph) -> Replayer:
        """For sequences of ``graph``."""
        return cls(graph_arrays(graph))

    def __call__(self, sequence: Iterable[int], match_range: int) -> Cost:
        """The cost of running these ops in this order; the blocks are those of ``match_range``."""
        ops = np.array(list(sequence), dtype=np.int64)
        memory = replay_memory(self.arrays, len(ops))
        allocated, peak = replay(self.arrays, memory, ops, len(ops), match_range, 1 << 62)
        return Cost(int(allocated), int(peak))


class ReplayMemory(NamedTuple):
    """Arrays that :func:`replay` works in.

    ``reads``: how often every output of every step is read. ``tensors``: of each its block and the
    reads to come. ``blocks``: class, true bytes, users and bytes of the content, and the free
    blocks before and after it in its class; ``free``: of each class the oldest and newest of these.
    """

    reads: Array
    tensors: Array
    blocks: Array
    free: Array


SIZE, TRUE, USERS, CONTENT, OLDER, NEWER = range(6)
OLDEST, NEWEST = range(2)


def replay_memory(arrays: GraphArrays, nsteps: int) -> ReplayMemory:
    """Room for sequences of up to ``nsteps`` steps."""
    most = int(np.max(np.diff(arrays.start[WRITTEN]), initial=0)) * nsteps
    return ReplayMemory(
        np.empty(most, dtype=np.int64),
        np.empty((2, arrays.tensors.shape[1]), dtype=np.int64),
        np.empty((6, most), dtype=np.int64),
        np.empty((2, len(arrays.classes)), dtype=np.int64),
    )


@numba.njit(cache=True)
def _count_reads(graph, memory, ops, nsteps):  # type: ignore[no-untyped-def]
    """How often each output of each step is read, in the order of steps; how many there are."""
    start, flat = graph.start, graph.flat
    to_come = memory.tensors[1]
    to_come[:] = 0
    for i in range(len(graph.heads)):
        to_come[graph.heads[i]] += 1
    total = 0
    for step in range(nsteps):
        total += start[WRITTEN, ops[step] + 1] - start[WRITTEN, ops[step]]
    place = total
    for step in range(nsteps - 1, -1, -1):
        op = ops[step]
        for i in range(start[WRITTEN, op + 1] - 1, start[WRITTEN, op] - 1, -1):
            place -= 1
            memory.reads[place] = to_come[flat[i]]
            to_come[flat[i]] = 0
        for i in range(start[READ, op], start[READ, op + 1]):
            to_come[flat[i]] += 1
    return total


@numba.njit(cache=True)
def _take(classes, memory, size, match_range):  # type: ignore[no-untyped-def]
    """Take the free block for a request of class ``size``, or -1 (plan_memory.cc)."""
    free, blocks = memory.free, memory.blocks
    if match_range == 0:
        return np.int64(-1)
    most, least = classes[size] * match_range, classes[size] // match_range
    for larger in range(size, len(classes)):
        if classes[larger] > most:
            break
        block = free[OLDEST, larger]
        if block >= 0:
            newer = blocks[NEWER, block]
            free[OLDEST, larger] = newer
            if newer >= 0:
                blocks[OLDER, newer] = -1
            else:
                free[NEWEST, larger] = -1
            return block
    for smaller in range(size - 1, -1, -1):
        if classes[smaller] < least:
            break
        block = free[NEWEST, smaller]
        if block >= 0:
            older = blocks[OLDER, block]
            free[NEWEST, smaller] = older
            if older >= 0:
                blocks[NEWER, older] = -1
            else:
                free[OLDEST, smaller] = -1
            return block
    return np.int64(-1)


@numba.njit(cache=True)
def _release(memory, block):  # type: ignore[no-untyped-def]
    """Make a block the newest free one of its class."""
    free, blocks = memory.free, memory.blocks
    size = blocks[SIZE, block]
    newest = free[NEWEST, size]
    blocks[OLDER, block] = newest
    blocks[NEWER, block] = -1
    free[NEWEST, size] = block
    if newest >= 0:
        blocks[NEWER, newest] = block
    else:
        free[OLDEST, size] = block


@numba.njit(cache=True)
def replay(graph, memory, ops, nsteps, match_range, enough):  # type: ignore[no-untyped-def]
    """Bytes of the blocks, and the peak of live bytes, of running ``ops[:nsteps]``.

    Stops as soon as the blocks have more than ``enough`` bytes.
    """
    start, flat, blocks = graph.start, graph.flat, memory.blocks
    size_of, nbytes_of = graph.tensors[CLASS], graph.tensors[NBYTES]
    sizes, true, users, content = blocks[SIZE], blocks[TRUE], blocks[USERS], blocks[CONTENT]
    _count_reads(graph, memory, ops, nsteps)
    block_of, unread = memory.tensors[0], memory.tensors[1]
    block_of[:] = -1
    memory.free[:] = -1
    nblocks, total, live, peak, place = 0, 0, 0, 0, 0
    for step in range(nsteps):
        op = ops[step]
        for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
            block_of[flat[i]] = -1
            unread[flat[i]] = memory.reads[place]
            place += 1
        given = 0
        for i in range(start[HANDED, op], start[HANDED, op + 1], 4):
            output = flat[i + 1]
            block = block_of[flat[i]]
            if (
                block >= 0
                and block_of[output] < 0
                and unread[output] > 0
                and given >> flat[i + 3] & 1 == 0
                and (flat[i + 2] == 1 or users[block] == 1)
            ):
                given |= 1 << flat[i + 3]
                block_of[output] = block
                users[block] += unread[output]
                total += max(0, nbytes_of[output] - true[block])
                true[block] = max(true[block], nbytes_of[output])
        for i in range(start[PLACED, op], start[PLACED, op + 1]):
            output = flat[i]
            if block_of[output] >= 0:
                continue
            size, need = size_of[output], nbytes_of[output]
            block = _take(graph.classes, memory, size, match_range)
            if block < 0:
                block = nblocks
                nblocks += 1
                sizes[block] = size
                true[block] = need
                total += need
            else:
                sizes[block] = max(sizes[block], size)
                total += max(0, need - true[block])
                true[block] = max(true[block], need)
            block_of[output] = block
            users[block] = unread[output]
            content[block] = need
            live += need
        peak = max(peak, live)
        if total > enough:
            break
        for i in range(start[READ, op], start[READ, op + 1]):
            block = block_of[flat[i]]
            if block >= 0:
                users[block] -= 1
                if users[block] == 0:
                    live -= content[block]
                    _release(memory, block)
        for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
            block = block_of[flat[i]]
            if unread[flat[i]] == 0 and block >= 0:
                live -= content[block]
                _release(memory, block)
    return total, peak
