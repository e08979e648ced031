"""The integer program of mirroring: flag forward ops so that recomputation is cheap and fits.

Checkmate (Jain et al. 2020) chooses any schedule; MXNet's mirroring can run one schedule per set
of flags (:mod:`memplan.mirroring`). Here the only decisions are the flags; what is executed and
what is alive at a moment of the step follows from them by linear constraints. Moments are added
one by one: a program with some of them is a relaxation, so its bound holds for all of them, and a
solution that an exact replay finds within the budget is optimal.

Notation, for a forward op u and the moment at which backward op k runs:

- F[u]: u is flagged. C[u]: its copy is executed at some time.
- E[k, u]: the copy of u has been executed when k runs.
- O[k, a], P[k, a]: the original of tensor a, its copy, is alive while k runs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memplan.errors import DependencyError
from memplan.graph import TrainingGraph
from memplan.mirroring import flaggable
from memplan.schedule import Schedule
from memplan.simulate import simulate

try:
    import mip
except ImportError as error:  # pragma: no cover - mip is a plain requirement of memplan
    raise DependencyError("python-mip is missing; pip install 'mip>=1.17'") from error

# Costs are scaled so that the unplanned step costs this much: solvers work with tolerances
# around 1e-6, and op times are of that order.
COST_SCALE = 1000.0
# Bytes are counted in MiB in the rows, for the same reason.
MIB = float(1 << 20)

Expr = Any


@dataclass(frozen=True)
class _View:
    """How far the step is: what counts for liveness at one moment.

    Backward ops from ``since`` on have not read yet; copies ``executed`` exist (with this value),
    copies ``pending`` will read; only forward ops up to ``until`` have run.
    """

    since: int
    executed: Mapping[int, Expr]
    pending: Mapping[int, Expr]
    until: int | None = None


@dataclass(frozen=True)
class Solution:
    """What a solve gave: flags (or None), a proven bound on extra seconds, and what is proved."""

    flags: frozenset[int] | None
    bound_seconds: float
    optimal: bool
    infeasible: bool


class MirrorProgram:
    """A relaxation of the program, with the moments added so far."""

    def __init__(
        self, graph: TrainingGraph, budget_nbytes: int, *, solver: str, threads: int
    ) -> None:
        self.graph = graph
        self.model = mip.Model(sense=mip.MINIMIZE, solver_name=solver)
        self.model.verbose = 0
        self.model.threads = threads
        self.scale = COST_SCALE / graph.seconds if graph.seconds else 1.0
        self.budget = self.model.add_var(name="budget", lb=0.0, ub=budget_nbytes / MIB)
        self._read_structure()
        self.flag = {u: self.model.add_var(var_type=mip.BINARY) for u in flaggable(graph)}
        self.copied = self._copied()
        self.model.objective = mip.xsum(
            self.scale * graph.ops[u].seconds * copied for u, copied in self.copied.items()
        )
        self.gradient_nbytes = _gradient_nbytes(graph)
        self.held_nbytes = _held_nbytes(graph)
        self.moments: set[tuple[int, int | None]] = set()
        self._executed: dict[int, dict[int, Expr]] = {}

    def _read_structure(self) -> None:
        """Which forward ops wait for, and which backward ops differentiate, each forward op."""
        graph = self.graph
        self.consumers: dict[int, list[int]] = defaultdict(list)
        self.first_backward: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            if index < graph.nforward:
                for source in dict.fromkeys((*(graph.producer[t] for t in op.inputs), *op.after)):
                    self.consumers[source].append(index)
            elif op.differentiates is not None:
                self.first_backward.setdefault(op.differentiates, index)
        self.alias_of = {
            op.outputs[handover.output]: op.inputs[handover.input]
            for op in graph.ops[: graph.nforward]
            for handover in op.handovers
            if handover.alias
        }

    def _copied(self) -> dict[int, Expr]:
        """C[u] = F[u] where a backward op waits for u's copy; else C[u] >= F[u] + C[x] - 1."""
        copied: dict[int, Expr] = {}
        for u in sorted(self.flag, reverse=True):
            if u in self.first_backward:
                copied[u] = self.flag[u]
                continue
            users = [copied[x] for x in self.consumers[u] if x in copied]
            if users:
                copied[u] = self.model.add_var(lb=0.0, ub=1.0)
                for used in users:
                    self.model.add_constr(copied[u] >= self.flag[u] + used - 1)
        return copied

    def executed(self, k: int) -> Mapping[int, Expr]:
        """E[k, ·]; ops whose copy cannot have been executed yet are left out.

        E[k, u] = C[u] from the first backward op of u on; before it, u's copy runs if and only if
        u is flagged and the copy of some op that reads u has run:
        E[k, u] >= E[k, x] + F[u] - 1,  E[k, u] <= F[u],  E[k, u] <= sum over x of E[k, x].
        """
        if k < self.graph.nforward:
            return {}
        if k not in self._executed:
            result: dict[int, Expr] = {}
            for u in sorted(self.flag, reverse=True):
                if self.first_backward.get(u, len(self.graph.ops)) <= k:
                    result[u] = self.flag[u]
                    continue
                users = [result[x] for x in self.consumers[u] if x in result]
                if users:
                    e = self.model.add_var(lb=0.0, ub=1.0)
                    self.model.add_constr(e <= self.flag[u])
                    self.model.add_constr(e <= mip.xsum(users))
                    for used in users:
                        self.model.add_constr(e >= used + self.flag[u] - 1)
                    result[u] = e
            self._executed[k] = result
        return self._executed[k]

    def add_moment(self, k: int, copy: int | None = None) -> bool:
        """Demand that what is alive fits the budget while op ``k`` runs.

        With ``copy``: while the copy of that forward op runs, if it does so right before backward
        op ``k``. Returns False if that moment was there already.
        """
        if (k, copy) in self.moments:
            return False
        self.moments.add((k, copy))
        if k < self.graph.nforward:
            self._add_forward_row(k)
        elif copy is None:
            self._add_backward_row(k)
        else:
            self._add_copy_row(k, copy)
        return True

    def _add_forward_row(self, k: int) -> None:
        graph = self.graph
        first = graph.nforward
        view = _View(first, {}, dict(self.copied), until=k)
        original, _ = self._alive(view)
        terms: list[Expr] = []
        for a, alive in original.items():
            used_now = graph.producer[a] == k or any(k <= r < first for r in graph.readers[a])
            if a not in self.alias_of:
                terms.append(graph.tensors[a].nbytes / MIB * (1 if used_now else alive))
        later = {a for a in graph.ops[k].inputs if any(k < r < first for r in graph.readers[a])}
        surviving = {a: 1 if a in later else alive for a, alive in original.items()}
        terms += self._handed_over(k, 0, surviving, {})
        self._add_row(mip.xsum(terms))

    def _add_backward_row(self, k: int) -> None:
        now = self.executed(k)
        pending = {x: _minus(copied, now.get(x, 0)) for x, copied in self.copied.items()}
        view = _View(k, now, pending)
        terms = self._live_terms(view)
        differentiated = self.graph.ops[k].differentiates
        if self._candidates(k):
            after = dataclasses.replace(view, since=k + 1)
            reader = 0 if differentiated is None else self.flag.get(differentiated, 0)
            terms += self._handed_over(k, reader, *self._alive(after))
        self._add_row(mip.xsum(terms) + self.gradient_nbytes[k] / MIB)

    def _add_copy_row(self, k: int, copy: int) -> None:
        """The row for the moment at which ``copy`` runs, where it does so in stage ``k``."""
        graph = self.graph
        now, before = self.executed(k), self.executed(k - 1)
        executed = dict(before)
        # Of what runs in the same stage, only what the copy reads through flagged ops is known to
        # run before it, and only what reads it to run after.
        chain: dict[int, Expr] = {copy: 1}
        for u in sorted(self._ancestors(copy), reverse=True):
            if u in now:
                users = [chain[x] + self.flag[u] - 1 for x in self.consumers[u] if x in chain]
                chain[u] = self._at_least([*users, before.get(u, 0)])
        executed.update(chain)
        later = {copy, *self.consumers[copy]}
        pending = {
            x: _minus(copied, (before if x in later else now).get(x, 0))
            for x, copied in self.copied.items()
        }
        view = _View(k, executed, pending)
        terms = self._live_terms(view)
        if self._candidates(copy):
            others = {x: expr for x, expr in pending.items() if x != copy}
            terms += self._handed_over(
                copy, 1, *self._alive(dataclasses.replace(view, pending=others))
            )
        held = self.held_nbytes[k]
        runs_here = _minus(now.get(copy, 0), before.get(copy, 0))
        most = sum(t.nbytes for t in graph.tensors) / MIB
        self._add_row(mip.xsum(terms) + held / MIB - most * (1 - runs_here))

    def _add_row(self, mib: Expr) -> None:
        self.model.add_constr(mib - self.budget <= 0)

    def _live_terms(self, view: _View) -> list[Expr]:
        return [
            self.graph.tensors[a].nbytes / MIB * alive
            for side in self._alive(view)
            for a, alive in side.items()
            if a not in self.alias_of
        ]

    def _candidates(self, op: int) -> dict[int, list[int]]:
        """For each output of ``op``, the forward tensors whose buffers it may take over."""
        graph = self.graph
        call = graph.ops[op]
        result: dict[int, list[int]] = defaultdict(list)
        for handover in call.handovers:
            source, target = call.inputs[handover.input], call.outputs[handover.output]
            if not handover.alias and graph.producer[source] < graph.nforward:
                result[target].append(source)
        return result

    def _handed_over(
        self, op: int, reader: Expr, original: Mapping[int, Expr], copies: Mapping[int, Expr]
    ) -> list[Expr]:
        """Minus the MiB that ``op`` saves by writing into forward tensors that die at it.

        ``original`` and ``copies`` tell what survives it, ``reader`` whether it reads copies. An
        output with m candidates saves its size unless all of them survive:
        w >= sum of survivors - (m - 1),  saved = nbytes (1 - w).
        """
        graph = self.graph
        terms: list[Expr] = []
        for target, sources in self._candidates(op).items():
            survivors: list[Expr] = []
            for a in sources:
                u = graph.producer[a]
                lows = [original.get(a, 0) - reader]
                if u != graph.ops[op].differentiates:
                    lows.append(original.get(a, 0) - self.flag.get(u, 0))
                if a in copies:
                    lows.append(copies[a] + reader - 1)
                # which of the two versions is read decides: either bound may be the true one
                survivors.append(self._at_least(lows))
            kept = self._at_least([mip.xsum(survivors) - (len(sources) - 1)])
            terms.append(-graph.tensors[target].nbytes / MIB * (1 - kept))
        return terms

    def _ancestors(self, op: int) -> set[int]:
        """The forward ops on which ``op`` depends."""
        graph = self.graph
        seen: set[int] = set()
        stack = [op]
        while stack:
            call = graph.ops[stack.pop()]
            for other in (*(graph.producer[t] for t in call.inputs), *call.after):
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return seen

    def _alive(self, view: _View) -> tuple[dict[int, Expr], dict[int, Expr]]:
        """O[k, ·] and P[k, ·] of the tensors of forward ops, as ``view`` sees the step.

        For a tensor a of op u, over the backward ops j >= k that read it and differentiate v:
        O >= 1 - F[v] and O >= 1 - F[u] (v's backward op reads copies only if both are flagged),
        P >= E[u] + F[v] - 1; over the copies of ops x still pending that read it:
        O >= pending[x] - F[u],  P >= E[u] + pending[x] - 1.
        """
        graph = self.graph
        original: dict[int, Expr] = {}
        copies: dict[int, Expr] = {}
        low_original: dict[int, list[Expr]] = defaultdict(list)
        low_copy: dict[int, list[Expr]] = defaultdict(list)
        heads = frozenset(graph.heads)
        last = graph.nforward if view.until is None else view.until + 1
        for u in range(last - 1, -1, -1):
            flag = self.flag.get(u, 0)
            ran = view.executed.get(u)
            for a in graph.ops[u].outputs:
                if graph.tensors[a].nbytes == 0:
                    continue
                lows, copy_lows = low_original[a], low_copy[a]
                if a in heads:
                    lows.append(1)
                for j in graph.readers[a]:
                    if j >= view.since:
                        v = graph.ops[j].differentiates
                        wanted = 0 if v is None else self.flag.get(v, 0)
                        lows.append(1 - wanted)
                        if v != u:
                            lows.append(1 - flag)
                        copy_lows.append(1 if v == u else wanted)
                    elif j in view.pending:
                        lows.append(view.pending[j] - flag)
                        copy_lows.append(view.pending[j])
                original[a] = self._at_least(lows)
                if ran is not None:
                    copies[a] = self._at_least([ran + low - 1 for low in copy_lows])
                if a in self.alias_of:
                    source = self.alias_of[a]
                    owner = self.flag.get(graph.producer[source], 0)
                    low_original[source].append(original[a])
                    if a in copies:
                        low_original[source].append(copies[a] - owner)
                        low_copy[source].append(copies[a])
        return original, copies

    def _at_least(self, lows: list[Expr]) -> Expr:
        """A value in [0, 1] that is at least each of ``lows``; a constant where it can be."""
        constants = [low for low in lows if isinstance(low, (int, float))]
        floor = max([0, *constants])
        varying = {_key(low): low for low in lows if not isinstance(low, (int, float))}
        if floor >= 1 or not varying:
            return min(1, floor)
        result = self.model.add_var(lb=float(floor), ub=1.0)
        for low in varying.values():
            self.model.add_constr(result >= low)
        return result

    def forbid(self, flags: frozenset[int]) -> None:
        """Exclude exactly this set of flags (an exact replay found it over the budget)."""
        self.model.add_constr(
            mip.xsum(1 - var if u in flags else var for u, var in self.flag.items()) >= 1
        )

    def start_from(self, flags: frozenset[int]) -> None:
        """Give the solver a first solution."""
        self.model.start = [(var, 1.0 if u in flags else 0.0) for u, var in self.flag.items()]

    def solve(self, seconds: float) -> Solution:
        """Solve the relaxation for at most ``seconds``."""
        status = self.model.optimize(max_seconds=max(0.1, seconds))
        infeasible = status in (
            mip.OptimizationStatus.INFEASIBLE,
            mip.OptimizationStatus.INT_INFEASIBLE,
        )
        flags = None
        if self.model.num_solutions:
            flags = frozenset(u for u, var in self.flag.items() if var.x > 0.5)
        bound = self.model.objective_bound
        if infeasible or bound is None or not bound > 0.0:
            bound = 0.0
        # With a gap tolerance a solver may say OPTIMAL although a gap remains: read the gap.
        value = self.model.objective_value
        closed = (
            status == mip.OptimizationStatus.OPTIMAL
            and value is not None
            and value - bound <= 1e-6 * max(1.0, abs(value))
        )
        return Solution(flags, bound / self.scale, closed, infeasible)


