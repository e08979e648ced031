"""Other orders of the backward pass: what an op makes ready runs next, or the last forward op's.

MXNet's own order comes from the gradients that are asked for. In a recurrent network the gradients
of all cells may then wait until the last one is there, when those of weights are computed.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered

# Another order is better where what the backward pass writes waits for less than this part of the
# time: with two orders there is half of the time for each. An SSD's 0.97 made plans worse, and so
# did 0.99 of four layers of LSTM.
LESS = 0.95


@dataclass(frozen=True)
class Reordered:
    """A graph whose ops have another base order: ``order`` has their numbers in ``original``."""

    original: TrainingGraph
    order: Sequence[int]
    graph: TrainingGraph

    def there(self, schedule: Schedule) -> Schedule:
        """A schedule of the original graph as one of this."""
        if self.graph is self.original:
            return schedule
        place = {op: k for k, op in enumerate(self.order)}
        return Schedule.sequence(self.graph, [place[op] for op in schedule.ops])

    def back(self, schedule: Schedule) -> Schedule:
        """The same schedule of the original graph."""
        if schedule.graph is self.original:
            return schedule
        return Schedule.sequence(self.original, [self.order[op] for op in schedule.ops])


def reordered(graph: TrainingGraph, *, reorder: bool = True) -> Reordered:
    """The graph in its better order, which may be the one that it has, as it is without leave."""
    if not reorder:
        return Reordered(graph, range(len(graph.ops)), graph)
    return remembered(graph, reordered, lambda: in_order(graph, better_order(graph)))


def in_order(graph: TrainingGraph, order: Sequence[int]) -> Reordered:
    """The graph with its ops in this order."""
    if isinstance(order, range):
        return Reordered(graph, order, graph)
    place = {op: k for k, op in enumerate(order)}
    ops = tuple(graph.ops[op].renumbered(place) for op in order)
    return Reordered(graph, order, dataclasses.replace(graph, ops=ops))


def better_order(graph: TrainingGraph) -> Sequence[int]:
    """The base order, or another one if what the backward pass writes then waits for less time."""

    def derive() -> Sequence[int]:
        best: Sequence[int] = range(len(graph.ops))
        for order in (_eager(graph), mirrored_order(graph)):
            if _waiting(graph, order) < LESS * _waiting(graph, best):
                best = order
        return best

    return remembered(graph, better_order, derive)


def _eager(graph: TrainingGraph) -> list[int]:
    """The forward pass as it is; then an op, what it makes ready, and so on, before the next.

    Of what is ready, what leads least far comes first: so do gradients of weights.
    """
    depth = depths(graph)
    nmissing = [len(set(dependencies)) for dependencies in graph.dependencies]
    order: list[int] = []
    has_run = [False] * len(graph.ops)
    for first in range(len(graph.ops)):
        stack = [] if has_run[first] else [first]
        while stack:
            op = stack.pop()
            has_run[op] = True
            order.append(op)
            for follower in graph.followers[op]:
                nmissing[follower] -= 1
            if op >= graph.nforward:
                ready = [follower for follower in graph.followers[op] if not nmissing[follower]]
                stack += sorted(ready, key=lambda follower: -depth[follower])
    return order


def depths(graph: TrainingGraph) -> list[int]:
    """For each op, on how many ops that follow each other the longest way from it leads."""
    depth = [0] * len(graph.ops)
    for op in range(len(graph.ops) - 1, -1, -1):
        depth[op] = max((depth[follower] + 1 for follower in graph.followers[op]), default=0)
    return depth


def mirrored_order(graph: TrainingGraph) -> list[int]:
    """The forward pass as it is; then of what is ready what differentiates the last op of it.

    Before that runs what differentiates none, as sums of gradients do. Where the forward pass has
    finished one branch before another, so does the backward pass.
    """
    nmissing = [len(set(dependencies)) for dependencies in graph.dependencies]
    order = list(range(graph.nforward))
    ready: list[tuple[int, int]] = []

    def prepare(op: int) -> None:
        twin = graph.ops[op].differentiates
        heapq.heappush(ready, (-(graph.nforward if twin is None else twin), op))

    for op in range(graph.nforward, len(graph.ops)):
        nmissing[op] -= len({d for d in graph.dependencies[op] if d < graph.nforward})
        if not nmissing[op]:
            prepare(op)
    while ready:
        op = heapq.heappop(ready)[1]
        order.append(op)
        for follower in graph.followers[op]:
            nmissing[follower] -= 1
            if not nmissing[follower]:
                prepare(follower)
    return order


def _waiting(graph: TrainingGraph, order: Sequence[int]) -> int:
    """The bytes that backward ops write, each for as many steps as it waits for its last reader."""
    step = {op: place for place, op in enumerate(order)}
    heads = frozenset(graph.heads)
    return sum(
        graph.tensors[a].nbytes * (max((step[r] for r in readers), default=step[p]) - step[p])
        for a, (p, readers) in enumerate(zip(graph.producer, graph.readers, strict=True))
        if p >= graph.nforward and a not in heads
    )
