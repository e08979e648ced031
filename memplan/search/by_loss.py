"""An order in which the backward pass of a loss runs before the forward pass of the next one.

MXNet runs the forward pass of all losses first. Where several have ops of their own, as the heads
of a multi-task network and auxiliary losses do, all that these save for their backward passes is
then alive at once. Loss by loss it is not, and nothing is recomputed for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise

from memplan.search.reordered import Reordered, depths, reordered
from memplan.step.graph import Op, TrainingGraph, reached
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.remember import remembered


def best_order(graph: TrainingGraph, *, reorder: bool, recompute_backward: bool) -> Reordered:
    """The graph loss by loss where that holds less, else in its better order."""
    other = loss_by_loss(graph, reorder=reorder, recompute_backward=recompute_backward)
    return reordered(graph, reorder=reorder) if other.graph is graph else other


def loss_by_loss(graph: TrainingGraph, *, reorder: bool, recompute_backward: bool) -> Reordered:
    """The graph in :func:`order_by_loss`; as it is where there is none, and without leave.

    All of its ops stand as forward ops, as those of both passes are mixed. Which may run again is
    as in ``graph``: backward ops only with ``recompute_backward``.
    """
    order = order_by_loss(graph) if reorder else None
    if order is None:
        return Reordered(graph, range(len(graph.ops)), graph)
    place = {op: k for k, op in enumerate(order)}

    def changed(index: int) -> Op:
        op = graph.ops[index].renumbered(place)
        may_rerun = op.recomputable and (recompute_backward or index < graph.nforward)
        return dataclasses.replace(op, recomputable=may_rerun)

    def derive() -> Reordered:
        ops = tuple(map(changed, order))
        return Reordered(graph, order, dataclasses.replace(graph, ops=ops, nforward=len(ops)))

    return remembered(graph, (loss_by_loss, recompute_backward), derive)


def order_by_loss(graph: TrainingGraph) -> Sequence[int] | None:
    """The order loss by loss with the lowest peak; None if none has a lower one than the others.

    The others are MXNet's order, and that with a better order of the backward pass.
    """

    def derive() -> Sequence[int] | None:
        orders = {tuple(_Order(graph, turns).ops): None for turns in _turns(graph)}
        mixed = [order for order in orders if _is_mixed(graph, order)]
        if not mixed:
            return None
        better = reordered(graph)
        usual = (Schedule.unplanned(graph), better.back(Schedule.unplanned(better.graph)))
        peaks = [simulate(Schedule.sequence(graph, order)).peak_nbytes for order in mixed]
        if min(peaks) >= min(simulate(schedule).peak_nbytes for schedule in usual):
            return None
        return mixed[peaks.index(min(peaks))]

    return remembered(graph, order_by_loss, derive)


def losses_of(graph: TrainingGraph) -> list[int]:
    """The forward ops after which a backward pass can begin, in base order.

    They are what those backward ops depend on that read no gradient, as those that differentiate a
    loss operator, or make the gradient of an output. Others of these, such as a mask that a
    gradient is multiplied by, depend on what a loss depends on, which is not counted.
    """
    nforward, dependencies = graph.nforward, graph.dependencies
    backward = range(nforward, len(graph.ops))
    fills = {op for op in backward if not dependencies[op]}
    first = [op for op in backward if all(d < nforward or d in fills for d in dependencies[op])]
    ops = {d for op in first for d in dependencies[op] if d < nforward}
    return sorted(ops - reached((d for op in ops for d in dependencies[op]), dependencies))


def _turns(graph: TrainingGraph) -> list[list[int]]:
    """The losses in orders: as they are, from the last, and by how many ops each depends on."""
    losses = losses_of(graph)
    if len(losses) < 2:
        return [losses]
    count = {op: len(reached((op,), graph.dependencies)) for op in losses}
    return [losses, losses[::-1], sorted(losses, key=lambda op: count[op])]


def _is_mixed(graph: TrainingGraph, order: Sequence[int]) -> bool:
    """Does a backward op run before a forward op on which another one depends?"""
    needed = _needed(graph)
    passes = [op < graph.nforward for op in order if op >= graph.nforward or op in needed]
    return not all(passes[: sum(passes)])


def _needed(graph: TrainingGraph) -> set[int]:
    """The forward ops on which the backward pass depends."""
    backward = range(graph.nforward, len(graph.ops))
    before = reached((d for op in backward for d in graph.dependencies[op]), graph.dependencies)
    return {op for op in before if op < graph.nforward}


class _Order:
    """``ops`` in an order: for each loss what it depends on, then what it makes ready.

    That is its backward pass, and whatever else no backward op depends on. What leads least far
    comes first. What reads no gradient, and no loss, runs just before its first reader, which does
    not wait for it. Forward ops that must not run again keep their order among themselves.
    """

    def __init__(self, graph: TrainingGraph, losses: Sequence[int]) -> None:
        nforward, every_op = graph.nforward, range(len(graph.ops))
        backward = every_op[nforward:]
        self.before = [list(dict.fromkeys(row)) for row in graph.dependencies]
        waits_for = set(backward).union(losses)
        self.lazy = {
            op for op in backward if graph.followers[op] and waits_for.isdisjoint(self.before[op])
        }
        self.eager = set(every_op) - self.lazy - _needed(graph)
        self.nmissing = [len(set(row) - self.lazy) for row in self.before]
        self.followers, self.depth = graph.followers, depths(graph)
        for op, call in enumerate(graph.ops):
            if call.differentiates is not None:  # which need not be among what it depends on
                self.before[op].append(call.differentiates)
        once = [op for op in range(nforward) if not graph.ops[op].recomputable]
        for before, op in pairwise(once):
            self.before[op].append(before)
        self.ops: list[int] = []
        self.has_run = [False] * len(graph.ops)
        for op in (*losses, *every_op):
            self._run_with_followers(op)

    def _run_with_followers(self, first: int) -> None:
        stack = [first]
        while stack:
            op = stack[-1]
            missing = [] if self.has_run[op] else self._missing(op)
            if missing:
                stack += reversed(missing)
                continue
            stack.pop()
            if not self.has_run[op]:
                self.has_run[op] = True
                self.ops.append(op)
                stack += sorted(self._ready(op), key=lambda follower: -self.depth[follower])

    def _missing(self, op: int) -> list[int]:
        return [before for before in self.before[op] if not self.has_run[before]]

    def _ready(self, op: int) -> Iterator[int]:
        """What waited for ``op`` alone, which has run now, and is to run as soon as it can."""
        for follower in self.followers[op] if op not in self.lazy else ():
            self.nmissing[follower] -= 1
            if not self.nmissing[follower] and follower in self.eager:
                yield follower
