"""An order of the backward pass that holds less: sums of gradients are begun later.

In an unrolled network what the gradients of shared weights are summed up in is as large as a weight
from its first summand on, while that summand could be made later of a small tensor that waits for
it. In the first steps of the backward pass, when most of what the forward pass has left is still
there, this pays: where memory is scarce it decides how many steps can be stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memplan.search.kernels.arrays import NBYTES, Array, graph_arrays
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.search.reordered import Reordered, better_order, in_order
from memplan.step.graph import TrainingGraph
from memplan.util.remember import remembered

# What is postponed goes to one of the valleys of memory among this many ops behind the peak. Set on
# an LSTM of 1,292 ops, of which a step has 32.
LOOK = 200
# Orders of this many steps in all are replayed, which takes half a second: a bidirectional LSTM of
# 868 ops has a peak that is 6% lower with twice as many, and 4% with half of them.
MOST_STEPS = 2_000_000


def postponed(graph: TrainingGraph, *, reorder: bool = True) -> Reordered:
    """The graph in this order, which may be the better one; as it is without leave."""
    if not reorder:
        return Reordered(graph, range(len(graph.ops)), graph)

    def derive() -> Reordered:
        return in_order(graph, _Postponing(graph, better_order(graph)).order)

    return remembered(graph, postponed, derive)


class _Postponing:
    """Ops in an ``order``; the peak of what backward ops write is lowered step by step."""

    def __init__(self, graph: TrainingGraph, order: Sequence[int]) -> None:
        self.graph, self.order = graph, list(order)
        arrays = graph_arrays(graph)
        tensors = arrays.tensors.copy()
        tensors[NBYTES, [p < graph.nforward for p in graph.producer]] = 0
        self._arrays = arrays._replace(tensors=tensors)
        self._memory = replay_memory(self._arrays, len(graph.ops), len(graph.tensors))
        self._nsteps_left = MOST_STEPS
        live = self._live(self.order)
        while self._nsteps_left > 0 and (lower := self._lower(live)) is not None:
            self.order, live = lower

    def _live(self, order: Sequence[int]) -> Array:
        """The bytes alive at each step, of what backward ops write."""
        self._nsteps_left -= len(order)
        steps = np.array(order, dtype=np.int64)
        replay(self._arrays, self._memory, steps, len(steps), 0, UNLIMITED)
        return self._memory.live[: len(steps)].copy()

    def _lower(self, live: Array) -> tuple[list[int], Array] | None:
        """The order of the lowest peak, with its bytes, that postponing ops behind the peak makes.

        None if none is lower.
        """
        peak = int(np.argmax(live))
        rest = live[peak : peak + LOOK + 1]
        is_valley = (rest[1:-1] <= rest[:-2]) & (rest[1:-1] < rest[2:])
        places = [peak, *(peak + 1 + np.flatnonzero(is_valley)).tolist()]
        best: tuple[list[int], Array] | None = None
        least = _most(live)
        for ops in self._sets(peak):
            if self._nsteps_left <= 0:
                break
            for place in places:
                order = self._behind(place, peak, ops)
                if order is None or self._nsteps_left <= 0:
                    break
                now = self._live(order)
                if place == peak and now[order.index(self.order[peak])] >= live[peak]:
                    break  # at the peak as much is alive without these ops
                if _most(now) < least:
                    least, best = _most(now), (order, now)
        return best

    def _behind(self, place: int, peak: int, ops: set[int]) -> list[int] | None:
        """The order in which ``ops`` and what follows from them run behind this step.

        None where what runs at the peak follows from them.
        """
        before = self.order[: place + 1]
        closed = self._with_followers(ops, set(before), self.order[peak])
        if closed is None:
            return None
        others, moved = (
            [op for op in before if (op in closed) == is_in] for is_in in (False, True)
        )
        return others + moved + self.order[place + 1 :]

    def _sets(self, peak: int) -> Iterator[set[int]]:
        """What may run behind the peak: an op whose result waits there, and what only it needs."""
        graph, heads = self.graph, frozenset(self.graph.heads)
        before = set(self.order[:peak])
        tried = set[frozenset[int]]()
        for op in self.order[graph.nforward : peak]:
            waits = any(
                a in heads or any(r not in before for r in graph.readers[a])
                for a in graph.ops[op].outputs
                if graph.tensors[a].nbytes
            )
            ops: set[int] | None = {op} if waits else None
            while ops and (ops := self._with_followers(ops, before, self.order[peak])):
                if frozenset(ops) in tried:
                    break
                tried.add(frozenset(ops))
                yield ops
                sources = {p for other in ops for p in graph.dependencies[other]} - ops
                ops |= {p for p in sources if self._is_for(p, ops, before)}

    def _is_for(self, op: int, ops: set[int], before: set[int]) -> bool:
        """Does all that follows from a backward op, of what runs before, belong to ``ops``?"""
        followers = self.graph.followers[op]
        return op >= self.graph.nforward and ops.issuperset(before.intersection(followers))

    def _with_followers(self, ops: set[int], before: set[int], last: int) -> set[int] | None:
        """``ops`` and what follows from them before the peak; None if what runs at it does."""
        result, stack = set(ops), list(ops)
        while stack:
            followers = self.graph.followers[stack.pop()]
            if last in followers:
                return None
            new = before.intersection(followers) - result
            result |= new
            stack += new
        return result


def _most(live: Array) -> tuple[int, int]:
    """The peak, and how often it is reached."""
    peak = live.max()
    return int(peak), int(np.count_nonzero(live == peak))
