"""A schedule as MXNet can run it: :func:`lower` gives every op, anchors and gates too, its node.

Where those come in, and how many bytes they take, :mod:`memplan.memory.additions` says. A search
asks for the bytes alone, in :func:`lowered_memory`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from memplan.errors import ScheduleError
from memplan.memory.additions import (
    ANCHOR,
    GATE,
    OP,
    READER,
    Additions,
    Gate,
    LoweredMemory,
    Reader,
    with_additions,
)
from memplan.memory.memory import Memory
from memplan.mxnet.realise.in_place import kept_in_explicit
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import EntryInfo, Infos, Node, total_nbytes
from memplan.mxnet.trace.operators import ignored_inputs, must_be_read, places_of_tensors
from memplan.mxnet.trace.probe import counts_as_backward
from memplan.step.graph import UPDATE
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered


@dataclass(frozen=True)
class Lowered:
    """A schedule as MXNet gets it, anchors and gates included; ``nodes[i]`` is the node of op i.

    ``index_of`` gives the op of a node of the trace. What MXNet allocates is
    ``allocate(lowered.schedule)``.
    """

    schedule: Schedule
    nodes: tuple[Node, ...]
    index_of: Mapping[Node, int]

    def node_at(self, step: int) -> Node:
        """The node of the op that runs at this step."""
        return self.nodes[self.schedule.ops[step]]


def lowered_memory(trace: Trace, memory: Memory) -> LoweredMemory:
    """The bytes in ``memory`` of what MXNet gets for a schedule of ``trace``."""
    return LoweredMemory(_additions(trace), memory)


def lower(trace: Trace, schedule: Schedule) -> Lowered:
    """``schedule`` as :func:`memplan.memory.additions.with_additions` has it, with its nodes."""
    extended = with_additions(_additions(trace), schedule)
    gated = {op: _gated(trace.nodes[op]) for kind, op in extended.origins if kind == GATE}
    readers = _readers(trace)
    nodes: list[Node] = []
    index_of: dict[Node, int] = {}
    for place, (kind, op) in enumerate(extended.origins):
        if kind == READER:
            nodes.append(readers[op])
            continue
        node = trace.nodes[op]
        if kind == OP:
            index_of[node] = place
            nodes.append(gated[op][1] if op in gated else node)
        elif kind == GATE:
            nodes.append(gated[op][0])
        else:
            assert kind == ANCHOR
            nodes.append(Node("shape_array", f"{node.name}_anchor", inputs=[(node, 0)]))
    return Lowered(extended.schedule, tuple(nodes), index_of)


def _additions(trace: Trace) -> Additions:
    """What MXNet needs beside the ops of ``trace``."""
    if not trace.form.spells_out_backward:
        raise ScheduleError(
            "the schedule belongs to another graph than one that spells out the whole step: the "
            "trace was not made with realisation='explicit' or 'packed'"
        )
    infos = [node.infos.outputs[0] if node.infos.outputs else None for node in trace.nodes]
    ndims = tuple(len(info.shape) if info else 0 for info in infos)
    gated = {
        op: node
        for op, node in enumerate(trace.nodes)
        if not node.control and counts_as_backward(node)
    }
    weights = {op: node.inputs[1][0] for op, node in enumerate(trace.nodes) if node.op == UPDATE}
    name_of = {weight: weight.name for weight in weights.values()}
    weights_read: dict[tuple[str, int], tuple[str, ...]] = {}
    for op, node in enumerate(trace.nodes):
        parts = zip((GATE, OP), _gated(node), strict=True) if op in gated else [(OP, node)]
        for kind, part in parts:
            names = tuple(name_of[source] for source, _ in part.inputs if source in name_of)
            if names:
                weights_read[kind, op] = names
    unread = () if trace.form.in_one_array else enumerate(trace.nodes)
    return Additions(
        ndims,
        gates={op: _gate(node) for op, node in gated.items()},
        must_be_read=frozenset(op for op, node in unread if must_be_read(node)),
        kept={op: tuple(sorted(tensors)) for op, tensors in _kept(trace).items()},
        readers={
            tensor: Reader(node.op, info.nbytes, info.nelements)
            for tensor, node in _readers(trace).items()
            for info in node.infos.outputs
            if info
        },
        weight_of={op: weight.name for op, weight in weights.items()},
        weights_read=weights_read,
    )


def _kept(trace: Trace) -> dict[int, dict[int, bool]]:
    """What ops must not write over in an executor, and what of that a slice can read."""
    if trace.form.in_one_array or trace.device_type != "cpu" or not trace.by_onednn:
        return {}
    graph, order = trace.graph, trace.stock_order
    return remembered(graph, "kept", lambda: kept_in_explicit(graph, trace.nodes, order))


def _readers(trace: Trace) -> dict[int, Node]:
    """What reads each tensor that is not to be written over, in their order."""
    kept: dict[int, bool] = {}
    for tensors in _kept(trace).values():
        kept.update(tensors)
    return {tensor: _reader(trace, tensor, is_sliced=kept[tensor]) for tensor in sorted(kept)}


def _reader(trace: Trace, tensor: int, *, is_sliced: bool) -> Node:
    """What reads a tensor that is not to be written over.

    A slice: oneDNN reads any of its layouts, where another op would have a copy of the array. Where
    it cannot, the array is in the usual layout, and its shape is asked for.
    """
    producer, k = trace.nodes[trace.graph.producer[tensor]], trace.graph.position[tensor]
    info, name = producer.infos.outputs[k], f"{producer.name}_reader{k}"
    assert info is not None
    if not is_sliced:
        sizes = EntryInfo((len(info.shape),), "int64", 8)
        return Node("shape_array", name, inputs=[(producer, k)], infos=Infos((info,), (sizes,)))
    shape = tuple(n if axis == 1 else min(n, 1) for axis, n in enumerate(info.shape))
    part = EntryInfo(shape, info.dtype, info.itemsize)
    attrs = {"begin": str((0,) * len(shape)), "end": str(shape)}
    return Node("slice", name, attrs, [(producer, k)], infos=Infos((info,), (part,)))


def _gate(node: Node) -> Gate:
    """The copy by which ``node`` is told to wait."""
    info = node.infos.inputs[_copied(node)]
    return Gate(
        place=0 if places_of_tensors(node) else None,  # the first of them
        nbytes=info.nbytes if info else 0,
        nelements=info.nelements if info else 0,
    )


def _gated(node: Node) -> tuple[Node, Node]:
    """The gate of ``node``, and ``node`` as it reads that."""
    place = _copied(node)
    gate = Node("_copy", f"{node.name}_gate", inputs=[node.inputs[place]])
    sources = list(node.inputs)
    sources[place] = (gate, 0)
    return gate, dataclasses.replace(node, inputs=sources)


def _copied(node: Node) -> int:
    """The place of the input that a gate copies.

    A copy of a tensor shares its buffer, that of a variable does not: then it is the smallest.
    """
    if internal := places_of_tensors(node):
        return internal[0]
    ignored = ignored_inputs(node)
    read = (place for place in range(len(node.inputs)) if place not in ignored)
    return min(read, key=lambda place: total_nbytes([node.infos.inputs[place]]))
