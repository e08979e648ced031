"""Aiming lower: how a search that counts other bytes is held to those that must fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memplan.step.schedule import Schedule
from memplan.util.stop import Stop


class Excess(Protocol):
    """By how many bytes a schedule is over a budget; ``roughly`` in no time, if by more."""

    def __call__(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int: ...


# How often at most.
TRIES = 7

# From the third try on the aim is lowered by this share of it at least, and more each time: what is
# over by less may be found again, in nearly the same memory.
LEAST_STEP = 0.006

# What part of the time that is left a try gets, but for the last.
SHARE_OF_TIME = 0.6


def aim_lower(
    solve: Callable[[int, Stop], Schedule | None],
    budget_nbytes: int,
    excess: Excess,
    stop: Stop,
    *,
    share: float = SHARE_OF_TIME,
) -> Schedule | None:
    """A schedule that ``excess`` says is over the budget by no bytes, or None.

    ``solve(aim, until)`` looks for a schedule in ``aim`` bytes, as it counts them. First the budget
    is aimed at; where what is found is over it, the aim is lowered by the excess, later by more. A
    try gets this ``share`` of the time that is left, and the last one all of it.
    """
    aim = budget_nbytes
    for tries in range(TRIES):
        if aim < 0 or (tries and stop.is_over()):
            return None
        schedule = solve(aim, stop.share_of_work(1.0 if tries == TRIES - 1 else share))
        if schedule is None:
            return None
        over = excess(schedule, budget_nbytes, roughly=tries < TRIES - 1)
        if not over:
            return schedule
        aim -= max(over, int(LEAST_STEP * max(0, tries - 1) * aim))
    return None
