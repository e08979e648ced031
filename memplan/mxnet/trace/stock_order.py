"""The order in which MXNet's own executor runs the ops of a step that is planned in another one."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.mxnet.trace.nnvm import Node
from memplan.step.graph import TrainingGraph


def stock_order(
    graph: TrainingGraph, nodes: Sequence[Node], stock: Sequence[Node]
) -> tuple[int, ...]:
    """The ops of ``graph``, which ``nodes`` are, in the order in which MXNet runs ``stock``.

    A realisation may take sums term by term, and as early as possible. Ops that MXNet does not have
    come right before the first one that reads what they write.
    """
    place_of = {node: place for place, node in enumerate(stock)}
    places = [place_of.get(node, len(place_of)) for node in nodes]
    result: dict[int, None] = {}
    for last in sorted(range(len(nodes)), key=places.__getitem__):
        stack = [last]
        while stack:
            missing = [other for other in graph.dependencies[stack[-1]] if other not in result]
            if missing:
                stack += sorted(missing, key=places.__getitem__, reverse=True)
            else:
                result[stack.pop()] = None
    return tuple(result)
