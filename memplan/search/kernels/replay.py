"""What a schedule costs, compiled: the bytes alive and those of MXNet's blocks.

The rules are those of :func:`memplan.step.simulate.replay` and
:func:`memplan.memory.blocks.allocate`; the tests hold them equal. A search may use this to choose;
what it returns is scored by those two.

A step runs an op, and reads the latest execution; or it runs on copies, as MXNet's mirroring has
it: the copy of a flagged op, and the backward op of one, read and write copies where there are
any. A copy's tensors are further tensors, so that an original and its copy can be alive together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import (
    CLASS,
    HANDED,
    NBYTES,
    PLACED,
    READ,
    WRITTEN,
    Array,
    GraphArrays,
)
from memplan.util.compiled import compiled

# More bytes than there can be: the tensors of a graph have 2^53 at most, and as many elements.
UNLIMITED = 1 << 62

# Rows of ReplayMemory.tensors, of ReplayMemory.blocks and of ReplayMemory.free.
BLOCK, UNREAD = range(2)
SIZE, TRUE, USERS, CONTENT, OLDER, NEWER = range(6)
OLDEST, NEWEST = range(2)


class ReplayMemory(NamedTuple):
    """Arrays that :func:`replay` works in.

    ``reads``: how often every output of every step is read. ``copies``: for each tensor that of
    the copy of its op, or itself if there is none. ``tensors``: of each (and of each copy) its
    block and the reads to come. ``given``: of each place that reads, the last step at which it
    gave its buffer. ``blocks``: class, true bytes, users and bytes of the content, and the free
    blocks before and after it in its class; ``free``: of each class the oldest and newest of
    these. ``live``: the bytes alive at each step.
    """

    reads: Array
    copies: Array
    tensors: Array
    given: Array
    blocks: Array
    free: Array
    live: Array


def replay_memory(
    arrays: GraphArrays, nsteps: int, nwritten: int, *, copies: bool = False
) -> ReplayMemory:
    """Room for up to ``nsteps`` steps, which may run on ``copies``, and write up to ``nwritten``.

    The latter are tensors, each as often as it is written.
    """
    ntensors = arrays.tensors.shape[1]
    most_handed = int(np.max(np.diff(arrays.start[HANDED]), initial=0))
    return ReplayMemory(
        np.empty(nwritten, dtype=np.int64),
        np.arange(ntensors),
        np.empty((2, (1 + copies) * ntensors), dtype=np.int64),
        np.empty(most_handed, dtype=np.int64),
        np.empty((6, nwritten), dtype=np.int64),
        np.empty((2, len(arrays.classes)), dtype=np.int64),
        np.empty(nsteps, dtype=np.int64),
    )


@compiled
def _count_reads(graph, memory, steps, nsteps):  # type: ignore[no-untyped-def]
    """How often each output of each step is read, in the order of steps."""
    start, flat, copies = graph.start, graph.flat, memory.copies
    nops, to_come = start.shape[1] - 1, memory.tensors[UNREAD]
    to_come[:] = 0
    for i in range(len(graph.heads)):
        to_come[graph.heads[i]] += 1
    place = 0
    for step in range(nsteps):
        op = steps[step] % nops
        place += start[WRITTEN, op + 1] - start[WRITTEN, op]
    for step in range(nsteps - 1, -1, -1):
        copied = steps[step] >= nops
        op = steps[step] - nops * copied
        for i in range(start[WRITTEN, op + 1] - 1, start[WRITTEN, op] - 1, -1):
            place -= 1
            tensor = copies[flat[i]] if copied else np.int64(flat[i])
            memory.reads[place] = to_come[tensor]
            to_come[tensor] = 0
        for i in range(start[READ, op], start[READ, op + 1]):
            to_come[copies[flat[i]] if copied else np.int64(flat[i])] += 1


@compiled
def _take(classes, free, blocks, size, match_range, limit):  # type: ignore[no-untyped-def]
    """Take the free block for a request of class ``size``, or -1 (plan_memory.cc).

    What is larger than ``limit`` must not be multiplied by the match range: that would wrap.
    """
    if match_range == 0:
        return np.int64(-1)
    least = classes[size] // match_range
    most = classes[size] * match_range if classes[size] <= limit else UNLIMITED
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


@compiled
def _release(free, blocks, block):  # type: ignore[no-untyped-def]
    """Make a block the newest free one of its class; the bytes that die with its content."""
    size = blocks[SIZE, block]
    newest = free[NEWEST, size]
    blocks[OLDER, block] = newest
    blocks[NEWER, block] = -1
    free[NEWEST, size] = block
    if newest >= 0:
        blocks[NEWER, newest] = block
    else:
        free[OLDEST, size] = block
    return blocks[CONTENT, block]


@compiled
def _hand_over(handed, copies, copied, step, nbytes_of, tensors, given, blocks):  # type: ignore[no-untyped-def]
    """Outputs take over, or share, the buffers of inputs; the bytes by which blocks grow."""
    grown = 0
    for i in range(0, len(handed), 4):
        source, output = np.int64(handed[i]), np.int64(handed[i + 1])
        need = nbytes_of[output]
        if copied:
            source, output = copies[source], copies[output]
        block, place = tensors[BLOCK, source], handed[i + 3]
        if (
            block >= 0
            and tensors[BLOCK, output] < 0
            and tensors[UNREAD, output] > 0
            and given[place] != step
            and (handed[i + 2] == 1 or blocks[USERS, block] == 1)
        ):
            given[place] = step
            tensors[BLOCK, output] = block
            blocks[USERS, block] += tensors[UNREAD, output]
            grown += max(0, need - blocks[TRUE, block])
            blocks[TRUE, block] = max(blocks[TRUE, block], need)
    return grown


@compiled
def replay(graph, memory, steps, nsteps, match_range, enough):  # type: ignore[no-untyped-def]
    """Bytes of the blocks, and the peak of live bytes, of running ``steps[:nsteps]``.

    A step is an op, or an op plus the number of ops: then it runs on copies. Stops as soon as the
    blocks have more than ``enough`` bytes. It is one function, and a long one, because it is called
    for every move of a search: numba hands the arrays on to another at three times its seconds.
    """
    start, flat, classes = graph.start, graph.flat, graph.classes
    size_of, nbytes_of = graph.tensors[CLASS], graph.tensors[NBYTES]
    reads, copies, tensors, given = memory.reads, memory.copies, memory.tensors, memory.given
    blocks, free, alive = memory.blocks, memory.free, memory.live
    _count_reads(graph, memory, steps, nsteps)
    tensors[BLOCK] = -1
    free[:] = -1
    given[:] = -1
    nops, limit = start.shape[1] - 1, UNLIMITED // max(1, match_range)
    nblocks, total, live, peak, first = 0, 0, 0, 0, 0
    for step in range(nsteps):
        copied = steps[step] >= nops
        op = steps[step] - nops * copied
        for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
            output = copies[flat[i]] if copied else np.int64(flat[i])
            tensors[BLOCK, output] = -1
            tensors[UNREAD, output] = reads[first]
            first += 1
        handed = flat[start[HANDED, op] : start[HANDED, op + 1]]
        if len(handed):
            total += _hand_over(handed, copies, copied, step, nbytes_of, tensors, given, blocks)
        for i in range(start[PLACED, op], start[PLACED, op + 1]):
            output = copies[flat[i]] if copied else np.int64(flat[i])
            if tensors[BLOCK, output] < 0:
                size, need = size_of[flat[i]], nbytes_of[flat[i]]
                block = _take(classes, free, blocks, size, match_range, limit)
                if block < 0:
                    block = nblocks
                    nblocks += 1
                    blocks[SIZE, block] = size
                    blocks[TRUE, block] = 0
                grown = max(0, need - blocks[TRUE, block])
                blocks[SIZE, block] = max(blocks[SIZE, block], size)
                blocks[TRUE, block] += grown
                blocks[CONTENT, block] = need
                total += grown
                tensors[BLOCK, output] = block
                blocks[USERS, block] = tensors[UNREAD, output]
                live += need
        alive[step] = live
        peak = max(peak, live)
        if total > enough:
            break
        for i in range(start[READ, op], start[READ, op + 1]):
            block = tensors[BLOCK, copies[flat[i]] if copied else np.int64(flat[i])]
            if block >= 0:
                blocks[USERS, block] -= 1
                if blocks[USERS, block] == 0:
                    live -= _release(free, blocks, block)
        for i in range(start[WRITTEN, op], start[WRITTEN, op + 1]):
            output = copies[flat[i]] if copied else np.int64(flat[i])
            if tensors[UNREAD, output] == 0 and tensors[BLOCK, output] >= 0:
                live -= _release(free, blocks, tensors[BLOCK, output])
    return total, peak
