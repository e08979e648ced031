"""The integer program of mirroring: flag forward ops so that recomputation is cheap and fits.

Checkmate (Jain et al. 2020) chooses any schedule; MXNet's mirroring can run one schedule per set of
flags (:mod:`memplan.step.mirroring`). Here the only decisions are the flags; what is executed and
what is alive at a moment of the step follows from them by linear constraints. Moments are added one
by one: a program with some of them is a relaxation, so its bound holds for all of them, and a
solution that an exact replay finds within the budget is optimal.

Flags leave the order of the backward ops as it is; stage k is the time from the end of backward
op k - 1 to the end of backward op k. Notation, for a forward op u:

- F[u]: u is flagged. C[u]: its copy is executed at some time.
- E[k, u]: the copy of u has been executed when backward op k runs.
- O[k, a], P[k, a]: the original of tensor a, its copy, is alive while k runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from memplan.errors import ScheduleError
from memplan.programs.solver import BINARY, Expr, Var, new_model, solve, total
from memplan.step.graph import Tensor, TrainingGraph
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule
from memplan.step.simulate import replay

# Costs are scaled so that the unplanned step costs this much: solvers work with tolerances
# around 1e-6, and op times are of that order.
COST_SCALE = 1000.0
# Bytes are counted in MiB in the rows, for the same reason.
MIB = float(1 << 20)


@dataclass(frozen=True)
class _View:
    """How far the step is: what counts for liveness at one moment.

    Ops from ``since`` on have not read yet; copies ``executed`` exist (with this value), copies
    ``pending`` will read.
    """

    since: int
    executed: Mapping[int, Expr]
    pending: Mapping[int, Expr]


@dataclass(frozen=True)
class Solution:
    """What a solve gave: flags (or None), a proven bound on extra seconds, and what is proved."""

    flags: frozenset[int] | None
    bound_seconds: float
    optimal: bool
    infeasible: bool


class MirrorProgram:
    """A relaxation of the program, with the moments added so far.

    Raises ScheduleError for a graph whose base order is not the one in which MXNet runs it.
    """

    def __init__(self, graph: TrainingGraph, budget_nbytes: int, *, solver: str) -> None:
        self.graph = graph
        self.model = new_model(solver)
        self.scale = COST_SCALE / graph.seconds if graph.seconds else 1.0
        self.budget = self.model.add_var(name="budget", lb=0.0, ub=budget_nbytes / MIB)
        self.flag = {u: self.model.add_var(var_type=BINARY) for u in flaggable(graph)}
        self.consumers = _consumers(graph)
        self.reasons = _reasons(graph, self.consumers)
        self.aliases = _Aliases.of(graph)
        self.gradients = _gradients(graph, self.aliases)
        self.copied = self._copied()
        self.model.objective = total(
            self.scale * graph.ops[u].seconds * copied for u, copied in self.copied.items()
        )
        self.moments: set[tuple[int, int | None]] = set()
        self._executed: dict[int, dict[int, Expr]] = {}
        self._maxima: dict[Any, Expr] = {}

    def _copied(self) -> dict[int, Expr]:
        """C[u] = F[u] where u's own backward op asks for the copy; else, for every other op v
        whose backward op asks for it and every reader x of u:
        C[u] >= F[u] + F[v] - 1,  C[u] >= F[u] + C[x] - 1.
        """
        copied: dict[int, Expr] = {}
        for u in sorted(self.flag, reverse=True):
            if u in self.reasons[u]:
                copied[u] = self.flag[u]
                continue
            users = [copied[x] for x in self.consumers[u] if x in copied]
            users += [self.flag[v] for v in self.reasons[u] if v in self.flag]
            if users:
                copied[u] = self.model.add_var(lb=0.0, ub=1.0)
                for used in users:
                    self.model.add_constr(copied[u] >= self.flag[u] + used - 1)
        return copied

    def executed(self, k: int) -> Mapping[int, Expr]:
        """E[k, ·]; ops whose copy cannot have been executed yet are left out.

        E[k, u] = F[u] once u's own backward op has asked for the copy. Before, u's copy has run
        if and only if u is flagged and somebody has needed it, by the terms n of _copied:
        E[k, u] >= n + F[u] - 1,  E[k, u] <= F[u],  E[k, u] <= sum of all n.
        """
        if k < self.graph.nforward:
            return {}
        if k not in self._executed:
            result: dict[int, Expr] = {}
            for u in sorted(self.flag, reverse=True):
                asked = [v for v, stage in self.reasons[u].items() if stage <= k]
                if u in asked:
                    result[u] = self.flag[u]
                    continue
                users = [result[x] for x in self.consumers[u] if x in result]
                users += [self.flag[v] for v in asked if v in self.flag]
                if users:
                    e = self.model.add_var(lb=0.0, ub=1.0)
                    self.model.add_constr(e <= self.flag[u])
                    self.model.add_constr(e <= total(users))
                    for used in users:
                        self.model.add_constr(e >= used + self.flag[u] - 1)
                    result[u] = e
            self._executed[k] = result
        return self._executed[k]

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
        now = self.executed(k)
        pending = {x: _minus(copied, now.get(x, 0)) for x, copied in self.copied.items()}
        view = _View(k, now, pending)
        differentiated = self.graph.ops[k].differentiates
        reads_copies = 0 if differentiated is None else self.flag.get(differentiated, 0)
        saved = self._saved(k, reads_copies, dataclasses.replace(view, since=k + 1))
        terms = [nbytes / MIB * alive for nbytes, alive in self._live(view)]
        self._add_row(total(terms) - saved + self.gradients[k].during_nbytes / MIB)

    def _add_row_of_copy(self, k: int, copy: int) -> None:
        """The row for the moment at which ``copy`` runs, where it does so in stage ``k``."""
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
        others = {x: expr for x, expr in pending.items() if x != copy}
        saved = self._saved(copy, 1, dataclasses.replace(view, pending=others))
        live = self._live(view)
        held = self.gradients[k].before_nbytes / MIB
        # Where the copy does not run here, the row must hold whatever is alive.
        most = sum(nbytes for nbytes, _ in live) / MIB + held
        runs_here = _minus(now.get(copy, 0), before.get(copy, 0))
        terms = [nbytes / MIB * alive for nbytes, alive in live]
        self._add_row(total(terms) - saved + held - most * (1 - runs_here))

    def _add_row(self, mib: Expr) -> None:
        self.model.add_constr(mib - self.budget <= 0)

    def _live(self, view: _View) -> list[tuple[int, Expr]]:
        """(bytes, alive) for every buffer of forward tensors that may be alive."""
        return [
            (self.graph.tensors[a].nbytes, alive)
            for side in self._alive(view)
            for a, alive in side.items()
            if a not in self.aliases.source
        ]

    def _saved(self, op: int, reads_copies: Expr, after: _View) -> Expr:
        """MiB that ``op`` saves by writing into forward tensors that die at it.

        ``after`` is the view once it has read. An output with m candidates saves its size unless
        all of them survive: w >= sum of survivors - (m - 1),  saved = nbytes (1 - w). Two outputs
        that may take the same one are both taken to save: a relaxation.
        """
        graph, aliases = self.graph, self.aliases
        only_originals = isinstance(reads_copies, int) and not reads_copies
        candidates = self._candidates(op, only_originals)
        if not candidates:
            return 0
        original, copies = self._alive(after)
        survives: dict[int, Expr] = {}
        for a in {a for sources in candidates.values() for a in sources}:
            flag = self.flag.get(graph.producer[a], 0)
            kept = original.get(aliases.root(a), 0)
            # The copy is read if the producer is flagged too.
            lows = [kept - reads_copies, kept - flag]
            lows += [low + reads_copies - 1 for low in self._copy_kept(a, original, copies)]
            survives[a] = self._at_least(lows)
        saved = []
        for target, sources in candidates.items():
            kept = [total(survives[a] for a in sources) - (len(sources) - 1)]
            saved.append(graph.tensors[target].nbytes / MIB * (1 - self._at_least(kept)))
        return total(saved)

    def _copy_kept(
        self, a: int, original: Mapping[int, Expr], copies: Mapping[int, Expr]
    ) -> list[Expr]:
        """Lower bounds on whether the buffer of the copy of tensor ``a`` survives.

        It is that of an original where ``a`` is an alias of a tensor whose op is not flagged.
        """
        lows = [copies[a]] if a in copies else []
        flag = self.flag.get(self.graph.producer[a], 0)
        if a in self.aliases.source and a in copies:
            source = self.aliases.source[a]
            owner = self.flag.get(self.graph.producer[source], 0)
            kept = original.get(self.aliases.root(source), 0)
            lows.append(kept + flag - owner - 1)
            lows += [low + flag - 1 for low in self._copy_kept(source, original, copies)]
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
        met: set[int] = set()  # outputs that may take over a gradient's buffer
        for handover in call.handovers:
            source, target = call.inputs[handover.input], call.outputs[handover.output]
            if graph.producer[source] >= graph.nforward:
                met.add(target)
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
        if op >= graph.nforward and met <= self.gradients[op].handed_over:
            # Their savings are counted with the gradients.
            for target in met:
                result.pop(target, None)
        return result

    def _ancestors(self, op: int) -> set[int]:
        """The forward ops on which ``op`` depends."""
        seen: set[int] = set()
        stack = [op]
        while stack:
            for other in self.graph.dependencies[stack.pop()]:
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
        for u in range(min(view.since, graph.nforward - 1), -1, -1):
            flag = self.flag.get(u, 0)
            ran = view.executed.get(u)
            for a in graph.ops[u].outputs:
                if graph.tensors[a].nbytes == 0 or a in self.aliases.uncounted:
                    continue
                lows, copy_lows = low_original[a], low_copy[a]
                if a in heads or u == view.since:
                    lows.append(1)
                for j in graph.readers[a]:
                    if j >= graph.nforward:
                        if j < view.since:
                            continue
                        v = graph.ops[j].differentiates
                        wanted = 0 if v is None else self.flag.get(v, 0)
                        lows += [1 - wanted, 1 - flag]
                        copy_lows.append(1 if v == u else wanted)
                        continue
                    if j >= view.since:
                        lows.append(1)
                    if j in view.pending:
                        lows.append(view.pending[j] - flag)
                        copy_lows.append(view.pending[j])
                original[a] = self._at_least(lows)
                if ran is not None:
                    copies[a] = self._at_least([ran + low - 1 for low in copy_lows])
                if a in self.aliases.source:
                    source = self.aliases.source[a]
                    owner = self.flag.get(graph.producer[source], 0)
                    low_original[source].append(original[a])
                    if a in copies:
                        low_original[source].append(copies[a] - owner)
                        low_copy[source].append(copies[a])
        return original, copies

    def _at_least(self, lows: list[Expr]) -> Expr:
        """A value in [0, 1] that is at least each of ``lows``; a constant where it can be.

        The same for the same ``lows``: values only ever count against the budget.
        """
        constants = [low for low in lows if isinstance(low, (int, float))]
        floor = max([0, *constants])
        varying = {_key(low): low for low in lows if not isinstance(low, (int, float))}
        if floor >= 1 or not varying:
            return min(1, floor)
        key = (floor, frozenset(varying))
        if key not in self._maxima:
            result = self._maxima[key] = self.model.add_var(lb=float(floor), ub=1.0)
            for low in varying.values():
                self.model.add_constr(result >= low)
        return self._maxima[key]

    def forbid(self, flags: frozenset[int]) -> None:
        """Exclude exactly this set of flags (an exact replay found it over the budget)."""
        self.model.add_constr(
            total(1 - var if u in flags else var for u, var in self.flag.items()) >= 1
        )

    def start_from(self, flags: frozenset[int]) -> None:
        """Give the solver a first solution."""
        self.model.start = [(var, 1.0 if u in flags else 0.0) for u, var in self.flag.items()]

    def solve(self, seconds: float) -> Solution:
        """Solve the relaxation for at most ``seconds``."""
        solved = solve(self.model, seconds)
        flags = None
        if solved.values is not None:
            flags = frozenset(u for u, var in self.flag.items() if solved.values[var.idx] > 0.5)
        return Solution(flags, solved.bound / self.scale, solved.optimal, solved.infeasible)


def _key(expr: Expr) -> tuple[tuple[tuple[int, float], ...], float]:
    """What makes two expressions equal (python-mip's own comparison builds a constraint)."""
    if isinstance(expr, Var):
        return ((expr.idx, 1.0),), 0.0
    return tuple(sorted((var.idx, factor) for var, factor in expr.expr.items())), expr.const


def _minus(a: Expr, b: Expr) -> Expr:
    """a - b; python-mip loses one of two terms with the same variable."""
    return 0 if a is b else a - b


def _consumers(graph: TrainingGraph) -> dict[int, list[int]]:
    """For each forward op, the forward ops that depend on it."""
    result: dict[int, list[int]] = {u: [] for u in range(graph.nforward)}
    for x in range(graph.nforward):
        for u in dict.fromkeys(graph.dependencies[x]):
            result[u].append(x)
    return result


def _reasons(graph: TrainingGraph, consumers: Mapping[int, list[int]]) -> dict[int, dict[int, int]]:
    """For each forward op u, when backward ops ask for its copy, if it is flagged.

    ``{v: k}``: from stage k on if v, which they differentiate, is flagged. Left out where
    another reason comes no later.
    """
    asked: dict[int, dict[int, int]] = {u: {} for u in range(graph.nforward)}
    for (op, needed), stage in _stages(graph).items():
        v = graph.ops[op].differentiates
        if v is not None and needed < graph.nforward:
            asked[needed][v] = min(stage, asked[needed].get(v, stage))
    result = {}
    for u, found in asked.items():
        own = found.get(u, math.inf)
        result[u] = {
            v: stage
            for v, stage in found.items()
            if v == u
            or (stage < own and not (v in consumers[u] and asked[v].get(v, math.inf) <= stage))
        }
    return result


def _stages(graph: TrainingGraph) -> dict[tuple[int, int], int]:
    """For each backward op and each op that it depends on: the stage in which it asks for it.

    MXNet runs the graph depth first: an op asks for what it needs one after the other.
    """
    result: dict[tuple[int, int], int] = {}
    seen: set[int] = set()
    done = 0
    for root in (graph.producer[head] for head in graph.heads):
        stack = [] if root in seen else [(root, iter(graph.dependencies[root]))]
        seen.add(root)
        while stack:
            op, waiting = stack[-1]
            for needed in waiting:
                if op >= graph.nforward:
                    result.setdefault((op, needed), done)
                if needed not in seen:
                    seen.add(needed)
                    stack.append((needed, iter(graph.dependencies[needed])))
                    break
            else:
                if op != done:
                    raise ScheduleError(
                        f"op {graph.ops[op].name!r} comes {op}th in the graph, but MXNet would "
                        f"run it {done}th: mirroring needs the graph in MXNet's own order"
                    )
                done += 1
                stack.pop()
    return result


@dataclass(frozen=True)
class _Aliases:
    """Which tensors share the buffer of a forward tensor, whether that dies or not.

    ``source[a]`` is the tensor whose buffer the forward tensor ``a`` shares. ``uncounted`` are
    the tensors of which that cannot be told for certain; leaving them out is safe, as it only
    makes the program more of a relaxation.
    """

    source: Mapping[int, int]
    uncounted: frozenset[int]

    @classmethod
    def of(cls, graph: TrainingGraph) -> _Aliases:
        source: dict[int, int] = {}
        uncounted: set[int] = set()
        for index, op in enumerate(graph.ops):
            found: dict[int, set[int]] = defaultdict(set)
            for handover in op.handovers:
                a = op.inputs[handover.input]
                shared = index < graph.nforward or graph.producer[a] < graph.nforward
                if handover.alias and (shared or a in uncounted) and graph.tensors[a].nbytes:
                    found[op.outputs[handover.output]].add(a)
            for target, sources in found.items():
                if index < graph.nforward and len(sources) == 1:
                    source[target] = sources.pop()
                else:
                    uncounted.add(target)
        return cls(source, frozenset(uncounted))

    def root(self, a: int) -> int:
        """The tensor that first had the buffer of ``a``."""
        while a in self.source:
            a = self.source[a]
        return a


class _Gradients(NamedTuple):
    """Bytes of backward tensors alive right before and while an op of the unplanned step runs.

    Flags change neither. ``handed_over`` are the op's outputs that take over a gradient's buffer.
    """

    before_nbytes: int
    during_nbytes: int
    handed_over: frozenset[int]


class _GradientArena:
    """Counts what :class:`_Gradients` tells, while a step is replayed."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.sizes: list[int] = []
        self.live = 0
        self.requested = 0
        self.shared: set[int] = set()
        self.found: list[_Gradients] = []

    def request(self, step: int, tensor: int) -> int:
        self.sizes.append(self.tensors[tensor].nbytes)
        self.requested += self.sizes[-1]
        return len(self.sizes) - 1

    def share(self, buffer: int, step: int, tensor: int) -> None:
        self.shared.add(tensor)

    def release(self, buffer: int, step: int) -> None:
        self.live -= self.sizes[buffer]

    def end_of_requests(self, step: int) -> None:
        during = self.live + self.requested
        self.found.append(_Gradients(self.live, during, frozenset(self.shared)))
        self.live, self.requested, self.shared = during, 0, set()


def _gradients(graph: TrainingGraph, aliases: _Aliases) -> list[_Gradients]:
    """What the gradients occupy at every op, forward tensors (and what is theirs) left out."""
    tensors = tuple(
        Tensor(tensor.name, 0, 0)
        if graph.producer[t] < graph.nforward or t in aliases.uncounted
        else tensor
        for t, tensor in enumerate(graph.tensors)
    )
    arena = _GradientArena(tensors)
    replay(Schedule.unplanned(dataclasses.replace(graph, tensors=tensors)), arena)
    return arena.found
