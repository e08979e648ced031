"""Arrays whose memory layout a schedule decides on, and what would compute other numbers by it.

On a CPU an operator that is none of oneDNN's leaves oneDNN's layout only where it writes over an
array in it, and a plan has other tensors die there than MXNet (MXNet's src/common/exec_utils.h).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from memplan.errors import TraceError
from memplan.mxnet.realise.layout_copies import SUM
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import (
    KEEPS_LAYOUT,
    is_gradient_of_slopes,
    reads_any_layout,
)
from memplan.step.graph import Op, TrainingGraph

# They choose the layout of what they write by their shapes, whatever that of what they read.
_CHOOSE = frozenset({"Convolution", "Deconvolution"})

# They write over a term in the layout that this has.
_SUMS = frozenset({SUM, "add_n"})


def with_notes_for_their_data(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, in which no data comes again in a layout that the notes on it are not for.

    A max pooling notes the places of the largest for its backward op, in the layout that its data
    had when it ran. So data whose layout may be another one in a copy is computed once. That of an
    LRN, too: its backward op has another gradient for data in another layout than the gradient.
    """
    varying = varying_layouts(graph, nodes)
    once = {
        graph.producer[op.inputs[0]]
        for op, node in zip(graph.ops, nodes, strict=True)
        if _takes_notes(node) and not node.inputs[0][0].is_variable and op.inputs[0] in varying
    }
    return _run_once(graph, once)


def check_layouts_of_slopes(graph: TrainingGraph, nodes: Sequence[Node]) -> None:
    """TraceError for a PReLU whose slopes get another gradient by a layout that plans decide on.

    Its backward op writes over the gradient of the output before it computes that of the slopes,
    unless the former is in a layout of oneDNN's: then it has read a copy.
    """
    varying = varying_layouts(graph, nodes)
    for op, node in _of_trained_slopes(graph, nodes):
        if op.inputs[0] in varying:
            assert node.forward is not None
            raise TraceError(
                f"op {node.forward.name!r} (LeakyReLU, act_type='prelu') cannot be trained by an "
                f"explicit plan: the schedule would decide on the memory layout of the gradient "
                f"of its output, and MXNet computes another gradient of its slopes by it. Use "
                f"realisation='packed', or freeze the slopes (grad_req 'null')"
            )


def with_layouts_of_slopes(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, in which ops run once that decide on the layout of a PReLU's gradient.

    They are what that gradient is made of as far as layouts vary, with all that reads the same:
    each writes over what it does in MXNet's own step then.
    """
    varying = varying_layouts(graph, nodes)
    tensors = [op.inputs[0] for op, _ in _of_trained_slopes(graph, nodes)]
    once: set[int] = set()
    deciding: set[int] = set()
    while tensors:
        tensor = tensors.pop()
        op = graph.producer[tensor]
        if tensor not in varying or op in deciding:
            continue
        deciding.add(op)
        once.add(op)
        for source in graph.ops[op].inputs:
            once.update((graph.producer[source], *graph.readers[source]))
            tensors.append(source)
    return _run_once(graph, once)


def varying_layouts(graph: TrainingGraph, nodes: Sequence[Node]) -> set[int]:
    """The tensors of ``graph`` that other schedules of its ops, ``nodes``, may lay out otherwise.

    All other ones are in the usual layout, or in one that follows from the shapes.
    """
    own: set[int] = set()  # what may be in a layout of oneDNN's
    varying: set[int] = set()
    for op, node in zip(graph.ops, nodes, strict=True):
        call = node if node.forward is None else node.forward
        if call.op in _CHOOSE:
            own.update(op.outputs)
        elif not reads_any_layout(node):
            written = {op.outputs[h.output] for h in op.handovers if op.inputs[h.input] in own}
            own |= written
            varying |= written
        elif node.op in KEEPS_LAYOUT and (node.op == "_backward_Pooling" or own & {*op.inputs}):
            own.update(op.outputs)
            if _varies(op, node, own, varying):
                varying.update(op.outputs)
    return varying


def _varies(op: Op, node: Node, own: set[int], varying: set[int]) -> bool:
    """May what an op of oneDNN's writes be in another layout, by what it is written over?"""
    is_of_one_layout = not op.handovers or own.issuperset(op.inputs)
    return node.op in _SUMS or not is_of_one_layout or not varying.isdisjoint(op.inputs)


def _takes_notes(node: Node) -> bool:
    if node.op == "Pooling":
        return node.attrs.get("pool_type", "max") == "max"
    return node.op in ("LRN", "_contrib_BatchNormWithReLU")


def _of_trained_slopes(graph: TrainingGraph, nodes: Sequence[Node]) -> list[tuple[Op, Node]]:
    """The backward ops of PReLUs, and their nodes, of which the gradient of the slopes is read."""
    return [
        (op, node)
        for op, node in zip(graph.ops, nodes, strict=True)
        if is_gradient_of_slopes(node)
        and not node.inputs[0][0].is_variable
        and (graph.readers[op.outputs[1]] or op.outputs[1] in graph.heads)
    ]


def _run_once(graph: TrainingGraph, once: Iterable[int]) -> TrainingGraph:
    ops = list(graph.ops)
    for index in once:
        ops[index] = dataclasses.replace(ops[index], recomputable=False)
    return dataclasses.replace(graph, ops=tuple(ops))
