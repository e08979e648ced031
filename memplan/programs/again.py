"""What can run again after a moment: not what takes more than gradients that stay leave room for.

A gradient that a step hands out is there at its end. From the first op that computes a part of it
on, something is always there that leads to it, as backward ops run once: that part, or a sum that
it has gone into, or the gradient itself. An op that needs more than all of these leave of the
budget cannot run again any more. So an op with outputs for every step of a recurrent network, such
as a split of its sequence, cannot run again once the gradients of the weights are there, and what
it has written for steps whose gradients are still to come has to stay.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from memplan.search.buffers import Buffers
from memplan.step.graph import TrainingGraph


class _Part(NamedTuple):
    """Once op ``producer`` has run, a tensor of ``nbytes`` at least is there, up to the end."""

    producer: int
    nbytes: int


class Again:
    """Which ops of a graph may run again once some ops have run, in live bytes.

    ``parts`` are, by head, what leads to it. No buffer leads to two heads, so that bytes of several
    heads add up. ``working_nbytes`` are, by op, what a run of it takes beside all these at least.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        buffers: Buffers,
        class_of: Sequence[int],
        repeatable: Sequence[bool],
    ) -> None:
        self._graph, self._buffers, self._class_of = graph, buffers, class_of
        self._repeatable = repeatable
        self._head_of: dict[int, int] = {}  # by buffer
        self.parts: dict[int, list[_Part]] = {}
        self._enter_parts()
        self.working_nbytes = [self._beside_heads(p) for p in range(len(graph.ops))]

    def _enter_parts(self) -> None:
        """Follow each head back over ops that run once, to tensors that lead to no other head."""
        leading: dict[int, tuple[int, int]] = {}  # by tensor: its head, the least bytes up to that
        for head in self._graph.heads:
            self._lead(head, (head, self._graph.tensors[head].nbytes), leading)
        for op in reversed(self._graph.ops):
            ways = [leading[a] for a in op.outputs if a in leading]
            if ways:
                for a in op.inputs:
                    self._lead(a, max(ways, key=lambda way: way[1]), leading)

    def _lead(self, a: int, way: tuple[int, int], leading: dict[int, tuple[int, int]]) -> None:
        """Enter tensor a as one that leads to a head, unless it or its buffer leads to another."""
        producer, c, (head, nbytes) = self._graph.producer[a], self._class_of[a], way
        if c < 0 or a in leading or self._repeatable[producer]:
            return
        if self._head_of.setdefault(c, head) == head:
            nbytes = min(nbytes, self._graph.tensors[a].nbytes)
            leading[a] = head, nbytes
            self.parts.setdefault(head, []).append(_Part(producer, nbytes))

    def _beside_heads(self, p: int) -> int:
        """The bytes that a run of op p takes at least, without buffers that lead to heads."""
        op = self._graph.ops[p]
        classes = {self._class_of[a] for a in (*op.inputs, *op.outputs)} - {-1}
        nbytes = sum(self._buffers.classes[c][0] for c in classes if c not in self._head_of)
        return nbytes - sum(nbytes for nbytes, _ in self._buffers.takeovers[p])

    def staying_nbytes(self, before: Set[int]) -> int:
        """The bytes that are there from when these ops have run up to the end of the step."""
        return sum(
            max((part.nbytes for part in parts if part.producer in before), default=0)
            for parts in self.parts.values()
        )

    def may_run(self, p: int, room_nbytes: int) -> bool:
        """May op p run again where that many bytes are left beside what stays?"""
        return self._repeatable[p] and self.working_nbytes[p] <= room_nbytes
