"""What packed steps do so that every op finds the layouts that it finds in MXNet's executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import mxnet as mx

from memplan.mxnet.realise.in_place import layouts_taken_over, overwritten
from memplan.mxnet.realise.layout_copy import can_copy
from memplan.mxnet.realise.lowering import Lowered
from memplan.mxnet.realise.packed_arrays import Layouts, Overwritten
from memplan.mxnet.realise.packed_rules import needs_state
from memplan.mxnet.realise.shared_arrays import between_shapes, read_turned, rounds_by_layout
from memplan.mxnet.realise.varying_layouts import may_be_own
from memplan.mxnet.realise.viewed_arrays import turned_inputs
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import is_by_onednn, onednn_is_enabled
from memplan.mxnet.trace.layouts import must_be_in_place
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_gradient_of_slopes, places_of_tensors
from memplan.step.graph import TrainingGraph


def as_run(trace: Trace) -> tuple[TrainingGraph, set[int], int]:
    """The graph of ``trace``, whose ops also hand on layouts between shapes, as packed steps do.

    And the ops that do so: they are copies, which need no others. And the bytes of the largest
    gradient that autograd writes and that takes over a layout, of which there is a copy.
    """
    graph, nodes, order = between_shapes(trace.graph, trace.nodes), trace.nodes, trace.stock_order
    if not (onednn_is_enabled() and can_copy()):
        return trace.graph, set(), 0
    taking = layouts_taken_over(graph, nodes, order, overwritten(graph, nodes, order))
    ops, copying = list(trace.graph.ops), set()
    for index, op in enumerate(graph.ops):
        if len(op.handovers) > len(ops[index].handovers) and not taking.isdisjoint(op.outputs):
            ops[index] = op
            copying.add(index)
    by_autograd = (t for t in taking if needs_state(nodes[graph.producer[t]]))
    largest = max((graph.tensors[tensor].nbytes for tensor in by_autograd), default=0)
    return dataclasses.replace(graph, ops=tuple(ops)), copying, largest


def in_layouts_of_unplanned(trace: Trace, lowered: Lowered, ctx: mx.Context) -> Layouts:
    """The layouts of the unplanned step."""
    nodes, order = trace.nodes, trace.stock_order
    has_layouts = is_by_onednn(ctx.device_type)
    graph = between_shapes(trace.graph, nodes) if has_layouts and can_copy() else trace.graph
    sources = overwritten(graph, nodes, order)
    taking_layouts = layouts_taken_over(graph, nodes, order, sources) if has_layouts else ()
    in_place = {}
    for tensor, source in sources.items():
        node = nodes[graph.producer[tensor]]
        entry = nodes[graph.producer[source]], graph.position[source]
        is_needed = (
            tensor in taking_layouts or is_gradient_of_slopes(node) or must_be_in_place(node)
        )
        in_place[lowered.index_of[node], graph.position[tensor]] = Overwritten(entry, is_needed)
    turned = turned_inputs(trace.graph, nodes, ctx.device_type)
    if has_layouts:
        wanted = read_turned(graph, nodes, order, sources)
        as_lowered = {lowered.index_of[nodes[index]]: places for index, places in wanted.items()}
        others = _read_as_they_are(lowered, as_lowered)
        for index, places in wanted.items():
            if lowered.index_of[nodes[index]] not in others:
                turned[index] = sorted({*turned.get(index, ()), *places})
        in_place |= _over_copies(graph, nodes, lowered, {*turned})
    by_op = {lowered.index_of[nodes[index]]: places for index, places in turned.items()}
    return Layouts(in_place, by_op)


def _over_copies(
    graph: TrainingGraph, nodes: Sequence[Node], lowered: Lowered, turned: Set[int]
) -> dict[tuple[int, int], Overwritten]:
    """What is to be written over what it reads, or a copy of that, though it is not unplanned.

    As a Reshape turns the array there before, and here does not: it is none of the ``turned``.
    """
    own = may_be_own(graph, nodes)
    return {
        (lowered.index_of[node], 0): Overwritten(node.inputs[0], is_needed=True)
        for index, (op, node) in enumerate(zip(graph.ops, nodes, strict=True))
        if must_be_in_place(node) and index not in turned and not own.isdisjoint(op.inputs)
    }


def _read_as_they_are(lowered: Lowered, turned: Mapping[int, Sequence[int]]) -> set[int]:
    """The ops that must not turn what they read: who reads it before that in MXNet does so later.

    As where both run again, in another order.
    """
    latest: dict[tuple[int, int], int] = {}
    steps = list(enumerate(lowered.schedule.ops))
    entries = {}
    for step, op in steps:
        node = lowered.nodes[op]
        sources = zip(places_of_tensors(node), lowered.schedule.reads[step], strict=False)
        entries[step] = {place: (source, node.inputs[place][1]) for place, source in sources}
        if rounds_by_layout(node):
            untouched = entries[step].keys() - {*turned.get(op, ())}
            latest.update((entries[step][place], step) for place in untouched)
    return {
        op
        for step, op in steps
        for place in turned.get(op, ())
        if latest.get(entries[step][place], step) > step
    }
