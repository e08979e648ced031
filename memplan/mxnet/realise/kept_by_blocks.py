"""What a block writes over in MXNet, which is less than MXNet's executor writes over.

The graph of a block (src/imperative/cached_op.h) keeps all that the gradients of any of its inputs
would read, whichever are asked for, and arrays of which ops read no more than the shape. Its
outputs are arrays of their own, and its backward pass writes over none of the forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from memplan.mxnet.trace.form import is_of_block
from memplan.mxnet.trace.gradient import training_graph
from memplan.mxnet.trace.nnvm import Entry, Node, depth_first
from memplan.mxnet.trace.operators import ignored_inputs
from memplan.mxnet.trace.states import states_of
from memplan.step.graph import Op, TrainingGraph
from memplan.util.remember import remembered


def as_unplanned(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, which ``nodes`` are, in which nothing dies that MXNet keeps without a plan.

    That is ``graph`` itself, unless it is of a block: what that keeps is in its heads, and what it
    returns is written over nothing.
    """
    if not is_of_block(nodes):
        return graph
    return remembered(graph, "of block", lambda: _of_block(graph, nodes))


def _of_block(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    forward, outputs = nodes[: graph.nforward], set(_of_forward(graph, graph.heads))
    returned = [(nodes[graph.producer[t]], graph.position[t]) for t in outputs]
    kept = {graph.ops[op].outputs[k] for op, k in _read_later(forward, returned)}
    kept.update(_of_forward(graph, (t for op in graph.ops[graph.nforward :] for t in op.inputs)))
    ops = [op if outputs.isdisjoint(op.outputs) else _beside(op, outputs) for op in graph.ops]
    return dataclasses.replace(graph, ops=tuple(ops), heads=(*graph.heads, *sorted(kept - outputs)))


def _read_later(forward: Sequence[Node], outputs: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """What the gradients of all inputs read, by op and output, and what is read as a shape."""
    place_of, states = {node: place for place, node in enumerate(forward)}, states_of(forward)
    variables = {source for node in forward for source, _ in node.inputs if source.is_variable}
    names = {variable.name for variable in variables - states}
    for node in depth_first(training_graph(outputs, outputs, names)):
        places = ignored_inputs(node) if node in place_of else range(len(node.inputs))
        for source, k in (node.inputs[place] for place in places):
            if source in place_of:
                yield place_of[source], k


def _of_forward(graph: TrainingGraph, tensors: Iterable[int]) -> Iterator[int]:
    """Those of the ``tensors`` that forward ops write."""
    return (tensor for tensor in tensors if graph.producer[tensor] < graph.nforward)


def _beside(op: Op, outputs: set[int]) -> Op:
    """``op``, which writes none of these ``outputs`` over what it reads; it may share its array."""
    handovers = (h for h in op.handovers if h.alias or op.outputs[h.output] not in outputs)
    return dataclasses.replace(op, handovers=tuple(handovers))
