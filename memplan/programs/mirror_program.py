"""The integer program of mirroring: flag forward ops so that recomputation is cheap and fits.

Checkmate (Jain et al. 2020) chooses any schedule; MXNet's mirroring can run one schedule per set of
flags (:mod:`memplan.step.mirroring`). Here the only decisions are the flags; what is executed and
what is alive at a moment of the step follows from them by linear constraints. Moments are added one
by one: a program with some of them is a relaxation, so its bound holds for all of them, and a
solution that an exact replay finds within the budget is optimal.

Flags leave the order of the backward ops as it is; stage k is the time from the end of backward
op k - 1 to the end of backward op k. For forward ops u, v, x and a tensor a of op u:

- F[u]: u is flagged. The only integers.
- C[u]: the copy of u is executed at some time. Where u's own backward op asks for it, C[u] = F[u];
  else C[u] >= F[u] + F[v] - 1 for every op v whose backward op asks for it (:func:`reasons_of`),
  and C[u] >= F[u] + C[x] - 1 for every reader x of u.
- E[k, u]: the copy of u has been executed when backward op k runs. As C[u], of what has been asked
  for by then; and E[k, u] <= F[u], E[k, u] <= the sum of these F[v] and E[k, x].
- O[k, a], P[k, a]: the original of a, its copy, is alive while op k runs. Over the backward ops
  j >= k that read a and differentiate v (the backward op of v reads copies only if both are
  flagged): O >= 1 - F[v], O >= 1 - F[u], P >= E[k, u] + F[v] - 1 (for v = u, P >= E[k, u]).
  Over the ops x whose copies are pending, that is C[x] - E[k, x], and read a:
  O >= C[x] - E[k, x] - F[u], P >= E[k, u] + C[x] - E[k, x] - 1. O = 1 if a forward op from k on
  reads a, if op k writes it, or if it is a head. Aliases count as the tensor whose buffer they are.
- W[k, b]: output b of op k takes over the buffer of none of its m candidates:
  W >= the sum of their survivals - (m - 1). What b takes over saves its size, 1 - W times.
- Row of op k: the sum of nbytes[a] (O[k, a] + P[k, a]) + gradients[k] - savings <= budget.
- Row of the copy of u in stage k: the same at the moment at which it runs, less all of it where it
  does not run there: savings and E as they are then, - most * (1 - (E[k, u] - E[k - 1, u])).

Minimised are the seconds of the copies, the sum of seconds[u] * C[u].
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memplan.programs.linear import Linear
from memplan.programs.mirror_facts import Aliases, consumers_of, gradients_of, reasons_of
from memplan.programs.solver import LEEWAY, SCALE, Looks, Program
from memplan.step.graph import TrainingGraph, reached
from memplan.step.mirroring import flaggable
from memplan.util.stop import Stop

NONE, ALL = Linear(), Linear(constant=1.0)


@dataclass(frozen=True)
class _View:
    """How far the step is: what counts for liveness at one moment.

    Ops from ``begin`` on have not read yet; the copies of ``executions`` exist (with this value),
    copies ``pending`` will read.
    """

    begin: int
    executions: Mapping[int, Linear]
    pending: Mapping[int, Linear]


@dataclass(frozen=True)
class Solution:
    """What a solve gave: flags (or None), and what is proved: a bound on extra seconds."""

    flags: frozenset[int] | None
    bound_seconds: float
    infeasible: bool


class MirrorProgram:
    """A relaxation of the program, with the moments added so far, built in ``program``.

    Raises ScheduleError for a graph whose base order is not the one in which MXNet runs it.
    """

    def __init__(self, graph: TrainingGraph, budget_nbytes: int, program: Program) -> None:
        self.graph = graph
        self.program = program
        self.scale = SCALE / graph.seconds if graph.seconds else 1.0
        self.unit = SCALE / max(1, budget_nbytes)
        self.budget_nbytes = budget_nbytes
        self.consumers = consumers_of(graph)
        self.reasons = reasons_of(graph, self.consumers)
        self.aliases = Aliases.of(graph)
        self.gradients = gradients_of(graph, self.aliases)
        self.moments: set[tuple[int, int | None]] = set()
        self._executions: dict[int, dict[int, Linear]] = {}
        self._maxima: dict[Any, Linear] = {}
        # The variables but the flags, in the order in which they were made: each is, for given
        # flags, the largest of these sums.
        self._derived: list[tuple[int, list[Linear]]] = []
        self.number = {
            u: program.variable(self._cost(u) if u in self.reasons[u] else 0.0, integer=True)
            for u in flaggable(graph)
        }
        self.flag = {u: Linear.variable(number) for u, number in self.number.items()}
        self.is_copied = self._is_copied()

    def _cost(self, u: int) -> float:
        return self.scale * self.graph.ops[u].seconds

    def _is_flagged(self, u: int) -> Linear:
        """F[u]; 0 where u cannot be flagged."""
        return self.flag.get(u, NONE)

    def _is_copied(self) -> dict[int, Linear]:
        """C; ops whose copy is never asked for are left out."""
        is_copied: dict[int, Linear] = {}
        for u in sorted(self.flag, reverse=True):
            if u in self.reasons[u]:
                is_copied[u] = self.flag[u]
                continue
            users = self._users(u, self.reasons[u], is_copied)
            if users:
                is_copied[u] = self._largest([self.flag[u] + n - 1 for n in users], self._cost(u))
        return is_copied

    def executions(self, k: int) -> Mapping[int, Linear]:
        """E[k, ·]; ops whose copy cannot have been executed yet are left out."""
        if k < self.graph.nforward:
            return {}
        if k not in self._executions:
            result: dict[int, Linear] = {}
            for u in sorted(self.flag, reverse=True):
                askers = [v for v, stage in self.reasons[u].items() if stage <= k]
                if u in askers:
                    result[u] = self.flag[u]
                    continue
                users = self._users(u, askers, result)
                if users:
                    result[u] = self._largest([self.flag[u] + n - 1 for n in users])
                    self._at_most(result[u], self.flag[u])
                    self._at_most(result[u], Linear.total(users))
            self._executions[k] = result
        return self._executions[k]

    def _users(self, u: int, askers: Iterable[int], runs: Mapping[int, Linear]) -> list[Linear]:
        """Who needs the copy of u if it is flagged: readers' copies in ``runs``, and ``askers``."""
        users = [runs[x] for x in self.consumers[u] if x in runs]
        return users + [self.flag[v] for v in askers if v in self.flag]

    def add_moment(self, k: int, copy: int | None = None) -> bool:
        """Demand that what is alive fits the budget while op ``k`` runs.

        With ``copy``: while the copy of that forward op runs, if it does so in stage ``k``.
        Returns False if that moment was there already.
        """
        if (k, copy) in self.moments:
            return False
        self.moments.add((k, copy))
        if copy is None:
            self._add_row_of_op(k)
        else:
            self._add_row_of_copy(k, copy)
        return True

    def _add_row_of_op(self, k: int) -> None:
        """The row for the moment at which op ``k``, forward or backward, runs in its place."""
        executions = self.executions(k)
        pending = {x: c - executions.get(x, NONE) for x, c in self.is_copied.items()}
        view = _View(k, executions, pending)
        twin = self.graph.ops[k].differentiates
        reads_copies = NONE if twin is None else self._is_flagged(twin)
        savings = self._savings(k, reads_copies, dataclasses.replace(view, begin=k + 1))
        alive = Linear.total(nbytes * alive for nbytes, alive in self._live(view))
        self._add_row(alive - savings + self.gradients[k].during_nbytes)

    def _add_row_of_copy(self, k: int, copy: int) -> None:
        """The row for the moment at which ``copy`` runs, where it does so in stage ``k``."""
        executions, previous = self.executions(k), self.executions(k - 1)
        at_copy = dict(previous)
        # Of what runs in the same stage, only what the copy reads through flagged ops is known to
        # run before it, and only what reads it to run after.
        chain = {copy: ALL}
        dependencies = self.graph.dependencies
        for u in sorted(reached(dependencies[copy], dependencies), reverse=True):
            if u in executions:
                users = [chain[x] + self.flag[u] - 1 for x in self.consumers[u] if x in chain]
                chain[u] = self._at_least([*users, previous.get(u, NONE)])
        at_copy.update(chain)
        later_ops = {copy, *self.consumers[copy]}
        pending = {
            x: c - (previous if x in later_ops else executions).get(x, NONE)
            for x, c in self.is_copied.items()
        }
        view = _View(k, at_copy, pending)
        others = {x: expr for x, expr in pending.items() if x != copy}
        savings = self._savings(copy, ALL, dataclasses.replace(view, pending=others))
        live = self._live(view)
        gradient_nbytes = self.gradients[k].before_nbytes
        # Where the copy does not run here, the row must hold whatever is alive.
        most = sum(nbytes for nbytes, _ in live) + gradient_nbytes
        runs_here = executions.get(copy, NONE) - previous.get(copy, NONE)
        alive = Linear.total(nbytes * alive for nbytes, alive in live)
        self._add_row(alive - savings + gradient_nbytes - most * (1.0 - runs_here))

    def _add_row(self, nbytes: Linear) -> None:
        room = self.unit * self.budget_nbytes + LEEWAY
        self._at_most(self.unit * nbytes, Linear(constant=room))

    def _at_most(self, left: Linear, right: Linear) -> None:
        """The row left <= right."""
        row = left - right
        self.program.at_most(row.terms, -row.constant)

    def _live(self, view: _View) -> list[tuple[int, Linear]]:
        """(bytes, alive) for every buffer of forward tensors that may be alive."""
        return [
            (self.graph.tensors[a].nbytes, alive)
            for side in self._alive(view)
            for a, alive in side.items()
            if a not in self.aliases.source
        ]

    def _savings(self, op: int, reads_copies: Linear, after: _View) -> Linear:
        """Bytes that ``op`` saves by writing into forward tensors that die at it.

        ``after`` is the view once it has read. An output with m candidates saves its size unless
        all of them survive: w >= sum of survivors - (m - 1),  saved = nbytes (1 - w). Two outputs
        that may take the same one are both taken to save: a relaxation.
        """
        graph, aliases = self.graph, self.aliases
        only_originals = reads_copies == NONE
        candidates = self._candidates(op, only_originals)
        if not candidates:
            return NONE
        original, copies = self._alive(after)
        survives: dict[int, Linear] = {}
        for a in {a for sources in candidates.values() for a in sources}:
            flag = self._is_flagged(graph.producer[a])
            survival = original.get(aliases.root(a), NONE)
            # The copy is read if the producer is flagged too.
            lows = [survival - reads_copies, survival - flag]
            lows += [low + reads_copies - 1 for low in self._copy_survivals(a, original, copies)]
            survives[a] = self._at_least(lows)
        savings = []
        for target, sources in candidates.items():
            survival = Linear.total(survives[a] for a in sources) - (len(sources) - 1)
            savings.append(graph.tensors[target].nbytes * (1.0 - self._at_least([survival])))
        return Linear.total(savings)

    def _copy_survivals(
        self, a: int, original: Mapping[int, Linear], copies: Mapping[int, Linear]
    ) -> list[Linear]:
        """Lower bounds on whether the buffer of the copy of tensor ``a`` survives.

        It is that of an original where ``a`` is an alias of a tensor whose op is not flagged.
        """
        lows = [copies[a]] if a in copies else []
        flag = self._is_flagged(self.graph.producer[a])
        if a in self.aliases.source and a in copies:
            source = self.aliases.source[a]
            owner = self._is_flagged(self.graph.producer[source])
            survival = original.get(self.aliases.root(source), NONE)
            lows.append(survival + flag - owner - 1)
            lows += [low + flag - 1 for low in self._copy_survivals(source, original, copies)]
        return lows

    def _candidates(self, op: int, only_originals: bool) -> dict[int, list[int]]:
        """For each output of ``op``, the forward tensors whose buffers it may take over.

        No buffer that it reads twice; with ``only_originals`` aliases are known to be one buffer
        (of copies, only one of two may be flagged).
        """
        graph = self.graph
        call = graph.ops[op]
        buffers = [self.aliases.root(a) for a in call.inputs] if only_originals else call.inputs
        result: dict[int, list[int]] = defaultdict(list)
        of_gradients: set[int] = set()  # outputs that may take over a gradient's buffer
        for handover in call.handovers:
            source, target = call.inputs[handover.input], call.outputs[handover.output]
            if graph.producer[source] >= graph.nforward:
                of_gradients.add(target)
            elif (
                not handover.alias
                and buffers.count(buffers[handover.input]) == 1
                and graph.tensors[source].nbytes
                and graph.tensors[target].nbytes
                and (graph.readers[target] or target in graph.heads)
                and target not in self.aliases.source
                and target not in self.aliases.uncounted
            ):
                result[target].append(source)
        if op >= graph.nforward and of_gradients <= self.gradients[op].handed_over:
            # Their savings are counted with the gradients.
            for target in of_gradients:
                result.pop(target, None)
        return result

    def _alive(self, view: _View) -> tuple[dict[int, Linear], dict[int, Linear]]:
        """O[k, ·] and P[k, ·] of the tensors of forward ops, as ``view`` sees the step."""
        graph = self.graph
        original: dict[int, Linear] = {}
        copies: dict[int, Linear] = {}
        low_original: dict[int, list[Linear]] = defaultdict(list)
        low_copy: dict[int, list[Linear]] = defaultdict(list)
        heads = frozenset(graph.heads)
        for u in range(min(view.begin, graph.nforward - 1), -1, -1):
            flag = self._is_flagged(u)
            execution = view.executions.get(u)
            for a in graph.ops[u].outputs:
                if graph.tensors[a].nbytes == 0 or a in self.aliases.uncounted:
                    continue
                lows, copy_lows = low_original[a], low_copy[a]
                if a in heads or u == view.begin:
                    lows.append(ALL)
                for j in graph.readers[a]:
                    if j >= graph.nforward:
                        if j < view.begin:
                            continue
                        v = graph.ops[j].differentiates
                        reads_copy = NONE if v is None else self._is_flagged(v)
                        lows += [1.0 - reads_copy, 1.0 - flag]
                        copy_lows.append(ALL if v == u else reads_copy)
                        continue
                    if j >= view.begin:
                        lows.append(ALL)
                    if j in view.pending:
                        lows.append(view.pending[j] - flag)
                        copy_lows.append(view.pending[j])
                original[a] = self._at_least(lows)
                if execution is not None:
                    copies[a] = self._at_least([execution + low - 1 for low in copy_lows])
                if a in self.aliases.source:
                    source = self.aliases.source[a]
                    owner = self._is_flagged(graph.producer[source])
                    low_original[source].append(original[a])
                    if a in copies:
                        low_original[source].append(copies[a] - owner)
                        low_copy[source].append(copies[a])
        return original, copies

    def _at_least(self, lows: list[Linear]) -> Linear:
        """A value in [0, 1] that is at least each of ``lows``; a constant where it can be.

        The same for the same ``lows``: values only ever count against the budget.
        """
        floor = max([0.0, *(low.constant for low in lows if low.is_constant)])
        varying = {low.key: low for low in lows if not low.is_constant}
        if floor >= 1.0 or not varying:
            return Linear(constant=min(1.0, floor))
        key = (floor, frozenset(varying))
        if key not in self._maxima:
            constant = [Linear(constant=floor)] if floor else []
            self._maxima[key] = self._largest([*varying.values(), *constant])
        return self._maxima[key]

    def _largest(self, lows: list[Linear], cost: float = 0.0) -> Linear:
        """A new variable in [0, 1] that is at least each of ``lows``."""
        number = self.program.variable(cost)
        result = Linear.variable(number)
        for low in lows:
            self._at_most(low, result)
        self._derived.append((number, lows))
        return result

    def forbid(self, flags: frozenset[int]) -> None:
        """Exclude exactly this set of flags (an exact replay found it over the budget)."""
        differing = (1.0 - flag if u in flags else flag for u, flag in self.flag.items())
        self._at_most(ALL, Linear.total(differing))

    def start_from(self, flags: frozenset[int]) -> None:
        """Give the solver a first solution: HiGHS takes only the values of all variables."""
        values = {number: float(u in flags) for u, number in self.number.items()}
        for number, lows in self._derived:
            values[number] = max([0.0, *(low.value(values) for low in lows)])
        self.program.start_from([values[number] for number in range(len(values))])

    def solve(
        self,
        stop: Stop,
        *,
        effort: float = 1.0,
        gap_seconds: float = 0.0,
        looks: Looks | None = None,
    ) -> Solution:
        """Solve the relaxation by so much work, to such a gap."""
        gap = gap_seconds * self.scale
        answer = self.program.solve(stop, effort=effort, gap=gap, looks=looks)
        flags = None
        if answer.values is not None:
            flags = frozenset(u for u, n in self.number.items() if answer.values[n] > 0.5)
        return Solution(flags, answer.bound / self.scale, answer.infeasible)
