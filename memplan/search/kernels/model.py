"""A graph as the search over sequences sees it: groups of ops, and who reads what.

An op whose one output is an alias of its one input (reshape) runs with the op that writes it, again
only if it is read then: what compiled code calls an op is such a group, and there is one more,
which ends the sequence and reads the heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import Array, ragged, ragged_lists
from memplan.step.graph import Op, TrainingGraph

# Lists of an op, as rows of SequenceModel.start. ALIASED are the ops an alias of which it reads.
READ, WRITTEN, HANDED, BEFORE, AFTER, ALIASED, MEMBERS = range(7)
# Rows of SequenceModel.tensors.
WRITER, NBYTES, READERS, READERS_END = range(4)


class SequenceModel(NamedTuple):
    """Groups of ops as flat arrays: ``flat[start[k, v]:start[k, v + 1]]`` is list k of group v.

    ``readers`` are those of each tensor; ``edges`` all (tensor, reader) whose tensor may be
    recomputed. ``written_nbytes`` and ``repeatable`` are by group, ``seconds``, without those of
    aliases, too; ``op_seconds`` are by op of the graph. What op i writes as an alias is read by the
    groups ``alias_readers[alias_start[i]:alias_start[i + 1]]``. ``widths`` say, by group, how many
    ops it runs, or how many tensors these write, if that is more.
    """

    start: Array
    flat: Array
    tensors: Array
    readers: Array
    written_nbytes: Array
    seconds: Array
    repeatable: Array
    edges: Array
    op_seconds: Array
    alias_start: Array
    alias_readers: Array
    widths: Array


def groups(graph: TrainingGraph, may_rerun: tuple[bool, ...], *, adjacent: bool) -> list[list[int]]:
    """Ops with the aliases of what they write, in base order.

    With ``adjacent`` only those that directly follow.
    """
    leader = list(range(len(graph.ops)))
    result: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        source = _aliased(graph, index)
        if source is not None:
            first = leader[source]
            follows = result[first][-1] == index - 1 or not adjacent
            has_waited = _have_run(graph, first, set(op.after).difference(result[first]))
            if follows and has_waited and may_rerun[index] >= may_rerun[first]:
                leader[index] = first
                result[first].append(index)
                continue
        result[index] = [index]
    return list(result.values())


def _have_run(graph: TrainingGraph, index: int, others: set[int]) -> bool:
    """Must all of the ``others`` have run before op ``index`` runs?"""
    missing, seen, ops = set(others), {index}, [index]
    first = min(missing, default=index)  # what is before it in base order leads to none of them
    while missing and ops:
        above = {u for u in graph.dependencies[ops.pop()] if u >= first} - seen
        missing -= above
        seen |= above
        ops += above
    return not missing


def _aliased(graph: TrainingGraph, index: int) -> int | None:
    """The op whose output op ``index`` does nothing but alias."""
    op = graph.ops[index]
    # Only ops of one input and one output count: all aliases in MXNet's graphs are such.
    alias = len(op.handovers) == 1 and op.handovers[0].alias
    if not alias or len(op.inputs) != 1 or len(op.outputs) != 1:
        return None
    if not graph.tensors[op.inputs[0]].nbytes or not graph.tensors[op.outputs[0]].nbytes:
        return None
    return graph.producer[op.inputs[0]]


def sequence_model(
    graph: TrainingGraph, may_rerun: tuple[bool, ...], *, reorder: bool
) -> SequenceModel:
    """``graph`` as the search sees it; ``may_rerun`` says which ops may run again.

    Without ``reorder`` the ops keep their base order; with it, those forward ops that must not
    run again do, among themselves.
    """
    members = groups(graph, may_rerun, adjacent=not reorder)
    calls = [graph.ops[ops[0]] for ops in members]
    written_by = [(v, a) for v, call in enumerate(calls) for a in call.outputs]
    sized = [(v, a) for v, a in written_by if graph.tensors[a].nbytes]
    number = {a: i for i, (_, a) in enumerate(sized)}
    for ops in members:
        for op in ops[1:]:
            number[graph.ops[op].outputs[0]] = number[graph.ops[op].inputs[0]]
    reads = [
        list(dict.fromkeys(number[a] for a in row if a in number))
        for row in (*(call.inputs for call in calls), graph.heads)
    ]
    # In the order in which they are placed, which decides between placements that are alike.
    placed = [graph.placements[ops[0]] for ops in members]
    writes = [
        [number[a] for a in map(call.outputs.__getitem__, places) if a in number]
        for call, places in zip(calls, placed, strict=True)
    ]
    pairs = [_handed(call, number) for call in calls]
    before = _predecessors(graph, members, may_rerun, reorder)
    readers = _reversed(reads, len(sized))
    nbytes = [graph.tensors[a].nbytes for _, a in sized]
    repeatable = [*(may_rerun[ops[0]] for ops in members), False]
    reader_start, reader_flat = ragged(readers)
    after = _reversed(before, len(before))
    alias_readers = _alias_readers(graph, members)
    aliased: list[list[int]] = [[] for _ in before]
    for v, ops in enumerate(members):
        for reader in sorted(set().union(*(alias_readers[op] for op in ops))):
            aliased[reader].append(v)
    start, flat = ragged_lists(
        [reads, [*writes, []], [*pairs, []], before, after, aliased, [*members, []]]
    )
    edges = [(a, v) for a, row in enumerate(readers) if repeatable[sized[a][0]] for v in row]
    return SequenceModel(
        start,
        flat,
        np.array(
            [[v for v, _ in sized], nbytes, reader_start[:-1], reader_start[1:]], dtype=np.int64
        ),
        reader_flat,
        np.array([*(sum(nbytes[a] for a in row) for row in writes), 0], dtype=np.int64),
        np.array([*(call.seconds for call in calls), 0.0]),
        np.array(repeatable),
        np.array(edges, dtype=np.int64).reshape(-1, 2),
        np.array([op.seconds for op in graph.ops], dtype=float),
        *ragged(alias_readers),
        np.array([*map(_width, members, writes), 0], dtype=np.int64),
    )


def _width(ops: Sequence[int], written: Sequence[int]) -> int:
    """See SequenceModel: what the first of these ops writes, and each alias that follows it."""
    return max(1, len(written)) + len(ops) - 1


def _alias_readers(graph: TrainingGraph, members: list[list[int]]) -> list[list[int]]:
    """For each op that runs with the one whose output it aliases, the groups that read it.

    Those that read an alias of it that runs with it do, too.
    """
    group_of = {op: v for v, ops in enumerate(members) for op in ops}
    heads = set(graph.heads)
    result: list[set[int]] = [set() for _ in graph.ops]
    for v, ops in enumerate(members):
        for op in reversed(ops[1:]):
            [output] = graph.ops[op].outputs
            if output in heads:
                result[op].add(len(members))
            for reader in graph.readers[output]:
                result[op] |= result[reader] if group_of[reader] == v else {group_of[reader]}
    return [sorted(row) for row in result]


def _reversed(rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """For each of ``count`` values, the rows in which it is."""
    result: list[list[int]] = [[] for _ in range(count)]
    for index, row in enumerate(rows):
        for value in row:
            result[value].append(index)
    return result


def _handed(call: Op, number: Mapping[int, int]) -> list[int]:
    """Pairs of tensors: the second may take over the buffer of the first, which is read once."""
    inputs = [number.get(a) for a in call.inputs]
    pairs = [(inputs[h.input], number.get(call.outputs[h.output])) for h in call.handovers]
    return [
        t
        for source, output in pairs
        if source is not None and output is not None and inputs.count(source) == 1
        for t in (source, output)
    ]


def _predecessors(
    graph: TrainingGraph,
    members: list[list[int]],
    may_rerun: tuple[bool, ...],
    reorder: bool,
) -> list[list[int]]:
    """For each group, and for the end, the groups that must have run before it first runs."""
    group_of = {op: v for v, ops in enumerate(members) for op in ops}
    result = []
    last_single: int | None = None
    for v, ops in enumerate(members):
        predecessors = {group_of[u] for op in ops for u in graph.dependencies[op]} - {v}
        if not reorder and v:
            predecessors.add(v - 1)
        elif ops[0] < graph.nforward and not may_rerun[ops[0]]:
            predecessors |= set() if last_single is None else {last_single}
            last_single = v
        result.append(sorted(predecessors))
    return [*result, list(range(len(members)))]
