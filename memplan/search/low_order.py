"""An order of the backward pass in which little is alive, whatever is kept for it.

Where branches may run backwards in any order, those parts run first that need little memory until
they have freed some: the low resolutions of all branches, say, before the high ones of any. So what
is read there is gone where most is alive. Liu 1987, "An application of generalized tree pebbling to
sparse matrix factorization", merges branches of a tree by such parts, which lead from one valley
of memory to a lower one over the lowest hill; here what an op makes ready is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from memplan.step.graph import TrainingGraph
from memplan.util.remember import remembered

# An op is followed for this many others at most until less is alive than before it. With more, five
# networks of convolutions of 136 to 647 ops have the same order; with half of it some do not.
LOOK = 40
# This many ops that are ready are looked at, from the last on: of 700 branches all take two
# seconds.
MOST_READY = 16
# What the forward pass has written counts so much of its bytes: a plan keeps a part of it, and what
# is made again is hardly there sooner than it is read. Set on two siamese networks and a
# high-resolution one, at 40, 40 and 30% of the step, of 0 to 1.
KEPT = 0.5


class _Part(NamedTuple):
    """Ops that would run next, one after the other, and how good that is: ``rank``, least first.

    First what frees memory, over the lowest hill; then what frees most after its hill.
    """

    rank: tuple[int, float, float]
    ops: list[int]


def low_order(graph: TrainingGraph) -> Sequence[int]:
    """The ops of the graph in this order."""
    return remembered(graph, low_order, lambda: _Low(graph).order)


class _Low:
    """The ops in an ``order``: the forward pass as it is, then the best part of those ready."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph, self.order = graph, list[int]()
        self.weights = [
            tensor.nbytes * (KEPT if producer < graph.nforward else 1.0)
            for tensor, producer in zip(graph.tensors, graph.producer, strict=True)
        ]
        heads = frozenset(graph.heads)  # which are read behind all
        self.nleft = [len(readers) + (a in heads) for a, readers in enumerate(graph.readers)]
        self.nmissing = [len(set(dependencies)) for dependencies in graph.dependencies]
        for op in range(graph.nforward):
            self._run(op)
        backward = range(graph.nforward, len(graph.ops))
        # A dict, as that keeps the order in which they became ready.
        ready = dict.fromkeys(op for op in backward if not self.nmissing[op])
        while ready:
            parts = map(self._part, islice(reversed(ready), MOST_READY))
            for op in min(parts, key=lambda part: part.rank).ops:
                ready.pop(op)
                ready |= dict.fromkeys(self._run(op))

    def _run(self, op: int) -> list[int]:
        """Run the op; what that makes ready."""
        self.order.append(op)
        for tensor in set(self.graph.ops[op].inputs):
            self.nleft[tensor] -= 1
        followers = self.graph.followers[op]
        for follower in followers:
            self.nmissing[follower] -= 1
        return [follower for follower in followers if not self.nmissing[follower]]

    def _part(self, first: int) -> _Part:
        """From ``first`` to where less is alive than before, or after a hill the least is."""
        missing, left = dict[int, int](), dict[int, int]()
        live, hill, end = 0.0, 0.0, 0
        fall, hill_of_fall = -1.0, 0.0
        ops, stack = list[int](), [first]
        while stack and len(ops) < LOOK:
            op = stack.pop()
            ops.append(op)
            hill = max(hill, live + self._written(op))
            live += self._written(op) - self._freed(op, left)
            if live <= 0:
                return _Part((0, hill, 0.0), ops)
            if hill - live > fall:
                fall, hill_of_fall, end = hill - live, hill, len(ops)
            stack += sorted(self._made_ready(op, missing), key=self._written, reverse=True)
        return _Part((1, -fall, hill_of_fall), ops[:end])

    def _written(self, op: int) -> float:
        return sum(self.weights[tensor] for tensor in self.graph.ops[op].outputs)

    def _freed(self, op: int, left: dict[int, int]) -> float:
        """The bytes that are not read after ``op``; ``left`` counts what still reads tensors."""
        call, freed = self.graph.ops[op], 0.0
        for tensor in set(call.inputs):
            left[tensor] = left.get(tensor, self.nleft[tensor]) - 1
            if not left[tensor]:
                freed += self.weights[tensor]
        return freed + sum(self.weights[a] for a in call.outputs if not self.nleft[a])

    def _made_ready(self, op: int, missing: dict[int, int]) -> Sequence[int]:
        """What waits for ``op`` alone; ``missing`` counts what others wait for."""
        ready = []
        for follower in self.graph.followers[op]:
            missing[follower] = missing.get(follower, self.nmissing[follower]) - 1
            if not missing[follower]:
                ready.append(follower)
        return ready
