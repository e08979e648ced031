"""Aiming lower: how a search that counts other bytes is held to those that must fit."""

from __future__ import annotations

from collections.abc import Callable

from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# How often at most.
TRIES = 5

# From the second try on the aim is lowered by this share of it, and more each time, at least.
LARGER_STEP = 0.02

# What part of the time that is left a try gets, but for the last.
SHARE_OF_TIME = 0.6


def aim_lower(
    solve: Callable[[int, Stop], Schedule | None],
    budget_nbytes: int,
    nbytes: Callable[[Schedule], int],
    stop: Stop,
    *,
    share: float = SHARE_OF_TIME,
) -> Schedule | None:
    """A schedule of which ``nbytes`` says that it is within the budget, or None.

    ``solve(aim, until)`` looks for a schedule in ``aim`` bytes, as it counts them. First the budget
    is aimed at; where what is found is over it by ``nbytes``, the aim is lowered by the excess, and
    later by more. A try gets this ``share`` of the time that is left.
    """
    aim = budget_nbytes
    for tries in range(TRIES):
        if aim < 0 or (tries and stop.is_over()):
            return None
        found = solve(aim, stop.share(1.0 if tries == TRIES - 1 else share))
        if found is None:
            return None
        excess = nbytes(found) - budget_nbytes
        if excess <= 0:
            return found
        # The same schedule may fit the lower aim, too: then a larger step is needed.
        aim -= max(excess, int(LARGER_STEP * tries * aim))
    return None
