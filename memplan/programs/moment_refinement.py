"""The program of a few moments, solved with more and more of them until its answer fits.

That program (:mod:`memplan.programs.moment_program`) is far smaller than Checkmate's, which has one
per op; often one or two are enough for an answer that is a schedule within the budget, and so
optimal. Where the answer does not fit, :mod:`memplan.search.eviction` mends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from memplan.memory.memory import Live
from memplan.memory.memory import cheapest as cheapest_of
from memplan.programs.moment_program import Bound, MomentProgram, moment_bound
from memplan.programs.moments import Moments
from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.solver import Looks, Program
from memplan.search.eviction import Drop, Evictions, Fit
from memplan.search.rematerialize import rematerialize
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# Of the moments that may be added, relaxations tell which says most: of this many that are over the
# budget, and as many that are likely to prove most by themselves, or of one alone where programs
# are large. The limit is on ops times moments, summed over these. Set on the networks that
# benchmarks/gaps.py calls tuned.
CANDIDATES, CANDIDATES_SIZE = 3, 6_000

# Moments this many ops apart, in parts of all, tell each other nothing. Set on the same networks.
FAR = 0.125

# Moments in a row that may raise nothing: neither the bound, nor is a schedule cheaper.
PATIENCE = 3

# Programs of several moments take seconds on graphs of more ops than this: they get this part of
# the usual effort, and one that raises the bound by less than this part of the step is the last.
# Set on a tree of LSTM cells, dense blocks of 1,470 ops and SENet-154, whose bounds such programs
# raised by 0 to 0.5 points, in up to 24 s each.
LARGE, LARGE_EFFORT, LITTLE = 1000, 0.1, 0.001

# Moments that are added at most, times the effort.
MOMENTS = 10

# The schedule of an answer as it stands takes time by the square of the number of ops: up to this.
ANSWERED = 2000


def refine_moments(
    graph: TrainingGraph,
    budget_nbytes: int,
    stop: Stop,
    options: ProofOptions,
) -> Iterator[Fact]:
    """What is known after each moment that is added, the bound never falling.

    Ends when no other moment is worth adding, when the last ones changed nothing, after so much
    effort, or with ``stop``.
    """
    backward = options.recompute_backward
    moments = Moments(graph, recompute_backward=backward)
    evictions = Evictions(graph, budget_nbytes, recompute_backward=backward)
    looks = Looks(options.effort * options.looks)
    bound = moment_bound(moments, budget_nbytes, stop, options, looks)
    promising = moments.promising(budget_nbytes)
    highest = bound.seconds
    nadded, stalled, cheapest = 0, 0, float("inf")
    is_large = len(graph.ops) > LARGE
    effort = options.effort * (LARGE_EFFORT if is_large else 1.0)
    patience, raised = (1, LITTLE * graph.seconds) if is_large else (PATIENCE, 0.0)
    while True:
        if highest == float("inf"):
            yield Fact(None, highest)
            return
        drops = drops_of(bound, evictions)
        stages = evictions.stages(drops)
        fit = evictions.fit(drops, stop)
        best = cheapest_of(_schedules(moments, bound, fit), budget_nbytes, Live())
        yield Fact(best, highest)
        if best is not None and best.seconds < cheapest:
            stalled, cheapest = 0, best.seconds
        is_enough = stalled == patience or nadded >= options.effort * MOMENTS or looks.left <= 0.0
        if is_enough or len(graph.ops) * (len(bound.ops) + 1) > options.size:
            return
        op = _next(moments, bound, stages, budget_nbytes, promising, options.solver, stop)
        if op is None or stop.is_over():
            return
        with Program(options.solver) as program:
            several = MomentProgram(moments, sorted((*bound.ops, op)), budget_nbytes, program)
            gap = options.program_gap
            bound = several.bound(stop, effort=effort, gap_seconds=gap, looks=looks)
        nadded += 1
        stalled = 0 if bound.seconds > highest + raised else stalled + 1
        highest = max(highest, bound.seconds)


def _schedules(moments: Moments, bound: Bound, fit: Fit | None) -> Iterator[Schedule]:
    """That of an answer's drops, mended, and of small graphs that of the answer as it stands."""
    if fit is not None:
        yield fit.schedule
    if bound.present and len(moments.graph.ops) <= ANSWERED:
        yield _as_answered(moments, bound)


def _as_answered(moments: Moments, bound: Bound) -> Schedule:
    """The schedule that has at each moment what the answer has there, and else what it has made.

    A choice of drops cannot say that something stays which only what runs again reads.
    """
    present, class_of = dict(zip(bound.ops, bound.present, strict=True)), moments.buffers.class_of

    def keep(stage: int, a: int) -> bool:
        return stage not in present or class_of[a] in present[stage]

    return rematerialize(moments.graph, keep)


def drops_of(bound: Bound, evictions: Evictions) -> set[Drop]:
    """What is dropped at the moments of a bound, each until it is read next."""
    return {
        (a, evictions.next_read(a, t) or t)
        for t, tensors in zip(bound.ops, bound.drops, strict=True)
        for a in tensors
    }


def _next(
    moments: Moments,
    bound: Bound,
    stages: Sequence[Sequence[int]],
    budget_nbytes: int,
    promising: Sequence[int],
    solver: str,
    stop: Stop,
) -> int | None:
    """The op to add: the one with which a relaxation says most, or that is most over the budget.

    It must be an ancestor or a descendant of every moment that is there.
    """
    ordered = [moments.before_and_after(t) for t in bound.ops]

    def is_new(t: int) -> bool:
        return t not in bound.ops and all(t in before or t in after for before, after in ordered)

    over = list(filter(is_new, ops_over(moments.graph, stages, budget_nbytes, bound.ops)))
    others = list(filter(is_new, promising[: CANDIDATES * len(ordered) + CANDIDATES]))
    candidates = list(dict.fromkeys([*over[:CANDIDATES], *others[:CANDIDATES]]))
    size = len(stages) * (len(ordered) + 1)
    if size * len(candidates) > CANDIDATES_SIZE:
        return over[0] if over else None
    best, highest = over[0] if over else None, bound.seconds
    for t in candidates:
        if stop.is_over():
            break
        with Program(solver) as program:
            several = MomentProgram(moments, sorted((*bound.ops, t)), budget_nbytes, program)
            seconds = several.bound(stop, relax=True).seconds
        if seconds > highest:
            best, highest = t, seconds
    return best


def ops_over(
    graph: TrainingGraph,
    stages: Sequence[Sequence[int]],
    budget_nbytes: int,
    moment_ops: Sequence[int],
) -> Iterator[int]:
    """Ops whose stages are over the budget, the fullest first; at first executions before all.

    What is near a known moment says little more than that one does, so fullness counts by how far
    away it is: an answer runs all again right after the last moment at which it had no room.
    """
    live = simulate(Schedule.sequence(graph, chain.from_iterable(stages))).live_nbytes
    ends = list(accumulate(map(len, stages)))
    at_first = [live[end - 1] for end in ends]
    in_stage = [max(live[end - len(stage) : end]) for end, stage in zip(ends, stages, strict=True)]
    far = len(stages) * FAR
    for nbytes in (at_first, in_stage):
        ops_over = [t for t in range(len(stages)) if nbytes[t] > budget_nbytes]
        away = {t: min([far, *(abs(t - other) for other in moment_ops)]) for t in ops_over}
        yield from sorted(ops_over, key=lambda t: -away[t] * (nbytes[t] - budget_nbytes))
