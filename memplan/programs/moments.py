"""What holds for every schedule, in any order: the moments of a step, and the least bytes.

Look at the moment at which op t first runs. Its ancestors have run, its descendants have not: that
follows from the graph alone. What descendants read of ancestors is there at this moment, or is
computed again after it, from what is there. Of other ops either what they read must be there, or
what they have written. Each moment by itself is thus a relaxation of the whole problem
(:mod:`memplan.programs.moment_program`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from memplan.programs.again import Again
from memplan.programs.moment_ranking import bits, needed, ranked
from memplan.search.buffers import Buffers
from memplan.search.rematerialize import repeatable
from memplan.step.graph import TrainingGraph, reached
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

# Beyond this many ops the floor counts only what an op itself reads and writes, and the fullest
# moments of the unplanned step are those that are looked at.
LARGE = 20_000


@dataclass(frozen=True)
class Floor:
    """No schedule holds less than ``nbytes`` while op ``op`` runs (None: at the end of the step).

    ``tensors`` are those that force it: what the op reads and writes, and what is needed later
    and cannot be computed again.
    """

    nbytes: int
    op: int | None
    tensors: tuple[int, ...]


class Moments:
    """The moments of one graph; backward ops run once unless ``recompute_backward``.

    ``class_of`` tells the buffer of each tensor; -1 of those that programs need not count: they
    have no bytes, or are the smallest and have at most ``negligible_nbytes`` together.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        *,
        recompute_backward: bool = False,
        negligible_nbytes: float = 0.0,
    ) -> None:
        self.graph = graph
        self.repeatable = repeatable(graph, backward=recompute_backward)
        self.buffers = Buffers(graph)
        classes = self.buffers.classes
        smallest = sorted(range(len(classes)), key=lambda c: classes[c][0])
        totals = accumulate(classes[c][0] for c in smallest)
        ncounted = sum(total > negligible_nbytes for total in totals)
        counted = set(smallest[len(classes) - ncounted :])
        self.class_of = [c if c in counted else -1 for c in self.buffers.class_of]

    @cached_property
    def again(self) -> Again:
        """Which ops may run again."""
        return Again(self.graph, self.buffers, self.class_of, self.repeatable)

    @cached_property
    def floor(self) -> Floor:
        """The most that any single moment forces."""
        ops, classes = self.graph.ops, self.buffers.classes
        masks = self._unrepeatable_masks()
        resident_nbytes = np.zeros(len(ops), dtype=np.int64)
        for c, mask in masks.items():
            resident_nbytes += classes[c][0] * bits(mask, len(ops))
        best = Floor(self._nbytes(self.graph.heads), None, self.graph.heads)
        for t, op in enumerate(ops):
            working_set = {self.buffers.class_of[a] for a in (*op.inputs, *op.outputs)} - {-1}
            residents = {c for c in working_set if masks.get(c, 0) >> t & 1}
            nbytes = int(resident_nbytes[t]) + sum(classes[c][0] for c in working_set - residents)
            nbytes -= self._taken_over(t, residents)
            if nbytes > best.nbytes:
                others = [a for c, mask in masks.items() if mask >> t & 1 for a in classes[c][1]]
                best = Floor(nbytes, t, tuple(dict.fromkeys((*op.inputs, *op.outputs, *others))))
        return best

    def _unrepeatable_masks(self) -> dict[int, int]:
        """For buffers of what cannot be computed again: a bit for every op at which they are there.

        Nothing is said of large graphs.
        """
        classes = enumerate(self.buffers.class_of)
        tensors = [a for a, c in classes if c >= 0 and not self.repeatable[self.graph.producer[a]]]
        return needed(self.graph, self.buffers, tensors) if len(self.graph.ops) <= LARGE else {}

    def promising(self, budget_nbytes: int) -> list[int]:
        """Ops at whose first run something must be dropped, those likely to prove most first.

        Then those over the budget in the unplanned step, where that depends on the order.
        """
        live = simulate(Schedule.unplanned(self.graph)).live_nbytes
        ops_over = [t for t, nbytes in enumerate(live) if nbytes > budget_nbytes]
        ops_over.sort(key=lambda t: -live[t])
        if len(self.graph.ops) > LARGE:
            return ops_over
        nbytes_of_ops = [self.working_nbytes(t) for t in range(len(self.graph.ops))]
        first = ranked(self.graph, self.buffers, self.repeatable, nbytes_of_ops, budget_nbytes)
        return list(dict.fromkeys([*first, *ops_over]))

    def before_and_after(self, t: int) -> tuple[set[int], set[int]]:
        """The ops that have run once t has, with t, and those that cannot have run before it."""
        ancestors = reached([t], self.graph.dependencies)
        return ancestors, reached(self.graph.followers[t], self.graph.followers)

    def crossings(self, before: Iterable[int], after: set[int]) -> list[int]:
        """What ``before`` has written and ``after``, or the end of the step, still reads."""
        heads = frozenset(self.graph.heads)
        return [
            a
            for p in sorted(before)
            for a in self.graph.ops[p].outputs
            if a in heads or any(r in after for r in self.graph.readers[a])
        ]

    def _nbytes(self, tensors: Iterable[int]) -> int:
        """Bytes of the buffers of ``tensors``, each counted once."""
        classes = {self.buffers.class_of[a] for a in tensors} - {-1}
        return sum(self.buffers.classes[c][0] for c in classes)

    def _taken_over(self, t: int, residents: Collection[int]) -> int:
        """Bytes that op t may save by writing into buffers that are not ``residents``."""
        return sum(
            nbytes
            for nbytes, givers in self.buffers.takeovers[t]
            if any(self.buffers.class_of[giver[0]] not in residents for giver in givers)
        )

    def overwritten(self, t: int) -> dict[int, int]:
        """The buffers that op t may write over, and by how many bytes; else they stay beside.

        Only of outputs that no other input's buffer may take.
        """
        result: dict[int, int] = {}
        for nbytes, givers in self.buffers.takeovers[t]:
            if len(givers) == 1:
                c = self.buffers.class_of[givers[0][0]]
                result[c] = result.get(c, 0) + nbytes
        return result

    def working_nbytes(self, t: int) -> int:
        """The bytes of what op t reads and writes, where nothing that it reads is needed later."""
        op = self.graph.ops[t]
        return self._nbytes((*op.inputs, *op.outputs)) - self._taken_over(t, ())
