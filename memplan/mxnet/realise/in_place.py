"""Where the unplanned step writes over an input: what is in another place may round otherwise.

An operator leaves its output in the layout in which oneDNN left the input that it writes over
(MXNet's src/common/exec_utils.h and src/operator/nn/mkldnn/mkldnn_base.cc), and the sums of a
BatchNorm are rounded by the layout of what it reads. A plan lets tensors die earlier than MXNet.
What a PReLU's backward op writes over it reads once more, so that its numbers depend on that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from memplan.mxnet.realise.estimate.layout_copies import COPIES, own_layouts
from memplan.mxnet.realise.estimate.layout_rules import SUM
from memplan.mxnet.realise.kept_by_blocks import as_unplanned
from memplan.mxnet.realise.shared_arrays import (
    are_readable,
    between_shapes,
    in_own_shape,
    rounds_by_layout,
    turned_arrays,
)
from memplan.mxnet.realise.varying_layouts import arrays, may_be_own
from memplan.mxnet.trace.layouts import writes_in_layout_of_place
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_gradient_of_slopes, keeps_gradient
from memplan.mxnet.trace.sums import FALLBACK_SUM
from memplan.step.graph import UPDATE, Handover, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay

# MXNET_SPECIAL_MAX_NDIM of MXNet's kernels.
MOST_DIMENSIONS_OF_SLICES = 5


def overwritten(
    graph: TrainingGraph, nodes: Sequence[Node], stock_order: Sequence[int]
) -> dict[int, int]:
    """For each tensor that the unplanned step writes over one that it reads: which one that is.

    That is MXNet's step, which runs the ops in ``stock_order``: the last that reads a tensor may
    be another one there than in the order of ``graph``, to which its schedules may have to keep.

    What an add_n leaves without oneDNN has the usual layout, wherever it is. The gradient of an
    argument is written over none: MXNet's executor has an array for it beside the step.
    """
    block = as_unplanned(graph, nodes)
    ops = tuple(dataclasses.replace(op, after=()) for op in block.ops)
    schedule = Schedule.sequence(dataclasses.replace(block, ops=ops), stock_order)
    arena = _Overwritten(schedule)
    replay(schedule, arena)
    gradients = _gradients(graph)
    return {
        tensor: source
        for tensor, source in arena.source_of.items()
        if nodes[graph.producer[tensor]].op != FALLBACK_SUM and tensor not in gradients
    }


def _gradients(graph: TrainingGraph) -> set[int]:
    """The gradients of arguments: what the backward pass leaves, or updates use up."""
    used_up = {tensor for op in graph.ops if op.kind == UPDATE for tensor in op.inputs}
    return used_up | {tensor for tensor in graph.heads if graph.producer[tensor] >= graph.nforward}


def kept_in_training(
    graph: TrainingGraph, nodes: Sequence[Node], stock_order: Sequence[int]
) -> dict[int, dict[int, int | None]]:
    """For each forward op over whose inputs inference must not write: which of them these are.

    They are read last by an op that leaves its output in the layout of its place, and that the
    unplanned step does not write over, nor over one that the op reads before: that is chosen in
    inference, too. And by which tensor of the same array a slice can read it: oneDNN's knows only
    the shape of the layout. None if there is none.
    """
    graph, kept = between_shapes(graph, nodes), {}
    source_of = overwritten(graph, nodes, stock_order)
    turned = turned_arrays(graph, nodes, source_of)
    _, reshaped = own_layouts(graph, nodes, stock_order, source_of, turned)
    order = [index for index in stock_order if index < graph.nforward]
    for index, tensors in _beside(graph, nodes, order, source_of).items():
        kept[index] = {t: in_own_shape(graph, nodes, source_of, reshaped, t) for t in tensors}
    return kept


def kept_in_explicit(
    graph: TrainingGraph, nodes: Sequence[Node], stock_order: Sequence[int]
) -> dict[int, dict[int, bool]]:
    """For each forward op over whose inputs an explicit step must not write: which these are.

    They would leave it in another layout than it has unplanned, by which others round: a plan may
    have them die there, or a block keep them unplanned, though the backward pass of the step does
    not read them (:mod:`memplan.mxnet.realise.kept_by_blocks`). And for each of them: can a slice
    read it? Not if it is read in several shapes, as oneDNN's slice knows only that of the layout,
    or has too many dimensions for it. Others would have copies of what is in a layout of oneDNN's,
    so that such an array is left out where no slice can read it.
    """
    counting = list(_whose_layout_counts(graph, nodes))
    if not counting:
        return {}  # to find the layouts takes a quarter of tracing
    source_of, array_of = overwritten(graph, nodes, stock_order), arrays(graph)
    turned = turned_arrays(graph, nodes, source_of)
    all_own, reshaped = own_layouts(graph, nodes, stock_order, source_of, turned)
    shapes = [info.shape if info else None for node in nodes for info in node.infos.outputs]
    heads = set(graph.heads)  # which live to the end, so that nothing is written over them
    result: dict[int, dict[int, bool]] = {}
    for index, handover in counting:
        op, own = graph.ops[index], all_own[index]
        source, taken = op.inputs[handover.input], source_of.get(op.outputs[handover.output])
        is_own_elsewhere = nodes[index].op == SUM and bool(own)
        if (source in own) == (is_own_elsewhere if taken is None else taken in own):
            continue
        if not heads.isdisjoint(array_of[source]):
            continue
        is_sliced = source not in reshaped and _may_be_sliced({shapes[t] for t in array_of[source]})
        if is_sliced or source not in own:
            result.setdefault(index, {})[source] = is_sliced
    return result


def _whose_layout_counts(
    graph: TrainingGraph, nodes: Sequence[Node]
) -> Iterator[tuple[int, Handover]]:
    """The hand-overs of forward ops that may leave an output in a layout that others round by.

    That is a layout of oneDNN's or the usual one, as what it is written over. Others compute by it,
    or write over it in turn; outputs of the network are a script's.
    """
    own, counting = may_be_own(graph, nodes), {*graph.heads}
    for op, node in reversed([*zip(graph.ops, nodes, strict=True)]):
        if rounds_by_layout(node):
            counting.update(op.inputs)
        for place, output, _ in op.handovers:
            if op.outputs[output] in counting:
                counting.add(op.inputs[place])
    for index, op in enumerate(graph.ops[: graph.nforward]):
        may_vary = nodes[index].op == SUM or writes_in_layout_of_place(nodes[index])
        if may_vary and not own.isdisjoint(op.inputs):
            for handover in op.handovers:
                if op.outputs[handover.output] in counting and not handover.alias:
                    yield index, handover


def _may_be_sliced(shapes: Collection[tuple[int, ...] | None]) -> bool:
    """May an array be sliced that is read in these ``shapes``, whatever its layout is?"""
    shape, *others = shapes
    return shape is not None and len(shape) <= MOST_DIMENSIONS_OF_SLICES and not others


def _beside(
    graph: TrainingGraph,
    nodes: Sequence[Node],
    order: Sequence[int],
    source_of: Mapping[int, int],
) -> dict[int, set[int]]:
    """Of the ops in this ``order`` what they may be written over, and are not by ``source_of``.

    Those alone that leave their output in the layout of its place.
    """
    kept = {}
    last_reader = {tensor: index for index in order for tensor in graph.ops[index].inputs}
    for index in order:
        op, node = graph.ops[index], nodes[index]
        if node.op == SUM or writes_in_layout_of_place(node):
            taken = [op.inputs.index(source_of[t]) for t in op.outputs if t in source_of]
            sizes = {graph.tensors[tensor].nelements for tensor in op.outputs}
            dying = {t for t in op.inputs[: min(taken, default=None)] if last_reader[t] == index}
            if apart := {t for t in dying if graph.tensors[t].nelements in sizes}:
                kept[index] = apart
    return kept


class _Overwritten(Arena):
    """Notes which tensor lies where another one is written."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.nbuffers = 0
        self.buffer_of: dict[int, int] = {}
        self.source_of: dict[int, int] = {}

    def request(self, step: int, tensor: int) -> int:
        self.buffer_of[tensor] = self.nbuffers
        self.nbuffers += 1
        return self.buffer_of[tensor]

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.buffer_of[tensor] = buffer
        inputs = self.schedule.graph.ops[self.schedule.ops[step]].inputs
        self.source_of[tensor] = next(t for t in inputs if self.buffer_of[t] == buffer)


