"""Aiming lower: how a search that counts other bytes is held to those that must fit."""

from __future__ import annotations

from collections.abc import Callable

from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# How often at most.
TRIES = 7

# After this many tries the aim is lowered by this share of it at least, and more each time, where
# the same schedule comes back.
EXACT_TRIES, LARGER_STEP = 4, 0.02

# What part of the time that is left a try gets, but for the last.
SHARE_OF_TIME = 0.6


def aim_lower(
    solve: Callable[[int, Stop], Schedule | None],
    budget_nbytes: int,
    excess: Callable[[Schedule, int], int],
    stop: Stop,
    *,
    share: float = SHARE_OF_TIME,
) -> Schedule | None:
    """A schedule that ``excess`` says is over the budget by no bytes, or None.

    ``solve(aim, until)`` looks for a schedule in ``aim`` bytes, as it counts them. First the budget
    is aimed at; where what is found is over it, the aim is lowered by the excess, and by more where
    the same comes back. A try gets this ``share`` of the time that is left.
    """
    aim, before = budget_nbytes, -1
    for tries in range(TRIES):
        if aim < 0 or (tries and stop.is_over()):
            return None
        schedule = solve(aim, stop.share(1.0 if tries == TRIES - 1 else share))
        if schedule is None:
            return None
        step = excess_nbytes = excess(schedule, budget_nbytes)
        if not excess_nbytes:
            return schedule
        if excess_nbytes == before:  # the same schedule, which fitted the lower aim, too
            step = max(step, int(LARGER_STEP * max(0, tries + 1 - EXACT_TRIES) * aim))
        aim, before = aim - step, excess_nbytes
    return None
