"""The least memory, by one meaning: the fewest bytes at no more than a problem's seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memplan.step.schedule import Schedule
from memplan.strategies.base import Problem
from memplan.strategies.spaces.space import SearchOptions
from memplan.util.stop import Stop

# What part of the time goes into schedules to begin with.
BEGINNINGS_SHARE = 0.5

# Steps follow, at first by this much less memory each; a step without a schedule halves that, down
# to the smallest. Each takes this share at most of the time that is left, and less where a cheap
# enough schedule is found sooner. Set on DenseNet-121 and memonger's ResNet in blocks.
FIRST_STEP = 0.08
SMALLEST_STEP = 0.001
STEP_SHARE = 0.25

# What part of the work that is left then goes into steps from where drops at the peaks have ended.
LOWER_SHARE = 0.5


def least(
    problem: Problem, starts: Sequence[Schedule], stop: Stop, options: SearchOptions
) -> Schedule:
    """The schedule of the fewest bytes found that takes no more than ``problem.most_seconds``.

    An interrupt ends the search with what is found so far.
    """
    space = problem.space
    schedules = [Schedule.unplanned(problem.graph), *starts]
    in_one_go: list[Schedule | None] = []
    try:
        if space.takes_at_most(problem.graph) <= problem.most_seconds:
            in_one_go = [space.improve(problem, problem.cheapest(schedules), stop, options)]
        # A search in one go does not see what further runs take; one within a budget keeps it.
        if not in_one_go or problem.memory.counts_runs:
            schedules += space.beginnings(problem, stop.share_of_work(BEGINNINGS_SHARE), options)
            _step_down(problem, schedules, stop, options)
    except KeyboardInterrupt:
        stop.end()
    return problem.cheapest([*schedules, *in_one_go]) or schedules[0]


def least_of_drops(
    problem: Problem, best: Schedule, stop: Stop, options: SearchOptions
) -> tuple[Schedule, Schedule | None]:
    """``best`` or a schedule of fewer bytes, by way of drops at the peaks; and what these made.

    In blocks, steps down from other schedules may end far above it: what a search finds within an
    aim then fits with much room to spare, and takes too many seconds.
    """
    dropped: Schedule | None = None
    schedules = [best]
    try:
        dropped = problem.cheapest([problem.space.dropped_at_peaks(problem, stop, options)])
        if dropped is not None and problem.memory.nbytes(dropped) < problem.memory.nbytes(best):
            schedules.append(dropped)
            _step_down(problem, schedules, stop.share_of_work(LOWER_SHARE), options)
    except KeyboardInterrupt:
        stop.end()
    return problem.cheapest(schedules) or best, dropped


def lower(problem: Problem, best: Schedule, stop: Stop, options: SearchOptions) -> Schedule:
    """``best``, or what is found in steps down from it."""
    schedules = [best]
    try:
        _step_down(problem, schedules, stop, options)
    except KeyboardInterrupt:
        stop.end()
    return problem.cheapest(schedules) or best


def _step_down(
    problem: Problem, schedules: list[Schedule], stop: Stop, options: SearchOptions
) -> None:
    """Add to ``schedules`` what is found within less and less memory."""
    best = problem.cheapest(schedules) or schedules[0]
    enough = dataclasses.replace(options, enough_seconds=problem.most_seconds)
    step = FIRST_STEP
    while step > SMALLEST_STEP and not stop.is_over():
        aim = int((1.0 - step) * problem.memory.nbytes(best))
        until = stop.share_of_work(STEP_SHARE)
        schedule = problem.space.improve(problem.within(aim), best, until, enough)
        if schedule is not None and schedule.seconds <= problem.most_seconds:
            schedules.append(schedule)
            best = problem.cheapest([best, schedule]) or best
        else:
            step *= 0.5
