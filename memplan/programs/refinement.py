"""Schedules made of what the moments say: more moments are added until they fit the budget.

The program of a few moments (:mod:`memplan.programs.moments`) is far smaller than Checkmate's,
which has one per op; often one or two are enough for an answer that is a schedule within the
budget, and so optimal. Where the answer does not fit, :mod:`memplan.search.eviction` mends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from memplan.programs.moments import Bound, MomentProgram, Moments
from memplan.programs.solver import DEFAULT_SOLVER, Program
from memplan.search.eviction import Evictions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# A moment within this share of all ops from one that is there already says little more.
APART = 0.01

# Moments in a row that may raise nothing: neither the bound, nor is a schedule cheaper.
PATIENCE = 3

# Moments that are added at most, times the effort.
MOMENTS = 10

# A program may leave this share of the gap that ends a search.
PROGRAM_GAP = 0.1


@dataclass(frozen=True)
class Refined:
    """A schedule within the budget, or None, and what every schedule within it takes at least.

    An infinite bound means that no schedule is within the budget. With ``in_order`` it holds among
    the schedules that keep the order in which ops first run, and run an op once per stage at most.
    """

    schedule: Schedule | None
    bound_seconds: float
    in_order: bool = False


@dataclass(frozen=True)
class Proving:
    """How a program is solved: by which ``solver``, and whether backward ops may run again.

    Checkmate's relaxation is rounded at ``thresholds`` thresholds; at most ``search_share`` of the
    time goes into a better first schedule. ``effort`` times the usual work is done, which may end
    where no schedule can be cheaper by more than ``gap_seconds``.
    """

    solver: str = DEFAULT_SOLVER
    recompute_backward: bool = False
    thresholds: int = 12
    search_share: float = 0.3
    effort: float = 1.0
    gap_seconds: float = 0.0

    @property
    def program_gap(self) -> float:
        """The gap in seconds that a single program may leave."""
        return PROGRAM_GAP * self.gap_seconds


def refine(
    graph: TrainingGraph,
    budget_nbytes: int,
    deadline: float | Stop,
    options: Proving | None = None,
) -> Iterator[Refined]:
    """What is known after each moment that is added, the bound never falling.

    Ends when no other moment is worth adding, when the last ones changed nothing, after so much
    effort, or at ``deadline``, a time of time.monotonic() or a stop.
    """
    options, stop = options or Proving(), Stop.at(deadline)
    backward = options.recompute_backward
    moments = Moments(graph, recompute_backward=backward)
    evictions = Evictions(graph, budget_nbytes, recompute_backward=backward)
    effort, gap = options.effort, options.program_gap
    bound = moments.bound(
        budget_nbytes, stop, solver=options.solver, effort=effort, gap_seconds=gap
    )
    highest = bound.seconds
    added, stalled, cheapest = 0, 0, float("inf")
    while True:
        if highest == float("inf"):
            yield Refined(None, highest)
            return
        drops = {
            (a, evictions.next_read(a, t) or t)
            for t, dropped in zip(bound.ops, bound.dropped, strict=True)
            for a in dropped
        }
        stages = evictions.stages(drops)
        found = evictions.fit(drops, stop)
        yield Refined(None if found is None else found.schedule, highest)
        if found is not None and found.schedule.seconds < cheapest:
            stalled, cheapest = 0, found.schedule.seconds
        op = _worst(moments, bound, stages, budget_nbytes)
        if op is None or stalled == PATIENCE or added >= options.effort * MOMENTS:
            return
        if stop.is_over():
            return
        with Program(options.solver) as program:
            several = MomentProgram(moments, sorted((*bound.ops, op)), budget_nbytes, program)
            bound = several.bound(stop, effort=effort, gap_seconds=gap)
        added += 1
        stalled = 0 if bound.seconds > highest else stalled + 1
        highest = max(highest, bound.seconds)


def _worst(
    moments: Moments, bound: Bound, stages: Sequence[Sequence[int]], budget_nbytes: int
) -> int | None:
    """The op to add: where most bytes are over the budget, first at first executions.

    It must be an ancestor or a descendant of every moment that is there.
    """
    live = simulate(Schedule.sequence(moments.graph, chain.from_iterable(stages))).live_nbytes
    ends = list(accumulate(map(len, stages)))
    at_first = [live[end - 1] for end in ends]
    within = [max(live[end - len(stage) : end]) for end, stage in zip(ends, stages, strict=True)]
    ordered = [moments.before_and_after(t) for t in bound.ops]
    apart = max(1, int(APART * len(stages)))
    for nbytes in (at_first, within):
        over = [t for t in range(len(stages)) if nbytes[t] > budget_nbytes]
        for t in sorted(over, key=lambda t: -nbytes[t]):
            far = all(abs(t - other) >= apart for other in bound.ops)
            if far and all(t in before or t in after for before, after in ordered):
                return t
    return None
