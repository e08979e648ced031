"""Arrays that MXNet's executor has under several shapes, of which packed steps have one for each.

An operator that only changes the shape (FInplaceIdentity) has the array of its input for an output
there. What that array has of a layout of oneDNN's, which is for one shape, shows under the others:
the gradient of a Reshape leaves the layout as it is, and so does what is written over that in turn
(CastNonDefaultStorage of MXNet's src/common/exec_utils.h). A Reshape itself turns the array into
the usual layout, for all that read it from then on (src/operator/nn/mkldnn/mkldnn_reshape.cc).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from memplan.mxnet.realise.estimate.whole_pictures import has_notes_of_any_layout
from memplan.mxnet.realise.varying_layouts import may_be_own, takes_notes
from memplan.mxnet.trace.layouts import (
    KEEPS_LAYOUT,
    adds_along_axes,
    must_be_in_place,
    reads_any_layout,
    writes_in_layout_of_place,
)
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import CONVOLUTIONS, places_of_tensors
from memplan.mxnet.trace.probe import handovers
from memplan.step.graph import Handover, TrainingGraph

# The operators that turn what they share, if that has up to so many dimensions.
_TURNING, _MOST_DIMENSIONS = ("Reshape", "Flatten", "expand_dims"), 4

# Those of oneDNN's that read an array in the layout of another shape, as it was seen with each, and
# whose gradients do. Others find no function of oneDNN's for it, or compute garbage.
_READ_OTHER_SHAPES = frozenset({*CONVOLUTIONS, "Activation", "FullyConnected", "LeakyReLU", "copy"})


def between_shapes(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph`` with the hand-overs of its ops, ``nodes``, between shapes, as MXNet makes them."""
    ops = []
    for op, node in zip(graph.ops, nodes, strict=True):
        further = (each for each in _between_shapes(node) if each not in op.handovers)
        ops.append(dataclasses.replace(op, handovers=(*op.handovers, *further)))
    return dataclasses.replace(graph, ops=tuple(ops))


def _between_shapes(node: Node) -> Iterator[Handover]:
    """The hand-overs of ``node``, if it only changes the shape, by the inputs of its op.

    Others, such as a broadcast sum of more dimensions than its terms, compute something, which no
    copy can take the place of.
    """
    places = places_of_tensors(node)
    for handover in handovers(node):
        read, written = node.infos.inputs[handover.input], node.infos.outputs[handover.output]
        if handover.alias and handover.input in places and read != written:
            yield handover._replace(input=places.index(handover.input))


def turned_arrays(
    graph: TrainingGraph, nodes: Sequence[Node], source_of: Mapping[int, int]
) -> dict[int, list[int]]:
    """For each op that turns an array into the usual layout the tensors that share the array.

    ``source_of`` tells over which tensor each is written.
    """
    array_of: dict[int, list[int]] = {}
    result = {}
    for index, (op, node) in enumerate(zip(graph.ops, nodes, strict=True)):
        array_of.update((tensor, [tensor]) for tensor in op.outputs)
        for place, output, alias in op.handovers:
            source, written = op.inputs[place], op.outputs[output]
            if alias and source_of.get(written) == source:
                array_of[source].append(written)
                array_of[written] = array_of[source]
        if _turns(node) and source_of.keys() & set(op.outputs):
            result[index] = array_of[op.outputs[0]]
    return result


def _turns(node: Node) -> bool:
    """Does ``node`` turn what it reads into the usual layout, where it shares that?"""
    data = node.infos.inputs[0] if node.op in _TURNING else None
    return data is not None and data.dtype == "float32" and len(data.shape) <= _MOST_DIMENSIONS


def _leaves_as_it_is(node: Node) -> bool:
    """Is ``node`` a Reshape that does not turn what it shares?"""
    return node.op in _TURNING and not _turns(node)


def read_turned(
    graph: TrainingGraph,
    nodes: Sequence[Node],
    stock_order: Sequence[int],
    source_of: Mapping[int, int],
) -> dict[int, list[int]]:
    """For each op the inputs of its node that are in the usual layout because a Reshape turned it.

    Those whose layout decides on that of what the op writes, or on how it rounds: others may read
    any. As the unplanned step runs the ops, in ``stock_order``. But no array on which an op has
    taken notes by its layout before: MXNet's gradient of that is wrong.
    """
    result: dict[int, list[int]] = defaultdict(list)
    own = may_be_own(graph, nodes)
    position = {index: place for place, index in enumerate(stock_order)}
    for turning, array in turned_arrays(graph, nodes, source_of).items():
        readers = [reader for tensor in array for reader in graph.readers[tensor]]
        before = [nodes[reader] for reader in readers if position[reader] < position[turning]]
        if any(takes_notes(node) and not _are_of_any_layout(node) for node in before):
            continue
        for tensor in array:
            if tensor not in own or _turns(nodes[graph.producer[tensor]]):
                continue
            for reader in graph.readers[tensor]:
                if position[reader] > position[turning]:
                    op, node = graph.ops[reader], nodes[reader]
                    is_over = any(source_of.get(written) == tensor for written in op.outputs)
                    counts = rounds_by_layout(node) or adds_along_axes(node)
                    if counts or (writes_in_layout_of_place(node) and is_over):
                        place = places_of_tensors(node)[op.inputs.index(tensor)]
                        result[reader].append(place)
    return result


def _are_of_any_layout(noting: Node) -> bool:
    return noting.op == "Pooling" and has_notes_of_any_layout(noting)


def rounds_by_layout(node: Node) -> bool:
    """Does what ``node`` computes, or its layout, depend on the layout of what it reads?

    Or whether MXNet can run it, as a softmax of rows that is not written over these.
    """
    return (node.op in KEEPS_LAYOUT and reads_any_layout(node)) or must_be_in_place(node)


def are_readable(
    graph: TrainingGraph, nodes: Sequence[Node], reshaped: Collection[int], tensor: int
) -> bool:
    """Can all read ``tensor`` in the layout of another shape, and what they leave in such a one?

    ``reshaped`` are the tensors that have one in MXNet's executor. There an array may have been
    turned that is another one in a packed step.
    """
    if tensor in graph.heads:
        return False
    for reader in graph.readers[tensor]:
        node, outputs = nodes[reader], graph.ops[reader].outputs
        name = node.op.removeprefix("_backward").removeprefix("_")
        if reads_any_layout(node) and name not in _READ_OTHER_SHAPES:
            return False
        if not all(are_readable(graph, nodes, reshaped, t) for t in outputs if t in reshaped):
            return False
    return True


def in_own_shape(
    graph: TrainingGraph,
    nodes: Sequence[Node],
    source_of: Mapping[int, int],
    reshaped: Collection[int],
    tensor: int,
) -> int | None:
    """The tensor that shares the array of ``tensor``, and has the shape of its layout, if any.

    ``source_of`` and ``reshaped`` are as above. A Reshape of more dimensions than it turns leaves
    its output in the layout of its input, too, if it does not copy that.
    """
    while tensor in reshaped or _leaves_as_it_is(nodes[graph.producer[tensor]]):
        op, source = graph.ops[graph.producer[tensor]], source_of.get(tensor)
        pairs = [(op.inputs[h.input], op.outputs[h.output]) for h in op.handovers if h.alias]
        if source is None or (source, tensor) not in pairs:
            return None if tensor in reshaped else tensor
        tensor = source
    return tensor
