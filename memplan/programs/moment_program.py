"""The program of a few moments of a step: what is there at each, what runs again after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from memplan.programs.moments import Moments
from memplan.programs.proof import ProofOptions
from memplan.programs.solver import LEEWAY, SCALE, TOLERANCE, Looks, Program
from memplan.util.stop import Stop


@dataclass(frozen=True)
class Bound:
    """No schedule takes less than ``seconds``: infinite if none is within the budget.

    Because of the moments at which ``ops`` first run (none: nothing says more than that every
    op runs). ``drops[k]`` are the tensors that are needed after moment k, but not there, in the
    best answer for these moments alone; a good schedule drops much the same. ``present[k]`` are the
    buffers that are there, also such as only what runs again reads.
    """

    seconds: float
    ops: tuple[int, ...]
    drops: tuple[tuple[int, ...], ...]
    present: tuple[frozenset[int], ...] = ()


class MomentProgram:
    """What is there at some moments, what runs again between them, at the least cost.

    Built in ``program``. ``ops`` are the ops whose first executions are the moments, in the order
    in which they come: none an ancestor of one before it. Where the graph leaves their order open,
    the program holds for the schedules that have this one.
    has_run[k, q]: op q, neither an ancestor nor a descendant of moment k, has run before it.
    present[k, c]: buffer c is held at moment k. Of what the moment's op may write over, it stays.
    runs[k, p]: op p, which has run before moment k, runs again after it, and before moment k + 1 if
    there is one. runs_until[k, last, p]: it runs again between moments k and ``last + 1``, once at
    least. Integer answers need none; without them a relaxation may spread a run over many
    intervals, and read a little in each.
    """

    def __init__(
        self,
        moments: Moments,
        ops: Sequence[int],
        budget_nbytes: int,
        program: Program,
    ) -> None:
        self.moments, self.ops = moments, tuple(ops)
        self.graph, self.class_of = moments.graph, moments.class_of
        self.scale = SCALE / (self.graph.seconds or 1.0)
        self.program = program
        sets = [moments.before_and_after(t) for t in ops]
        for k in range(1, len(ops)):  # what has run before a moment, has before all later ones
            sets[k][0].update(sets[k - 1][0])
        for k in range(len(ops) - 1, 0, -1):  # what cannot have run yet, could not before, either
            sets[k - 1][1].update({ops[k]}, sets[k][1])
        self.before = [ancestors for ancestors, _ in sets]
        self.after = [descendants for _, descendants in sets]
        self.crossings = [moments.crossings(*pair) for pair in sets]
        self.overwritten = [moments.overwritten(t) for t in ops]
        self.operands = [
            {self.class_of[a] for a in (*self.graph.ops[t].inputs, *self.graph.ops[t].outputs)}
            - self.overwritten[k].keys()
            for k, t in enumerate(ops)
        ]
        self.present: dict[tuple[int, int], int] = {}
        self.runs_until: dict[tuple[int, int, int], int] = {}
        self.has_run: dict[tuple[int, int], int] = {}
        self.runs: dict[tuple[int, int], int] = {}
        for k in range(len(ops)):
            self._order(k, budget_nbytes - moments.again.staying_nbytes(self.before[k]))
        for k in range(len(ops)):
            self._read(k)
            for last in range(len(ops) - 1, k - 1, -1):  # what is read until last, is before it
                self._recompute(k, last)
        for k in range(len(ops) - 1, 0, -1):  # what may be there at k, may be there before
            self._carry(k)
        for k in range(len(ops)):
            self._fit(k, budget_nbytes)

    def _order(self, k: int, room_nbytes: int) -> None:
        """An op has run if one that depends on it has, and stays so; only then it runs again."""
        for p, op in enumerate(self.graph.ops):
            if p in self.after[k]:
                continue
            if p not in self.before[k]:
                has_run = self.has_run[k, p] = self.program.variable(integer=True)
                for other in dict.fromkeys(self.graph.dependencies[p]):
                    self._has_run_if(k, other, has_run)
                if (k - 1, p) in self.has_run:
                    self._has_run_if(k, p, self.has_run[k - 1, p])
            if self.moments.again.may_run(p, room_nbytes):
                run = self.program.variable(self.scale * op.seconds, integer=True)
                self.runs[k, p] = run
                self._has_run_if(k, p, run)

    def _has_run_if(self, k: int, p: int, condition: int) -> None:
        if (k, p) in self.has_run:
            self.program.at_most({condition: 1.0, self.has_run[k, p]: -1.0}, 0.0)

    def _is_there(self, k: int, a: int) -> int | None:
        """The variable present[k, c] for the buffer of a; None if it is there in any case."""
        c = self.class_of[a]
        if c < 0 or c in self.operands[k]:
            return None
        if (k, c) not in self.present:
            self.present[k, c] = self.program.variable(integer=True)
        return self.present[k, c]

    def _available(self, k: int, a: int, last: int) -> dict[int, float] | None:
        """present[k, a] + runs_until[k, last, p] for a's producer p; None if a is there anyway."""
        presence, p = self._is_there(k, a), self.graph.producer[a]
        if presence is None:
            return None
        if (k, p) not in self.runs:
            return {presence: 1.0}
        return {presence: 1.0, self._runs_until(k, last, p): 1.0}

    def _runs_until(self, k: int, last: int, p: int) -> int:
        while (last, p) not in self.runs:  # where it may not run again, nor may it any later
            last -= 1
        if last == k:
            return self.runs[k, p]
        if (k, last, p) not in self.runs_until:
            self.runs_until[k, last, p] = number = self.program.variable()
            before = self._runs_until(k, last - 1, p)
            self.program.at_most({number: 1.0, before: -1.0, self.runs[last, p]: -1.0}, 0.0)
        return self.runs_until[k, last, p]

    def _demand(self, terms: Mapping[int, float], *, at_least: float) -> None:
        self.program.at_most({v: -factor for v, factor in terms.items()}, -at_least)

    def _demand_if(self, condition: int, terms: dict[int, float] | None) -> None:
        if terms is not None:
            self._demand(terms | {condition: -1.0}, at_least=0.0)

    def _read(self, k: int) -> None:
        """What is written before moment k and read after it is there, or runs again in time."""
        for a, reader in self._waiting(k):
            self._demand_read(k, a, reader, self._available(k, a, self._interval(k, reader)))

    def _interval(self, k: int, reader: int | None) -> int:
        """The last interval after moment k in which ``reader`` may first run."""
        last = len(self.ops) - 1
        if reader is None:
            return last
        return next((j for j in range(k, last) if reader in self.before[j + 1]), last)

    def _waiting(self, k: int) -> Iterator[tuple[int, int | None]]:
        """Tensors that may be written before moment k, and who reads them later (None: the end).

        Of readers that are sure to come, the first: it asks for most.
        """
        heads = frozenset(self.graph.heads)
        for a, p in enumerate(self.graph.producer):
            if p in self.after[k] or self.class_of[a] < 0 or self.class_of[a] in self.operands[k]:
                continue
            readers = self.graph.readers[a]
            sure = [r for r in readers if r in self.after[k]]
            sure.sort(key=lambda r: self._interval(k, r))
            if sure or a in heads:
                yield a, next(iter(sure), None)
            is_settled = bool(sure) or a in heads
            for r in readers:
                if (k, r) in self.has_run and (not is_settled or self._comes_soon(k, r)):
                    yield a, r

    def _comes_soon(self, k: int, r: int) -> bool:
        return k < len(self.ops) - 1 and r in self.before[k + 1]

    def _demand_read(
        self, k: int, a: int, reader: int | None, terms: dict[int, float] | None
    ) -> None:
        """That ``terms`` are 1 if moment k comes after a is written and before ``reader`` runs."""
        if terms is None:
            return
        p, at_least = self.graph.producer[a], 1.0
        if (k, p) in self.has_run:
            terms, at_least = terms | {self.has_run[k, p]: -1.0}, 0.0
        if reader is not None and (k, reader) in self.has_run:
            terms = terms | {self.has_run[k, reader]: 1.0}
        self._demand(terms, at_least=at_least)

    def _recompute(self, k: int, last: int) -> None:
        """What an op reads that runs again after moment k is there, or runs again as soon."""
        for p in range(len(self.graph.ops) - 1, -1, -1):  # a producer comes before its readers
            number = self.runs.get((k, p)) if last == k else self.runs_until.get((k, last, p))
            if number is not None:
                for b in dict.fromkeys(self.graph.ops[p].inputs):
                    self._demand_if(number, self._available(k, b, last))

    def _carry(self, k: int) -> None:
        """What is there at moment k was there at the one before, or has run in between."""
        for (moment, c), presence in list(self.present.items()):
            members = self.moments.buffers.classes[c][1]
            producers = {self.graph.producer[a] for a in members}
            if moment != k or not producers.isdisjoint(self.after[k - 1]):
                continue
            terms: dict[int, float] = {}
            for a in members:
                supply = self._available(k - 1, a, k - 1)
                if supply is None:
                    break
                terms |= supply
            else:
                firsts = [self.has_run[k - 1, p] for p in producers if (k - 1, p) in self.has_run]
                terms |= {presence: -1.0, **dict.fromkeys(firsts, -1.0)}
                self._demand(terms, at_least=-float(len(firsts)))

    def _fit(self, k: int, budget_nbytes: int) -> None:
        """What is there beside the op's working set takes at most the room, but for a solver's
        precision."""
        unit = SCALE / max(1, budget_nbytes)
        room = budget_nbytes - self.moments.working_nbytes(self.ops[k])
        sizes = {
            variable: unit * self.overwritten[k].get(c, self.moments.buffers.classes[c][0])
            for (moment, c), variable in self.present.items()
            if moment == k
        }
        self.program.at_most(sizes, unit * room + LEEWAY)

    def demand_less(self, seconds: float) -> None:
        """Allow no answer of more than ``seconds``, which may be infinite."""
        if math.isfinite(seconds):
            most = self.scale * (seconds - self.graph.seconds) + SCALE * TOLERANCE
            costs = {v: self.scale * self.graph.ops[p].seconds for (_, p), v in self.runs.items()}
            self.program.at_most(costs, most)

    def bound(
        self,
        stop: Stop,
        *,
        relax: bool = False,
        effort: float = 1.0,
        gap_seconds: float = 0.0,
        looks: Looks | None = None,
    ) -> Bound:
        """What is proved before ``stop``; of the linear relaxation with ``relax``.

        That comes first in any case: HiGHS begins with the answer to which it rounds.
        """
        gap = self.scale * gap_seconds
        if not relax:
            self.program.solve(stop, relax=True)
        answer = self.program.solve(stop, relax=relax, effort=effort, gap=gap, looks=looks)
        if answer.infeasible:
            return Bound(math.inf, self.ops, ((),) * len(self.ops))
        extra = max(0.0, (answer.bound - SCALE * TOLERANCE) / self.scale)
        if answer.values is None:
            return Bound(self.graph.seconds + extra, self.ops, ((),) * len(self.ops))
        present = tuple(self._all_there(k, answer.values) for k in range(len(self.ops)))
        drops = tuple(
            tuple(a for a in tensors if self.class_of[a] not in buffers)
            for tensors, buffers in zip(self.crossings, present, strict=True)
        )
        return Bound(self.graph.seconds + extra, self.ops, drops, present)

    def _all_there(self, k: int, values: Sequence[float]) -> frozenset[int]:
        present = {c for (moment, c), v in self.present.items() if moment == k and values[v] > 0.5}
        return frozenset(present | self.operands[k] | {-1})


def moment_bound(
    moments: Moments,
    budget_nbytes: int,
    stop: Stop,
    options: ProofOptions,
    looks: Looks | None = None,
) -> Bound:
    """What a schedule costs at least if its live bytes are within the budget.

    The moments looked at are the ``nmoments`` of the ``options`` that are likely to prove most; of
    the one whose relaxation says most, the integer program is solved.
    """
    if moments.floor.nbytes > budget_nbytes:  # gradients at the end of the step are of no moment
        return Bound(math.inf, (), ())
    best, tightest = Bound(moments.graph.seconds, (), ()), None
    with ExitStack() as programs:
        for t in moments.promising(budget_nbytes)[: options.nmoments]:
            if not stop.is_over():
                program = programs.enter_context(Program(options.solver))
                moment = MomentProgram(moments, [t], budget_nbytes, program)
                bound = moment.bound(stop, relax=True, effort=options.effort)
                if bound.seconds >= best.seconds:
                    best, tightest = bound, moment
        if tightest is None or math.isinf(best.seconds) or stop.is_over():
            return best
        gap = options.program_gap
        bound = tightest.bound(stop, effort=options.effort, gap_seconds=gap, looks=looks)
    return bound if bound.seconds >= best.seconds else best
