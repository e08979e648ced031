"""The order in which MXNet's own executor runs the ops of a step that is planned in another one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from memplan.mxnet.trace.nnvm import Node, dependencies
from memplan.mxnet.trace.operators import may_draw
from memplan.mxnet.trace.states import states_shared, states_touched
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


def with_states_in_order(order: Sequence[Node], stock: Sequence[Node]) -> list[Node]:
    """``order``, but what touches the same state, or may draw, comes as in MXNet's ``stock``.

    The base order is that of a walk from the gradients to what they are computed from. Where sums
    are taken term by term, the walk comes to some ops earlier than MXNet's own does: for instance
    to one of the two backward ops of a BatchNorm that is called twice, both of which update its
    statistics.
    """
    place_of = {node: place for place, node in enumerate(order)}
    before = {node: {*dependencies(node)} & place_of.keys() for node in order}
    for follower, leader in _neighbours([node for node in stock if node in place_of]):
        before[follower].add(leader)
    waiters: dict[Node, list[Node]] = {node: [] for node in order}
    for node, leaders in before.items():
        for leader in leaders:
            waiters[leader].append(node)
    ready = [place_of[node] for node in order if not before[node]]
    result: list[Node] = []
    while ready:
        result.append(order[heapq.heappop(ready)])
        for node in waiters[result[-1]]:
            before[node].remove(result[-1])
            if not before[node]:
                heapq.heappush(ready, place_of[node])
    assert len(result) == len(order)
    return result


def _neighbours(stock: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Ops that touch a state, or may draw, each with the one before it that does so."""
    shared = states_shared(stock)
    latest: dict[Node | None, Node] = {}
    result = []
    for node in stock:
        touched: list[Node | None] = [*dict.fromkeys(states_touched(node, shared))]
        if may_draw(node):
            touched.append(None)
        result += [(node, latest[key]) for key in touched if key in latest]
        latest.update(dict.fromkeys(touched, node))
    return result