def with_layouts_of_unplanned(
    graph: TrainingGraph, nodes: Sequence[Node], stock_order: Sequence[int]
) -> TrainingGraph:
    """``graph``, whose ops, ``nodes``, write over what leaves the layouts of the unplanned step.

    That is the input over which they write there, if it dies, else one in the same layout.
    """
    stock = between_shapes(graph, nodes)
    source_of = overwritten(stock, nodes, stock_order)
    turned = turned_arrays(stock, nodes, source_of)
    (all_own, _), ops = own_layouts(stock, nodes, stock_order, source_of, turned), []
    for op, node, own in zip(graph.ops, nodes, all_own, strict=True):
        first, second = [], []
        for handover in op.handovers:
            source, taken = op.inputs[handover.input], source_of.get(op.outputs[handover.output])
            if source == taken:
                first.append(handover)
            elif handover.alias or _has_layout(node, source, taken, own):
                second.append(handover)
        ops.append(dataclasses.replace(op, handovers=(*first, *second)))
    return dataclasses.replace(graph, ops=tuple(ops))


def with_slopes_of_unplanned(
    graph: TrainingGraph, nodes: Sequence[Node], stock_order: Sequence[int]
) -> TrainingGraph:
    """``graph``, in which a PReLU's backward op writes over no input if it does not unplanned.

    Nor if it is one that keeps what it reads: autograd calls that by itself without a plan.
    """
    of_slopes = [index for index, node in enumerate(nodes) if is_gradient_of_slopes(node)]
    if not of_slopes:
        return graph
    source_of, ops = overwritten(graph, nodes, stock_order), list(graph.ops)
    for index in of_slopes:
        if keeps_gradient(nodes[index]) or source_of.keys().isdisjoint(ops[index].outputs):
            ops[index] = dataclasses.replace(ops[index], handovers=())
    return dataclasses.replace(graph, ops=tuple(ops))