def _key(expr: Expr) -> tuple[tuple[tuple[int, float], ...], float]:
    """What makes two expressions equal (python-mip's own comparison builds a constraint)."""
    if isinstance(expr, mip.Var):
        return ((expr.idx, 1.0),), 0.0
    return tuple(sorted((var.idx, factor) for var, factor in expr.expr.items())), expr.const


def _minus(a: Expr, b: Expr) -> Expr:
    """a - b; python-mip loses one of two terms with the same variable."""
    return 0 if a is b else a - b


def _gradient_nbytes(graph: TrainingGraph) -> tuple[int, ...]:
    """Bytes of backward tensors alive at every op of the unplanned step, whatever is flagged."""
    forward = {t for op in graph.ops[: graph.nforward] for t in op.outputs}
    tensors = tuple(
        dataclasses.replace(tensor, nbytes=0, nelements=0) if t in forward else tensor
        for t, tensor in enumerate(graph.tensors)
    )
    gradients = dataclasses.replace(graph, tensors=tensors)
    return simulate(Schedule.unplanned(gradients)).live_nbytes


def _held_nbytes(graph: TrainingGraph) -> list[int]:
    """Bytes of backward tensors alive right before every op of the unplanned step."""
    last_use = [max(readers, default=-1) for readers in graph.readers]
    for head in graph.heads:
        last_use[head] = len(graph.ops)
    held = [0] * (len(graph.ops) + 1)
    for index in range(len(graph.ops) - 1, graph.nforward - 1, -1):
        op = graph.ops[index]
        shared = {op.outputs[h.output]: op.inputs[h.input] for h in op.handovers if h.alias}
        for t in op.outputs:
            if t in shared:
                last_use[shared[t]] = max(last_use[shared[t]], last_use[t])
                continue
            for later in range(index + 1, min(last_use[t], len(graph.ops)) + 1):
                held[later] += graph.tensors[t].nbytes
    return held
