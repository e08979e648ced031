"""What `auto` begins another search with: its plan of least memory, and what `evict` finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memplan.step.schedule import Schedule
from memplan.strategies.base import Problem
from memplan.strategies.evict import Evict
from memplan.strategies.least import least, least_of_drops, lower
from memplan.strategies.quick import quick_start
from memplan.strategies.spaces.space import SearchOptions
from memplan.util.stop import Stop

# The part of the time that goes into the least memory; the rest makes the schedule of that memory
# cheaper.
LEAST_SHARE = 0.8

# In blocks steps down from what was made cheaper get lower again: so often at most, each time with
# this part of the usual work, on graphs of at most this many ops. Set on small networks.
MOST_TIMES, AGAIN_SHARE, REPEATED_UP_TO = 4, 0.25, 300


def least_made_cheaper(
    problem: Problem, starts: Sequence[Schedule], stop: Stop, options: SearchOptions
) -> Schedule:
    """The schedule of least memory of a problem without a budget, cheaper in the same bytes."""
    work = stop.work_left
    best = _once(problem, starts, stop, options)
    is_repeated = problem.memory.match_ranges and len(problem.graph.ops) <= REPEATED_UP_TO
    for _ in range(MOST_TIMES if is_repeated else 0):
        until = stop.with_work(AGAIN_SHARE * work)
        lowered = lower(problem, best, until.share_of_work(LEAST_SHARE), options)
        if lowered is best:
            break
        best = _cheaper(problem, lowered, None, until, options)
    return best


def within_a_pass(
    problem: Problem, starts: Sequence[Schedule], stop: Stop, options: SearchOptions
) -> Schedule:
    """About the least memory of a problem with a budget, for at most one extra forward pass."""
    graph = problem.graph
    most_seconds = min(problem.most_seconds, graph.seconds + graph.forward_seconds)
    most_overhead = most_seconds / graph.seconds - 1.0
    without = dataclasses.replace(problem.within(None), max_overhead=most_overhead)
    return _once(without, starts, stop, options)


def evicted(problem: Problem, stop: Stop, options: SearchOptions) -> Schedule | None:
    """What the strategy `evict` finds, if anything; an interrupt ends ``stop``."""
    evict = Evict(seed=options.seed, recompute_backward=options.recompute_backward)
    return evict.within(problem, stop)


def _once(
    problem: Problem, starts: Sequence[Schedule], stop: Stop, options: SearchOptions
) -> Schedule:
    """Steps down and drops at the peaks, once, and the result made cheaper."""
    starts = starts or [quick_start(problem, stop, options)]
    best = least(problem, starts, stop.share_of_work(LEAST_SHARE), options)
    improving = stop.with_work(stop.work_left)  # drops that gain nothing take none of it
    best, dropped = least_of_drops(problem, best, stop, options)
    return _cheaper(problem, best, dropped, improving, options)


def _cheaper(
    problem: Problem, best: Schedule, other: Schedule | None, stop: Stop, options: SearchOptions
) -> Schedule:
    """``best`` or a cheaper one in its bytes: the ``other``, or what a search makes of it."""
    held = problem.within(problem.memory.nbytes(best))
    cheaper = None if stop.is_over() else held.space.improve(held, best, stop, options)
    # Where the best is packed again in a hurry it may seem not to fit its own bytes.
    others = [s for s in (cheaper, other) if s is not None and s.seconds < best.seconds]
    return (held.cheapest([best, *others]) or best) if others else best