def _has_layout(node: Node, source: int, taken: int | None, own: Collection[int]) -> bool:
    """Is an op that is written over ``source`` in the layout that it has unplanned?

    There it is written over ``taken``, or over nothing. ``own`` are its inputs in oneDNN's layouts.
    """
    if node.op != SUM and not writes_in_layout_of_place(node):
        return True
    if taken is None:
        return node.op != SUM or not own or source in own
    return (source in own) == (taken in own)


def layouts_taken_over(
    graph: TrainingGraph,
    nodes: Sequence[Node],
    stock_order: Sequence[int],
    source_of: Mapping[int, int],
) -> set[int]:
    """The tensors that have another layout where they are written over an input than elsewhere.

    ``source_of`` says over which one: see :func:`overwritten`. Elsewhere a sum of oneDNN's is in
    one of its layouts if a term is, and a copy and what is none of oneDNN's in the usual one. None
    that has the layout of another shape where somebody may read it that cannot.
    """
    result: set[int] = set()
    turned = turned_arrays(graph, nodes, source_of)
    all_own, reshaped = own_layouts(graph, nodes, stock_order, source_of, turned)
    for op, node, own in zip(graph.ops, nodes, all_own, strict=True):
        is_own_elsewhere = node.op == SUM and bool(own)
        if node.op in (SUM, *COPIES) or writes_in_layout_of_place(node):
            written = source_of.keys() & set(op.outputs)
            result.update(t for t in written if (source_of[t] in own) != is_own_elsewhere)
    return {t for t in result if t not in reshaped or are_readable(graph, nodes, reshaped, t)}
