"""What holds for every schedule, in any order: the least bytes, and the least seconds in a budget.

Look at the moment at which op t first runs. Its ancestors have run, its descendants have not: that
follows from the graph alone. What descendants read of ancestors is there at this moment, or is
computed again after it, from what is there. Each moment by itself is thus a relaxation of the
whole problem, solved as a linear program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from memplan.programs.solver import DEFAULT_SOLVER, TOLERANCE, Program
from memplan.search.buffers import Buffers
from memplan.search.rematerialize import repeatable
from memplan.step.graph import TrainingGraph, reached
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

Array = np.ndarray[Any, Any]

# Solvers work with tolerances around 1e-6: seconds and bytes are scaled to about this range.
SCALE = 1000.0

# Beyond this many ops the floor counts only what an op itself reads and writes.
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


@dataclass(frozen=True)
class Bound:
    """No schedule takes less than ``seconds``: infinite if none is within the budget.

    Because of the moments at which ``ops`` first run (none: nothing says more than that every
    op runs). ``dropped[k]`` are the tensors that are needed after moment k, but not there, in the
    best answer for these moments alone; a good schedule drops much the same. ``exact``: no
    integer answer for these moments is cheaper than this one.
    """

    seconds: float
    ops: tuple[int, ...]
    dropped: tuple[tuple[int, ...], ...]
    exact: bool


class Moments:
    """The moments of one graph; backward ops run once unless ``recompute_backward``."""

    def __init__(self, graph: TrainingGraph, *, recompute_backward: bool = False) -> None:
        self.graph = graph
        self.again = repeatable(graph, backward=recompute_backward)
        self.buffers = Buffers(graph)

    @cached_property
    def floor(self) -> Floor:
        """The most that any single moment forces."""
        ops, classes = self.graph.ops, self.buffers.classes
        held = self._held()
        beside = np.zeros(len(ops), dtype=np.int64)
        for c, mask in held.items():
            beside += classes[c][0] * _bits(mask, len(ops))
        best = Floor(self._nbytes(self.graph.heads), None, self.graph.heads)
        for t, op in enumerate(ops):
            working = {self.buffers.class_of[a] for a in (*op.inputs, *op.outputs)} - {-1}
            kept = {c for c in working if held.get(c, 0) >> t & 1}
            nbytes = int(beside[t]) + sum(classes[c][0] for c in working - kept)
            nbytes -= self._taken_over(t, kept)
            if nbytes > best.nbytes:
                others = [a for c, mask in held.items() if mask >> t & 1 for a in classes[c][1]]
                best = Floor(nbytes, t, tuple(dict.fromkeys((*op.inputs, *op.outputs, *others))))
        return best

    def _held(self) -> dict[int, int]:
        """For buffers of what cannot be computed again: a bit for every op at which they are there.

        That of tensor a is there at the descendants of its op that are ancestors of a reader.
        """
        nops = len(self.graph.ops)
        if nops > LARGE:
            return {}
        ancestors, descendants = [0] * nops, [0] * nops
        for t in range(nops):
            for other in self.graph.dependencies[t]:
                ancestors[t] |= ancestors[other] | 1 << other
        for t in range(nops - 1, -1, -1):
            for other in self.graph.followers[t]:
                descendants[t] |= descendants[other] | 1 << other
        masks: dict[int, int] = defaultdict(int)
        heads = frozenset(self.graph.heads)
        for a, c in enumerate(self.buffers.class_of):
            p = self.graph.producer[a]
            if c >= 0 and not self.again[p]:
                before = -1 if a in heads else 0
                for r in self.graph.readers[a]:
                    before |= ancestors[r]
                masks[c] |= descendants[p] & before
        return dict(masks)

    def bound(
        self,
        budget_nbytes: int,
        deadline: float | Stop,
        *,
        nmoments: int = 5,
        solver: str = DEFAULT_SOLVER,
        effort: float = 1.0,
        gap_seconds: float = 0.0,
    ) -> Bound:
        """What a schedule costs at least if its live bytes are within the budget.

        The moments looked at are those with most bytes in the unplanned step; of the one whose
        relaxation says most, the integer program is solved, with so much effort, to such a gap.
        ``deadline`` is a time of time.monotonic(), or a stop.
        """
        stop = Stop.at(deadline)
        best, tightest = Bound(self.graph.seconds, (), (), False), None
        with ExitStack() as programs:
            for t in self._fullest(budget_nbytes, nmoments):
                if not stop.is_over():
                    program = programs.enter_context(Program(solver))
                    moment = MomentProgram(self, [t], budget_nbytes, program)
                    found = moment.bound(stop, relax=True, effort=effort)
                    if found.seconds >= best.seconds:
                        best, tightest = found, moment
            if tightest is None or math.isinf(best.seconds) or stop.is_over():
                return best
            found = tightest.bound(stop, effort=effort, gap_seconds=gap_seconds)
        return found if found.seconds >= best.seconds else best

    def _fullest(self, budget_nbytes: int, count: int) -> list[int]:
        """Ops over the budget in the unplanned step: the fullest, and others far from it."""
        live = simulate(Schedule.unplanned(self.graph)).live_nbytes
        over = [t for t, nbytes in enumerate(live) if nbytes > budget_nbytes]
        if not over:
            return []
        spread = over[:: max(1, len(over) // max(1, count - 1))]
        return list(dict.fromkeys([max(over, key=lambda t: live[t]), *spread]))[:count]

    def before_and_after(self, t: int) -> tuple[set[int], set[int]]:
        """The ops that have run once t has, with t, and those that cannot have run before it."""
        ancestors = reached([t], self.graph.dependencies)
        return ancestors, reached(self.graph.followers[t], self.graph.followers)

    def crossing(self, before: Iterable[int], after: set[int]) -> list[int]:
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

    def _taken_over(self, t: int, kept: Collection[int]) -> int:
        """Bytes that op t may save by writing into buffers that are not ``kept``."""
        return sum(
            nbytes
            for nbytes, givers in self.buffers.takeovers[t]
            if any(self.buffers.class_of[giver[0]] not in kept for giver in givers)
        )

    def working_nbytes(self, t: int) -> int:
        op = self.graph.ops[t]
        return self._nbytes((*op.inputs, *op.outputs)) - self._taken_over(t, ())


class MomentProgram:
    """What is there at some moments, what runs again between them, at the least cost.

    Built in ``program``. ``ops`` are the ops whose first executions are the moments, each an
    ancestor of the next.
    there[k, c]: buffer c is held at moment k. runs[k, p]: op p, an ancestor of moment k, runs
    again after it, and before moment k + 1 if there is one.
    """

    def __init__(
        self,
        moments: Moments,
        ops: Sequence[int],
        budget_nbytes: int,
        program: Program,
    ) -> None:
        self.moments, self.ops = moments, tuple(ops)
        self.graph, self.class_of = moments.graph, moments.buffers.class_of
        self.scale = SCALE / (self.graph.seconds or 1.0)
        self.program = program
        sets = [moments.before_and_after(t) for t in ops]
        self.before = [ancestors for ancestors, _ in sets]
        self.after = [descendants for _, descendants in sets]
        self.crossing = [moments.crossing(*pair) for pair in sets]
        self.working = [
            {self.class_of[a] for a in (*self.graph.ops[t].inputs, *self.graph.ops[t].outputs)}
            for t in ops
        ]
        self.there: dict[tuple[int, int], int] = {}
        self.runs = {
            (k, p): self.program.variable(self.scale * self.graph.ops[p].seconds, integer=True)
            for k in range(len(ops))
            for p in sorted(self.before[k])
            if moments.again[p]
        }
        for k in range(len(ops)):
            self._read(k)
            self._recompute(k)
        for k in range(len(ops) - 1, 0, -1):  # what may be there at k, may be there before
            self._carry(k)
        for k in range(len(ops)):
            self._fit(k, budget_nbytes)

    def _is_there(self, k: int, a: int) -> int | None:
        """The variable there[k, c] for the buffer of a; None if it is there in any case."""
        c = self.class_of[a]
        if c < 0 or c in self.working[k]:
            return None
        if (k, c) not in self.there:
            self.there[k, c] = self.program.variable(integer=True)
        return self.there[k, c]

    def _available(self, k: int, a: int, until: int) -> dict[int, float] | None:
        """there[k, a] + runs[k, p] + ... + runs[until, p]; None if a is there in any case."""
        there = self._is_there(k, a)
        if there is None:
            return None
        producer = self.graph.producer[a]
        again = (self.runs.get((j, producer)) for j in range(k, until + 1))
        return {there: 1.0, **{run: 1.0 for run in again if run is not None}}

    def _demand(self, terms: Mapping[int, float] | None, *, at_least: float = 1.0) -> None:
        if terms is not None:
            self.program.at_most({v: -factor for v, factor in terms.items()}, -at_least)

    def _read(self, k: int) -> None:
        """What descendants of moment k read of its ancestors is there, or runs again after it.

        What an op before the next moment reads, before that.
        """
        last = len(self.ops) - 1
        soon: AbstractSet[int] = frozenset()
        if k < last:
            soon = self.after[k] & self.before[k + 1]
        for a in self.crossing[k]:
            is_soon = any(r in soon for r in self.graph.readers[a])
            self._demand(self._available(k, a, k if is_soon else last))

    def _recompute(self, k: int) -> None:
        """What an op reads that runs again is there, or runs again in the same interval."""
        for p in sorted(self.before[k]):
            run = self.runs.get((k, p))
            if run is None:
                continue
            for b in dict.fromkeys(self.graph.ops[p].inputs):
                terms = self._available(k, b, k)
                if terms is not None:
                    self._demand(terms | {run: -1.0}, at_least=0.0)

    def _carry(self, k: int) -> None:
        """What is there at moment k was there at the one before, or ran again in between."""
        for (moment, c), there in list(self.there.items()):
            members = self.moments.buffers.classes[c][1]
            if moment == k and all(self.graph.producer[a] in self.before[k - 1] for a in members):
                terms: dict[int, float] = {}
                for a in members:
                    found = self._available(k - 1, a, k - 1)
                    if found is None:
                        break
                    terms |= found
                else:
                    self._demand({**terms, there: -1.0}, at_least=0.0)

    def _fit(self, k: int, budget_nbytes: int) -> None:
        """What is there beside the op's working set takes at most the room."""
        unit = SCALE / max(1, budget_nbytes)
        room = budget_nbytes - self.moments.working_nbytes(self.ops[k])
        sizes = {
            variable: unit * self.moments.buffers.classes[c][0]
            for (moment, c), variable in self.there.items()
            if moment == k
        }
        self.program.at_most(sizes, unit * room)

    def bound(
        self,
        seconds: float | Stop,
        *,
        relax: bool = False,
        effort: float = 1.0,
        gap_seconds: float = 0.0,
    ) -> Bound:
        """What is proved within ``seconds``; of the linear relaxation with ``relax``."""
        gap = self.scale * gap_seconds
        solved = self.program.solve(seconds, relax=relax, effort=effort, gap=gap)
        if solved.infeasible:
            return Bound(math.inf, self.ops, ((),) * len(self.ops), False)
        extra = max(0.0, (solved.bound - SCALE * TOLERANCE) / self.scale)
        dropped: tuple[tuple[int, ...], ...] = ((),) * len(self.ops)
        if solved.values is not None:
            dropped = tuple(self._dropped(k, solved.values) for k in range(len(self.ops)))
        return Bound(self.graph.seconds + extra, self.ops, dropped, solved.optimal and not relax)

    def _dropped(self, k: int, values: Sequence[float]) -> tuple[int, ...]:
        there = {c for (moment, c), v in self.there.items() if moment == k and values[v] > 0.5}
        there |= self.working[k] | {-1}
        return tuple(a for a in self.crossing[k] if self.class_of[a] not in there)


def _bits(mask: int, count: int) -> Array:
    """The lowest ``count`` bits of ``mask`` as an array, the lowest first."""
    packed = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), dtype=np.uint8)
    # NumPy would multiply bytes by a Python int above 2^32 as unsigned numbers.
    return np.unpackbits(packed, bitorder="little")[:count].astype(np.int64)
