"""A plan to start from: the best of strategies that are fast, and unlike each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain

from memplan.memory.memory import Live
from memplan.search.by_loss import best_order, loss_by_loss
from memplan.search.eviction import Evictions
from memplan.search.online import online_schedules
from memplan.search.segments import stages
from memplan.search.slices import sliced_schedules
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import OneOf, Problem
from memplan.strategies.checkpoint_last import CheckpointLast
from memplan.strategies.chen import ChenGreedy, ChenSqrt
from memplan.strategies.griewank import Griewank
from memplan.strategies.memonger import Memonger
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import LARGE, SearchOptions
from memplan.util.stop import Stop

# Part of little time for these schedules, where no other is known.
QUICK_SHARE = 0.1

# Part of that for greedy eviction.
ONLINE_SHARE = 0.5

# On graphs with more ops than this greedy eviction takes a quarter of a minute for one schedule.
# Drops at the peaks take seconds, for these shares of the budget, and come first: where they add no
# more than this share of the step, that is all. Set on memonger's ResNet of 10,300 ops.
HUGE, PEAK_SLACKS, FEW_SECONDS = 8000, (1.0, 0.97), 0.5

# Of schedules in memory that takes long to count, this many with the fewest live bytes are counted.
COUNTED = 5


def candidates(
    problem: Problem, stop: Stop, *, recompute_backward: bool = False, reorder: bool = False
) -> Iterator[Schedule]:
    """Schedules of quick strategies, as many as are made in time; first the unplanned.

    With ``recompute_backward`` greedy eviction may run backward ops again, with ``reorder`` ops may
    change their order.
    """
    graph, budget_nbytes = problem.graph, problem.budget_nbytes
    yield Schedule.unplanned(graph)
    rules = {"reorder": reorder, "recompute_backward": recompute_backward}
    if isinstance(problem.space, Sequences):
        in_turns = loss_by_loss(graph, **rules)
        if in_turns.graph is not graph:
            yield in_turns.back(Schedule.unplanned(in_turns.graph))
    # What fits as live bytes seldom fits in blocks.
    by_live = isinstance(problem.space, Sequences) and not problem.memory.match_ranges
    if budget_nbytes is not None and by_live:
        until = stop.share_for_little(ONLINE_SHARE)
        schedules = list(_dropped(problem, until, recompute_backward))
        yield from schedules
        if not any(schedule.overhead <= FEW_SECONDS for schedule in schedules):
            other = best_order(graph, **rules)
            run = partial(online_schedules, recompute_backward=recompute_backward)
            schedules = [other.back(s) for s in run(other.graph, budget_nbytes, until)]
            yield from schedules
            # From recomputed slices moves of single ops do not get far.
            if not any(simulate(s).peak_nbytes <= budget_nbytes for s in schedules):
                yield from sliced_schedules(graph, budget_nbytes, stop, reorder=reorder)
    if len(graph.ops) > LARGE:
        yield from problem.space.cut(problem, stages(graph), stop)
        return
    quick: list[OneOf] = [ChenGreedy(), ChenGreedy(linear=True), ChenSqrt(), Memonger()]
    if isinstance(problem.space, Sequences):
        quick += [Griewank(), CheckpointLast()]
    for number, schedule in enumerate(chain.from_iterable(s.candidates(problem) for s in quick)):
        if number and stop.is_over():  # after the last one nothing is left out
            return
        yield schedule


def _dropped(problem: Problem, stop: Stop, recompute_backward: bool) -> Iterator[Schedule]:
    """Schedules of a huge graph with drops where the peaks are."""
    assert problem.budget_nbytes is not None
    if len(problem.graph.ops) > HUGE:
        evictions = Evictions(problem.graph, 0, recompute_backward=recompute_backward)
        for slack in PEAK_SLACKS:
            fit = evictions.within(int(slack * problem.budget_nbytes)).fit((), stop)
            if fit is not None:
                yield fit.schedule


def quick_schedule(
    problem: Problem, stop: Stop, *, recompute_backward: bool = False, reorder: bool = False
) -> Schedule:
    """The better one of the known schedule and the cheapest of quick strategies that fits.

    If none does, the one that is least over the budget in at most one extra forward pass, by live
    bytes where time is up. Candidates that are not made in time are left out, which ``stop`` then
    says.
    """
    drafts = candidates(problem, stop, recompute_backward=recompute_backward, reorder=reorder)
    schedules = [*problem.starts(), *drafts]
    if problem.budget_nbytes is not None:
        best = _cheapest(problem, schedules)
        if best is not None:
            return best
    most_seconds = min(problem.most_seconds, problem.graph.seconds + problem.graph.forward_seconds)
    affordable = [s for s in schedules if s.seconds <= most_seconds]
    if stop.is_short_of(0.0):  # what packing each of them takes would come on top
        return min(affordable or schedules, key=Live().nbytes)
    return fewest_bytes(problem, affordable or schedules)


def quick_start(problem: Problem, stop: Stop, options: SearchOptions) -> Schedule:
    """What :func:`quick_schedule` finds in its part of little time, by the rules of a search."""
    rules = {"recompute_backward": options.recompute_backward, "reorder": options.reorder}
    return quick_schedule(problem, stop.share_for_little(QUICK_SHARE), **rules)


def _cheapest(problem: Problem, schedules: list[Schedule]) -> Schedule | None:
    if problem.memory.is_exact:  # which is counted as fast as live bytes
        return problem.cheapest(schedules)
    live = Live()
    ranked = sorted(((s.seconds, live.nbytes(s), n) for n, s in enumerate(schedules)))
    ranked = [entry for entry in ranked if entry[0] <= problem.most_seconds]

    def solve(aim: int, until: Stop) -> Schedule | None:
        del until
        return next((schedules[n] for _, peak, n in ranked if peak <= aim), None)

    return problem.aim_lower(solve, Stop(math.inf))


def fewest_bytes(problem: Problem, schedules: list[Schedule], *, by_live: bool = False) -> Schedule:
    """Of ``schedules``, the one that takes about the fewest bytes.

    ``by_live`` and where memory takes long to count, of those with the fewest live bytes, and
    roughly.
    """
    if by_live or not problem.memory.is_exact:
        schedules = sorted(schedules, key=Live().nbytes)[:COUNTED]
    return min(schedules, key=lambda schedule: problem.memory.excess(schedule, 0, roughly=True))
