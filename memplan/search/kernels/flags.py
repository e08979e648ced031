"""What a set of flags costs, compiled: thousands of evaluations a second for searches.

The same rules as :func:`memplan.step.mirroring.mirror`, :func:`memplan.step.simulate.replay` and
:func:`memplan.memory.blocks.allocate`, in one pass over arrays; the tests hold them equal. A search
may use this to choose; what it returns is scored by those three.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from memplan.memory.blocks import PLANNER_ELEMENT_NBYTES
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Cost:
    """Bytes of MXNet's blocks, peak of live bytes, and seconds of the step."""

    allocated_nbytes: int
    peak_nbytes: int
    seconds: float


class Evaluator:
    """Evaluates sets of flags of one graph."""

    def __init__(self, graph: TrainingGraph) -> None:
        ops, producer, position = graph.ops, graph.producer, graph.position
        self.flaggable = flaggable(graph)
        self.nops = len(ops)
        dep_start, deps = _ragged(graph.dependencies)
        in_start, places = _ragged([[position[t] for t in op.inputs] for op in ops])
        out_start, outputs = _ragged([op.outputs for op in ops])
        put_start, puts = _ragged(graph.placements)
        hand_start, hands = _ragged([[n for h in op.handovers for n in h] for op in ops])
        nelements = np.array([t.nelements for t in graph.tensors], dtype=np.int64)
        nbytes = np.array([t.nbytes for t in graph.tensors], dtype=np.int64)
        differentiates = [-1 if op.differentiates is None else op.differentiates for op in ops]
        self._arrays = (
            *(dep_start, deps, in_start, places, out_start, put_start, puts, hand_start, hands),
            nelements[outputs] * PLANNER_ELEMENT_NBYTES,
            nbytes[outputs],
            np.array(differentiates, dtype=np.int64),
            np.array([producer[t] for t in graph.heads], dtype=np.int64),
            np.array([position[t] for t in graph.heads], dtype=np.int64),
            np.array([op.seconds for op in ops]),
            graph.match_range,
        )

    def flags(self, ops: Iterable[int]) -> Array:
        """A set of ops as the array that :meth:`__call__` takes."""
        result = np.zeros(self.nops, dtype=np.bool_)
        result[list(ops)] = True
        return result

    def __call__(self, flags: Array) -> Cost:
        """The cost of flagging the ops where ``flags`` is true."""
        allocated, peak, seconds = _evaluate(flags, *self._arrays)
        return Cost(allocated, peak, seconds)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Rows of integers as one array, and where in it each row starts."""
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    return start, np.array([value for row in rows for value in row], dtype=np.int64)


@numba.njit(cache=True)
def _order(flags, dep_start, deps, differentiates, head_ops):  # type: ignore[no-untyped-def]
    """Nodes (op, or op + nops for its copy) in the order of execution; step of each, or -1."""
    nops = len(differentiates)
    step_of = np.full(2 * nops, -1, dtype=np.int64)
    order = np.empty(2 * nops, dtype=np.int64)
    stack = np.empty(2 * len(deps) + len(head_ops) + 1, dtype=np.int64)
    nsteps = 0
    for root in head_ops:
        stack[0] = root
        top = 1
        while top:
            node = stack[top - 1]
            if step_of[node] >= 0:
                top -= 1
                continue
            op = node % nops
            mapped = node >= nops or (differentiates[op] >= 0 and flags[differentiates[op]])
            before = top
            for i in range(dep_start[op + 1] - 1, dep_start[op] - 1, -1):
                needed = deps[i]
                if mapped and flags[needed]:
                    needed += nops
                if step_of[needed] < 0:
                    stack[top] = needed
                    top += 1
            if top == before:
                top -= 1
                step_of[node] = nsteps
                order[nsteps] = node
                nsteps += 1
    return order[:nsteps], step_of


@numba.njit(cache=True)
def _sources(  # type: ignore[no-untyped-def]
    flags, order, step_of, dep_start, deps, in_start, places, out_start, differentiates
):
    """First output instance of every step; the instance behind every read, and where they start."""
    nops = len(differentiates)
    nsteps = len(order)
    first = np.zeros(nsteps + 1, dtype=np.int64)
    read_start = np.zeros(nsteps + 1, dtype=np.int64)
    for step in range(nsteps):
        op = order[step] % nops
        first[step + 1] = first[step] + out_start[op + 1] - out_start[op]
        read_start[step + 1] = read_start[step] + in_start[op + 1] - in_start[op]
    sources = np.empty(read_start[nsteps], dtype=np.int64)
    for step in range(nsteps):
        node = order[step]
        op = node % nops
        mapped = node >= nops or (differentiates[op] >= 0 and flags[differentiates[op]])
        for k in range(in_start[op + 1] - in_start[op]):
            needed = deps[dep_start[op] + k]
            if mapped and flags[needed]:
                needed += nops
            place = places[in_start[op] + k]
            sources[read_start[step] + k] = first[step_of[needed]] + place
    return first, read_start, sources


@numba.njit(cache=True)
def _find(free_size, nfree, size, match_range):  # type: ignore[no-untyped-def]
    """Where in the sorted free list the block for a request is, or -1 (plan_memory.cc)."""
    if match_range == 0:
        return -1
    place = np.searchsorted(free_size[:nfree], size)
    if place < nfree and free_size[place] <= size * match_range:
        return place
    if place > 0 and free_size[place - 1] >= size // match_range:
        return place - 1
    return -1


@numba.njit(cache=True)
def _evaluate(  # type: ignore[no-untyped-def]
    flags,
    dep_start,
    deps,
    in_start,
    places,
    out_start,
    put_start,
    puts,
    hand_start,
    hands,
    sizes,
    nbytes,
    differentiates,
    head_ops,
    head_places,
    op_seconds,
    match_range,
):
    """Allocated bytes, peak of live bytes and seconds of the schedule that ``flags`` give."""
    nops = len(differentiates)
    order, step_of = _order(flags, dep_start, deps, differentiates, head_ops)
    first, read_start, sources = _sources(
        flags, order, step_of, dep_start, deps, in_start, places, out_start, differentiates
    )
    unread = np.zeros(first[-1], dtype=np.int64)
    for source in sources:
        unread[source] += 1
    for h in range(len(head_ops)):
        unread[first[step_of[head_ops[h]]] + head_places[h]] += 1
    block_of = np.full(first[-1], -1, dtype=np.int64)
    # A block: planner's size, true size, users of its present content, bytes of that content.
    reported = np.empty(first[-1], dtype=np.int64)
    true = np.empty(first[-1], dtype=np.int64)
    users = np.zeros(first[-1], dtype=np.int64)
    content = np.zeros(first[-1], dtype=np.int64)
    nblocks = 0
    free_size = np.empty(first[-1] + 1, dtype=np.int64)
    free_block = np.empty(first[-1] + 1, dtype=np.int64)
    nfree = 0
    given = np.zeros(np.max(in_start[1:] - in_start[:-1]) + 1, dtype=np.bool_)
    live = 0
    peak = 0
    seconds = 0.0
    for step in range(len(order)):
        op = order[step] % nops
        base = first[step]
        seconds += op_seconds[op]
        given[: in_start[op + 1] - in_start[op]] = False
        for i in range(hand_start[op], hand_start[op + 1], 3):
            source = sources[read_start[step] + hands[i]]
            output = base + hands[i + 1]
            block = block_of[source]
            if (
                block >= 0
                and block_of[output] < 0
                and unread[output] > 0
                and not given[hands[i]]
                and (hands[i + 2] == 1 or users[block] == 1)
                and sizes[out_start[op] + hands[i + 1]] > 0
            ):
                given[hands[i]] = True
                block_of[output] = block
                users[block] += unread[output]
                true[block] = max(true[block], nbytes[out_start[op] + hands[i + 1]])
        for i in range(put_start[op], put_start[op + 1]):
            output = base + puts[i]
            if block_of[output] >= 0:
                continue
            size = sizes[out_start[op] + puts[i]]
            need = nbytes[out_start[op] + puts[i]]
            place = _find(free_size, nfree, size, match_range)
            if place < 0:
                block = nblocks
                nblocks += 1
                reported[block] = size
                true[block] = need
            else:
                block = free_block[place]
                for j in range(place, nfree - 1):
                    free_size[j] = free_size[j + 1]
                    free_block[j] = free_block[j + 1]
                nfree -= 1
                reported[block] = max(reported[block], size)
                true[block] = max(true[block], need)
            block_of[output] = block
            users[block] = unread[output]
            content[block] = need
            live += need
        peak = max(peak, live)
        for i in range(read_start[step], read_start[step + 1]):
            block = block_of[sources[i]]
            if block >= 0:
                users[block] -= 1
                if users[block] == 0:
                    live -= content[block]
                    nfree = _release(free_size, free_block, nfree, reported[block], block)
        for output in range(base, first[step + 1]):
            if unread[output] == 0 and block_of[output] >= 0:
                block = block_of[output]
                live -= content[block]
                nfree = _release(free_size, free_block, nfree, reported[block], block)
    return true[:nblocks].sum(), peak, seconds


@numba.njit(cache=True)
def _release(free_size, free_block, nfree, size, block):  # type: ignore[no-untyped-def]
    """Insert a block into the sorted free list, after those of equal size; the new length."""
    place = np.searchsorted(free_size[:nfree], size, side="right")
    for j in range(nfree, place, -1):
        free_size[j] = free_size[j - 1]
        free_block[j] = free_block[j - 1]
    free_size[place] = size
    free_block[place] = block
    return nfree + 1
